"""Plan -> Schedule. No torch."""
