"""The captured graph: ops, the types of values, and what follows from them."""
