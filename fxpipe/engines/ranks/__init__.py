"""Engines of several processes: a rank for each device."""
