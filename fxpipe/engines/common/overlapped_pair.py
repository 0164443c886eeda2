"""An overlapped pair: forward of one micro-batch and backward of another as one action. The generated code has lines of
both in turns (`codegen/stage/pair_methods.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fxpipe.ir.schedule.schedule import Action, Schedule
from fxpipe.runtime.error_notes import in_pairs_forward
from fxpipe.runtime.written_buffers import keep

from .kept_values import NO_BUFFERS, Kept
from .step import Step
from .step_plan import Row


def forward_beside_backward(
    m: Step, forward: tuple[Any, ...], backward: tuple[Any, ...], again: bool = False
) -> Sequence[Any]:
    """Run a stage forward on one micro-batch, and a stage of the same device backward on another.

    - `forward`: the stage, the micro-batch, and the arguments.
    - `backward`: the stage, the micro-batch, and the gradients of its results.
    - `again`: activation checkpointing: forward keeps only its arguments, and is recomputed before its own backward.

    Returns the results, and behind them the gradients of the second stage's arguments.
    """
    (j, i, *args), (k, b, *grads) = forward, backward
    own, other, old = m.generated[j], m.generated[k], m.kept[k, b]
    assert own is not None
    assert other is not None
    again = again and (j, i) not in m.engine.at_once
    before = keep(own.stage) if again and own.stage.rereads else NO_BUFFERS
    made = own.forward_beside_backward(args, other, f"forward_beside_backward_{k}", old, grads)
    single = len(m.engine.gradients[k].takes) == 1
    if made is None:  # there is no backward
        results = (m.forward_to_recompute if again else m.forward)(j, i, *args)
        takes = m.backward(k, b, *grads)
        return (*(results if isinstance(results, tuple) else (results,)), *([takes] if single else takes))
    results, values, found = made
    kept = m.kept[j, i] = Kept(tuple(args), buffers=before)
    if not again:
        own.keep(kept, results, values)
    takes = m.finish_backward(k, m.kept.pop((k, b)), found)
    return (*results, *([takes] if single else takes))


class Overlapped(NamedTuple):
    """A pair in the row of a worker: called in place of the methods of its actions. `together` is the method of both;
    a batch with fewer micro-batches may have one of them only."""

    forward: Action
    backward: Action
    together: Callable[..., None]

    def __call__(self, engine: Any, m: Step, _: int) -> None:
        i, j = self.forward.micro_batch, self.backward.micro_batch
        if max(i, j) <= m.last:
            self.together(engine, m, i, j)
        else:
            alone = self.forward if i <= m.last else self.backward
            engine.methods[alone](engine, m, alone.micro_batch)

    def failed(self, error: BaseException, m: Step) -> Action:
        """The action whose line has raised the error."""
        if max(self.forward.micro_batch, self.backward.micro_batch) > m.last:
            return self.forward if self.forward.micro_batch <= m.last else self.backward
        return self.forward if in_pairs_forward(error) else self.backward


def in_pairs(row: Row, schedule: Schedule, engine: type) -> Row:
    """The row with one entry for each pair of the schedule. `engine`: the class that has the pairs' methods."""
    return tuple(_joined(row, schedule, engine))


def _joined(row: Row, schedule: Schedule, engine: type) -> Iterator[Any]:
    first: Action | None = None
    for action, method in row:
        if action in schedule.beside:
            first = action
        elif first is not None:
            together = getattr(engine, f"forward_{first.stage}_beside_backward_{action.stage}")
            yield min(first, action, key=lambda one: one.micro_batch), Overlapped(first, action, together)
            first = None
        else:
            yield action, method
