"""Steps of recurrent layers. A part has some of the channels of the state. It needs the rows of these channels in each
gate of the weights, all channels of the previous hidden state, and its own channels of an LSTM's cell state.

    gates = linear(x, weight_ih[rows], bias_ih[rows]) + linear(h, weight_hh[rows], bias_hh[rows])

Parts with all channels call torch's own cell.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from fxpipe.ir.graph.graph import Op, Ref, op_name
from fxpipe.ir.graph.op_arguments import by_name
from fxpipe.ir.graph.value_types import TupleType, tensors
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Place, Places, Range, extent, full
from fxpipe.passes.sharding.sharding_rule import Rule, by_place, items

GATES = {"lstm_cell": 4, "gru_cell": 3, "rnn_tanh_cell": 1, "rnn_relu_cell": 1}
NAMES = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")


def _make(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    return by_place(b, op, places, lambda name, place: Cell(b, op, name, place).part())


class Cell:
    """A part of a step: `samples` of its input and state, `channels` of its result."""

    def __init__(self, b: GraphRewriter, op: Op, name: str, place: Place) -> None:
        self.b, self.op, self.name, self.place, self.device = b, op, name, place, place.device
        self.samples, self.channels = place.region
        given = by_name(op, NAMES)
        self.x, self.weights = given["input"], [given.get(name) for name in NAMES[2:]]
        self.states = given["hx"] if isinstance(given["hx"], (tuple, list)) else (given["hx"],)
        self.size = b.shape(self.states[0].name)[1]
        self.type = next(tensors(b.captured[op.name]))

    def part(self) -> Part:
        kind, gates = op_name(self.op), GATES[op_name(self.op)]
        x, h = self.read(self.x, (0, self.b.shape(self.x.name)[1])), self.read(self.states[0], (0, self.size))
        own = [self.read(state, self.channels) for state in self.states]
        if self.channels == (0, self.size):
            return self.plain(x, own)
        from_x = self.step("from_x", F.linear, x, *map(self.rows, self.weights[::2]), parts=gates)
        from_h = self.step("from_h", F.linear, h, *map(self.rows, self.weights[1::2]), parts=gates)
        if kind == "gru_cell":
            return self.gru(from_x, from_h, own[0])
        added = self.step("gates", operator.add, from_x, from_h, parts=gates)
        if kind == "lstm_cell":
            return self.lstm(added, own[1])
        return self.made(self.step("", torch.tanh if kind == "rnn_tanh_cell" else torch.relu, added))

    def plain(self, x: Ref, states: Sequence[Ref]) -> Part:
        """A part with all channels: torch's own cell."""
        held = tuple(weight and self.b.read(self.op, weight, None, self.device) for weight in self.weights)
        hx = tuple(states) if len(states) > 1 else states[0]
        one = replace(self.type, shape=extent(self.place.region))
        type = TupleType((one, one)) if len(states) > 1 else one
        name = self.b.add(self.op, self.name, self.device, self.op.target, (x, hx, *held), type=type)
        return Part(name, self.place.region, self.device, items(self.b, self.op, name, self.device, self.place.region))

    def lstm(self, gates: Ref, remembered: Ref) -> Part:
        take, forget, new, show = (self.gate(gates, at) for at in range(4))
        kept = self.step("kept", operator.mul, self.step("forget", torch.sigmoid, forget), remembered)
        taken = self.step(
            "taken", operator.mul, self.step("take", torch.sigmoid, take), self.step("new", torch.tanh, new)
        )
        c = self.step("c", operator.add, kept, taken)
        h = self.step("h", operator.mul, self.step("show", torch.sigmoid, show), self.step("shown", torch.tanh, c))
        return self.made(h, c)

    def gru(self, from_x: Ref, from_h: Ref, before: Ref) -> Part:
        reset, update = (
            self.step(
                stem, torch.sigmoid, self.step("gate", operator.add, self.gate(from_x, at), self.gate(from_h, at))
            )
            for at, stem in enumerate(("reset", "update"))
        )
        seen = self.step("seen", operator.mul, reset, self.gate(from_h, 2))
        new = self.step("new", torch.tanh, self.step("both", operator.add, self.gate(from_x, 2), seen))
        kept = self.step("kept", operator.mul, update, self.step("change", operator.sub, before, new))
        return self.made(self.step("", operator.add, new, kept))

    def made(self, *states: Ref) -> Part:
        """The finished part: the two results of an LSTM, or the one result of other cells."""
        parts = tuple(Part(state.name, self.place.region, self.device) for state in states)
        return Part(parts[0].name, self.place.region, self.device, parts if len(parts) > 1 else ())

    def step(self, stem: str, target: Any, *args: Any, parts: int = 1) -> Ref:
        """One op on the part's samples and `parts` times its channels."""
        rows, columns = extent(self.place.region)
        name = self.b.free(f"{self.name}_{stem}") if stem else self.name
        type = replace(self.type, shape=(rows, parts * columns))
        return Ref(self.b.add(self.op, name, self.device, target, args, type=type))

    def gate(self, gates: Ref, at: int) -> Ref:
        columns = extent(self.place.region)[1]
        return self.step("gate", operator.getitem, gates, (slice(None), slice(at * columns, (at + 1) * columns)))

    def read(self, value: Ref, channels: Range) -> Ref:
        return self.b.read(self.op, value, (self.samples, channels), self.device)

    def rows(self, weight: Ref | None) -> Ref | None:
        """The rows of the part's channels in each gate, the same for all steps of a layer."""
        if weight is None:
            return None
        key = (f"gates of {weight.name}", (self.channels,), self.device)
        if key not in self.b.made:
            shape = self.b.shape(weight.name)
            first, after = self.channels
            regions = [((at + first, at + after), *full(shape[1:])) for at in range(0, shape[0], self.size)]
            pieces = [self.b.read(self.op, weight, region, self.device) for region in regions]
            type = self.b.typed(weight.name, (len(pieces) * (after - first), *shape[1:]))
            joined = self.b.glue(self.op, f"{weight.name}_rows", self.device, torch.cat, (pieces, 0), type)
            self.b.made[key] = joined if len(pieces) > 1 else pieces[0].name
        return Ref(self.b.made[key])


CELLS = dict.fromkeys(GATES, Rule(_make, lambda b, op: (0, 1)))
