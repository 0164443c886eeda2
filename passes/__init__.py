"""Program -> Program, one file per pass."""
