"""What a stage with replicas sends and takes: slices of micro-batches, as the others cut them.

    micro-batch of 5      stage 0, 2 replicas     stage 1, 3 replicas
                              0 1 2                0 1
                              3 4                  2 │ 3     joined of two pieces
                                                   4

Between stages of equally many replicas, number k sends to number k. Else samples go straight from who has them to who
needs them, in pieces, and are joined there; gradients go back the same way. A micro-batch with fewer samples than there
are replicas leaves the last of these without work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from fxpipe.runtime import MicroBatch
from fxpipe.runtime.microbatch import join, overlaps, scatter, split_sizes

from .scheduler_base import Batches, SchedulerBase

Piece = tuple[int, int, int]  # from replica, to replica, samples
Cut = tuple[str, int, int, int | None]  # a value, where from and to, and the dimension of its samples


class Route(NamedTuple):
    """How messages of one name are cut: the stage that sends them, the dimension of the samples (None: the value is the
    same for all of them), and whether they go forward."""

    source: int
    dim: int | None
    forward: bool


class Routes:
    """`counts`: of each stage, how many replicas it has; `of`: by stage and name, the messages that are cut."""

    def __init__(self, counts: Iterable[int], cuts: Iterable[Cut] = ()) -> None:
        self.counts = tuple(counts)
        self.of: dict[tuple[int, str], Route] = {}
        for name, source, target, dim in cuts:
            self.of[target, name] = Route(source, dim, True)
            self.of[source, gradient_key(name, target)] = Route(target, dim, False)

    def pieces(self, rows: int, target: int, route: Route) -> tuple[Piece, ...]:
        """Which replicas of a stage send how many samples, of so many, to which of another. What is the same for all
        samples comes from the first, and gradients of it go there."""
        return pieces(rows, self.counts[route.source], self.counts[target], route.dim is None, route.forward)


@lru_cache(maxsize=1024)
def pieces(rows: int, here: int, there: int, whole: bool, forward: bool) -> tuple[Piece, ...]:
    ours, theirs = split_sizes(rows, here), split_sizes(rows, there)
    if not whole:
        return tuple(overlaps(ours, theirs))
    return tuple([(0, to, 0) for to in range(len(theirs))] if forward else [(k, 0, 0) for k in range(len(ours))])


def gradient_key(name: str, source: int) -> str:
    """What the message with the gradient of a value is called that stage `source` sends back."""
    return f"gradient of {name} from stage {source}"


def piece_name(name: str, source: int, target: int) -> str:
    """What a piece of a value is called between these replicas."""
    return f"{name}, {source} to {target}"


def sliced(engine: SchedulerBase, whole: Batches, count: int) -> list[tuple[tuple[int, ...], list[MicroBatch]]]:
    """Of each of `count` replicas its slices of the micro-batches, with the samples in each before them."""
    sizes = [split_sizes(rows, count) for rows in whole.sizes]
    cut_up = [_slices(engine, m, rows) for m, rows in zip(whole, sizes, strict=True)]
    return [
        (tuple(rows[k] for rows in sizes if k < len(rows)), [row[k] for row in cut_up if k < len(row)])
        for k in range(count)
    ]


def _slices(engine: SchedulerBase, m: MicroBatch, rows: Sequence[int]) -> list[MicroBatch]:
    """A micro-batch for each replica, of what is known of a whole one."""
    found, dims = [MicroBatch() for _ in rows], dict(engine.inputs)
    for name, value in vars(m).items():
        for own, piece in zip(found, scatter(value, dims.get(name), rows), strict=True):
            setattr(own, name, piece)
    for own in found:
        for name, source, dim in engine.sizes:
            setattr(own, name, getattr(own, source).shape[dim])
    return found


def cut(value: Any, dim: int | None, rows: Sequence[int], total: int) -> Sequence[Any]:
    """Pieces of so many samples, of `total`. A sample may be several places along `dim`, as in a flattened sequence."""
    if dim is None and isinstance(value, Tensor):
        return [value.detach() for _ in rows]  # each is a leaf of its own to who gets it
    if dim is None or value is None or len(rows) == 1:
        return [value] * len(rows)
    each = value.shape[dim] // total
    found: Sequence[Tensor] = value.split([count * each for count in rows], dim)
    outermost = value.stride(dim) == max(value.stride())
    return found if outermost else [piece.clone() for piece in found]  # the model may rely on dense memory


def joined(pieces: Sequence[Tensor | None], rows: Sequence[int], dim: int) -> Tensor | None:
    """One tensor of the pieces of so many samples, a leaf if they are. Gradients may be missing, all or some."""
    like = next((piece for piece in pieces if piece is not None), None)
    if like is None:
        return None
    each = like.shape[dim] // next(count for count, piece in zip(rows, pieces, strict=True) if piece is like)
    shapes = [[*like.shape[:dim], count * each, *like.shape[dim + 1 :]] for count in rows]
    there = [
        like.new_zeros(shape) if piece is None else piece.detach() for shape, piece in zip(shapes, pieces, strict=True)
    ]
    return join(there, dim).requires_grad_(like.requires_grad)
