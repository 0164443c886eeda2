"""What needs the whole batch: totals, computed before it is cut, and an epilogue, on what all micro-batches give."""
