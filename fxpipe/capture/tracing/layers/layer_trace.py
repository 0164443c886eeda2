"""The trace of one layer alone: a function that takes the layer as an argument is compiled, once for a class of layers.

Dynamo's own guards then say which layers are alike, whatever their forward reads: where they hold, what was traced for
one layer is right for the other one, with the tensors that the compiled code hands over for that one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.capture.tracing.effects.recorded_runs import RAN
from fxpipe.capture.tracing.input_values import is_assertion
from fxpipe.capture.tracing.storageless_tensors import like_traced
from fxpipe.torch_internals.compiling.compiled_code import CompiledCode, compiled_for, forget_with
from fxpipe.torch_internals.compiling.compiler import compiled, settings
from fxpipe.torch_internals.compiling.dynamic_sizes import depends_on_data, size_of_tensor, source_of
from fxpipe.torch_internals.operator_classes import HigherOrderOperator
from fxpipe.torch_internals.tracing.tensors_without_memory import FakeTensor, FakeTensorMode, let_vary
from fxpipe.torch_internals.tracing.trace_context import guarded

from .layer_values import LayerRun

Pattern = Any  # a nest of tuples and None, with the numbers of tensors


class NotSeparate(Exception):
    """Why a layer is traced with the model."""


@dataclass(eq=False)
class LayerTrace:
    """What was traced for a kind of layer.

    - `module`: the graph; `guards`: what it asks of sizes.
    - `layer`: the first one; `paths`: its modules by id.
    - `result`: what forward returns, with the numbers of the graph's outputs.
    - `floats`: those that numpy made of plain numbers.
    - `objects`: the ids of the objects that it reads; `variables`: the context variables.
    - `known`: runs of the graph by the kinds of the arguments, in the trace of the model that has this `mode`.
    """

    module: fx.GraphModule
    guards: tuple[Any, ...]
    layer: nn.Module
    sizes: dict[fx.Node, tuple[int, int]]
    paths: dict[int, str]
    result: Pattern = None
    floats: tuple[float, ...] = ()
    known: dict[Any, LayerRun] = field(default_factory=dict)
    objects: frozenset[int] = frozenset()
    variables: frozenset[Any] = frozenset()
    mode: FakeTensorMode | None = None
    reached: Callable[[], list[Any]] = list

    def known_in(self, mode: FakeTensorMode) -> dict[Any, LayerRun]:
        """`known` of the model's trace with this mode of fake tensors: those of another one are of no use in it."""
        if self.mode is not mode:
            self.mode, self.known = mode, {}
        return self.known

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        found: tuple[fx.Node, ...] = next(iter(reversed(self.module.graph.nodes))).args[0]
        return found


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call of a layer while the model is traced: its trace, the values that the trace took, the stand-ins of the
    arguments, and what torch.compile has made of it."""

    trace: LayerTrace
    layer: nn.Module
    taken: tuple[Any, ...]
    given: tuple[Tensor, ...]
    compiled: CompiledCode


def call_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is traced: the forward of a layer; its hooks are in the trace of the model."""
    return type(layer).forward(layer, *args, **kwargs)


class LayerFunction:
    """The compiled function for the layers of a class. `note(trace)` is called for each new trace, while it is made;
    what it raises refuses the layer."""

    def __init__(self, name: str, note: Callable[[LayerTrace], None]) -> None:
        self.note = note
        self._seen: list[tuple[LayerTrace, tuple[Any, ...], tuple[Tensor, ...]]] = []
        self._layer: nn.Module | None = None
        code = call_layer.__code__
        self.function = FunctionType(code.replace(co_name=f"{code.co_name}_{name}"), {"__builtins__": __builtins__})
        own = weakref.ref(self)  # torch keeps every backend alive

        def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
            function = own()
            assert function is not None
            return function._traced(module, own)

        run = compiled(self.function, backend, dynamic=False)
        assert run is not None
        self.compiled = run
        forget_with(self, self.function)

    def _traced(self, module: fx.GraphModule, own: weakref.ref[LayerFunction]) -> Callable[..., Any]:
        assert self._layer is not None
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))  # the original loses the sources of its arguments
        for node in graph.nodes:
            node.meta.pop(RAN, None)  # of fake tensors that are not those of the model's trace
        copied = fx.GraphModule(module, graph)
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        env = next((n.meta["example_value"].fake_mode.shape_env for n in nodes if _is_fake(n)), None)
        paths: dict[int, str] = {}
        for path, part in self._layer.named_modules():
            paths[id(part)] = path
        guards = tuple(env.guards) if env is not None else ()
        trace = LayerTrace(copied, guards, self._layer, dict(_sizes(nodes)), paths)
        trace.reached = guarded()
        _check(copied)
        self.note(trace)
        made = [output.meta["example_value"] for output in trace.outputs]

        def run(*taken: Any) -> tuple[Tensor, ...]:
            function = own()
            assert function is not None
            results = tuple(map(hollow_like, made))
            function._seen.append((trace, taken, results))
            return results

        return run

    def call(self, layer: nn.Module, args: Any, kwargs: Any, given: tuple[Tensor, ...]) -> LayerCall:
        """Call the function. `args` and `kwargs` have stand-ins, which are `given`. Raises NotSeparate, and whatever
        Dynamo raises."""
        self._seen.clear()
        self._layer = layer
        try:
            known = compiled_for(self.function, (layer, args, kwargs))
            if known is not None:
                result = known.run(layer, args, kwargs)
            else:
                with settings({"force_compile_during_fx_trace": True}):  # while the model is traced
                    result = self.compiled(layer, args, kwargs)
                known = compiled_for(self.function, (layer, args, kwargs))
            if known is None or len(self._seen) != 1:
                raise NotSeparate("no reusable compiled code was produced")
            [(trace, taken, results)] = self._seen
        finally:
            self._layer = None
            self._seen.clear()
        numbers = {id(made): number for number, made in enumerate((*results, *given))}
        trace.result = pattern(result, numbers, len(results))
        return LayerCall(trace, layer, taken, given, known)


def pattern(result: Any, numbers: dict[int, int], count: int) -> Pattern:
    """What a layer returned, with the numbers of its tensors: the first `count` ones it has made, the others it was
    given. Raises NotSeparate for what cannot be built in its place."""
    seen: set[int] = set()

    def of(value: Any) -> Pattern:
        if isinstance(value, Tensor) and id(value) in numbers:
            seen.add(numbers[id(value)])
            return numbers[id(value)]
        if type(value) is tuple:
            return tuple(map(of, value))
        if value is not None:
            raise NotSeparate(f"it returns a {type(value).__name__} that it does not make")
        return None

    found = of(result)
    if not count or not seen.issuperset(range(count)):
        raise NotSeparate("the graph has no outputs, or one that forward does not return")
    return found


def filled(made_of: Pattern, items: Sequence[Any]) -> Any:
    """The pattern with items in place of their numbers."""
    if isinstance(made_of, tuple):
        return tuple(filled(part, items) for part in made_of)
    return None if made_of is None else items[made_of]


def hollow_like(fake: Any, marked: bool = False) -> Tensor:
    """A tensor without memory like a fake one; `marked`: its sizes that vary may do so in a trace. Raises
    NotSeparate."""
    if type(fake) is not FakeTensor or fake.layout != torch.strided or fake.is_conj() or fake.is_neg():
        raise NotSeparate(f"it takes or gives a {type(fake).__name__} that is no plain tensor")
    if depends_on_data(fake):
        raise NotSeparate("it takes or gives a size that depends on data")
    made = like_traced(fake)
    if made.dim() == 0:
        made.zero_()  # Dynamo remembers the item of a 0-dim tensor
    made.requires_grad_(fake.requires_grad)
    for dim, size in enumerate(fake.shape if marked else ()):
        if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
            let_vary(made, dim)
    return made


def _is_fake(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), FakeTensor)


def _sizes(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, tuple[int, int]]]:
    """Of which argument of the graph, and of which dimension of it, an argument that is a size is one."""
    shapes = [node.meta["example_value"].shape if _is_fake(node) else () for node in nodes]
    for node in nodes:
        value = node.meta["example_value"]
        if isinstance(value, torch.SymInt):
            where = ((place, dim) for place, shape in enumerate(shapes) for dim, size in enumerate(shape))
            same = (at for at in where if _expression(shapes[at[0]][at[1]]) == value.node.expr)
            found = next(same, None)
            if found is None or size_of_tensor(source_of(node)) is None:
                raise NotSeparate("it takes a number that varies")
            yield node, found
        elif not isinstance(value, Tensor) or getattr(node.meta.get("grapharg"), "is_tensor", True) is False:
            raise NotSeparate("it takes a number that varies")


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else None


def _check(module: fx.GraphModule) -> None:
    """Raises NotSeparate for a graph that is not put in place: with a graph inside, an assertion, which is checked
    where the values of inputs are known, or sizes that depend on data."""
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        plain = node.op == "call_method" or (node.op == "call_function" and not hasattr(node.target, "piece"))
        if not plain or isinstance(node.target, HigherOrderOperator):
            raise NotSeparate("it has a graph inside, or a part that is kept whole")
        if is_assertion(node):
            raise NotSeparate("it asserts something")
        value = node.meta.get("example_value")
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and depends_on_data(item):
                raise NotSeparate("it has a size that depends on data")
