"""Traces a stage whole: its ops run one after the other, then autograd from their results back.

Autograd numbers its nodes as forward makes them, so each recorded op of backward belongs to the op of the stage that
made the node that runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.graph.evaluate_graph import within
from fxpipe.ir.graph.graph import Op, Origin, Region, called, map_leaves
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.program.program import OWN_DEVICE, Program, Stage
from fxpipe.passes.backward.fake_sizes import Sizes
from fxpipe.passes.backward.fake_tensors import device_of, empty, on_fake_tensors
from fxpipe.passes.backward.record_ops import NOWHERE, Recorder, marked_draws
from fxpipe.passes.backward.refused import Refused
from fxpipe.passes.backward.traces import Orders, Piece, Trace, is_scattered, order_of, roots


class WholeTracing:
    """One trace under way. `values`: the fake value of each name of the stage."""

    def __init__(
        self,
        program: Program,
        stage: Stage,
        sizes: Sizes,
        recorder: Recorder,
        around: tuple[Region, ...],
        orders: Orders,
    ) -> None:
        self.program, self.stage, self.sizes, self.recorder = program, stage, sizes, recorder
        self.around, self.orders = around, orders
        self.device = device_of(stage.device)
        self.values: dict[str, Any] = {}
        self.found = Trace()
        self.starts: list[int] = []  # the number of autograd's next node before each op

    def run(self, arriving: Sequence[str]) -> Trace:
        with on_fake_tensors(self.sizes):
            self.place()
            for op in self.stage.ops:
                self.forward(op)
            given = {name: x for name in self.stage.gives if isinstance(x := self.values[name], Tensor)}
            self.found.orders = {name: order for name, x in given.items() if (order := order_of(x.stride()))}
            self.found.scattered = frozenset(n for n, x in given.items() if is_scattered(x.shape, x.stride()))
            self.backward(arriving)
        self.found.types, self.found.memory = self.recorder.types, self.recorder.memory
        return self.found

    def place(self) -> None:
        """Fake values for what the stage takes and holds."""
        for name in (*self.stage.takes, *self.stage.borrows, *self.stage.states):
            kind = self.program.types[name]
            if name in self.sizes.values:
                self.values[name] = self.sizes.values[name]
            elif isinstance(kind, TensorType):
                made = empty(kind, self.orders.get(name, ()), self.sizes, self.device)
                self.values[name] = made
                self.recorder.hold(made, name)
                self.watch(made, name)
            else:
                self.values[name] = self.program.state(name).value
        self.leaves = {
            name: self.values[name]
            for name in (*self.stage.takes, *self.stage.states, *self.stage.borrows)
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
        self.starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.recorder.ops, self.recorder.origin = [], lambda: op.origin
        placed = map_leaves((op.args, dict(op.kwargs)), lambda leaf: self.device if leaf is OWN_DEVICE else leaf)
        alone = replace(op, args=placed[0], kwargs=placed[1], regions=(*self.around, *op.regions), draw=None)
        with self.recorder:
            value = within(alone, self.values, lambda number: nullcontext())
        self.values[op.name] = value
        if isinstance(value, torch.SymFloat):
            self.recorder.numbers.setdefault(value.node.expr, op.name)
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
        self.found.pieces.append(Piece(replace(op, regions=(*self.around, *op.regions)), ops, results, grad))
        if isinstance(value, Tensor):
            self.recorder.hold(value, op.name)
            self.watch(value, op.name)
        elif several and not all(item is None or not isinstance(item, Tensor) or place in results
                                 for place, item in items.items()):  # fmt: skip
            raise Refused(f"{called(op)} returns a nest of tensors, at {op.origin}")
        for name in op.writes:  # later readers of the memory may still say the old name
            written = self.values[name]
            if isinstance(written, Tensor) and written is not value and name not in self.stage.states:
                self.recorder.hold(written, name)

    def backward(self, arriving: Sequence[str]) -> None:
        """Run backward from the gradients of the results, and record what it runs."""
        recorder = self.recorder
        outputs = {name: self.values[name] for name in arriving if self.values[name].requires_grad}
        tangents = {name: torch.empty(x.shape, dtype=x.dtype, device=x.device) for name, x in outputs.items()}
        self.found.roots = roots(self.program, self.stage, recorder, tangents, self.values)
        recorder.ops, recorder.origin = [], self.origin
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
        self.found.gradients_of(self.program, self.stage, named)

    def origin(self) -> Origin:
        """The origin of the op whose node of autograd runs now."""
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        place = bisect_right(self.starts, number) - 1 if 0 <= number < 1 << 62 else -1
        if place >= 0:
            self.last = self.stage.ops[place].origin
        return getattr(self, "last", NOWHERE)
