"""Engines of one process: a worker thread for each device."""
