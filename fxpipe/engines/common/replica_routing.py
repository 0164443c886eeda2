"""How messages are cut between stages with different numbers of replicas: each replica has a slice of a micro-batch.

    micro-batch of 5      stage 0, 2 replicas     stage 1, 3 replicas
                              0 1 2                0 1
                              3 4                  2 │ 3     joined of two pieces
                                                   4

Between stages with equal numbers of replicas, replica k sends to replica k. Otherwise each replica sends its samples,
in pieces, directly to the replicas that need them, and these join the pieces; gradients go back the same way. If a
micro-batch has fewer samples than there are replicas, the last replicas have no work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from fxpipe.runtime import MicroBatch
from fxpipe.runtime.microbatch import join, overlaps, scatter, split_sizes
from fxpipe.runtime.random import replica_seed

from .scheduler_base import MiniBatch, SchedulerBase

Piece = tuple[int, int, int]  # from replica, to replica, samples
Cut = tuple[str, int, int, int | None]  # a value, its source and target stages, and the dimension of its samples


class Route(NamedTuple):
    """How messages of one name are cut.

    - `source`: the stage that sends them.
    - `dim`: the dimension of the samples; None if the value is the same for all samples.
    - `forward`: True for values, False for gradients.
    """

    source: int
    dim: int | None
    forward: bool


class Routes:
    """`counts`: the number of replicas of each stage; `of`: the messages that are cut, by target stage and name."""

    def __init__(self, counts: Iterable[int], cuts: Iterable[Cut] = ()) -> None:
        self.counts = tuple(counts)
        self.of: dict[tuple[int, str], Route] = {}
        for name, source, target, dim in cuts:
            self.of[target, name] = Route(source, dim, True)
            self.of[source, gradient_key(name, target)] = Route(target, dim, False)

    def pieces(self, rows: int, target: int, route: Route) -> tuple[Piece, ...]:
        """The pieces of a message to stage `target` for a micro-batch of `rows` samples. A value that is the same for
        all samples comes from the first replica of its stage, and its gradients go to that replica."""
        return pieces(rows, self.counts[route.source], self.counts[target], route.dim is None, route.forward)


@lru_cache(maxsize=1024)
def pieces(rows: int, here: int, there: int, whole: bool, forward: bool) -> tuple[Piece, ...]:
    ours, theirs = split_sizes(rows, here), split_sizes(rows, there)
    if not whole:
        return tuple(overlaps(ours, theirs))
    return tuple([(0, to, 0) for to in range(len(theirs))] if forward else [(k, 0, 0) for k in range(len(ours))])


@lru_cache(maxsize=4096)  # one for each message of a step, and all steps have the same
def gradient_key(name: str, source: int) -> str:
    """The name of the message with which stage `source` sends back the gradient of a value."""
    return f"gradient of {name} from stage {source}"


def piece_name(name: str, source: int, target: int) -> str:
    """The name of the message with which replica `source` sends a piece of a value to replica `target`."""
    return f"{name}, {source} to {target}"


def sliced(engine: SchedulerBase, whole: MiniBatch, count: int) -> list[MiniBatch]:
    """For each of `count` replicas its slices of the first micro-batches, those that have a sample for it."""
    sizes = [split_sizes(rows, count) for rows in whole.sizes]
    cut_up = [_slices(engine, m, rows) for m, rows in zip(whole.micro_batches, sizes, strict=True)]
    return [
        MiniBatch(
            [row[k] for row in cut_up if k < len(row)],
            tuple(rows[k] for rows in sizes if k < len(rows)),
            whole.total,
            replica_seed(whole.seed, k),
        )
        for k in range(count)
    ]


def _slices(engine: SchedulerBase, m: MicroBatch, rows: Sequence[int]) -> list[MicroBatch]:
    """The slices of micro-batch `m`, one for each replica."""
    found, dims = [MicroBatch() for _ in rows], dict(engine.inputs)
    for name, value in vars(m).items():
        for own, piece in zip(found, scatter(value, dims.get(name), rows), strict=True):
            setattr(own, name, piece)
    for own in found:
        for name, source, dim in engine.sizes:
            setattr(own, name, getattr(own, source).shape[dim])
    return found


def cut(value: Any, dim: int | None, rows: Sequence[int], total: int) -> Sequence[Any]:
    """Cut a value of `total` samples into pieces of `rows` samples along `dim`; with `dim` None all get the whole. A
    sample may take several places along `dim`, as in a flattened sequence."""
    if dim is None and isinstance(value, Tensor):
        return [value.detach() for _ in rows]  # each replica gets a leaf of its own
    if dim is None or value is None or len(rows) == 1:
        return [value] * len(rows)
    each = value.shape[dim] // total
    found: Sequence[Tensor] = value.split([count * each for count in rows], dim)
    outermost = value.stride(dim) == max(value.stride())
    return found if outermost else [piece.clone() for piece in found]  # the model may rely on dense memory


def joined(pieces: Sequence[Tensor | None], rows: Sequence[int], dim: int) -> Tensor | None:
    """Join pieces of `rows` samples along `dim`. None stands for a missing gradient, which counts as zeros; the result
    is None if all are missing."""
    like = next((piece for piece in pieces if piece is not None), None)
    if like is None:
        return None
    each = like.shape[dim] // next(count for count, piece in zip(rows, pieces, strict=True) if piece is like)
    shapes = [[*like.shape[:dim], count * each, *like.shape[dim + 1 :]] for count in rows]
    there = [
        like.new_zeros(shape) if piece is None else piece.detach() for shape, piece in zip(shapes, pieces, strict=True)
    ]
    return join(there, dim).requires_grad_(like.requires_grad)
