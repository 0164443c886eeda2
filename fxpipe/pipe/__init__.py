"""The pipe that a user gets, and everything from a call of it to a running build."""
