"""What a model computes, as operator-level parallelism sees it: operators, their output tensors, and how each
dimension of an output may be cut. The captured `Graph` says how to run a model; this says only what its parts cost
and what they read of each other, so that a strategy is judged without torch.

    operator  kind    inputs  output                                                   weights
    image     input           sample 64 S, channel 3, height 224 A, width 224 A
    conv1     conv2d  image   sample 64 S, channel 64 P, height 55 A, width 55 A       23232
    pool1     pool2d  conv1   sample 64 S, channel 64 A, height 27 A, width 27 A

A dimension's role is the SOAP paper's: cutting S (sample) or A (attribute) leaves the weights whole, so that every part
holds a copy; cutting P (parameter) cuts the weights with it. A dimension without a role is never cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod
from typing import Literal

from tabulate import tabulate

Role = Literal["S", "A", "P", ""]
ROLES = ("S", "A", "P", "")

KINDS = frozenset(
    {"input", "linear", "matmul", "conv1d", "conv2d", "pool1d", "pool2d", "batch_norm", "layer_norm", "embedding"}
    | {"lstm", "attention", "scaled_dot_product", "elementwise", "concat", "flatten", "softmax", "loss"}
    | {"projected_softmax", "samplewise"}
)
# Those that multiply matrices, which devices do at another speed than all else. What is "samplewise" multiplies
# matrices, or is bound by memory, so that the speed does not matter.
PRODUCTS = frozenset(
    {
        "linear",
        "matmul",
        "conv1d",
        "conv2d",
        "lstm",
        "attention",
        "scaled_dot_product",
        "projected_softmax",
        "samplewise",
    }
)


@dataclass(frozen=True)
class Dimension:
    """One dimension of an operator's output.

    - `size`: how many elements it has.
    - `role`: what cutting it cuts, see above.
    - `step`: it is cut only between multiples of this, as channels are between the heads of attention.
    """

    name: str
    size: int
    role: Role = ""
    step: int = 1

    def __str__(self) -> str:
        return f"{self.name} {self.size} {self.role}".rstrip()


@dataclass(frozen=True)
class Operator:
    """An operator and its output. One of kind "input" is fed in: it costs nothing, and every device has it.

    - `inputs`: the names of the operators it reads, in order.
    - `work`: floating-point operations of the forward pass for each element of the output.
    - `weights`: the number of its weights.
    - `shared`: operators with the same name here hold the same weights (the steps of an unrolled layer), whose
      gradients are exchanged once.
    - `window`, `stride`, `padding`: of a convolution or pooling, one number for each dimension that it slides over.
    - `axis`: the dimension that is concatenated.
    - `summed`: the size of the dimension that its products are summed over, such as the input channels of a linear
      layer; 0 if there is none that can be cut.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    output: tuple[Dimension, ...]
    work: float = 0.0
    weights: int = 0
    shared: str = ""
    window: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    axis: int = 0
    summed: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(dimension.size for dimension in self.output)

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(dimension.role for dimension in self.output)

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    @property
    def weight_group(self) -> str:
        """The name under which its weights are exchanged; empty where it has none."""
        return (self.shared or self.name) if self.weights else ""


@dataclass(frozen=True)
class OperatorGraph:
    """Operators in an order in which each comes after those it reads. Check with `check`, print with `str`.

    - `element`: bytes of an element in memory.
    - `dtype`: the element type in which matrices are multiplied, a key of `matrix_speed.STORED`.
    - `kept`: how many numbers are kept for backward for each number that an operator puts out, on average.
    """

    name: str
    operators: tuple[Operator, ...]
    element: int = 4
    dtype: str = "f32"
    kept: float = 1.0

    def __str__(self) -> str:
        return show(self)

    def __len__(self) -> int:
        return len(self.operators)

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.operators)

    @cached_property
    def positions(self) -> dict[str, int]:
        return {operator.name: at for at, operator in enumerate(self.operators)}

    def operator(self, name: str) -> Operator:
        """The operator of this name; KeyError where there is none."""
        if name not in self.positions:
            raise KeyError(f"{self.name} has no operator {name!r}")
        return self.operators[self.positions[name]]

    @cached_property
    def edges(self) -> tuple[tuple[int, int, int], ...]:
        """(producer, consumer, which input of the consumer), by positions, in order of consumers."""
        return tuple(
            (self.positions[name], at, which)
            for at, operator in enumerate(self.operators)
            for which, name in enumerate(operator.inputs)
        )

    @property
    def weights(self) -> int:
        """The number of weights, shared ones counted once."""
        return sum({o.weight_group: o.weights for o in self.operators if o.weights}.values())


def check(graph: OperatorGraph) -> None:
    """Raise ValueError if the graph is not well-formed: a name that comes twice, an input that does not come before its
    reader, an unknown kind or role, an empty dimension, operators that share weights but not their number."""
    before: set[str] = set()
    shared: dict[str, Operator] = {}
    if not graph.operators:
        raise ValueError(f"{graph.name} has no operators")
    for operator in graph.operators:
        where = f"operator {operator.name!r} of {graph.name}"
        if operator.name in before:
            raise ValueError(f"{where}: the name comes twice")
        if missing := [name for name in operator.inputs if name not in before]:
            raise ValueError(f"{where} reads {missing[0]!r}, which does not come before it")
        if operator.kind not in KINDS:
            raise ValueError(f"{where} is of kind {operator.kind!r}; there are {', '.join(sorted(KINDS))}")
        if not operator.output:
            raise ValueError(f"{where} has no output dimensions")
        for one in operator.output:
            if one.size < 1 or one.role not in ROLES:
                raise ValueError(f"{where} has the dimension {one}; sizes are positive and roles are S, A, P or none")
        if operator.work < 0 or operator.weights < 0:
            raise ValueError(f"{where} has a negative cost")
        if operator.summed < 0:
            raise ValueError(f"{where} sums over {operator.summed} numbers; write 0 where none can be cut")
        first = shared.setdefault(operator.weight_group, operator)
        if operator.weights and first.weights != operator.weights:
            theirs = f"shares them with {first.name!r}, which has {first.weights}"
            raise ValueError(f"{where} has {operator.weights} weights, but {theirs}")
        before.add(operator.name)


def micro_batch(graph: OperatorGraph, number: int) -> OperatorGraph:
    """The operators for one of `number` equal micro-batches. Raises ValueError if samples cannot be divided so."""
    if number == 1:
        return graph
    for operator in graph:
        for one in operator.output:
            if one.role == "S" and one.size % number:
                raise ValueError(
                    f"{graph.name} cannot run in {number} equal micro-batches: its operator {operator.name!r} puts out "
                    f"{one}"
                )
    return replace(graph, operators=tuple(replace(o, output=_divided(o, number)) for o in graph))


def micro_batch_numbers(graph: OperatorGraph) -> tuple[int, ...]:
    """Into how many equal micro-batches a step may be cut, in order. Only 1 if an operator needs the whole batch: a
    BatchNorm, whose statistics would be others."""
    if any(operator.kind == "batch_norm" for operator in graph):
        return (1,)
    most = gcd(*(one.size for operator in graph for one in operator.output if one.role == "S")) or 1
    return tuple(number for number in range(1, most + 1) if most % number == 0)


def _divided(operator: Operator, number: int) -> tuple[Dimension, ...]:
    return tuple(replace(d, size=d.size // number) if d.role == "S" else d for d in operator.output)


def show(graph: OperatorGraph) -> str:
    """A table with a row for each operator."""
    rows = [
        (o.name, o.kind, ", ".join(o.inputs), ", ".join(map(str, o.output)), o.weights or "") for o in graph.operators
    ]
    return tabulate(rows, ("operator", "kind", "inputs", "output", "weights"), tablefmt="plain", disable_numparse=True)
