"""A stage of the program as a Python file."""
