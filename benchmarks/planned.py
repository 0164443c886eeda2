"""How large a model fits so many devices, found by planning: no weights, no arithmetic, everything on the meta device.

    captured once a depth ──run on meta tensors──▶ the graph at any width ──plan, by memory──▶ bytes of each device

To capture a large model takes half a minute, and a search tries many sizes. But models of one family and depth have the
same ops whatever their width, so that one capture serves all: its ops are run on meta tensors of another width, which
gives the types that they have there.

What a device needs, with recomputation and M micro-batches:

    parameters     copies x the bytes of its parameters: weights, gradients, and what the optimizer keeps
    activations    M x what its stage takes + what autograd saves of one micro-batch, while that is recomputed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import AmoebaNetD, UNet
from fxpipe.capture import capture
from fxpipe.ir.cluster.cluster import Cluster, Device
from fxpipe.ir.graph.evaluate_graph import evaluate
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.value_types import TensorType, ValueType
from fxpipe.ir.plan.plan import Plan, stage_of
from fxpipe.ir.plan.profile import Profile, total
from fxpipe.planning import plan
from fxpipe.profiling import estimate

FLOAT = 4  # bytes
# Memory never binds here: what a plan needs is counted afterwards, and compared with what there is.
ANY = Device("cuda", memory=10**15, flops=12e12, bandwidth=350e9)


@dataclass(frozen=True)
class Family:
    """Models of one kind by depth and width: `make(depth, width)`, the shape of a sample, the number that widths are
    multiples of, and how many copies of its parameters training keeps."""

    name: str
    make: Callable[[int, int], nn.Module]
    sample: tuple[int, ...]
    step: int
    copies: int


# Weights, gradients, and RMSprop's mean square.
AMOEBANET = Family("AmoebaNet-D", lambda layers, filters: AmoebaNetD(3 * layers, filters), (3, 224, 224), 16, copies=3)
# Weights and gradients: SGD keeps nothing.
UNET = Family("U-Net", UNet, (3, 192, 192), 8, copies=2)


@dataclass(frozen=True)
class Size:
    """A model of a family."""

    depth: int
    width: int

    def __str__(self) -> str:
        return f"({self.depth}, {self.width})"


@dataclass(frozen=True)
class Need:
    """Bytes that a device needs."""

    parameters: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.activations


@dataclass(frozen=True)
class Training:
    """How a model is trained: a batch in `chunks` micro-batches on `devices` devices, with recomputation or not."""

    devices: int
    batch: int
    chunks: int
    recompute: bool = True

    @property
    def rows(self) -> int:
        """Samples in a micro-batch."""
        return -(-self.batch // self.chunks)


@cache
def captured(family: Family, depth: int) -> Graph:
    """The graph of a narrow model that has no memory."""
    model, image = made(family, Size(depth, family.step))
    return capture(model, (image,))


def made(family: Family, size: Size) -> tuple[nn.Module, Tensor]:
    """A model and a batch of two, without memory."""
    with torch.device("meta"):
        return family.make(size.depth, size.width), torch.empty(2, *family.sample)


@cache
def graph_of(family: Family, size: Size) -> Graph:
    """The graph of a model: that of its depth, with its own types."""
    graph = captured(family, size.depth)
    model, image = made(family, size)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    states = {state.name: tensors[state.path] for state in graph.states}
    values = evaluate(graph, {item.name: image for item in graph.inputs}, states)
    return replace(
        graph,
        ops=tuple(replace(op, type=retyped(op.type, values[op.name])) for op in graph.ops),
        states=tuple(replace(state, type=retyped(state.type, states[state.name])) for state in graph.states),
    )


def retyped(type: ValueType, value: Any) -> ValueType:
    """The type with the numbers of a value's shape; what depends on the batch stays as it is."""
    if not isinstance(type, TensorType):
        return type
    pairs = zip(type.shape, value.shape, strict=True)
    return replace(type, shape=tuple(dim if isinstance(dim, str) else int(size) for dim, size in pairs))


@cache
def profile_of(family: Family, size: Size, rows: int, device: Device = ANY) -> Profile:
    """What the ops take for a micro-batch of so many rows."""
    graph = graph_of(family, size)
    return estimate(graph, {size.name: rows for size in graph.sizes}, device)


def needs(family: Family, size: Size, training: Training) -> tuple[Need, ...]:
    """What each device needs, in the plan whose fullest device is emptiest."""
    graph = graph_of(family, size)
    profile = profile_of(family, size, training.rows)
    labels = [f"cuda:{d}" for d in range(training.devices)]
    decided = plan(
        graph,
        profile,
        Cluster.of(labels, gpu=ANY),
        chunks=training.chunks,
        checkpoint="always" if training.recompute else "never",
        cut="memory",
        parameter_copies=family.copies,
    )
    return counted(family, graph, decided, profile, training)


def counted(family: Family, graph: Graph, decided: Plan, profile: Profile, training: Training) -> tuple[Need, ...]:
    costs = {cost.name: cost for cost in profile.ops}
    found = []
    for stage, taken in zip(decided.stages, taken_bytes(family, graph, decided, profile, training), strict=True):
        own = total([costs[op] for op in stage.ops])
        live = training.chunks * taken + own.saved if training.recompute else training.chunks * own.saved
        found.append(Need(family.copies * own.parameters, live))
    return tuple(found)


def taken_bytes(family: Family, graph: Graph, decided: Plan, profile: Profile, training: Training) -> Iterator[int]:
    """What each stage takes of a micro-batch, skips straight from where they are made, and the samples."""
    home = stage_of(decided)
    output = {cost.name: cost.output for cost in profile.ops}
    output |= {item.name: FLOAT * training.rows * prod(family.sample) for item in graph.inputs}
    reads: list[set[str]] = [set() for _ in decided.stages]
    for op in graph.ops:
        reads[home[op.name]] |= {name for name in op.reads if name in output and home.get(name) != home[op.name]}
    return (sum(output[name] for name in names) for names in reads)


def parameters(family: Family, size: Size) -> int:
    """How many a model has."""
    return total(profile_of(family, size, 1).ops).parameters // FLOAT


def fits(found: Sequence[Need], memory: float) -> bool:
    return max(need.total for need in found) <= memory


def largest(family: Family, near: Size, training: Training, memory: float) -> Size | None:
    """The widest model of a depth that fits devices of so much memory; None if none does. Looks around a width first,
    then further and further away, and halves what is left between one that fits and one that does not."""

    def good(steps: int) -> bool:
        size = replace(near, width=steps * family.step)
        return steps == 0 or fits(needs(family, size, training), memory)

    start, stride = near.width // family.step, 1
    low = high = start
    if good(start):
        while good(high := low + stride):
            low, stride = high, 2 * stride
    else:
        while not good(low := max(0, high - stride)):
            high, stride = low, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return replace(near, width=low * family.step) if low else None
