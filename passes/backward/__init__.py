"""Backward as ops: the pass, and what it traces with."""
