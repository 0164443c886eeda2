"""The backward of an op that is kept whole: autograd's, for this op alone (`fxpipe/runtime/autograd/vjp.py`).

y = opaque(tensors, args, kwargs)       forward    y, graph = opaque(tensors, args, kwargs, of)
                                        backward   dweight, dx = gradients_of(graph, dy)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.ir.graph.graph import Op, Ref, Struct, map_leaves, refs
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.value_types import TensorType, TupleType, ValueType
from fxpipe.ir.program.backward import GRAPH
from fxpipe.ir.program.program import RuntimeCall
from fxpipe.passes.backward.refused import Refused
from fxpipe.passes.backward.tracing.fake_tensors import empty
from fxpipe.passes.backward.tracing.tensor_forms import Form, Gradients, Value
from fxpipe.passes.backward.tracing.traces import Piece, Task
from fxpipe.torch_internals.pytrees import tree_flatten

GRADIENTS = RuntimeCall("gradients_of")


def inseparable(op: Op) -> str:
    """Why autograd cannot compute the gradients of this op alone; "" if it can."""
    assert isinstance(op.target, Opaque)
    why = f"{op.target} is kept whole, {op.target.because}"
    leaves = tree_flatten(op.args)[0]
    objects = any(isinstance(leaf, (Struct, slice)) and any(refs(leaf)) for leaf in leaves)
    kinds = op.type.items if isinstance(op.type, TupleType) else (op.type,)
    dense = all(isinstance(kind, TensorType) for kind in kinds)
    lists = any(promise.lists for promise in op.target.promises)
    later = op.target.deferred is not None
    return why if objects or lists or later or not dense else ""


@dataclass(frozen=True)
class WholeRun:
    """An op that was kept whole, run. `graph`: the name of what its backward needs; `sources`, `gives`: the tensors
    that it reads and gets gradients for, and those that it makes, each with its gradients."""

    op: Op
    graph: str
    sources: list[tuple[Value, Gradients]]
    gives: list[tuple[Value, Gradients]]


class WholeOps:
    """The ops of one trace that are kept whole. `asked`: for each op of backward the names of what it returns."""

    def __init__(self, task: Task) -> None:
        self.task, self.recorder, self.traces = task, task.recorder, task.traces
        self.asked: dict[str, list[str]] = {}

    def form(self, kind: TensorType) -> Form:
        made = empty(replace(kind, grad=False), (), self.task.sizes, self.task.device)
        form = self.traces.form(made)
        return self.traces.form(replace(form, grad=True, leaf=False).made()) if kind.grad else form

    def forward(self, op: Op, values: dict[str, Any]) -> tuple[Piece, Any, WholeRun | None]:
        """Do as if the op ran: what is recorded, its value, and what to go back through if it has a gradient."""
        several = isinstance(op.type, TupleType)
        kinds: Sequence[Any] = op.type.items if isinstance(op.type, TupleType) else (op.type,)
        gives = [Value("", self.form(kind)) for kind in kinds]
        sources: list[tuple[int, Value]] = []
        for place, leaf in enumerate(tree_flatten(op.args)[0]):
            value = values[leaf.name] if isinstance(leaf, Ref) else None
            if isinstance(value, (tuple, list)):
                raise Refused(f"{op.target} is given a nest of tensors, at {op.origin}")
            again = place < len(op.args[0]) and any(value is other for _, other in sources)  # one that two parts share
            if isinstance(value, Value) and value.form.grad and not again:
                sources.append((place, value))
        grad = bool(sources) and any(value.form.grad for value in gives)
        args = map_leaves(op.args, lambda leaf: Ref(_name(values, leaf)) if isinstance(leaf, Ref) else leaf)
        regions = (*self.task.around, *op.regions)
        if not grad and not several:
            gives[0].name = own = self.made(op.name, kinds[0], gives[0].form)
            ops = [replace(op, name=own, args=args, regions=regions)]
        else:
            call = self.recorder.fresh(f"{op.name}_call" if not several else op.name)
            kind: ValueType = TupleType((*kinds, GRAPH) if grad else tuple(kinds))
            self.recorder.types[call] = kind
            given = (*args, tuple(place for place, _ in sources)) if grad else args
            ops = [replace(op, name=call, args=given, type=kind, regions=regions)]
            for place, value in enumerate(gives):
                value.name = self.made(op.name if not several else f"{op.name}_{place}", kinds[place], value.form)
                ops.append(self.item(value.name, call, place, op))
        run = None
        if grad:
            graph = self.recorder.fresh(f"{op.name}_vjp")
            self.recorder.types[graph] = GRAPH
            ops.append(self.item(graph, call, len(kinds), op))
            run = WholeRun(op, graph, [(x, x.gradients) for _, x in sources], [(x, x.gradients) for x in gives])
        places: Sequence[int | None] = range(len(gives)) if several else [None]
        results = {place: value.name for place, value in zip(places, gives, strict=True)}
        return Piece(replace(op, regions=regions), ops, results, grad), tuple(gives) if several else gives[0], run

    def made(self, wish: str, kind: TensorType, form: Form) -> str:
        """A new name for a tensor with memory of its own."""
        name = self.recorder.fresh(wish)
        tensor = form.empty()
        self.recorder.types[name] = self.recorder.type_of(tensor)
        self.recorder.memory[name] = name, self.task.sizes.text(tensor.untyped_storage().nbytes())
        return name

    def item(self, name: str, call: str, place: int, op: Op) -> Op:
        return Op(name, operator.getitem, (Ref(call), place), {}, self.recorder.types[name], op.origin)

    def pull_back(self, run: WholeRun) -> tuple[list[Op], list[tuple[Gradients, str]]]:
        """The ops of its backward, which add to the gradients of what it reads; and the names of the gradients that
        autograd has then, in its order. Raises Refused if a gradient arrives at a result that may need none."""
        op, recorder = run.op, self.recorder
        assert isinstance(op.target, Opaque)
        if any(run.gives[place][1].sum for place in op.target.unsure):
            raise Refused(f"{op.target} is kept whole, {op.target.because}", by_ops=True)
        given = [Ref(gradients.sum[0]) if gradients.sum else None for _, gradients in run.gives]
        call = recorder.fresh("gradients")
        ops: list[Op] = []
        names: list[str] = []
        finished = [(gradients, gradients.sum[0]) for _, gradients in run.gives if gradients.sum]
        for place, (value, gradients) in enumerate(run.sources):
            form = replace(value.form, grad=False, leaf=True)
            tensor = torch.empty(form.shape, dtype=form.dtype, device=form.device)
            own = recorder.fresh("gradient")
            kind = recorder.types[own] = recorder.type_of(tensor)
            recorder.memory[own] = own, self.task.sizes.text(tensor.untyped_storage().nbytes())
            ops.append(self.item(own, call, place, op))
            names.append(own)
            if gradients.sum:
                total = recorder.fresh("add")
                recorder.types[total], recorder.memory[total] = kind, (total, recorder.memory[own][1])
                refs_of = (Ref(gradients.sum[0]), Ref(own))
                ops.append(Op(total, torch.ops.aten.add.Tensor, refs_of, {}, kind, op.origin))
                own = total
            gradients.sum = own, self.traces.form(tensor)
            finished.append((gradients, own))
        recorder.types[call] = TupleType(tuple(recorder.types[name] for name in names))
        self.asked[call] = names
        asked = Op(call, GRADIENTS, (Ref(run.graph), *given), {}, recorder.types[call], op.origin)
        return [asked, *ops], finished

    def with_zeros(self, backward: Sequence[Op]) -> list[Op]:
        """Backward, where an op that reads one of these gradients gets zeros if there is none."""
        items = {name for names in self.asked.values() for name in names}
        read = {name for op in backward for name in op.reads} & items
        return [
            replace(op, kwargs={"zeros": zeros})
            if (zeros := tuple(n for n, name in enumerate(self.asked.get(op.name, ())) if name in read))
            else op
            for op in backward
        ]


def _name(values: dict[str, Any], ref: Ref) -> str:
    value = values[ref.name]
    return value.name if isinstance(value, Value) else ref.name
