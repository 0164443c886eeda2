"""Dynamo while it traces: what is read of a trace, and what is replaced in it."""
