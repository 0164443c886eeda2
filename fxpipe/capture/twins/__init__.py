"""Copies of the user's modules that capture works on, so that the user's own are only read."""
