"""Random models: graphs of a dozen ops, with everything a cut can get wrong, made by hypothesis.

Capturing a model takes a hundred times longer than running it, so these are made as graphs and never captured.
`GraphModel` is the plain model of a graph: it runs the ops one by one, as Python would have.

A graph grows op by op. Each function in `STEPS` adds one idea to it: a layer with an old weight or a new one, a
residual from anywhere, a piece of a chunk, an in-place op, a mask made from sizes. What autograd forbids (writing into
what backward needs) is not built: `Grower.writable` has the values that may still be written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from fxpipe.ir.graph import (
    Graph,
    Input,
    Op,
    Origin,
    Output,
    Ref,
    Region,
    Size,
    State,
    check,
    map_refs,
    may_cross,
    refs,
)
from fxpipe.ir.plan import CHECKPOINT_MODES, Plan, StagePlan
from fxpipe.ir.types import ScalarType, TensorType, TupleType, ValueType, tensors
from tests.models import Case

WIDTHS = (4, 6, 8)
NO_GRAD = (Region("grad", (False,)),)


@dataclass(frozen=True, repr=False)
class Example:
    """A model, a plan for it and a batch size."""

    graph: Graph
    plan: Plan
    batch: int

    def __repr__(self) -> str:
        return f"a batch of {self.batch} for\n{self.graph}\n{self.plan}"

    @property
    def case(self) -> Case:
        return Case(
            make=lambda: GraphModel(self.graph),
            inputs=lambda batch: (tuple(sample(item, batch) for item in self.graph.inputs), {}),
            traits=frozenset(() if carries_gradient(self.graph.inputs[0].type) else {"writes-inputs"}),
            random=any(op.random for op in self.graph.ops),
        )


# The plain model of a graph -------------------------------------------------------------------------------------------


class GraphModel(nn.Module):
    """Runs the ops of a graph one by one, with parameters and buffers under the paths that the graph gives them."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        for state in graph.states:
            assert isinstance(state.type, TensorType)
            *path, name = state.path.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner._modules[part]
            value = torch.randn([int(size) for size in state.type.shape], dtype=torch.float64) / 2
            if state.kind == "buffer":
                owner.register_buffer(name, value)
            else:
                owner.register_parameter(name, nn.Parameter(value, requires_grad=state.type.grad))

    def forward(self, *args: Any) -> Any:
        values = {item.name: arg for item, arg in zip(self.graph.inputs, args, strict=True)}
        values |= {size.name: values[size.input].shape[size.dim] for size in self.graph.sizes}
        values |= {state.name: self.tensor(state.path) for state in self.graph.states}
        for op in self.graph.ops:
            values[op.name] = run(op, values)
        return map_refs(self.graph.result, lambda ref: values[ref.name])

    def tensor(self, path: str) -> Tensor:
        *owner, name = path.split(".")
        return getattr(self.get_submodule(".".join(owner)), name)


def run(op: Op, values: Mapping[str, Any]) -> Any:
    """What the op returns; for `setitem`, which returns nothing, the tensor it wrote."""
    args = map_refs(op.args, lambda ref: values[ref.name])
    kwargs = map_refs(dict(op.kwargs), lambda ref: values[ref.name])
    target = (
        (lambda x, *rest, **named: getattr(x, op.target)(*rest, **named)) if isinstance(op.target, str) else op.target
    )
    with torch.set_grad_enabled(torch.is_grad_enabled() and not op.regions):
        result = target(*args, **kwargs)
    return args[0] if op.target is operator.setitem else result


def sample(item: Input, batch: int) -> Tensor:
    assert isinstance(item.type, TensorType)
    shape = [batch if size == "b" else int(size) for size in item.type.shape]
    return torch.rand(shape) < 0.5 if item.type.dtype == "bool" else torch.randn(shape, dtype=torch.float64)


# Growing a graph ------------------------------------------------------------------------------------------------------


@dataclass
class Grower:
    """A graph that grows. `pool` has the names of f64[b, width] values that later ops may read, with their widths."""

    draw: Callable[[st.SearchStrategy[Any]], Any]
    ops: list[Op] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    types: dict[str, ValueType] = field(default_factory=dict)
    pool: dict[str, int] = field(default_factory=dict)
    masks: dict[str, int] = field(default_factory=dict)
    writable: set[str] = field(default_factory=set)
    draws: int = 0

    def choose(self, names: Mapping[str, int] | None = None) -> str:
        return self.draw(st.sampled_from(list(self.pool if names is None else names)))

    def peers(self, x: str) -> list[str]:
        """Values of the same width as `x`, itself among them."""
        return [name for name, width in self.pool.items() if width == self.pool[x]]

    def add(
        self,
        stem: str,
        target: Callable[..., Any] | str,
        *args: Any,
        type: ValueType | None = None,
        writes: tuple[str, ...] = (),
        regions: tuple[Region, ...] = (),
        random: bool = False,
        **kwargs: Any,
    ) -> str:
        """One more op; its type is that of f64[b, width of the first argument] unless given. Returns its name."""
        name = f"{stem}_{len(self.ops)}"
        stopped = bool(regions) or target == "detach"
        grad = not stopped and any(carries_gradient(self.types[ref.name]) for ref in refs(args))
        type = self.vector(self.pool[args[0].name]) if type is None else type
        if isinstance(type, TensorType) and type.dtype == "f64":
            type = TensorType(type.dtype, type.shape, type.device, grad)
        if isinstance(type, TupleType):
            type = TupleType(tuple(TensorType(t.dtype, t.shape, t.device, grad) for t in type.items))
        origin = Origin("random.py", len(self.ops) + 1, f"{stem}({', '.join(map(str, args))})", "")
        draw = self.draws if random else None
        self.draws += random
        self.ops.append(Op(name, target, args, kwargs, type, origin, regions, writes, draw))
        self.types[name] = type
        return name

    def give(self, name: str, width: int, *, writable: bool = False) -> str:
        """Lets later ops read `name`, and write it if nothing keeps it for backward."""
        self.pool[name] = width
        if writable:
            self.writable.add(name)
        return name

    def keep(self, *names: str) -> None:
        """From now on, memory of these values is needed for backward or has a second name: nobody may write it."""
        self.writable -= set(names)

    def written(self, x: str, name: str, *, writable: bool) -> None:
        """Later ops read `name` where they would have read `x`."""
        width = self.pool.pop(x)
        self.writable.discard(x)
        self.give(name, width, writable=writable)

    def vector(self, width: int) -> TensorType:
        return TensorType("f64", ("b", width), "cpu")

    def parameter(self, *shape: int) -> str:
        """A parameter of this shape: an old one, or a new one, now and then a frozen one."""
        old = [s.name for s in self.states if s.kind == "parameter" and getattr(s.type, "shape", ()) == shape]
        if old and self.draw(st.booleans()):
            return self.draw(st.sampled_from(old))
        grad = self.draw(st.integers(0, 4)) > 0
        return self.state("parameter", TensorType("f64", shape, "cpu", grad))

    def state(self, kind: str, type: TensorType) -> str:
        index = len(self.states)
        name = f"layers_{index}_{kind}"
        self.states.append(State(name, f"layers.{index}.{kind}", kind, type))
        self.types[name] = type
        return name


def carries_gradient(type: ValueType) -> bool:
    return any(tensor.grad for tensor in tensors(type))


def linear(g: Grower) -> None:
    x = g.choose()
    width = g.draw(st.sampled_from(WIDTHS))
    weight = Ref(g.parameter(width, g.pool[x]))
    bias = Ref(g.parameter(width)) if g.draw(st.booleans()) else None
    y = g.add("linear", torch._C._nn.linear, Ref(x), weight, bias, type=g.vector(width))
    g.keep(x)
    g.give(y, width, writable=True)


def head(g: Grower) -> None:
    """The last layer: it can be trained, so that there is a gradient in every model."""
    x = g.choose()
    weight = g.state("parameter", TensorType("f64", (3, g.pool[x]), "cpu", grad=True))
    g.give(g.add("head", torch._C._nn.linear, Ref(x), Ref(weight), type=g.vector(3)), 3)


def elementwise(g: Grower) -> None:
    x = g.choose()
    function = g.draw(st.sampled_from([torch.tanh, torch.sin, F.silu, "sigmoid"]))
    y = g.add(function if isinstance(function, str) else function.__name__, function, Ref(x))
    g.keep(x)
    g.give(y, g.pool[x])


def residual(g: Grower) -> None:
    x = g.choose()
    other = g.draw(st.sampled_from(g.peers(x)))
    g.give(g.add("add", operator.add, Ref(x), Ref(other)), g.pool[x], writable=True)


def product(g: Grower) -> None:
    x = g.choose()
    other = g.draw(st.sampled_from(g.peers(x)))
    y = g.add("mul", operator.mul, Ref(x), Ref(other))
    g.keep(x, other)
    g.give(y, g.pool[x], writable=True)


def scale(g: Grower) -> None:
    weight = Ref(g.parameter(g.pool[x := g.choose()]))
    y = g.add("scaled", torch.mul, Ref(x), weight)
    g.keep(x)
    g.give(y, g.pool[x], writable=True)


def pieces(g: Grower) -> None:
    x = g.choose()
    half = g.vector(g.pool[x] // 2)
    both = g.add("chunk", "chunk", Ref(x), 2, type=TupleType((half, half)), dim=1)
    first, second = (g.add("getitem", operator.getitem, Ref(both), index, type=half) for index in (0, 1))
    g.keep(x)
    left = g.add("sin", torch.sin, Ref(first), type=half)
    y = g.add("cat", torch.cat, [Ref(second), Ref(left)], 1, type=g.vector(g.pool[x]))
    g.give(y, g.pool[x], writable=True)


def join(g: Grower) -> None:
    x, other = g.choose(), g.choose()
    wide = g.pool[x] + g.pool[other]
    both = g.add("cat", torch.cat, [Ref(x), Ref(other)], type=g.vector(wide), dim=1)
    weight = Ref(g.parameter(g.pool[x], wide))
    y = g.add("linear", torch._C._nn.linear, Ref(both), weight, type=g.vector(g.pool[x]))
    g.give(y, g.pool[x], writable=True)


def in_place(g: Grower) -> None:
    targets = {name: width for name, width in g.pool.items() if name in g.writable}
    if not targets:
        return
    x = g.choose(targets)
    kind = g.draw(st.sampled_from(["relu_", "mul_", "iadd", "relu", "setitem"]))
    if kind == "iadd":
        other = g.draw(st.sampled_from([peer for peer in g.peers(x) if peer != x] or [None]))
        y = g.add("iadd", operator.iadd, Ref(x), 0.5 if other is None else Ref(other), type=g.types[x], writes=(x,))
    elif kind == "setitem":
        where = (slice(None), slice(0, 2))
        y = g.add("setitem", operator.setitem, Ref(x), where, -0.5, type=g.types[x], writes=(x,))
    elif kind == "relu":
        y = g.add("relu", F.relu, Ref(x), type=g.types[x], writes=(x,), inplace=True)
    else:
        args = (1.5,) if kind == "mul_" else ()
        y = g.add(kind, kind, Ref(x), *args, type=g.types[x], writes=(x,))
    g.written(x, y, writable=kind not in ("relu_", "relu"))


def compare(g: Grower) -> None:
    x = g.choose()
    mask = g.add("gt", operator.gt, Ref(x), 0.1, type=TensorType("bool", ("b", g.pool[x]), "cpu"))
    g.masks[mask] = g.pool[x]


def mask_of_sizes(g: Grower) -> None:
    """Every other sample: computed from the batch size alone."""
    rows = g.add("arange", torch.arange, Ref("b"), type=TensorType("i64", ("b",), "cpu"))
    odd = g.add("mod", operator.mod, Ref(rows), 2, type=TensorType("i64", ("b",), "cpu"))
    column = g.add("unsqueeze", "unsqueeze", Ref(odd), 1, type=TensorType("i64", ("b", 1), "cpu"))
    mask = g.add("eq", operator.eq, Ref(column), 0, type=TensorType("bool", ("b", 1), "cpu"))
    g.masks[mask] = 0


def where(g: Grower) -> None:
    x = g.choose()
    masks = {name: width for name, width in g.masks.items() if width in (0, g.pool[x])}
    if not masks:
        return
    other = g.draw(st.sampled_from(g.peers(x)))
    y = g.add("where", torch.where, Ref(g.choose(masks)), Ref(x), Ref(other), type=g.vector(g.pool[x]))
    g.give(y, g.pool[x], writable=True)


def fold(g: Grower) -> None:
    """Rows of half the width, twice as many, and back: numbers that depend on the batch."""
    x = g.choose()
    half = g.pool[x] // 2
    rows = g.add("rows", operator.mul, Ref("b"), 2, type=ScalarType("int"))
    thin = TensorType("f64", ("2*b", half), "cpu")
    folded = g.add("reshape", "reshape", Ref(x), Ref(rows), half, type=thin)
    bent = g.add("tanh", torch.tanh, Ref(folded), type=thin)
    y = g.add("reshape", "reshape", Ref(bent), Ref("b"), g.pool[x], type=g.vector(g.pool[x]))
    g.keep(x)
    g.give(y, g.pool[x])


def average(g: Grower) -> None:
    x = g.choose()
    number = g.add("number", operator.add, Ref("b"), 1, type=ScalarType("int"))
    g.give(g.add("div", operator.truediv, Ref(x), Ref(number)), g.pool[x], writable=True)


def without_gradient(g: Grower) -> None:
    x = g.choose()
    if g.draw(st.booleans()):
        y = g.add("detach", "detach", Ref(x))
        g.keep(x)
        g.give(y, g.pool[x])
    else:
        g.give(g.add("exp", torch.tanh, Ref(x), regions=NO_GRAD), g.pool[x])


def dropout(g: Grower) -> None:
    x = g.choose()
    g.give(g.add("dropout", F.dropout, Ref(x), 0.4, True, random=True), g.pool[x])


def count(g: Grower) -> None:
    """A buffer that every micro-batch adds to, and that a value sees."""
    buffers = [state.name for state in g.states if state.kind == "buffer"]
    buffer = buffers[0] if buffers else g.state("buffer", TensorType("f64", (), "cpu"))
    g.add("count", "add_", Ref(buffer), 0.25, type=g.types[buffer], writes=(buffer,))
    x = g.choose()
    g.give(g.add("add", operator.add, Ref(x), Ref(buffer)), g.pool[x], writable=True)


STEPS = (
    linear, linear, elementwise, residual, residual, product, scale, pieces, join, in_place, in_place, compare,
    mask_of_sizes, where, fold, average, without_gradient, dropout, count,
)  # fmt: skip


@st.composite
def graphs(draw: Any) -> Graph:
    g = Grower(draw)
    inputs = []
    writes = draw(st.integers(0, 3)) == 0  # only what wants no gradient may be written
    for name, width in (("x", 8), ("y", draw(st.sampled_from(WIDTHS))))[: draw(st.integers(1, 2))]:
        g.types[name] = TensorType("f64", ("b", width), "cpu", grad=not writes)
        inputs.append(Input(name, name, g.types[name], 0))
        g.give(name, width, writable=writes)
    if draw(st.booleans()):
        inputs.append(Input("mask", "mask", TensorType("bool", ("b", 1), "cpu"), 0))
        g.types["mask"], g.masks["mask"] = inputs[-1].type, 0
    g.types["b"] = ScalarType("int")
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=14)):
        step(g)
    head(g)
    return finish(g, tuple(inputs), draw)


def finish(g: Grower, inputs: tuple[Input, ...], draw: Any) -> Graph:
    """The graph that has grown, with some of its values, the last one always, as outputs."""
    *early, last = g.pool
    names = [*draw(st.lists(st.sampled_from(early), max_size=3, unique=True)), last]
    form = draw(st.sampled_from(["tuple", "dict", "nest"]))
    result: Any = tuple(Ref(name) for name in names)
    if form == "dict":
        result = {f"out{index}": Ref(name) for index, name in enumerate(names)}
    elif form == "nest":
        result = [Ref(names[-1]), {"rest": [Ref(name) for name in names[:-1]], "none": None}]
    graph = Graph(
        model="Random",
        training=True,
        inputs=inputs,
        sizes=(Size("b", "x", 0),),
        states=tuple(g.states),
        ops=tuple(g.ops),
        outputs=tuple(Output(name, 0) for name in names),
        call=(tuple(Ref(item.name) for item in inputs), {}),
        result=result,
    )
    check(graph)
    return graph


# Cutting it -----------------------------------------------------------------------------------------------------------


def legal_cuts(graph: Graph) -> list[int]:
    """Where a cut may be: only tensors and numbers cross it, and ops on a written buffer stay together."""
    types = graph.types
    last_use = {name: position for position, op in enumerate(graph.ops) for name in op.reads}
    forbidden = set()
    for position, op in enumerate(graph.ops):
        if not may_cross(types[op.name]):
            forbidden |= set(range(position + 1, last_use.get(op.name, position) + 1))
    buffers = {state.name for state in graph.states if state.kind == "buffer"}
    touching = [position for position, op in enumerate(graph.ops) if buffers & {*op.reads, *op.writes}]
    if touching:
        forbidden |= set(range(touching[0] + 1, touching[-1] + 1))
    return [position for position in range(1, len(graph.ops)) if position not in forbidden]


@st.composite
def plans(draw: Any, graph: Graph) -> Plan:
    """Any cuts into at most five stages, on workers that some of them may share, with any recomputation."""
    legal = legal_cuts(graph)
    cuts = draw(st.lists(st.sampled_from(legal), max_size=4, unique=True)) if legal else []
    bounds = [0, *sorted(cuts), len(graph.ops)]
    names = [op.name for op in graph.ops]
    workers = draw(st.integers(1, 3))
    stages = tuple(
        StagePlan(tuple(names[start:end]), f"cpu:{index % workers}", draw(st.sampled_from(CHECKPOINT_MODES)))
        for index, (start, end) in enumerate(pairwise(bounds))
    )
    return Plan(graph.model, stages, chunks=draw(st.integers(1, 5)))


@st.composite
def examples(draw: Any) -> Example:
    graph = draw(graphs())
    return Example(graph, draw(plans(graph)), batch=draw(st.integers(1, 7)))
