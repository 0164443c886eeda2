"""Traces a stage from the traces of its ops, each of which is taken once (`op_traces.py`).

Autograd runs the nodes of an op after those of all later ops and before those of all earlier ones, since it takes them
in the opposite order to that in which forward made them. So the backward of a stage is that of its ops, from the last
to the first; and where several ops read a tensor, each is given the sum of the gradients so far, and adds its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.ir.graph.graph import Op, Origin, Ref, map_refs
from fxpipe.ir.graph.value_types import Dim, TensorType
from fxpipe.passes.backward.tracing.fake_tensors import empty
from fxpipe.passes.backward.tracing.op_traces import OpTrace, Recording
from fxpipe.passes.backward.tracing.record_ops import marked_draws
from fxpipe.passes.backward.tracing.tensor_forms import Form, Gradients, Inseparable, Place, Value, map_values
from fxpipe.passes.backward.tracing.traces import Piece, Shapes, Task, Trace, roots
from fxpipe.torch_internals.operator_classes import HigherOrderOperator


@dataclass(frozen=True)
class _Run:
    """An op of the stage, run.

    - `reads`, `gives`: the tensors that it reads and makes, each with its gradients.
    - `writes`: how often their memory has been written, when it has run.
    - `names`: what the names in its trace are here.
    """

    op: Op
    trace: OpTrace
    reads: list[tuple[Value, Gradients]]
    gives: list[tuple[Value, Gradients]]
    writes: tuple[int, ...]
    names: dict[str, str]


class ComposedTracing:
    """One trace under way. `values`: the value of each name of the stage, at first of what it takes and holds.
    `leaves`: those of them that need a gradient. Raises Inseparable if an op may do more than its own trace tells."""

    def __init__(self, task: Task) -> None:
        if any(isinstance(op.target, HigherOrderOperator) for op in task.stage.ops):
            raise Inseparable
        self.task, self.recorder, self.traces = task, task.recorder, task.traces
        self.values: dict[str, Any] = {}
        self.runs: list[_Run] = []
        self.writes = Counter[str]()  # by the memory that is written
        self.sharing: dict[str, set[Value]] = defaultdict(set)  # by their memory
        self.found = Trace()
        forms: dict[Any, tuple[Form, Dim]] = {}
        for name in (*self.task.stage.takes, *self.task.stage.borrows, *self.task.stage.states):
            kind, order = self.task.program.types[name], self.task.orders.get(name, ())
            if name in self.task.sizes.values:
                self.values[name] = self.task.sizes.values[name]
            elif isinstance(kind, TensorType):
                if (kind, order) not in forms:
                    made = empty(kind, order, self.task.sizes, self.task.device)
                    forms[kind, order] = self.traces.form(made), self.task.sizes.text(made.untyped_storage().nbytes())
                form, count = forms[kind, order]
                self.recorder.memory[name] = name, count
                self.values[name] = self.shared(Value(name, form, bool(order), Gradients([name])))
            else:
                self.values[name] = self.task.program.state(name).value
        names = (*self.task.stage.takes, *self.task.stage.states, *self.task.stage.borrows)
        self.leaves = {name: x for name in names if isinstance(x := self.values[name], Value) and x.form.grad}

    def forward(self, op: Op) -> None:
        """Do as if the op ran."""
        trace, reads = self.traces.trace(op, self.values, self.task.decided[op.name])
        before = [(value, value.gradients) for value in reads]
        names = {f"<{number}": value.name for number, value in enumerate(reads)}
        self.write(op, reads, trace.writes)
        ops = self.record(trace.forward, names, op.origin)
        for number, name in trace.renamed:
            reads[number].name = names[name]
        gives = []
        for given in trace.gives:
            if given.again is None:
                gives.append(self.shared(Value(names[given.name], given.form, given.view)))
            else:
                gives.append(self.written(reads[given.again], given.form))
        value = map_values(trace.value, Place, lambda at: (reads if at.read else gives)[at.number])
        self.values[op.name] = value
        if isinstance(value, torch.SymFloat):
            self.task.sizes.numbers.setdefault(value.node.expr, op.name)
        if op.draw is not None:
            ops = marked_draws(ops, {names[name] for name in trace.forward.drew}, op.draw)
        results = {place: names[name] for place, name in trace.results.items()}
        items = value if isinstance(value, (tuple, list)) else (value,)
        touched = (*items, *(self.values[name] for name in op.writes))
        grad = any(isinstance(item, Value) and item.form.grad for item in touched)
        self.found.pieces.append(Piece(replace(op, regions=(*self.task.around, *op.regions)), ops, results, grad))
        if isinstance(value, Value):
            self.hold(value, op.name)
            value.gradients.called.append(op.name)
        for name in op.writes:  # later readers of the memory may still say the old name
            written = self.values[name]
            if isinstance(written, Value) and written is not value and name not in self.task.stage.states:
                self.hold(written, name)
        after = [(value, value.gradients) for value in gives]
        writes = tuple(self.writes[self.memory(value)] for value in (*reads, *gives))
        self.runs.append(_Run(op, trace, before, after, writes, names))

    def write(self, op: Op, reads: Sequence[Value], places: Sequence[int]) -> None:
        """Note what an op writes: these of its `reads`, and what it says itself."""
        values = [*(reads[number] for number in places), *(self.values[name] for name in op.writes)]
        if not all(isinstance(value, Value) and value.name not in self.recorder.types for value in values):
            raise Inseparable
        memories = {self.memory(value) for value in values}
        if sum(self.memory(value) in memories for value in reads) > len({*values} & {*reads}):
            raise Inseparable  # it reads what it writes by another view, too
        self.writes.update(memories)

    def written(self, value: Value, form: Form) -> Value:
        """A tensor that has been written, with gradients, and so has others from now on. Autograd changes what it knows
        of views of its memory, too, and when they are used next."""
        if value.view or len(self.sharing[self.memory(value)]) > 1:
            raise Inseparable
        value.form, value.gradients = form, Gradients()
        return value

    def shared(self, value: Value) -> Value:
        self.sharing[self.memory(value)].add(value)
        return value

    def memory(self, value: Value) -> str:
        """The first name of a tensor's memory."""
        return self.recorder.memory[value.name][0]

    def hold(self, value: Value, name: str) -> None:
        """From now on the tensor is called this."""
        self.recorder.memory[name] = self.recorder.memory[value.name]
        value.name = name

    def record(self, recording: Recording, names: dict[str, str], origin: Origin) -> list[Op]:
        """The recorded ops with names of their own, which `names` tells from then on."""
        recorder = self.recorder
        for local, word, like in recording.made:
            names[local] = recorder.fresh(word) if like is None else recorder.fresh_like(names[like])
        for local, kind in recording.types.items():
            recorder.types[names[local]] = kind
        for local, (owner, count) in recording.memory.items():
            here = names[owner]
            recorder.memory[names[local]] = (here, count) if owner == local else recorder.memory[here]

        def change(ref: Ref) -> Ref:
            return Ref(names.get(ref.name, ref.name))  # a size keeps its name

        return [
            Op(
                names[op.name], op.target, map_refs(op.args, change), map_refs(op.kwargs, change), op.type, origin,
                op.regions, tuple(names[name] for name in op.writes),
            )
            for op in recording.ops
        ]  # fmt: skip

    def given(self) -> Shapes:
        values = {name: self.values[name] for name in self.task.stage.gives}
        return {name: (x.form.shape, x.form.strides) for name, x in values.items() if isinstance(x, Value)}

    def backward(self, arriving: Sequence[str]) -> None:
        """The backward of the ops, from the last to the first."""
        outputs = {name: x for name in arriving if (x := self.values[name]).form.grad}
        if len({*outputs.values()}) < len(outputs):  # one tensor, given twice
            raise Inseparable
        tangents = {
            name: torch.empty(x.form.shape, dtype=x.form.dtype, device=x.form.device) for name, x in outputs.items()
        }
        self.found.roots = roots(self.task.program, self.task.stage, self.recorder, tangents, self.values)
        arrived = dict(self.found.roots)
        for name, value in outputs.items():
            value.gradients.sum = arrived[name], self.traces.form(tangents[name])
        wishes = list[tuple[Gradients, str]]()
        for run in reversed(self.runs) if self.leaves else ():
            if any(gradients.sum for _, gradients in run.gives):
                wishes += self.pull_back(run)
        last = {gradients: place for place, (gradients, _) in enumerate(wishes)}  # earlier ops may add to a leaf's
        for place, (gradients, own) in enumerate(wishes):
            if last[gradients] == place and own in self.recorder.types and own not in arrived.values():
                for name in gradients.called:
                    self.found.wishes.setdefault(own, f"d{name}")
        named = {name: leaf.gradients.sum[0] if leaf.gradients.sum else "" for name, leaf in self.leaves.items()}
        self.found.gradients_of(self.task.program, self.task.stage, named)

    def pull_back(self, run: _Run) -> list[tuple[Gradients, str]]:
        """Run the backward of an op. Gives the names of the gradients that autograd has then, in its order."""
        names, forms = run.names, dict[str, list[Form | None]]()
        for letter, mark, values in (">", ">", run.gives), ("<", "(", run.reads):
            names |= {f"{mark}{number}": value.name for number, (value, _) in enumerate(values)}
            sums = [gradients.sum for _, gradients in values]
            names |= {f"d{letter}{number}": sum[0] for number, sum in enumerate(sums) if sum}
            forms[letter] = [sum and sum[1] for sum in sums]
        places = [*(Place(True, n) for n in range(len(run.reads))), *(Place(False, n) for n in range(len(run.gives)))]
        memories = [self.memory(value) for value, _ in (*run.reads, *run.gives)]
        changed = [at for at, memory, n in zip(places, memories, run.writes, strict=True) if self.writes[memory] != n]
        backward = run.trace.changed(tuple(changed)).backward(forms[">"], forms["<"])
        self.found.backward += self.record(backward.recording, names, run.op.origin)
        for (_, gradients), found in zip(run.reads, backward.gradients, strict=True):
            if found is not None:
                gradients.sum = names[found[0]], found[1]
        return [
            ((run.reads if at.read else run.gives)[at.number][1], names.get(name, "")) for at, name in backward.finished
        ]
