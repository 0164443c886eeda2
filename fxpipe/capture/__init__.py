"""From a model and a call to a `Graph`: `capture` for one graph, `Front` for a module that calls stand behind."""

from .front import Front, capture

__all__ = ["Front", "capture"]
