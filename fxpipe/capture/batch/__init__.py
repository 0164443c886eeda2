"""The batch dimension of each value, and whether the value may be cut along it."""
