"""A strategy becomes a graph that can be run: `shard`.

shard.py     what becomes of each captured op
regions.py   where the parts of its result lie
building.py  how a part gets the regions that it reads
rule.py      what a rule is; `rules/` has one for each op that can be cut
"""

from __future__ import annotations

from fxpipe.passes.sharding.shard import shard

__all__ = ["shard"]
