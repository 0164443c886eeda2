"""What is decided before a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fxpipe.engines.transports.mailbox import Transport
from fxpipe.ir.schedule.schedule import Action

from .gradient_scale import Scale
from .replica_routing import Routes
from .scheduler_base import MiniBatch, Place
from .step_contract import StepEngine

Method = Callable[[Any, Any, int], None]  # a method of a generated scheduler; takes it, the step, the micro-batch
Row = tuple[tuple[Action, Method], ...]
Rows = Mapping[str, Row]  # the actions of each worker, by its label


class StepPlan(NamedTuple):
    """What is decided before a step; where stages have replicas, before the step of one worker.

    - `engine`: the scheduler; `place`: where its stages run.
    - `batch`: the micro-batches, or a worker's slices of the first of them, those that have enough samples.
    - `own`: the stages that this step runs; `rows`: the actions of each worker.
    - `mailboxes`: by stage, the mailbox with the messages to it.
    - `scale`: what the gradients are multiplied by, or None.
    - `replica`: the number of the worker among the replicas of its stages.
    - `alone`: whether one thread runs the rows of all workers, though stages have replicas.
    - `routes`: how messages are cut between stages of different numbers of replicas, or None if no stage has replicas;
      `rows_of`: the samples in each whole micro-batch.
    """

    engine: StepEngine
    place: Place
    batch: MiniBatch
    own: Collection[int]
    rows: Rows
    mailboxes: Sequence[Transport]
    scale: Scale | None
    replica: int = 0
    routes: Routes | None = None
    rows_of: tuple[int, ...] = ()
    alone: bool = False
