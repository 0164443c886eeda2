"""Program -> readable Python files."""
