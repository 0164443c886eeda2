"""Random models: graphs of a few dozen ops, with everything a cut can get wrong.

Capturing a model takes a hundred times longer than running it, so these are made as graphs and never captured.
`GraphModel` is the plain model of a graph: it runs the ops one by one, as Python would have.

A graph grows op by op. Each function in `STEPS` adds one idea to it: a layer with an old weight or a new one, a
residual from anywhere, a piece of a chunk, an in-place op, a write through a view of a view, a mask made from sizes, a
value that is only measured. What autograd forbids (writing into what backward needs) is not built: `Grower.writable`
has the values that may still be written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.ir.graph.check_graph import check
from fxpipe.ir.graph.dead_code import without_dead_ops
from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, Region, Size, State, map_refs, refs
from fxpipe.ir.graph.legal_cuts import legal_cuts
from fxpipe.ir.graph.value_types import ScalarType, TensorType, TupleType, ValueType, tensors
from fxpipe.ir.plan.plan import CHECKPOINT_MODES, Plan, StagePlan
from fxpipe.planning.stages.op_order import reorder, requirements
from tests.helpers.models import Case, total

Draw = Callable[[Sequence[Any]], Any]  # any one of these

WIDTHS = (4, 6, 8)

NO_GRAD = (Region("grad", (False,)),)


@dataclass(frozen=True, repr=False)
class Example:
    """A model, a plan for it and a batch size. `whole` is the graph with its dead ops, which the model runs; `lost` are
    the outputs that have no part in the loss."""

    whole: Graph
    graph: Graph
    plan: Plan
    batch: int
    lost: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        lost = f", {', '.join(sorted(self.lost))} not in the loss" if self.lost else ""
        return f"a batch of {self.batch}{lost}, for\n{self.graph}\n{self.plan}"

    @property
    def case(self) -> Case:
        return Case(
            make=lambda: GraphModel(self.whole),
            inputs=lambda batch: (tuple(sample(item, batch) for item in self.graph.inputs), {}),
            traits=frozenset({"own-gradients"}),
            loss=self.loss,
            random=any(op.random for op in self.graph.ops),
        )

    def loss(self, output: Any) -> Tensor:
        names = [ref.name for ref in refs(self.graph.result)]
        return total([leaf for name, leaf in zip(names, leaves(output), strict=True) if name not in self.lost])


def leaves(output: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(output) if leaf is not None]


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
    if item.type.dtype == "bool":
        return torch.rand(shape) < 0.5
    return torch.randn(shape, dtype=torch.float64, requires_grad=item.type.grad)


# Growing a graph ------------------------------------------------------------------------------------------------------


@dataclass
class Grower:
    """A graph that grows. `pool` has the names of f64[b, width] values that later ops may read, with their widths;
    `views` those of their memory as f64[b, 2, width / 2], with the names in the pool that they are views of."""

    draw: Draw
    ops: list[Op] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    types: dict[str, ValueType] = field(default_factory=dict)
    pool: dict[str, int] = field(default_factory=dict)
    masks: dict[str, int] = field(default_factory=dict)
    writable: set[str] = field(default_factory=set)
    views: dict[str, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)  # values that have been written through a view
    warm: set[str] = field(default_factory=set)  # and those that have got a gradient so
    draws: int = 0
    given: tuple[str, ...] = ()  # the inputs

    def choose(self, names: Mapping[str, int] | None = None) -> str:
        return self.draw(list(self.pool if names is None else names))

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
        grad = not stopped and any(self.carries_gradient(ref.name) for ref in refs(args))
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
        self.views = {view: name if base == x else base for view, base in self.views.items()}
        self.give(name, width, writable=writable)

    def names(self, x: str) -> tuple[str, ...]:
        """The value and its views: all that see a write to one of them."""
        return (x, *(view for view, base in self.views.items() if base == x))

    def brings_gradient(self, x: str) -> None:
        """A gradient has come into the memory of `x` and its views: in the end, the types say so, but for inputs."""
        for name in self.names(x):
            kind = self.types[name]
            assert isinstance(kind, TensorType)
            self.types[name] = replace(kind, grad=kind.grad or name not in self.given)
            self.warm.add(name)

    def carries_gradient(self, name: str) -> bool:
        return name in self.warm or carries_gradient(self.types[name])

    def vector(self, width: int) -> TensorType:
        return TensorType("f64", ("b", width), "cpu")

    def parameter(self, *shape: int) -> str:
        """A parameter of this shape: an old one, or a new one, now and then a frozen one."""
        old = [s.name for s in self.states if s.kind == "parameter" and getattr(s.type, "shape", ()) == shape]
        if old and self.draw((False, True)):
            return self.draw(old)
        grad = self.draw(range(5)) > 0
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
    width = g.draw(WIDTHS)
    weight = Ref(g.parameter(width, g.pool[x]))
    bias = Ref(g.parameter(width)) if g.draw((False, True)) else None
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
    function = g.draw([torch.tanh, torch.sin, F.silu, "sigmoid"])
    y = g.add(function if isinstance(function, str) else function.__name__, function, Ref(x))
    g.keep(x)
    g.give(y, g.pool[x])


def residual(g: Grower) -> None:
    x = g.choose()
    other = g.draw(g.peers(x))
    g.give(g.add("add", operator.add, Ref(x), Ref(other)), g.pool[x], writable=True)


def product(g: Grower) -> None:
    x = g.choose()
    other = g.draw(g.peers(x))
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
    kind = g.draw(["relu_", "mul_", "iadd", "relu", "setitem"])
    names = g.names(x)
    if kind == "iadd":
        other = g.draw([peer for peer in g.peers(x) if peer != x] or [None])
        y = g.add("iadd", operator.iadd, Ref(x), 0.5 if other is None else Ref(other), type=g.types[x], writes=names)
    elif kind == "setitem":
        where = (slice(None), slice(0, 2))
        y = g.add("setitem", operator.setitem, Ref(x), where, -0.5, type=g.types[x], writes=names)
    elif kind == "relu":
        y = g.add("relu", F.relu, Ref(x), type=g.types[x], writes=names, inplace=True)
    else:
        args = (1.5,) if kind == "mul_" else ()
        y = g.add(kind, kind, Ref(x), *args, type=g.types[x], writes=names)
    g.written(x, y, writable=kind not in ("relu_", "relu"))
    if carries_gradient(g.types[y]):
        g.brings_gradient(y)


def view(g: Grower) -> None:
    """Another name for memory that may still be written."""
    targets = {name: width for name, width in g.pool.items() if name in g.writable}
    if targets:
        x = g.choose(targets)
        half = TensorType("f64", ("b", 2, g.pool[x] // 2), "cpu")
        g.views[g.add("view", "reshape", Ref(x), -1, 2, g.pool[x] // 2, type=half)] = x


def write_through_a_view(g: Grower) -> None:
    """A half of a view is written: the value that it is a view of has changed, under its old name."""
    views = [name for name, base in g.views.items() if base in g.writable]
    if not views:
        return view(g)
    v = g.draw(views)
    x = g.views[v]
    half = g.vector(g.pool[x] // 2)
    part = g.add("part", operator.getitem, Ref(v), (slice(None), g.draw(range(2))), type=half)
    others = [name for name, width in g.pool.items() if width == g.pool[x] // 2 and name != x]
    if others and g.draw((False, True)):
        other = Ref(g.draw(others))
        y = g.add("add_", "add_", Ref(part), other, type=half, writes=(part, *g.names(x)))
        if carries_gradient(g.types[y]):
            g.brings_gradient(x)
            g.types[part] = g.types[y]
    else:
        g.add("mul_", "mul_", Ref(part), 1.5, type=half, writes=(part, *g.names(x)))
    g.changed.add(x)


def read_a_view(g: Grower) -> None:
    if g.views:
        v = g.draw(list(g.views))
        width = g.pool[g.views[v]]
        tripled = g.add("tripled", operator.mul, Ref(v), 3.0, type=TensorType("f64", ("b", 2, width // 2), "cpu"))
        g.give(g.add("flat", "reshape", Ref(tripled), -1, width, type=g.vector(width)), width, writable=True)


def measured(g: Grower) -> None:
    """A value that a gradient never comes back to, so that what it was made from may be written; or nobody reads it."""
    targets = {name: width for name, width in g.pool.items() if name in g.writable}
    x = g.choose(targets or None)
    seen = g.add("seen", torch.sin, Ref(x))
    if targets and g.draw((False, True)):
        y = g.add("mul_", "mul_", Ref(x), 1.5, type=g.types[x], writes=g.names(x))
        g.written(x, y, writable=True)
        x = y
    how = g.draw(["detach", "no_grad", "unread"])
    if how == "detach":
        seen = g.add("stopped", "detach", Ref(seen), type=g.vector(g.pool[x]))
        g.give(g.add("scaled", operator.mul, Ref(seen), 0.5, type=g.vector(g.pool[x])), g.pool[x], writable=True)
    elif how == "no_grad":
        g.give(g.add("squashed", torch.tanh, Ref(seen), type=g.vector(g.pool[x]), regions=NO_GRAD), g.pool[x])


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
    other = g.draw(g.peers(x))
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
    if g.draw((False, True)):
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


Step = Callable[[Grower], None]
STEPS: tuple[Step, ...] = (
    linear, linear, elementwise, residual, residual, product, scale, pieces, join, in_place, in_place, compare,
    mask_of_sizes, where, fold, average, without_gradient, dropout, count, view, write_through_a_view,
    write_through_a_view, read_a_view, measured,
)  # fmt: skip


def grown(draw: Draw, steps: Sequence[Step] = STEPS, *, changes_inputs: bool = True) -> Graph:
    g = Grower(draw)
    inputs = []
    for name, width in (("x", 8), ("y", draw(WIDTHS)))[: draw(range(1, 3))]:
        g.types[name] = TensorType("f64", ("b", width), "cpu", grad=draw(range(3)) > 0)
        inputs.append(Input(name, name, g.types[name], 0))
        g.give(name, width, writable=changes_inputs and draw((False, True)))
    if draw((False, True)):
        inputs.append(Input("mask", "mask", TensorType("bool", ("b", 1), "cpu"), 0))
        g.types["mask"], g.masks["mask"] = inputs[-1].type, 0
    g.types["b"] = ScalarType("int")
    g.given = tuple(item.name for item in inputs)
    if draw((False, True)):
        view(g)
    for _ in range(draw(range(2, 22))):
        draw(steps)(g)
    head(g)
    return finish(g, tuple(inputs), draw)


def finish(g: Grower, inputs: tuple[Input, ...], draw: Draw) -> Graph:
    """The graph that has grown, with some of its values, the last one always, as outputs."""
    *early, last = (name for name in g.pool if name not in g.changed or name not in g.given)
    names = [*dict.fromkeys(draw(early) for _ in range(draw(range(4)) if early else 0)), last]
    form = draw(["tuple", "dict", "nest"])
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
        ops=tuple(replace(op, type=g.types[op.name]) for op in g.ops),
        outputs=tuple(Output(name, 0) for name in names),
        call=(tuple(Ref(item.name) for item in inputs), {}),
        result=result,
    )
    check(graph)
    return graph


# Cutting it -----------------------------------------------------------------------------------------------------------


def planned(draw: Draw, graph: Graph) -> Plan:
    """Any cuts into at most six stages, with any recomputation, on workers that any of them may share, of the ops in
    any order in which they can run."""
    graph = shuffled(graph, draw) if draw((False, True)) else graph
    legal = [place for place, may in enumerate(legal_cuts(graph)) if may and 0 < place < len(graph.ops)]
    cuts = {draw(legal) for _ in range(draw(range(6)))} if legal else set()
    bounds = [0, *sorted(cuts), len(graph.ops)]
    names = [op.name for op in graph.ops]
    workers = range(draw((1, 2, 3)))
    stages = tuple(
        StagePlan(tuple(names[start:end]), f"cpu:{draw(workers)}", draw(CHECKPOINT_MODES))
        for start, end in pairwise(bounds)
    )
    return Plan(graph.model, stages, chunks=draw(range(1, 10)))


def shuffled(graph: Graph, draw: Draw) -> Graph:
    """The graph with its ops in another order in which they can run."""
    waiting = dict(enumerate(map(set, requirements(graph))))
    order: list[int] = []
    while waiting:
        order.append(draw([place for place, needs in waiting.items() if needs <= set(order)]))
        del waiting[order[-1]]
    return reorder(graph, order)


def example(draw: Draw) -> Example:
    whole = grown(draw)
    graph = without_dead_ops(whole) if draw((False, True)) else whole
    early = [output.value for output in graph.outputs[:-1]]
    lost = frozenset(name for name in early if draw((False, False, True)))
    return Example(whole, graph, planned(draw, graph), batch=draw(range(1, 8)), lost=lost)


@st.composite
def examples(draw: Any) -> Example:
    """What hypothesis makes smaller when it fails. It likes what is small and repeats itself, so it is not all."""
    return example(lambda items: draw(st.sampled_from(items)))


def example_of(seed: int) -> Example:
    return example(Random(seed).choice)
