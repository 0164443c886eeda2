"""Backward as ops: the pass, what is made readable, and what is kept or computed again."""
