"""A strategy becomes a graph that can be run."""

from __future__ import annotations

from fxpipe.passes.sharding.shard import shard

__all__ = ["shard"]
