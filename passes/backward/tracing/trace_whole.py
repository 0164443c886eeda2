"""Traces a stage whole: its ops run one after the other, then autograd from their results back.

Autograd numbers its nodes as forward makes them, so each recorded op of backward belongs to the op of the stage that
made the node that runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.graph.graph import Op, called
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.value_types import NO_VALUE, TensorType
from fxpipe.passes.backward.refused import Refused
from fxpipe.passes.backward.tracing.fake_tensors import empty, run_op
from fxpipe.passes.backward.tracing.opaque_vjp import run_whole
from fxpipe.passes.backward.tracing.record_ops import NOWHERE, marked_draws
from fxpipe.passes.backward.tracing.traces import Piece, Shapes, Task, Trace, roots
from fxpipe.torch_internals.autograd_nodes import current_node, next_number, number_of

NOTHING = Op("", "", (), {}, NO_VALUE, NOWHERE)


class WholeTracing:
    """One trace under way.

    - `values`: the fake value of each name of the stage, at first of what it takes and holds; `leaves`: those of them
      that need a gradient.
    - `starts`: the number of autograd's next node before each op.
    - `last`: the op whose backward has run last.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.recorder = task, task.recorder
        self.values: dict[str, Any] = {}
        self.found = Trace()
        self.starts: list[int] = []
        self.last = NOTHING
        for name in (*self.task.stage.takes, *self.task.stage.borrows, *self.task.stage.states):
            kind = self.task.program.types[name]
            if name in self.task.sizes.values:
                self.values[name] = self.task.sizes.values[name]
            elif isinstance(kind, TensorType):
                made = empty(kind, self.task.orders.get(name, ()), self.task.sizes, self.task.device)
                self.values[name] = made
                self.recorder.hold(made, name)
                self.watch(made, name)
            else:
                self.values[name] = self.task.program.state(name).value
        self.leaves = {
            name: self.values[name]
            for name in (*self.task.stage.takes, *self.task.stage.states, *self.task.stage.borrows)
            if isinstance(self.values[name], Tensor) and self.values[name].requires_grad
        }

    def watch(self, tensor: Tensor, name: str) -> None:
        """Call the tensor's gradient d and its name."""
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self.called(grad, f"d{name}"))  # type: ignore[no-untyped-call]

    def called(self, grad: Tensor, wish: str) -> None:
        own = self.recorder.names.get(id(grad))
        if own is not None and own in self.recorder.types and own not in dict(self.found.roots).values():
            self.found.wishes.setdefault(own, wish)

    def forward(self, op: Op) -> None:
        """Run an op, and record what it runs."""
        self.starts.append(next_number())
        self.recorder.ops, self.recorder.origin = [], lambda: op.origin
        self.recorder.decided = lambda: self.task.decided[op.name]
        if isinstance(op.target, Opaque):
            value = run_whole(op, self.values, self.task.around, self.recorder)
        else:
            with self.recorder:
                value = run_op(op, self.values, self.task.around, self.task.device)
        self.values[op.name] = value
        if isinstance(value, torch.SymFloat):
            self.task.sizes.numbers.setdefault(value.node.expr, op.name)
        ops = self.recorder.ops
        if op.draw is not None:
            ops = marked_draws(ops, self.recorder.drew, op.draw)
        several = isinstance(value, (tuple, list))
        items: dict[int | None, Any] = dict(enumerate(value)) if several else {None: value}
        results = {
            place: self.recorder.names[id(item)]
            for place, item in items.items()
            if isinstance(item, Tensor) and id(item) in self.recorder.names
        }
        grad = any(isinstance(item, Tensor) and item.requires_grad for item in items.values())
        grad = grad or any(isinstance(x := self.values[name], Tensor) and x.requires_grad for name in op.writes)
        self.found.pieces.append(Piece(replace(op, regions=(*self.task.around, *op.regions)), ops, results, grad))
        if isinstance(value, Tensor):
            self.recorder.hold(value, op.name)
            self.watch(value, op.name)
        elif several and not all(item is None or not isinstance(item, Tensor) or place in results
                                 for place, item in items.items()):  # fmt: skip
            raise Refused(f"{called(op)} returns a nest of tensors, at {op.origin}")
        for name in op.writes:  # later readers of the memory may still say the old name
            written = self.values[name]
            if isinstance(written, Tensor) and written is not value and name not in self.task.stage.states:
                self.recorder.hold(written, name)

    def given(self) -> Shapes:
        values = {name: self.values[name] for name in self.task.stage.gives}
        return {name: (x.shape, x.stride()) for name, x in values.items() if isinstance(x, Tensor)}

    def backward(self, arriving: Sequence[str]) -> None:
        """Run backward from the gradients of the results, and record what it runs."""
        recorder = self.recorder
        outputs = {name: self.values[name] for name in arriving if self.values[name].requires_grad}
        tangents = {name: torch.empty(x.shape, dtype=x.dtype, device=x.device) for name, x in outputs.items()}
        self.found.roots = roots(self.task.program, self.task.stage, recorder, tangents, self.values)
        recorder.ops, recorder.origin = [], lambda: self.running().origin
        recorder.decided = lambda: self.task.decided.get(self.running().name, ())
        found: Sequence[Tensor | None] = [None] * len(self.leaves)
        if outputs and self.leaves:
            with recorder:
                found = torch.autograd.grad(
                    [*outputs.values()], [*self.leaves.values()], [*tangents.values()], allow_unused=True
                )
        named = {
            name: "" if grad is None else recorder._name(grad, "backward")
            for name, grad in zip(self.leaves, found, strict=True)
        }
        self.found.backward = recorder.ops
        self.found.gradients_of(self.task.program, self.task.stage, named)

    def running(self) -> Op:
        """The op whose node of autograd runs now."""
        number = number_of(current_node())
        place = bisect_right(self.starts, number) - 1 if 0 <= number < 1 << 62 else -1
        if place >= 0:
            self.last = self.task.stage.ops[place]
        return self.last
