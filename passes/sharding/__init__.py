"""Turns a strategy into a graph that can be run: `shard`.

shard.py             how each captured op is rewritten
part_regions.py      the regions of the parts of its result
graph_rewriter.py    how a part gets the regions that it reads
sharding_rule.py     what a rule is; `rules/` has one for each op that can be cut
shard_parameters.py  a pass: devices hold the parts of parameters that they use
group_segments.py    a pass: which stages of the program are pieces of one stage of the pipeline
"""

from __future__ import annotations

from fxpipe.passes.sharding.shard import shard

__all__ = ["shard"]
