"""Submodules that cannot be traced and are called whole."""
