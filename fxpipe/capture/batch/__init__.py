"""Where the batch is in each value, and whether it may be cut there."""
