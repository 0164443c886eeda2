"""The captured graph, and each stage, as a `torch.fx.GraphModule`, for tools that read these.

    h = conv2d(x, down.weight)  [no_grad]       x = placeholder            takes
                                                down.weight = get_attr     the model's own tensor
                                                no_grad, conv2d, ambient   a region: what enters, what leaves it
                                                output (h,)                gives

They run: the graph's on a whole batch as one micro-batch, a stage's on what the stage takes. Random ops draw from
torch's generator. The `meta` of an op has the user's line ("stack_trace"), its module ("module") and its type as text
("type").
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn

import fxpipe.runtime
from fxpipe.codegen.scheduler.value_locations import torch_device
from fxpipe.ir.graph.evaluate_graph import cudnn_flags
from fxpipe.ir.graph.graph import Graph, Op, Ref, Region, State, Struct, map_leaves
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.value_types import TensorType, ValueType
from fxpipe.ir.program.attribute_paths import attribute_path
from fxpipe.ir.program.program import OWN_DEVICE, Program, RuntimeCall
from fxpipe.torch_internals.grad_mode import autocast_calls, gradient_setter


def enter_cudnn_flags(*flags: bool) -> AbstractContextManager[Any]:
    """Set switches of cuDNN; returns what resets them."""
    context = cudnn_flags(*flags)
    context.__enter__()
    return context


def reset_cudnn_flags(entered: AbstractContextManager[Any]) -> None:
    """Let cuDNN have the switches from before."""
    entered.__exit__(None, None, None)


def _leave(region: Region) -> Any:
    """The function that leaves a region, given what the one that entered it has returned."""
    if region.kind == "cudnn":
        return reset_cudnn_flags
    return gradient_setter() if region.kind == "grad" else autocast_calls()[1]


class Whole(nn.Module):
    """A submodule that is kept whole, called as the op does: with its tensors, arguments and keywords."""

    def __init__(self, opaque: Opaque) -> None:
        super().__init__()
        self.call = opaque

    def forward(self, tensors: Any, args: Any, kwargs: Any) -> Any:
        return self.call(tuple(tensors), tuple(args), dict(kwargs))


def graph_module(graph: Graph, tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    """The captured graph: a function of the model's tensors and numbers that returns what the model returns, of a step
    (loss, output). `tensors`: the model's, and those of the loss function, by path."""
    made = _Maker(tensors, graph.model)
    known = made.inputs((item.name, item.type) for item in graph.inputs if item.path)
    if graph.totals is not None:
        inside = made.body(graph.totals, known)
        known |= {output.value: inside[output.value] for output in graph.totals.outputs}
    known = made.body(graph, known)
    if graph.epilogue is not None:
        known = made.body(graph.epilogue, known)
    return made.finish(made.nest(graph.result, known))


def stage_module(program: Program, index: int, tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    """A stage: a function of the values that it takes and borrows, and of sizes that these do not show; it returns a
    tuple of the values that it gives."""
    stage, graph = program.stages[index], program.graph
    made = _Maker(tensors, f"Stage{index}", torch.device(torch_device(stage.device)))
    known = made.inputs((name, program.types[name]) for name in (*stage.takes, *stage.borrows))
    known |= made.sizes(graph, known, {name for op in stage.ops for name in op.reads} | {*stage.gives})
    known |= made.states(program.state(name) for name in stage.states)
    known = made.ops(stage.ops, known)
    return made.finish(tuple(known[name] for name in stage.gives))


class _Maker:
    """Writes ops as nodes. `name`: that of the class; `device`: what ops call their own device."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str, device: torch.device | None = None) -> None:
        self.tensors, self.name, self.device = tensors, name, device
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.types: dict[str, ValueType] = {}

    def inputs(self, values: Iterable[tuple[str, ValueType]]) -> dict[str, Any]:
        known: dict[str, Any] = {}
        for name, kind in values:
            known[name] = self.graph.placeholder(name)
            known[name].meta["type"] = str(kind)
            self.types[name] = kind
        return known

    def sizes(self, graph: Graph, known: Mapping[str, Any], read: set[str]) -> dict[str, Any]:
        """The sizes that ops read: of a value that shows them, else inputs."""
        found: dict[str, Any] = {}
        for size in graph.sizes:
            if size.name in read and size.name not in known:
                shown = next(self._showing(size.name), None)
                found[size.name] = (
                    self.graph.placeholder(size.name)
                    if shown is None
                    else self.graph.call_method("size", (known[shown[0]], shown[1]))
                )
        return found

    def _showing(self, size: str) -> Iterator[tuple[str, int]]:
        for name, kind in self.types.items():
            if isinstance(kind, TensorType):
                yield from ((name, dim) for dim, one in enumerate(kind.shape) if one == size)

    def states(self, states: Iterable[State]) -> dict[str, Any]:
        known: dict[str, Any] = {}
        for state in states:
            path = attribute_path(state.held)
            self.attributes[path] = self._value(state)
            known[state.name] = self.graph.get_attr(path)
            known[state.name].meta["type"] = str(state.type)
        return known

    def _value(self, state: State) -> Any:
        if state.kind == "constant":
            return state.value
        tensor = self.tensors[state.path]
        return tensor[tuple(slice(*ends) for ends in state.part)] if state.part else tensor

    def body(self, graph: Graph, known: Mapping[str, Any]) -> dict[str, Any]:
        """All values of a graph, given those of its inputs."""
        known = dict(known)
        for size in graph.sizes:
            known[size.name] = self.graph.call_method("size", (known[size.input], size.dim))
        return self.ops(graph.ops, known | self.states(graph.states))

    def ops(self, ops: Iterable[Op], known: Mapping[str, Any]) -> dict[str, Any]:
        known = dict(known)
        open_regions: list[tuple[Region, fx.Node]] = []
        for op in ops:
            self._enter(op.regions, open_regions)
            known[op.name] = self._op(op, known)
        self._enter((), open_regions)
        return known

    def _enter(self, wanted: tuple[Region, ...], opened: list[tuple[Region, fx.Node]]) -> None:
        """Leave the regions that are open and not wanted, and enter those that are wanted and not open."""
        same = 0
        while same < min(len(wanted), len(opened)) and opened[same][0] == wanted[same]:
            same += 1
        while len(opened) > same:
            region, entered = opened.pop()
            self.graph.call_function(_leave(region), (entered,))
        for region in wanted[same:]:
            if region.kind == "cudnn":
                entered = self.graph.call_function(enter_cudnn_flags, region.args)
            elif region.kind == "grad":
                entered = self.graph.call_function(torch.is_grad_enabled)
                self.graph.call_function(gradient_setter(), region.args)
            else:
                entered = self.graph.call_function(autocast_calls()[0], region.args)
            opened.append((region, entered))

    def _op(self, op: Op, known: Mapping[str, Any]) -> Any:
        args, kwargs = self.nest(op.args, known), self.nest(dict(op.kwargs), known)
        if isinstance(op.target, Opaque):
            path = attribute_path(op.target.path or "whole_model")
            self.attributes[path] = Whole(op.target)
            node = self.graph.call_module(path, args, kwargs)
        elif isinstance(op.target, str):
            node = self.graph.create_node("call_method", op.target, args, kwargs, op.name)
        else:
            target = getattr(fxpipe.runtime, op.target.name) if isinstance(op.target, RuntimeCall) else op.target
            node = self.graph.create_node("call_function", target, args, kwargs, op.name)
        node.meta |= {"type": str(op.type), "module": op.origin.module}
        if op.origin.line:
            place = f'  File "{op.origin.file}", line {op.origin.line}, in forward'
            node.meta["stack_trace"] = f"{place}\n    {op.origin.code}\n"
        return known_of(op, known) if op.target is operator.setitem else node

    def nest(self, nest: Any, known: Mapping[str, Any]) -> Any:
        def leaf(item: Any) -> Any:
            if isinstance(item, Ref):
                return known[item.name]
            return self.device if item is OWN_DEVICE else item

        return self._built(map_leaves(nest, leaf))

    def _built(self, nest: Any) -> Any:
        """The nest, with a call of its class in place of each `Struct`."""
        if isinstance(nest, Struct):
            return self.graph.call_function(nest.cls, (), {name: self._built(value) for name, value in nest.fields})
        if isinstance(nest, tuple) and hasattr(nest, "_fields"):
            return type(nest)(*map(self._built, nest))
        if isinstance(nest, (tuple, list)):
            return type(nest)(map(self._built, nest))
        return {key: self._built(value) for key, value in nest.items()} if isinstance(nest, dict) else nest

    def finish(self, result: Any) -> fx.GraphModule:
        self.graph.output(result)
        self.graph.lint()
        return fx.GraphModule(self.attributes, self.graph, self.name)


def known_of(op: Op, known: Mapping[str, Any]) -> Any:
    """What `x[i] = v` changes: x, which is also the op's result."""
    first = op.args[0]
    return known[first.name] if isinstance(first, Ref) else first
