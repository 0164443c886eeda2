"""The options of the public functions: their table, the forms of their values, and which contradict each other."""
