"""Submodules that cannot be traced and are kept whole."""
