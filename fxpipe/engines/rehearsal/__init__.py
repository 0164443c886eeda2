"""Predicts what steps take: all workers run their own actions at once, and none waits for another."""
