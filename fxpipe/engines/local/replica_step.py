"""Stages with replicas: several workers run the row of a stage, each for its slice of every micro-batch.

    micro-batch of 5      stage 0 on cpu:0     stage 1 on cpu:1, cpu:2      stage 2 on cpu:3, cpu:4, cpu:5
                             0 1 2 3 4      ▶     0 1 2 │ 3 4            ▶     0 1 │ 2 3 │ 4

To a worker its slices are micro-batches like any others: it sees a step of its own, with fewer samples. Only who gets
a message is another question, which `slices.py` answers.

The first replica of a stage is the stage itself. `runtime/stage_replica.py` says what the others hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor

from fxpipe.engines.common.replica_routing import Cut, RoutedStep, Routes, sliced
from fxpipe.engines.common.scheduler_base import Batches, Place
from fxpipe.engines.common.step import Gradients, Rows, Scale, Step, StepEngine
from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.runtime import Stage
from fxpipe.runtime.deferred_norms import absorb, sums_of
from fxpipe.runtime.microbatch import gather
from fxpipe.runtime.stage_replica import empty, fill
from fxpipe.runtime.step_leaves import Pair, standing_in
from fxpipe.runtime.streams import Streams

__all__ = ["Gradients", "ReplicaStep", "ReplicatedScheduler", "Step"]


class ReplicaStep(RoutedStep):
    """A step as one worker sees it. `label`: of the worker; `team`: the steps of all workers, by their labels."""

    engine: ReplicatedScheduler

    def place_in(
        self, team: Mapping[str, ReplicaStep], label: str, replica: int, whole: Batches, routes: Routes
    ) -> None:
        """Say whose it is, and of which batch."""
        self.team, self.label = team, label
        self.slice_of(whole, replica, routes)

    def begin(self, engine: StepEngine, pairs: list[list[Pair]], scale: Scale, rows: Rows) -> None:
        super().begin(engine, pairs, scale, rows)
        first = next(iter(self.team.values()))
        self.done, self.failed = first.done, first.failed

    def stop(self, error: BaseException) -> None:
        super().stop(error)
        for mailbox in {mailbox for other in self.team.values() for mailbox in other.mailboxes}:
            mailbox.queue.put(None)

    def feed(self, name: str, j: int) -> None:
        if self.devices[j] == self.label:
            super().feed(name, j)

    def lend(self, j: int, tensor: Tensor) -> Tensor:
        return super().lend(j, tensor) if self.devices[j] == self.label else tensor

    def owner(self, tensor: Tensor) -> Tensor:
        first = (pairs for view in self.team.values() if view.replica == 0 for pairs in view.pairs)
        return next((held for pairs in first for held, stand_in in pairs if stand_in is tensor), tensor)

    def _put(
        self, j: int, i: int, target: int, to: int, name: str, value: Any, grad: bool, there: Step | None = None
    ) -> None:
        super()._put(j, i, target, to, name, value, grad, self.team[self.engine.labels[target][to]])


class ReplicatedScheduler(StepScheduler):
    """The base of schedulers with replicated stages. `cuts`: the values that go between stages of different numbers of
    replicas, where from and to, and the dimension of the samples (None: the value is the same for all of them)."""

    cuts: tuple[Cut, ...] = ()

    def __init__(self, stages: Sequence[Stage], whole: Stage | None = None) -> None:
        super().__init__(stages, whole)
        further = iter(self.further)
        # Of each stage, the modules and the labels of its replicas.
        self.replica_groups = tuple(
            (stage, *(next(further) for _ in labels)) for stage, labels in zip(self.stages, self.replicas, strict=True)
        )
        self.labels = tuple((label, *others) for label, others in zip(self.devices, self.replicas, strict=True))
        self.places = tuple(self._place(k) for k in range(max(map(len, self.labels))))
        self.routes = Routes(map(len, self.labels), self.cuts)
        for replica in self.further:
            empty(replica)

    def _place(self, k: int) -> Place:
        """Where replicas number k run; of stages that have fewer, the last one stands in for them and never runs."""
        stages = tuple(replica_group[min(k, len(replica_group) - 1)] for replica_group in self.replica_groups)
        devices = tuple(labels[min(k, len(labels) - 1)] for labels in self.labels)
        return Place(stages, devices, Streams(tuple(stage.device for stage in stages)))

    def run(self, batch: Sequence[Any], chunks: int, scale: Scale = None) -> tuple[Any, ...]:
        return self.step(batch, chunks, scale, ReplicaStep)[0]

    def scatter(self, batch: Sequence[Any], chunks: int, kind: Callable[..., Any]) -> Any:
        """The step as the calling thread sees it, with those of the others in its `team`."""
        whole = super().scatter(batch, chunks, Batches)
        team: dict[str, ReplicaStep] = {}
        for labels in dict.fromkeys(self.labels):
            for k, (label, (sizes, slices)) in enumerate(zip(labels, sliced(self, whole, len(labels)), strict=True)):
                own: ReplicaStep = kind(sizes, self.places[k], False)
                own[:] = slices
                own.place_in(team, label, k, whole, self.routes)
                team[label] = own
        return team[self.devices[-1]]

    @contextmanager
    def begun(self, m: Step, scale: Scale, rows: Rows) -> Iterator[None]:
        assert isinstance(m, ReplicaStep)
        with standing_in([*chain(*self.replica_groups)]) as flat:
            each = iter(flat)
            pairs = [[next(each) for _ in replica_group] for replica_group in self.replica_groups]
            try:
                for replica_group, own in zip(self.replica_groups, pairs, strict=True):
                    for replica, found in zip(replica_group[1:], own[1:], strict=True):
                        found += fill(replica, replica_group[0], own[0])
                for view in m.team.values():
                    view.pairs = [own[min(view.replica, len(own) - 1)] for own in pairs]
                for view in m.team.values():
                    view.begin(self, view.pairs, scale, rows)
                yield
                for stage, *others in self.replica_groups:
                    for replica in others:
                        absorb(stage, sums_of(replica))
            finally:
                for replica in self.further:
                    empty(replica)

    def replica_devices(self, m: Step) -> dict[str, tuple[Step, int]]:
        assert isinstance(m, ReplicaStep)
        return {label: (m.team[label], j) for j, labels in enumerate(self.labels) for label in labels}

    def outcome(self, m: Step, batch: Sequence[Any]) -> tuple[tuple[Any, ...], list[Pair]]:
        assert isinstance(m, ReplicaStep)
        outputs = tuple([x.detach() if isinstance(x, Tensor) else x for x in self.gather(m)])
        pairs = [pair for j, labels in enumerate(self.labels) for label in labels for pair in m.team[label].pairs[j]]
        for labels in dict.fromkeys(self.labels):
            order = in_order([m.team[label] for label in labels])
            names = order[0][0].leaves
            pairs += self._inputs({name: [view.leaves[name][i] for view, i in order] for name in names}, batch)
        return outputs, pairs

    def gather(self, m: Batches) -> tuple[Any, ...]:
        assert isinstance(m, ReplicaStep)
        teams = [[m.team[label] for label in labels] for labels in dict.fromkeys(self.labels)]

        def whole(name: str, dim: int | None, reduce: str | None) -> Any:
            order = in_order(next(views for views in teams if hasattr(views[0][0], name)))
            values = [getattr(view[i], name) for view, i in order]
            if isinstance(values[0], Tensor):
                values = [value.to(values[0].device) for value in values]
            return gather(values, dim, reduce, [view.sizes[i] for view, i in order])

        return tuple([whole(*output) for output in self.outputs])


def in_order(views: Sequence[ReplicaStep]) -> list[tuple[ReplicaStep, int]]:
    """The slices of the batch that replicas have, as (step, micro-batch), in the order of the samples."""
    return [(view, i) for i in range(len(views[0])) for view in views if i < len(view)]
