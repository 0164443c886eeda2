"""Products of matrices: a part has its own rows and columns, and reads all that they are summed over. Columns of a
layer are rows of its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F

from fxpipe.ir.graph.graph import Op, Ref, refs
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Places
from fxpipe.passes.sharding.sharding_rule import Rule, aligned, each, every, with_arguments


def _linear(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    names = ("input", "weight", "bias")
    x, weight, bias = (argument(op, at, name) for at, name in enumerate(names))
    inside = (0, b.shape(x.name)[-1])

    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        *rows, columns = region
        changed = {
            "input": Ref(b.gather(op, x.name, (*rows, inside), device)),
            "weight": Ref(b.gather(op, weight.name, (columns, inside), device)),
            "bias": bias and Ref(b.gather(op, bias.name, (columns,), device)),
        }
        return op.target, *with_arguments(op, changed if bias else {**changed, "bias": None}, names)

    return each(b, op, places, call)


def _matmul(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    """As torch has it: matrices in the last two dimensions, the others broadcast; a vector has one dimension less."""
    x, y = (ref.name for ref in refs((op.args, dict(op.kwargs))))
    first, second = b.shape(x), b.shape(y)

    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        *batch, last = region if len(second) > 1 else (*region, (0, 1))
        *batch, row = batch if len(first) > 1 else (*batch, (0, 1))
        left: Region = (row, (0, first[-1])) if len(first) > 1 else ((0, first[-1]),)
        right: Region = ((0, second[-2]), last) if len(second) > 1 else ((0, second[-1]),)
        left = (*aligned(tuple(batch), first[:-2]), *left)
        right = (*aligned(tuple(batch), second[:-2]), *right)
        return op.target, (Ref(b.gather(op, x, left, device)), Ref(b.gather(op, y, right, device))), {}

    return each(b, op, places, call)


def _rows(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Any dimension of what is looked up; its channels unless a row has to be seen whole, and nothing if the gradient
    depends on how often a word comes."""
    rank = len(b.shape(op.name))
    if op.target is not F.embedding or argument(op, 5, "scale_grad_by_freq", False) or op.writes:
        return ()
    whole = argument(op, 3, "max_norm") is not None or argument(op, 6, "sparse", False)
    return range(rank - 1 if whole else rank)


def _embedding(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    names = ("input", "weight")
    words, weight = (argument(op, at, name) for at, name in enumerate(names))
    rows = (0, b.shape(weight.name)[0])

    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        *place, columns = region
        changed = {
            "input": Ref(b.gather(op, words.name, tuple(place), device)),
            "weight": Ref(b.gather(op, weight.name, (rows, columns), device)),
        }
        return op.target, *with_arguments(op, changed, names)

    return each(b, op, places, call)


MATMULS = {
    "linear": Rule(_linear, every),
    **dict.fromkeys(("matmul", "bmm"), Rule(_matmul, every)),
    "embedding": Rule(_embedding, _rows),
}
