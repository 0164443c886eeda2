"""The front doors: one public verb a file, and the command line."""
