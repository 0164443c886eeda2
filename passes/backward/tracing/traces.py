"""What tracing a stage needs and finds: the ops that it runs forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fxpipe.ir.graph.graph import Op, Region
from fxpipe.ir.graph.value_types import Dim, TensorType, ValueType
from fxpipe.ir.program.program import Program, Stage
from fxpipe.passes.backward.tracing.fake_sizes import Sizes
from fxpipe.passes.backward.tracing.fake_tensors import on_fake_tensors
from fxpipe.passes.backward.tracing.op_traces import OpTraces
from fxpipe.passes.backward.tracing.opaque_vjp import with_zeros
from fxpipe.passes.backward.tracing.record_ops import Recorder

Orders = dict[str, tuple[int, ...]]  # of the values that are not contiguous
Shapes = dict[str, tuple[Iterable[Any], Iterable[Any]]]  # sizes and strides


@dataclass(frozen=True)
class Task:
    """A stage to trace.

    - `traces`: those of its ops; they know the sizes, the device, and the regions that are around all ops.
    - `recorder`: notes what torch runs.
    - `orders`: as of `trace_stage.layouts`.
    - `decided`: for each op the sizes that data decides in what it gives, or else in what it reads.
    """

    program: Program
    stage: Stage
    traces: OpTraces
    recorder: Recorder
    orders: Orders
    decided: Mapping[str, tuple[str, ...]]

    @property
    def sizes(self) -> Sizes:
        return self.traces.sizes

    @property
    def device(self) -> torch.device:
        return self.traces.device

    @property
    def around(self) -> tuple[Region, ...]:
        return self.traces.around


@dataclass
class Piece:
    """What one op of the stage does: itself, with its own regions, and the `ops` that it ran.

    - `results`: the recorded name of the op's result, or, with their places, of the tensors in its result.
    - `grad`: whether a gradient flows through it.
    """

    op: Op
    ops: list[Op]
    results: dict[int | None, str]
    grad: bool


@dataclass
class Trace:
    """A stage, traced.

    - `pieces`: forward, by the op of the stage.
    - `backward`: the recorded ops of backward.
    - `roots`, `takes`, `weights`: as in `Backward`.
    - `wishes`: better names for recorded values.
    - `types`: the types of all recorded values.
    - `memory`: for each value the one that first had its memory, and the bytes of all that memory.
    - `orders`: as of `layouts`, of the stage's results; `numbers`: those that it gives, as sizes.
    - `scattered`: results that are not dense in memory, such as `x[:, 0]`.
    """

    pieces: list[Piece] = field(default_factory=list)
    backward: list[Op] = field(default_factory=list)
    roots: list[tuple[str, str]] = field(default_factory=list)
    takes: list[tuple[str, str]] = field(default_factory=list)
    weights: list[tuple[str, str]] = field(default_factory=list)
    wishes: dict[str, str] = field(default_factory=dict)
    types: dict[str, ValueType] = field(default_factory=dict)
    memory: dict[str, tuple[str, Dim]] = field(default_factory=dict, compare=False)
    orders: Orders = field(default_factory=dict, compare=False)
    numbers: dict[str, Dim] = field(default_factory=dict, compare=False)
    scattered: frozenset[str] = field(default=frozenset(), compare=False)

    def gradients_of(self, program: Program, stage: Stage, named: Mapping[str, str]) -> None:
        """Take down the gradients of what the stage takes and holds, by name; "" where there is none."""
        roots = {gradient for _, gradient in self.roots}
        for name, gradient in named.items():
            if gradient and gradient not in roots:
                self.wishes.setdefault(gradient, f"d{name}")
        graded = [name for name in stage.takes if isinstance(kind := program.types[name], TensorType) and kind.grad]
        self.takes = [(name, named.get(name, "")) for name in graded]
        self.weights = [(name, gradient) for name, gradient in named.items() if gradient and name not in stage.takes]


class Tracing(Protocol):
    """One trace under way, made with values for what the stage takes and holds. `found`: what it has found; `values`:
    the value of each name of the stage.

    - `forward`: does what an op does.
    - `given`: the sizes and strides of the tensors that the stage gives.
    - `backward`: goes back from the results for which a gradient arrives.
    """

    found: Trace
    values: dict[str, Any]

    def forward(self, op: Op) -> None: ...
    def given(self) -> Shapes: ...
    def backward(self, arriving: Sequence[str]) -> None: ...


def run_tracing(begin: Callable[[Task], Tracing], task: Task, arriving: Sequence[str]) -> Trace:
    """The trace. `arriving`: the results for which a gradient arrives."""
    with on_fake_tensors(task.sizes):
        tracing = begin(task)
        found = tracing.found
        for op in task.stage.ops:
            tracing.forward(op)
        given = tracing.given()
        found.orders = {name: order for name, (_, strides) in given.items() if (order := order_of(strides))}
        found.scattered = frozenset(name for name, (shape, strides) in given.items() if is_scattered(shape, strides))
        given_numbers = {name: tracing.values[name] for name in task.stage.gives}
        found.numbers = {name: task.sizes.text(x) for name, x in given_numbers.items() if is_number(x)}
        tracing.backward(arriving)
        found.backward = with_zeros(found.backward)
    found.types, found.memory = task.recorder.types, task.recorder.memory
    return found


def is_number(value: Any) -> bool:
    """Whether a value is a size, or computed from sizes."""
    return type(value) is int or isinstance(value, torch.SymInt)


def order_of(strides: Iterable[Any]) -> tuple[int, ...]:
    """The dimensions of a tensor from the largest stride to the smallest; () if that is their order."""
    found = _hints(strides)
    order = tuple(sorted(range(len(found)), key=lambda dim: -found[dim]))
    return () if order == tuple(range(len(found))) else order


def is_scattered(shape: Iterable[Any], strides: Iterable[Any]) -> bool:
    """Whether there are gaps between the elements of a tensor, in whatever order its dimensions are."""
    dense = 1
    for stride, size in sorted(zip(_hints(strides), _hints(shape), strict=True)):
        if size > 1 and stride != dense:
            return True
        dense *= size
    return False


def _hints(numbers: Iterable[Any]) -> list[int]:
    """Sizes or strides as numbers, those of the batch that is traced."""
    return [number.node.hint if isinstance(number, torch.SymInt) else int(number) for number in numbers]


def roots(
    program: Program, stage: Stage, recorder: Recorder, tangents: Mapping[str, Tensor], taken: Collection[str]
) -> list[tuple[str, str]]:
    """The results that have gradients, each with the name of the one that arrives, of these `tangents`; "" if none
    does. `taken`: the names of the stage's values."""
    found = []
    for name in stage.gives:
        if not isinstance(own := program.types[name], TensorType) or not own.grad:
            continue
        if name not in tangents:
            found.append((name, ""))
            continue
        gradient, kind = f"d{name}", recorder.type_of(tangents[name])
        if gradient in taken or program.types.get(gradient, kind) != kind:
            gradient = recorder.fresh(gradient)
        recorder.types[gradient] = kind
        recorder.hold(tangents[name], gradient)
        found.append((name, gradient))
    return found
