"""The module that a user holds: from a call to a running build."""
