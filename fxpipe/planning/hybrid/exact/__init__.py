"""The search for the optimal hybrid plan, and the bounds that prove it."""
