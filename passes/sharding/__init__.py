"""A strategy becomes a graph that can be run."""

from __future__ import annotations

from .shard import shard

__all__ = ["shard"]
