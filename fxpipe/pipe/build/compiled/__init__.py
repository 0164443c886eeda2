"""Stages that run through a compiler, and what compilers need of the device."""
