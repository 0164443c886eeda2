"""A saved package that runs without capture or planning."""
