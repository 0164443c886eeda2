"""Stages with replicas: several workers run the row of a stage, each for its slice of every micro-batch.

    micro-batch of 5      stage 0 on cpu:0     stage 1 on cpu:1, cpu:2      stage 2 on cpu:3, cpu:4, cpu:5
                             0 1 2 3 4      ▶     0 1 2 │ 3 4            ▶     0 1 │ 2 3 │ 4

To a worker its slices are micro-batches like any others: it sees a step of its own, with fewer samples. Only who gets
a message is another question. Between stages of equally many replicas, number k sends to number k. Else samples go
straight from who has them to who needs them, in pieces, and are joined there; gradients go back the same way. A
micro-batch with fewer samples than there are replicas leaves the last of these without work.

The first replica of a stage is the stage itself. `runtime/replica.py` says what the others hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor

from fxpipe.runtime import MicroBatch, Stage
from fxpipe.runtime.aliases import Pair, standing_in
from fxpipe.runtime.batchnorm import absorb
from fxpipe.runtime.microbatch import gather, join, overlaps, scatter, split_sizes
from fxpipe.runtime.random import replica_seed
from fxpipe.runtime.replica import empty, fill
from fxpipe.runtime.stream import Streams

from .engine import Batches, Place
from .step import Step
from .stepper import Rows, Stepper

__all__ = ["Replicated", "Slices", "Step"]

Route = tuple[int, int | None, bool]  # the stage at the other end, the dimension of the samples, whether forward
Piece = tuple[int, int, int]  # from replica, to replica, samples


class Slices(Step):
    """A step as one worker sees it: its slices of the micro-batches in which it has a part, which are the first ones.

    `label`: of the worker; `replica`: its number; `team`: the steps of all workers, by their labels; `rows_of`: the
    samples in each whole micro-batch.
    """

    engine: Replicated

    def place_in(self, team: Mapping[str, Slices], label: str, replica: int, whole: Batches) -> None:
        """Say whose it is, and of which batch."""
        self.team, self.label, self.replica = team, label, replica
        self.rows_of, self.total, self.seed = whole.sizes, whole.total, replica_seed(whole.seed, replica)

    def begin(self, engine: Stepper, pairs: list[list[Pair]], scale: Tensor | None, rows: Rows) -> None:
        super().begin(engine, pairs, scale, rows)
        first = next(iter(self.team.values()))
        self.done, self.failed = first.done, first.failed

    def stop(self, error: BaseException) -> None:
        super().stop(error)
        for box in {box for other in self.team.values() for box in other.boxes}:
            box.queue.put(None)

    def feed(self, name: str, j: int) -> None:
        if self.devices[j] == self.label:
            super().feed(name, j)

    def lend(self, j: int, tensor: Tensor) -> Tensor:
        return super().lend(j, tensor) if self.devices[j] == self.label else tensor

    def owner(self, tensor: Tensor) -> Tensor:
        first = (pairs for view in self.team.values() if view.replica == 0 for pairs in view.pairs)
        return next((held for pairs in first for held, stand_in in pairs if stand_in is tensor), tensor)

    def receive(self, j: int, i: int, *names: str) -> Any:
        values = [self._join(j, i, name) for name in names]
        return values[0] if len(values) == 1 else values

    def _join(self, j: int, i: int, name: str) -> Any:
        """What has been sent under a name, by all who had a piece of it."""
        route = self.engine.routes.get((j, name))
        if route is None:
            return super().receive(j, i, name)
        source, dim, _ = route
        mine = [(k, rows) for k, to, rows in self.pieces(i, source, j, route) if to == self.replica]
        pieces = [super(Slices, self).receive(j, i, f"{name} of {k}") for k, _ in mine]
        if len(pieces) == 1:
            return pieces[0]
        # What is the same for all samples has the sum of the gradients that its users have for it.
        return self.add(*pieces) if dim is None else joined(pieces, [rows for _, rows in mine], dim)

    def _post(self, j: int, i: int, target: int, name: str, value: Any, grad: bool, there: Step | None = None) -> None:
        labels, route = self.engine.labels[target], self.engine.routes.get((target, name))
        if route is None:
            super()._post(j, i, target, name, value, grad, self.team[labels[self.replica]])
            return
        mine = [(to, rows) for k, to, rows in self.pieces(i, j, target, route) if k == self.replica]
        values = cut(value, route[1], [rows for _, rows in mine], self.sizes[i])
        for (to, _), piece in zip(mine, values, strict=True):
            super()._post(j, i, target, f"{name} of {self.replica}", piece, grad, self.team[labels[to]])

    def pieces(self, i: int, source: int, target: int, route: Route) -> Sequence[Piece]:
        """Which replicas of a stage send how many samples of micro-batch i to which of another. What is the same for
        all samples comes from the first, and gradients of it go there."""
        here, there = (split_sizes(self.rows_of[i], len(self.engine.labels[s])) for s in (source, target))
        if route[1] is not None:
            return tuple(overlaps(here, there))
        return [(0, to, 0) for to in range(len(there))] if route[2] else [(k, 0, 0) for k in range(len(here))]


def cut(value: Any, dim: int | None, rows: Sequence[int], total: int) -> Sequence[Any]:
    """Pieces of so many samples, of `total`. A sample may be several places along `dim`, as in a flattened sequence."""
    if dim is None and isinstance(value, Tensor):
        return [value.detach() for _ in rows]  # each is a leaf of its own to who gets it
    if dim is None or value is None or len(rows) == 1:
        return [value] * len(rows)
    each = value.shape[dim] // total
    pieces: Sequence[Tensor] = value.split([count * each for count in rows], dim)
    outermost = value.stride(dim) == max(value.stride())
    return pieces if outermost else [piece.clone() for piece in pieces]  # the model may rely on dense memory


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


class Replicated(Stepper):
    """The base of schedulers with replicated stages. `cuts`: the values that go between stages of different numbers of
    replicas, where from and to, and the dimension of the samples (None: the value is the same for all of them)."""

    cuts: tuple[tuple[str, int, int, int | None], ...] = ()

    def __init__(self, stages: Sequence[Stage], whole: Stage | None = None) -> None:
        super().__init__(stages, whole)
        further = iter(self.further)
        # Of each stage, the modules and the labels of its replicas.
        self.crews = tuple(
            (stage, *(next(further) for _ in labels)) for stage, labels in zip(self.stages, self.replicas, strict=True)
        )
        self.labels = tuple((label, *others) for label, others in zip(self.devices, self.replicas, strict=True))
        self.places = tuple(self._place(k) for k in range(max(map(len, self.labels))))
        self.routes: dict[tuple[int, str], Route] = {}
        for name, source, target, dim in self.cuts:
            self.routes[target, name] = source, dim, True
            self.routes[source, f"gradient of {name} from stage {target}"] = target, dim, False
        for replica in self.further:
            empty(replica)

    def _place(self, k: int) -> Place:
        """Where replicas number k run; of stages that have fewer, the last one stands in for them and never runs."""
        stages = tuple(crew[min(k, len(crew) - 1)] for crew in self.crews)
        devices = tuple(labels[min(k, len(labels) - 1)] for labels in self.labels)
        return Place(stages, devices, Streams(tuple(stage.device for stage in stages)))

    def run(self, batch: Sequence[Any], chunks: int, scale: Tensor | None = None) -> tuple[Any, ...]:
        return self.step(batch, chunks, scale, Slices)[0]

    def scatter(self, batch: Sequence[Any], chunks: int, kind: Callable[..., Any]) -> Any:
        """The step as the calling thread sees it, with those of the others in its `team`."""
        whole = super().scatter(batch, chunks, Batches)
        team: dict[str, Slices] = {}
        for labels in dict.fromkeys(self.labels):
            sizes = [split_sizes(rows, len(labels)) for rows in whole.sizes]
            slices = [self.slices(m, rows) for m, rows in zip(whole, sizes, strict=True)]
            for k, label in enumerate(labels):
                own: Slices = kind(tuple(rows[k] for rows in sizes if k < len(rows)), self.places[k], False)
                own[:] = [row[k] for row in slices if k < len(row)]
                own.place_in(team, label, k, whole)
                team[label] = own
        return team[self.devices[-1]]

    def slices(self, m: MicroBatch, rows: Sequence[int]) -> list[MicroBatch]:
        """A micro-batch for each replica, of what is known of a whole one."""
        found, dims = [MicroBatch() for _ in rows], dict(self.inputs)
        for name, value in vars(m).items():
            for own, piece in zip(found, scatter(value, dims.get(name), rows), strict=True):
                setattr(own, name, piece)
        for own in found:
            for name, source, dim in self.sizes:
                setattr(own, name, getattr(own, source).shape[dim])
        return found

    @contextmanager
    def begun(self, m: Step, scale: Tensor | None, rows: Rows) -> Iterator[None]:
        assert isinstance(m, Slices)
        with standing_in([*chain(*self.crews)]) as flat:
            each = iter(flat)
            pairs = [[next(each) for _ in crew] for crew in self.crews]
            try:
                for crew, own in zip(self.crews, pairs, strict=True):
                    for replica, found in zip(crew[1:], own[1:], strict=True):
                        found += fill(replica, crew[0], own[0])
                for view in m.team.values():
                    view.pairs = [own[min(view.replica, len(own) - 1)] for own in pairs]
                for view in m.team.values():
                    view.begin(self, view.pairs, scale, rows)
                yield
                for stage, *others in self.crews:
                    for replica in others:
                        absorb(stage, replica)
            finally:
                for replica in self.further:
                    empty(replica)

    def seats(self, m: Step) -> dict[str, tuple[Step, int]]:
        assert isinstance(m, Slices)
        return {label: (m.team[label], j) for j, labels in enumerate(self.labels) for label in labels}

    def outcome(self, m: Step, batch: Sequence[Any]) -> tuple[tuple[Any, ...], list[Pair]]:
        assert isinstance(m, Slices)
        outputs = tuple([x.detach() if isinstance(x, Tensor) else x for x in self.gather(m)])
        pairs = [pair for j, labels in enumerate(self.labels) for label in labels for pair in m.team[label].pairs[j]]
        for labels in dict.fromkeys(self.labels):
            order = in_order([m.team[label] for label in labels])
            names = order[0][0].leaves
            pairs += self._inputs({name: [view.leaves[name][i] for view, i in order] for name in names}, batch)
        return outputs, pairs

    def gather(self, m: Batches) -> tuple[Any, ...]:
        assert isinstance(m, Slices)
        teams = [[m.team[label] for label in labels] for labels in dict.fromkeys(self.labels)]

        def whole(name: str, dim: int | None, reduce: str | None) -> Any:
            order = in_order(next(views for views in teams if hasattr(views[0][0], name)))
            values = [getattr(view[i], name) for view, i in order]
            if isinstance(values[0], Tensor):
                values = [value.to(values[0].device) for value in values]
            return gather(values, dim, reduce, [view.sizes[i] for view, i in order])

        return tuple([whole(*output) for output in self.outputs])


def in_order(views: Sequence[Slices]) -> list[tuple[Slices, int]]:
    """The slices of the batch that replicas have, as (step, micro-batch), in the order of the samples."""
    return [(view, i) for i in range(len(views[0])) for view in views if i < len(view)]
