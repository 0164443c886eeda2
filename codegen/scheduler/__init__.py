"""The scheduler of a program as a Python file."""
