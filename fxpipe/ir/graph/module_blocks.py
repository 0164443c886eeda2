"""The blocks of a model: its layers as a user would count them, in the order in which they run.

A block is a run of consecutive ops of one module: the module's path is followed down to its first number, as in
`encoder.layers.3` or `layer1.0`, or else to its first name (`head`). Ops that the model's own forward holds between
modules belong to the block before them, those at the very start to the first one. A module called twice is two blocks.
For an `nn.Sequential`, blocks are exactly its children.
"""

from __future__ import annotations

from dataclasses import dataclass

from .graph import Graph


@dataclass(frozen=True)
class Block:
    """The ops at positions `first` to `last` of the graph, of the module at `path`."""

    path: str
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1


def blocks(graph: Graph) -> tuple[Block, ...]:
    """The blocks of a graph; together they cover every op once."""
    found: list[Block] = []
    for position, op in enumerate(graph.ops):
        path = block_path(op.origin.module)
        here = found[-1].path if found else None
        if here is None or (path and path != here and here):
            found.append(Block(path, position, position))
        else:  # the same block, or ops of no module: at the start `path` names the block that is still nameless
            found[-1] = Block(here or path, found[-1].first, position)
    return tuple(found)


def block_path(module: str) -> str:
    """The path of the block that ops of a module belong to.

    >>> block_path("encoder.layers.3.attention.query"), block_path("head.norm"), block_path("")
    ('encoder.layers.3', 'head', '')
    """
    parts = module.split(".") if module else []
    numbered = next((at for at, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: numbered + 1])
