"""Traces each op of a stage by itself, and once for all ops that are alike.

    h = linear(x, weight)       is the op of       h_1 = linear(y, weight_1)       if the tensors have the same form

Which functions torch runs for an op depends on the op and on the form of the tensors that it reads: their types, their
strides and whether they have gradients; not on their names, nor on what else is in the stage. So the op runs on
stand-ins for them, and so does its backward, from stand-ins for the gradients that arrive. Names are those of places:

    <0  <1      what the op reads, when it runs             %0  %1      what is recorded
    (0  (1      the same, when its backward runs            d<0         the sum of the gradients of <0 from later ops
    >0  >1      what the op gives, when its backward runs   d>0         the gradient of >0
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, increment_version

from fxpipe.ir.graph.graph import Op, Ref, Region
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.value_types import Dim, ValueType
from fxpipe.passes.backward.tracing.fake_sizes import Sizes
from fxpipe.passes.backward.tracing.fake_tensors import run_op
from fxpipe.passes.backward.tracing.opaque_vjp import run_whole
from fxpipe.passes.backward.tracing.record_ops import Recorder
from fxpipe.passes.backward.tracing.tensor_forms import PLAIN, SYMBOLS, Form, Inseparable, Place, Value, map_values
from fxpipe.torch_internals.tensor_memory import is_view, is_zero_tensor
from fxpipe.torch_internals.tracing.tensors_without_memory import FakeTensor


@dataclass(frozen=True)
class Recording:
    """What an op or its backward runs.

    - `made`: each new name, with the word that it should be, or with the recorded name whose word it has.
    - `types`, `memory`: as of `Recorder`, of these names.
    - `drew`: those that draw random numbers.
    """

    ops: tuple[Op, ...]
    made: tuple[tuple[str, str, str | None], ...]
    types: Mapping[str, ValueType]
    memory: Mapping[str, tuple[str, Dim]]
    drew: frozenset[str]


@dataclass(frozen=True)
class OpBackward:
    """The backward of an op for some gradients.

    - `gradients`: for each tensor that the op reads the name and form of its gradient, with that from later ops; None
      if it has none.
    - `finished`: the tensors that it gives, and the leaves that it reads, in the order in which autograd has all of
      their gradients, with the names of these; "" if they are not recorded.
    """

    recording: Recording
    gradients: tuple[tuple[str, Form] | None, ...]
    finished: tuple[tuple[Place, str], ...]


class OpTraces:
    """The traces of ops, by what they depend on."""

    def __init__(self, sizes: Sizes, device: torch.device, around: tuple[Region, ...]) -> None:
        self.sizes, self.device, self.around = sizes, device, around
        self.forms: dict[Any, Form] = {}
        self.traces: dict[Any, OpTrace] = {}

    def trace(self, op: Op, values: Mapping[str, Any], decided: tuple[str, ...]) -> tuple[OpTrace, list[Value]]:
        """The trace of the op, and the tensors that it reads. `decided`: as of `Task`, of this op."""
        reads: dict[Value, int] = {}
        key = (op.target, _key((op.args, dict(op.kwargs)), values, reads), op.regions, self.plain_sizes, decided)
        if key not in self.traces:
            forms = tuple(value.form for value in reads)
            places = {name: map_values(values[name], Value, lambda x: Place(True, reads[x])) for name in op.reads}
            self.traces[key] = OpTrace(self, op, places, forms, decided)
        return self.traces[key], [*reads]

    @property
    def plain_sizes(self) -> int:
        """How many sizes torch has turned into plain numbers; it may do otherwise since."""
        return len(self.sizes.symbols.env.replacements)

    def form(self, tensor: Tensor) -> Form:
        """The form of a tensor. Raises Inseparable if it is more than a form."""
        if type(tensor) is not FakeTensor or tensor.layout is not torch.strided or tensor.constant is not None:
            raise Inseparable
        if tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor):
            raise Inseparable
        shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        numbers = tuple(map(self._number, (*shape, *strides, offset)))
        key = (tensor.dtype, tensor.device, len(shape), numbers, tensor.requires_grad, tensor.is_leaf)
        if key not in self.forms:
            self.forms[key] = Form(*key[:2], shape, strides, offset, *key[4:])
        return self.forms[key]

    def _number(self, size: Any) -> Any:
        if type(size) is int:
            return size
        if not self.sizes.knows(size):
            raise Inseparable
        return (size.node.expr,)


def _key(nest: Any, values: Mapping[str, Any], reads: dict[Value, int]) -> Any:
    """A nest of arguments, with forms for tensors; notes these in `reads`."""
    if type(nest) is Ref:
        nest = values[nest.name]
    if type(nest) is Value:
        return reads.setdefault(nest, len(reads)), nest.form
    if isinstance(nest, (tuple, list)):
        return type(nest), *(_key(item, values, reads) for item in nest)
    if isinstance(nest, Mapping):
        return dict, *((name, _key(item, values, reads)) for name, item in nest.items())
    if isinstance(nest, slice):
        return slice, *(_key(item, values, reads) for item in (nest.start, nest.stop, nest.step))
    if isinstance(nest, SYMBOLS):
        return type(nest), nest.node.expr
    if isinstance(nest, (float, complex)):  # 0.0 is -0.0, and nan is not nan
        return type(nest), repr(nest)
    if isinstance(nest, Tensor):
        raise Inseparable
    try:
        hash(nest)
    except TypeError:
        return object()  # like nothing else
    return type(nest), nest


def _edge(tensor: Tensor) -> Any:
    """Where autograd brings the gradient of a tensor, as it is now; None if it has none."""
    node = tensor.grad_fn
    if node is not None:
        return GradientEdge(node, tensor.output_nr)
    return tensor if tensor.requires_grad else None


def _history(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.requires_grad, tensor.grad_fn, tensor.output_nr


class _OpRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records one op. `made`: as of `Recording`."""

    def __init__(self, traces: OpTraces) -> None:
        super().__init__(traces.sizes, traces.device, ())
        self.made: list[tuple[str, str, str | None]] = []

    def fresh(self, wish: str) -> str:
        self.made.append((f"%{len(self.made)}", wish, None))
        return self.made[-1][0]

    def fresh_like(self, name: str) -> str:
        self.made.append((f"%{len(self.made)}", "", name))
        return self.made[-1][0]

    def recorded(self, start: int) -> Recording:
        """What has been recorded since the name of this number."""
        made = tuple(self.made[start:])
        names = {name for name, _, _ in made}
        types = {name: kind for name, kind in self.types.items() if name in names}
        memory = {name: owner for name, owner in self.memory.items() if name in names}
        return Recording(tuple(self.ops), made, types, memory, frozenset(self.drew & names))


class KnownTraces:
    """The `traces` of ops that the stages of a program share, and other programs of the same graph, by their sizes and
    device, within the regions `around` all ops: autocast where the step is called. `numbers`: those that stages give
    each other, as sizes; `inseparable`: stages of which some op may do more than its own trace tells."""

    def __init__(self, around: tuple[Region, ...], traces: dict[Any, OpTraces]) -> None:
        self.around, self.traces = around, traces
        self.numbers: dict[str, Dim] = {}
        self.inseparable: set[int] = set()

    def taken(self, sizes: Sizes, device: torch.device) -> OpTraces:
        """Those for such sizes, if any: only `keep` makes them known again."""
        return self.traces.pop((sizes.key, device), None) or OpTraces(sizes, device, self.around)

    def keep(self, traces: OpTraces) -> None:
        if traces.sizes.reusable:
            self.traces[traces.sizes.key, traces.device] = traces


@dataclass(frozen=True)
class Given:
    """A tensor that an op makes, or one that it reads, number `again`, and writes in place: it has another gradient
    since. `name`: what it is called then; `view`: as of `Value`."""

    name: str
    form: Form
    view: bool
    again: int | None = None


class OpTrace:
    """What one op runs, for what it reads. Raises Inseparable if that may not be all.

    - `forward`: what is recorded.
    - `value`: the op's value, with a `Place` for each tensor.
    - `gives`: the tensors that it makes, and those that it writes in place.
    - `results`: as of `Piece`.
    - `renamed`: what it reads and what recorded ops call otherwise since.
    - `writes`: what it reads and whose memory it changes.
    """

    def __init__(
        self, traces: OpTraces, op: Op, reads: Mapping[str, Any], forms: tuple[Form, ...], decided: tuple[str, ...]
    ) -> None:
        self.traces, self.op, self.reads, self.forms, self.decided = traces, op, reads, forms, decided
        self.recorder = _OpRecorder(traces)
        self.recorder.decided = lambda: decided
        self.stand_ins = [form.made() for form in forms]
        for number, tensor in enumerate(self.stand_ins):
            self.recorder.hold(tensor, f"<{number}")
        self.edges = [*map(_edge, self.stand_ins)]
        self.histories = [*map(_history, self.stand_ins)]
        value = self._run()
        memory = self.recorder.memory
        changed = {memory[name][0] for one in self.recorder.ops for name in one.writes}  # x[i] = y writes a view of x
        self.writes = [number for number in range(len(forms)) if f"<{number}" in changed]
        self.outputs: list[Tensor] = []
        self.gives: list[Given] = []
        self.places: dict[int, Place] = {}
        for number, tensor in enumerate(self.stand_ins):
            self._read(number, tensor)
        self._check(value, changed)
        self.value = map_values(value, Tensor, self._place)
        names = self.recorder.names
        items = dict(enumerate(value)) if isinstance(value, (tuple, list)) else {None: value}
        self.results = {place: names[id(item)] for place, item in items.items() if isinstance(item, Tensor)}
        self.renamed = [(n, now) for n, x in enumerate(self.stand_ins) if (now := names[id(x)]) != f"<{n}"]
        self.forward = self.recorder.recorded(0)
        self.finished: list[tuple[Place, str]] = []  # of the backward under way, as in `OpBackward`
        self._later()
        self._backwards: dict[Any, OpBackward] = {}
        self._changed: dict[tuple[Place, ...], OpTrace] = {}

    def _run(self) -> Any:
        values = {
            name: map_values(nest, Place, lambda at: self.stand_ins[at.number]) for name, nest in self.reads.items()
        }
        if isinstance(self.op.target, Opaque):
            return run_whole(self.op, values, self.traces.around, self.recorder)
        with self.recorder:
            return run_op(self.op, values, self.traces.around, self.traces.device)

    def _read(self, number: int, tensor: Tensor) -> None:
        """Note a tensor that the op has read, and what it is now."""
        self.places[id(tensor)] = Place(True, number)
        if _history(tensor) != self.histories[number]:
            if number not in self.writes or not tensor.requires_grad:
                raise Inseparable
            self.gives.append(self._given(tensor, number))
            self.outputs.append(tensor)

    def _check(self, value: Any, changed: Collection[str]) -> None:
        """The op has done nothing that other ops may see besides its value and the memory that it has `changed`."""
        names, memory = self.recorder.names, self.recorder.memory
        graded = any(form.grad for form in self.forms)
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(item, (Tensor, *PLAIN, torch.Size)):
                raise Inseparable
            if not isinstance(item, Tensor):
                continue
            new = item.requires_grad and id(item) not in self.places
            if id(item) not in names or (new and (item.is_leaf or not graded)):
                raise Inseparable
            if new and is_view(item) and memory[names[id(item)]][0] in changed:
                raise Inseparable

    def _place(self, tensor: Tensor) -> Place:
        if id(tensor) not in self.places:
            self.places[id(tensor)] = Place(False, len(self.gives))
            self.gives.append(self._given(tensor))
            self.outputs.append(tensor)
        return self.places[id(tensor)]

    def _given(self, tensor: Tensor, again: int | None = None) -> Given:
        return Given(self.recorder.names[id(tensor)], self.traces.form(tensor), is_view(tensor), again)

    def _later(self) -> None:
        """What the tensors are called when backward runs; it tells when it has the gradient of one."""
        for number, (tensor, form) in enumerate(zip(self.stand_ins, self.forms, strict=True)):
            self.recorder.hold(tensor, f"({number}")
            if form.grad and form.leaf:
                self._watch(tensor, Place(True, number))
        for number, tensor in enumerate(self.outputs):
            self.recorder.hold(tensor, f">{number}")
            if tensor.requires_grad:
                self._watch(tensor, Place(False, number))

    def _watch(self, tensor: Tensor, place: Place) -> None:
        names = self.recorder.names
        tensor.register_hook(lambda grad: self.finished.append((place, names.get(id(grad), ""))))  # type: ignore[no-untyped-call]

    def changed(self, places: tuple[Place, ...]) -> OpTrace:
        """The same, where later ops have written into these tensors: autograd refuses to read them."""
        if not places:
            return self
        if places not in self._changed:
            found = self._changed[places] = OpTrace(self.traces, self.op, self.reads, self.forms, self.decided)
            for at in places:
                increment_version((found.stand_ins if at.read else found.outputs)[at.number])
        return self._changed[places]

    def backward(self, gradients: Sequence[Form | None], sums: Sequence[Form | None]) -> OpBackward:
        """The backward. `gradients`: the form of the gradient of each tensor that the op makes; `sums`: those of what
        it reads, as later ops have them. None where there is none."""
        key = (*gradients, *sums, self.traces.plain_sizes)
        if key not in self._backwards:
            self._backwards[key] = self._backward(gradients, sums)
        return self._backwards[key]

    def _backward(self, gradients: Sequence[Form | None], sums: Sequence[Form | None]) -> OpBackward:
        recorder, start = self.recorder, len(self.recorder.made)
        recorder.ops = []
        self.finished.clear()
        ends: list[Any] = []
        tangents = []
        for letter, own, forms in (">", self.outputs, gradients), ("<", self.edges, sums):
            for number, (end, form) in enumerate(zip(own, forms, strict=True)):
                if form is not None:
                    ends.append(end)
                    tangents.append(form.made())
                    recorder.hold(tangents[-1], f"d{letter}{number}")
        graded = {number: edge for number, edge in enumerate(self.edges) if edge is not None}
        with recorder:
            got = torch.autograd.grad(ends, [*graded.values()], tangents, retain_graph=True, allow_unused=True)
        found: list[tuple[str, Form] | None] = [None] * len(self.forms)
        for number, grad in zip(graded, got, strict=True):
            if grad is not None:
                found[number] = recorder._name(grad, "backward"), self.traces.form(grad)
        return OpBackward(recorder.recorded(start), tuple(found), tuple(self.finished))
