"""The options of the public functions: their tables, the forms of values, which contradict each other, and what is
chosen where they are "auto"."""
