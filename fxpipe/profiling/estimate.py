"""Graph -> Profile, without running anything: from the types of the ops and the figures of a device.

An op takes its time by the roofline model, and the time to launch it. A product's operations run at the speed of its
element type. The backward of a product is one more product for each operand that needs a gradient; of any
other op, about half as many bytes again. What autograd keeps depends on the kind of op: some keep their result, some
nothing, most what they read. Each memory counts once, at the first op that keeps it; views and in-place results share
the memory of what they view or write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from fxpipe.ir.cluster.cluster import ASSUMED_GPU, Device
from fxpipe.ir.cluster.roofline import roofline
from fxpipe.ir.graph.graph import Graph, Op, Ref, is_opaque, op_name
from fxpipe.ir.graph.ops import CHANNEL_DROPOUTS, DROPOUTS, KEEP_NOTHING, KEEP_RESULT, MAX_POOLS
from fxpipe.ir.graph.shared_memory_values import trains, viewed
from fxpipe.ir.graph.value_types import TensorType, TupleType, ValueType, dim_size, nbytes, tensors
from fxpipe.ir.plan.profile import OpCost, Profile

from .flops import BY_ROWS, products

LAUNCH = 5e-6  # least seconds from one op to the next
POOLS = MAX_POOLS | {"adaptive_max_pool2d", "max_pool3d"}
CELL = 5  # tensors of its result's size that a recurrent or opaque op also keeps: gates and cell


def estimate(graph: Graph, sizes: Mapping[str, int], device: Device, products: str | None = None) -> Profile:
    """The estimated costs of a micro-batch on `device`; `sizes` has a number for each of the graph's sizes. `products`
    is the element type in which matrices are multiplied, such as "tf32", if not that of their result."""
    states = frozenset(state.name for state in graph.states)
    sized = _Sized(graph.types, states, sizes, device, products)
    unused = {state.name for state in graph.states if state.kind == "parameter"}
    memory = {name: name for name in sized.types}  # the value in whose memory each value stands
    kept: set[str] = set()
    costs = []
    for op in graph.ops:
        shared = op.writes[0] if op.writes and op.writes[0] not in sized.states else viewed(op, sized.types)
        memory[op.name] = memory[shared or op.name]
        new = {memory[name] for name in sized.keeps(op)} - kept - sized.states
        kept |= new
        first_used = unused.intersection(op.reads)
        unused -= first_used
        costs.append(
            OpCost(
                op.name,
                *sized.seconds(op),
                saved=sized.bytes(new) + sized.kept_besides(op),
                output=nbytes(op.type, sizes),
                parameters=sized.bytes(first_used),
            )
        )
    batch = next((dim_size(i.type.shape[i.batch_dim], sizes) for i in graph.inputs
                  if isinstance(i.type, TensorType) and i.batch_dim is not None), 1)  # fmt: skip
    return Profile(graph.model, batch, device.label, "estimated", tuple(costs))


@dataclass(frozen=True)
class Product:
    """What an op that multiplies matrices computes: the element type, and the floating-point operations of its forward
    and of its backward."""

    dtype: str
    forward: int
    backward: int


def model_products(graph: Graph, sizes: Mapping[str, int], dtype: str | None = None) -> dict[str, Product]:
    """The ops that multiply matrices, by name. `dtype` is the element type of products, if not that of their result."""
    sized = _Sized(graph.types, frozenset(state.name for state in graph.states), sizes, ASSUMED_GPU)
    found = {}
    for op in graph.ops:
        flops = sized.products(op)
        if flops:
            found[op.name] = Product(dtype or _dtype(op), flops, sized.passes(op) * flops)
    return found


@dataclass(frozen=True)
class _Sized:
    """The types of all values, with a number for each size; answers questions about single ops. `known`: the operands
    and the products of ops that it was asked about."""

    types: Mapping[str, ValueType]
    states: frozenset[str]
    sizes: Mapping[str, int]
    device: Device
    multiplied: str | None = None
    known: dict[str, tuple[list[tuple[str, TensorType]], int]] = field(default_factory=dict)

    def bytes(self, names: Iterable[str]) -> int:
        return sum(nbytes(self.types[name], self.sizes) for name in names)

    def shape(self, type: TensorType) -> tuple[int, ...]:
        return tuple(dim_size(dim, self.sizes) for dim in type.shape)

    def operands(self, op: Op) -> list[tuple[str, TensorType]]:
        """The (name, type) of each tensor that the op reads, in order."""
        return self._of(op)[0]

    def products(self, op: Op) -> int:
        """Floating-point operations of an op that multiplies matrices, or 0."""
        return self._of(op)[1]

    def _of(self, op: Op) -> tuple[list[tuple[str, TensorType]], int]:
        if op.name not in self.known:
            operands = [(name, type) for name in op.operands for type in tensors(self.types[name])]
            self.known[op.name] = operands, self._products(op, operands)
        return self.known[op.name]

    # time ------------------------------------------------------------------------------------

    def seconds(self, op: Op) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        result = nbytes(op.type, self.sizes)
        if not any(True for _ in tensors(op.type)) or isinstance(self.types.get(_first(op)), TupleType):
            return 0.0, 0.0  # arithmetic on sizes, or a tuple unpacked
        needing = [type for _, type in self.operands(op) if type.grad]
        gradients = sum(type.nbytes(self.sizes) for type in needing)
        differentiable = any(type.grad for type in tensors(op.type)) and bool(needing)
        if viewed(op, self.types) is not None:
            pads = differentiable and gradients > result  # the rest of the gradient is filled with zeros
            return 0.0, self.roofline(0, gradients) if pads else 0.0
        read = sum(type.nbytes(self.sizes) for _, type in self.operands(op))
        if op_name(op) == "embedding":
            read = result
        flops = self.products(op)
        if flops:
            forward = roofline(self.device, flops, read + result, self.multiplied or _dtype(op)) + LAUNCH
        else:
            forward = self.roofline(self.elements(op), read + result)
        if not differentiable:
            return forward, 0.0
        if flops:
            return forward, self.passes(op) * forward
        return forward, self.roofline(self.elements(op), (read + result) // 2 + gradients)

    def passes(self, op: Op) -> int:
        """How many products like its forward the backward of a product has: one for each operand that needs a gradient;
        those of a bias are none."""
        needing = [type for _, type in self.operands(op) if type.grad]
        if not needing or not any(type.grad for type in tensors(op.type)):
            return 0
        return sum(len(type.shape) > 1 for type in needing) or 1

    def roofline(self, flops: int, moved: int) -> float:
        return roofline(self.device, flops, moved) + LAUNCH

    def elements(self, op: Op) -> int:
        found = [*tensors(op.type), *(type for _, type in self.operands(op))]
        return max(type.numel(self.sizes) for type in found)

    def _products(self, op: Op, operands: Sequence[tuple[str, TensorType]]) -> int:
        result = next(tensors(op.type), None)
        if result is None:
            return 0
        shapes = [self.shape(type) for _, type in operands]
        weights = [shape for (name, _), shape in zip(operands, shapes, strict=True) if name in self.states]
        if is_opaque(op):  # a guess: each row is multiplied by each weight
            rows = [
                prod(shape[:-1]) for (name, _), shape in zip(operands, shapes, strict=True) if name not in self.states
            ]
            return 2 * max(rows, default=0) * sum(prod(weight) for weight in weights if len(weight) > 1)
        return products(op_name(op), op.args, shapes, weights, result.numel(self.sizes))

    # memory ----------------------------------------------------------------------------------

    def keeps(self, op: Op) -> Iterator[str]:
        """The values whose memory autograd keeps for the op's backward."""
        name = op_name(op)
        needing = {read for read, type in self.operands(op) if type.grad}
        if not needing or not any(type.grad for type in tensors(op.type)) or name in KEEP_NOTHING:
            return
        if name in KEEP_RESULT or name == "scaled_dot_product_attention":
            yield op.name
        if name in KEEP_RESULT or name in DROPOUTS or viewed(op, self.types) is not None:
            return
        product = bool(self.products(op)) or name in {"mul", "imul"}
        for read, _ in self.operands(op):
            if not product or needing - {read}:  # of a product, what the gradients of the other operands need
                yield read

    def kept_besides(self, op: Op) -> int:
        """Bytes of memory that is neither an operand's nor the result's: masks, indices, gates."""
        name, found = op_name(op), list(tensors(op.type))
        if not found or not found[0].grad:
            return 0
        size, count = found[0].nbytes(self.sizes), found[0].numel(self.sizes)
        if name in ("dropout", "alpha_dropout") and trains(op):
            return size if self.device.label.startswith("cpu") else count  # a mask of numbers, or of booleans
        if name in CHANNEL_DROPOUTS and trains(op):
            return size // prod(self.shape(found[0])[2:])
        if name in POOLS:
            return 8 * count  # where each maximum came from
        if name == "cross_entropy":
            return next((type.nbytes(self.sizes) for _, type in self.operands(op)), 0)  # the log-softmax
        return CELL * size if name in BY_ROWS or is_opaque(op) else 0


def _dtype(op: Op) -> str:
    """The element type of a product, as `matrix_speed.STORED` has it."""
    return next(tensors(op.type)).dtype.partition("_")[0]


def _first(op: Op) -> str:
    return op.args[0].name if op.args and isinstance(op.args[0], Ref) else ""
