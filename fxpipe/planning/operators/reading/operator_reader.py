"""The state of reading a graph op by op: for each value the operator that it is a view of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.matrix_speed import STORED
from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.graph.graph import Graph, Op, refs, show_op
from fxpipe.ir.graph.value_types import TensorType, dim_size, tensors
from fxpipe.ir.operators.operators import PRODUCTS, Dimension, Operator
from fxpipe.ir.operators.tensor_axes import Axes, axis, reshaped, whole
from fxpipe.planning.operators.models import operator_kinds as kinds
from fxpipe.planning.operators.models.graph_builder import Draft

NAMES: dict[int, tuple[str, ...]] = {2: ("channel",), 3: ("length", "channel"), 4: ("channel", "height", "width")}


@dataclass(frozen=True)
class Value:
    """A tensor that depends on the samples: a view of an operator's output. `name` is the op that made it."""

    operator: Operator
    axes: Axes
    name: str


@dataclass(frozen=True)
class Held:
    """A tensor that does not depend on the samples, and the parameters that it is made of."""

    states: tuple[str, ...] = ()


class Reader:
    """The operators and values so far, while the ops of a graph are read one by one."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int]) -> None:
        self.draft, self.sizes = Draft(), sizes
        self.values: dict[str, Value | Held] = {}
        self.types = graph.types
        self.ops: dict[str, Value] = {}  # what each op puts out
        self.pieces: dict[str, Value] = {}  # what was split, by the op that split it
        self.views: dict[tuple[str, Axes], Operator] = {}  # operators made for views that ops read
        self.names: dict[str, int] = {}
        self.parameters = {state.name: state.path for state in graph.states if state.kind == "parameter"}
        self.element = max(
            (DTYPES[t.dtype].size for name in self.parameters for t in tensors(self.types[name])), default=4
        )
        self.dtype: str | None = None  # of products
        for state in graph.states:
            self.values[state.name] = Held((state.name,) if state.name in self.parameters else ())
        for item in graph.inputs:
            if isinstance(item.type, TensorType):
                self.values[item.name] = Held() if item.batch_dim is None else self.fed(item.name, item.type)
        self.batch = next((v.operator.sizes[0] for v in self.values.values() if isinstance(v, Value)), 1)

    # what is asked of an op ----------------------------------------------------------------------

    def shape(self, name: str) -> tuple[int, ...]:
        type = next(tensors(self.types[name]))
        return tuple(dim_size(dim, self.sizes) for dim in type.shape)

    def known(self, arg: Any) -> Iterator[Value | Held]:
        """The tensors in an argument."""
        for ref in refs(arg):
            if ref.name in self.values:
                yield self.values[ref.name]

    def refuse(self, op: Op, why: str) -> PlanError:
        return PlanError(f"{show_op(op)}: {why}")

    # operators -----------------------------------------------------------------------------------

    def fed(self, name: str, type: TensorType) -> Value:
        """An operator for what is fed in."""
        shape = tuple(dim_size(dim, self.sizes) for dim in type.shape)
        named = zip(("length",), shape[1:], strict=True) if _words(type) else self.dimensions(shape)
        output = (Dimension("sample", shape[0], "S"), *(Dimension(n, s) for n, s in named))
        return self.new(Operator(name, "input", (), output))

    def dimensions(self, shape: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Names for all dimensions but the first."""
        names = NAMES.get(len(shape)) or tuple(f"dimension {dim}" for dim in range(1, len(shape)))
        return zip(names, shape[1:], strict=True)

    def new(self, operator: Operator) -> Value:
        """Add an operator, under a name that no other has, and return its output."""
        count = self.names.get(operator.name, 0)
        self.names[operator.name] = count + 1
        named = replace(operator, name=f"{operator.name}.{count}") if count else operator
        self.draft(named)
        return Value(named, whole(named.sizes), named.name)

    def make(self, op: Op, operator: Operator, shape: Sequence[int] = ()) -> Value:
        """Add the operator of an op, with the op's sizes and weights; `shape` is the op's if not given."""
        named = zip(operator.output, shape or self.shape(op.name), strict=True)
        dimensions = tuple(replace(dimension, size=size) for dimension, size in named)
        states = list(self.known((op.args, dict(op.kwargs))))
        held = tuple(dict.fromkeys(name for value in states if isinstance(value, Held) for name in value.states))
        dtype = next(tensors(op.type)).dtype.partition("_")[0]
        if operator.kind in PRODUCTS and self.dtype is None and dtype in STORED:
            self.dtype = dtype
        return self.new(
            replace(
                operator,
                output=dimensions,
                weights=sum(prod(self.shape(name)) for name in held),
                shared=", ".join(sorted({self.parameters[name].rpartition(".")[0] or name for name in held})),
            )
        )

    def name(self, op: Op) -> str:
        """The path of the op's module; the op's own name if it has none."""
        return op.origin.module or op.name

    def whole(self, op: Op, value: Value | Held) -> Operator:
        """An operator whose output is just this value, for `op` to read. Raises PlanError if the value does not have
        the samples in its first dimension."""
        if isinstance(value, Held):
            raise self.refuse(op, "it reads, in place of a tensor of the samples, one that does not depend on them")
        operator, axes = value.operator, value.axes
        if axes == whole(operator.sizes) and len(axes) == len(operator.sizes):
            return operator
        if (operator.name, axes) not in self.views:
            shape = self.shape(value.name)
            if not shape or axes[:1] != (axis(0, operator.sizes[0]),):
                raise self.refuse(op, f"of {value.name}, the first dimension is not that of the samples")
            flat = len(shape) == 2 and reshaped(whole(operator.sizes), shape) == axes and len(operator.sizes) > 2
            made = kinds.flatten(value.name, operator) if flat else self.alone(value.name, (operator,), shape)
            self.views[operator.name, axes] = self.new(made).operator
        return self.views[operator.name, axes]

    def alone(self, name: str, xs: tuple[Operator, ...], shape: Sequence[int], work: float = 0.0) -> Operator:
        output = (Dimension("sample", shape[0]), *(Dimension(n, s) for n, s in self.dimensions(shape)))
        return kinds.samplewise(name, xs, output, work)

    def operands(self, op: Op) -> tuple[Operator, ...]:
        """The operators whose outputs the op reads, each once."""
        values = (v for v in self.known((op.args, dict(op.kwargs))) if isinstance(v, Value))
        return tuple({(found := self.whole(op, value)).name: found for value in values}.values())

    def first(self, op: Op) -> Value:
        found = next(self.known((op.args, dict(op.kwargs))))
        if isinstance(found, Held):
            raise self.refuse(op, "it reads, in place of a tensor of the samples, one that does not depend on them")
        return found

    def lasts(self, value: Value) -> bool:
        """Whether the last dimension is the last one of the operator's output, whole."""
        return bool(value.axes) and value.axes[-1] == axis(len(value.operator.sizes) - 1, value.operator.sizes[-1])


def _words(type: TensorType) -> bool:
    """Whether these look like sequences of token numbers."""
    return type.dtype in ("i64", "i32") and len(type.shape) == 2
