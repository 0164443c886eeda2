"""A program as a Python package: writing its files, loading them, and binding them to a model."""
