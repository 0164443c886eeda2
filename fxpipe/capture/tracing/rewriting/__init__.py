"""Changes of a traced graph before it becomes a `Graph`: those of capture, and those that the user asks for."""
