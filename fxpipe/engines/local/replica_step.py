"""Stages with replicas: several workers run the row of a stage, each for its slice of every micro-batch.

    micro-batch of 5      stage 0 on cpu:0     stage 1 on cpu:1, cpu:2      stage 2 on cpu:3, cpu:4, cpu:5
                             0 1 2 3 4      ▶     0 1 2 │ 3 4            ▶     0 1 │ 2 3 │ 4

To a worker its slices are ordinary micro-batches: it has a step of its own, with fewer samples. Only the routing of
messages differs (`replica_routing.py`).

The first replica of a stage is the stage itself; for the other replicas see `stage_replica.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from fxpipe.engines.common.gradient_scale import Scale
from fxpipe.engines.common.replica_routing import Routes, sliced
from fxpipe.engines.common.scheduler_base import Batches, Place
from fxpipe.engines.common.step import Observer, Step
from fxpipe.engines.common.step_contract import Gradients
from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.engines.common.step_messages import Progress
from fxpipe.engines.common.step_plan import Rows, StepPlan
from fxpipe.engines.transports.mailbox import Mailbox
from fxpipe.runtime import Stage
from fxpipe.runtime.autograd.gradient_aliases import Pair, standing_in
from fxpipe.runtime.deferred_norms import absorb, sums_of
from fxpipe.runtime.microbatch import gather
from fxpipe.runtime.streams import Streams

from .stage_replica import empty, fill, let_go

__all__ = ["Gradients", "ReplicatedScheduler", "Step"]


class ReplicatedScheduler(StepScheduler):
    """The base of schedulers with replicated stages."""

    def __init__(
        self, stages: Sequence[Stage], whole: Stage | None = None, last: Stage | None = None, threads: bool = True
    ) -> None:
        super().__init__(stages, whole, last, threads)
        further = iter(self.further)
        # For each stage, the modules of its replicas; then their labels.
        self.replica_groups = tuple(
            (stage, *(next(further) for _ in labels)) for stage, labels in zip(self.stages, self.replicas, strict=True)
        )
        self.labels = tuple((label, *others) for label, others in zip(self.devices, self.replicas, strict=True))
        self.places = tuple(self._place(k) for k in range(max(map(len, self.labels))))
        self.routes = Routes(map(len, self.labels), self.cuts)
        for replica in self.further:
            let_go(replica)

    def _place(self, k: int) -> Place:
        """Where replicas number k run. For a stage with fewer replicas, its last one fills the place and is not run."""
        stages = tuple(replica_group[min(k, len(replica_group) - 1)] for replica_group in self.replica_groups)
        devices = tuple(labels[min(k, len(labels) - 1)] for labels in self.labels)
        return Place(stages, devices, Streams(tuple(stage.device for stage in stages)))

    def plans(self, batch: Sequence[Any], chunks: int, scale: Scale | None, rows: Rows) -> list[StepPlan]:
        whole, found = self.scatter(batch, chunks), list[StepPlan]()
        slices = {count: sliced(self, whole, count) for count in {*map(len, self.labels)}}
        alone = any(rows is one for one in (self.alone, self._paired_alone))
        boxes = [Mailbox(self.check_alive) for _ in self.places]
        workers = [len(labels) if alone else labels for labels in self.labels]
        for same in dict.fromkeys(workers):
            own = [j for j, other in enumerate(workers) if other == same]
            for k, batches in enumerate(slices[len(self.labels[own[0]])]):
                box = boxes[k] if alone else Mailbox(self.check_alive)  # a worker gets all its messages in one
                to, place, routes = [box] * len(self.stages), self.places[k], self.routes
                found.append(StepPlan(self, place, batches, own, rows, to, scale, k, routes, whole.sizes, alone))
        return found

    def take(self, plans: Sequence[StepPlan], progress: Progress, observer: Observer | None) -> Step:
        with standing_in([*chain(*self.replica_groups)]) as flat:
            each = iter(flat)
            pairs = [[next(each) for _ in replica_group] for replica_group in self.replica_groups]
            try:
                for replica_group, own in zip(self.replica_groups, pairs, strict=True):
                    for replica, found in zip(replica_group[1:], own[1:], strict=True):
                        found += fill(replica, replica_group[0], own[0])
                views: tuple[list[Step], ...] = tuple([[] for _ in self.stages])
                steps = []
                for plan in plans:
                    held = [own[min(plan.replica, len(own) - 1)] for own in pairs]
                    steps.append(step := Step(plan, held, progress, views))
                    for j in plan.own:
                        views[j].append(step)
                self.begin(steps, observer)
                m = views[-1][0]
                self.run_rows(m)
                for stage, *others in self.replica_groups:
                    for replica in others if stage.mutates else ():
                        absorb(stage, sums_of(replica))
            finally:
                for replica in self.further:
                    empty(replica)
        return m

    def worker_steps(self, m: Step) -> dict[str, tuple[Step, int]]:
        assert m.views is not None
        if m.plan.alone:
            return {self.devices[-1]: (m, len(self.stages) - 1)}
        return {
            label: (step, j)
            for j, (labels, steps) in enumerate(zip(self.labels, m.views, strict=True))
            for label, step in zip(labels, steps, strict=True)
        }

    def outcome(self, m: Step, batch: Sequence[Any]) -> tuple[tuple[Any, ...], list[Pair]]:
        assert m.views is not None
        outputs = tuple([x.detach() if isinstance(x, Tensor) else x for x in self.results(m)])
        pairs = [pair for j, steps in enumerate(m.views) for step in steps for pair in step.pairs[j]]
        for steps in self._groups(m):
            order = in_order(steps)
            names = order[0][0].leaves
            pairs += self.input_pairs({name: [step.leaves[name][i] for step, i in order] for name in names}, batch)
        return outputs, pairs

    def gather(self, m: Batches, taken: bool = True) -> tuple[Any, ...]:
        assert isinstance(m, Step)
        groups = self._groups(m)

        def whole(name: str, dim: int | None, reduce: str | None) -> Any:
            order = in_order(next(steps for steps in groups if hasattr(steps[0][0], name)))
            values = [getattr(step[i], name) for step, i in order]
            if isinstance(values[0], Tensor):
                values = [value.to(values[0].device) for value in values]
            return gather(values, dim, reduce, [step.sizes[i] for step, i in order])

        return tuple([whole(*output) for output in self.outputs if taken or output[0] not in self.epilogue[1]])

    def _groups(self, m: Step) -> list[Sequence[Step]]:
        """The steps of each group of workers that are replicas of each other."""
        assert m.views is not None
        return list({id(steps[0]): steps for steps in m.views}.values())


def in_order(steps: Sequence[Step]) -> list[tuple[Step, int]]:
    """The slices of the batch, as (step of a replica, micro-batch), in the order of their samples."""
    return [(step, i) for i in range(len(steps[0])) for step in steps if i < len(step)]
