"""Cuts of a graph into stages, one device each."""
