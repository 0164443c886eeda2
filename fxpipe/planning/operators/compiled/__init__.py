"""The inner loops of the strategy search, compiled with numba."""
