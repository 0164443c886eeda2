"""A captured graph as an operator graph."""
