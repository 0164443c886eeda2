"""How names, numbers, objects and ops are written in Python source."""
