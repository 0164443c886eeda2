"""Puts the graph of each layer in place of the op that stands for it, with the tensors of that layer."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.capture.tracing.effects.observed_writes import tensors_in
from fxpipe.capture.twins.twin import Slot
from fxpipe.torch_internals.tracing.tensors_without_memory import FakeTensorMode

from .layer_trace import LayerCall, filled
from .layer_values import LayerRun, PlacedLayer

Flat = tuple[Any, ...]
Call = tuple[LayerCall, LayerRun, list[Tensor]]
Calls = Mapping[int, Call]


class Stale(Exception):
    """A layer that was traced separately has changed since, or an input value that was read while tracing differs."""


@dataclass(frozen=True)
class Placed:
    """A graph with the layers in it.

    - `places`: where the value of each placeholder comes from: a place among Dynamo's flat arguments, or a slot.
    - `calls`: the calls of the layers.
    - `layer_of`: for each op of a layer the layer, and the node of its graph.
    """

    module: fx.GraphModule
    places: tuple[int | Slot, ...]
    calls: tuple[LayerCall, ...] = ()
    layer_of: Mapping[fx.Node, tuple[PlacedLayer, fx.Node]] = field(default_factory=dict)

    def flat(self, flat: Flat) -> Flat:
        """The flat arguments of the graph, from Dynamo's. Raises Stale if what was traced for a layer is not right for
        it as it is now."""
        if not all(call.compiled.holds() for call in self.calls):
            raise Stale
        return tuple(place.twin if isinstance(place, Slot) else flat[place] for place in self.places)


def is_separate(node: fx.Node) -> bool:
    return hasattr(node.target, "fxpipe_layer")


def place_layers(module: fx.GraphModule, calls: Calls, slots: Mapping[int, Slot], mode: FakeTensorMode) -> Placed:
    """The trace of a model with the graphs of layers in place of their ops. `slots`: of all tensors, by their ids."""
    nodes = list(module.graph.nodes)
    if not any(map(is_separate, nodes)):
        count = sum(node.op == "placeholder" for node in nodes)
        return Placed(module, tuple(range(count)))
    made = _Placing(nodes, calls, slots, mode)
    placed = fx.GraphModule(module, made.graph)
    placed.meta = module.meta
    return Placed(placed, tuple(made.places), tuple(made.calls), made.layer_of)


@dataclass
class _Names:
    """How often a graph has given each name by now: names of nodes that it dropped count too."""

    given: Counter[str] = field(default_factory=Counter)

    def skipped(self, name: str) -> int:
        """How many names like this one were given to nodes that are gone."""
        base, number = _base(name), int((re.search(r"_(\d+)$", name) or [0, 0])[1])
        if base not in self.given:
            self.given[base] = int(_start(base) != base)
        missing = max(0, number - self.given[base])
        self.given[base] = max(self.given[base], number) + 1
        return missing


class _Placing:
    """The graph with the layers, while it is made.

    - `node_of`: its node for each of the trace's; `held`: its placeholders by the id of their tensor.
    - `sizes`: its sizes, by their expressions.
    - `results`: what the op of a layer, or a part of its result, is in this graph.
    """

    def __init__(self, nodes: list[fx.Node], calls: Calls, slots: Mapping[int, Slot], mode: FakeTensorMode) -> None:
        self.graph, self.slots, self.mode = fx.Graph(), slots, mode
        self.node_of: dict[fx.Node, fx.Node] = {}
        self.held: dict[int, fx.Node] = {}
        self.places: list[int | Slot] = []
        self.sizes: dict[Any, fx.Node] = {}
        self.results: dict[fx.Node, Any] = {}
        self.names = _Names()
        self.first: dict[tuple[int, int], fx.Node] = {}  # placeholders of the first layer of a kind
        call_of = {node: _call_of(node, calls) for node in nodes if is_separate(node)}
        self.layer_of: dict[fx.Node, tuple[PlacedLayer, fx.Node]] = {}
        self.calls = [call for call, _, _ in call_of.values()]
        self._placeholders(nodes, call_of)
        for node in nodes:
            if node in call_of:
                self.names.skipped(node.name)
                self._layer(node, *call_of[node])
            elif node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self._node))
            elif node.target is operator.getitem and _is_part(node, self.results):
                self._part(node)
            elif node.op != "placeholder" and (size := _size(node.meta.get("example_value"))) in self.sizes:
                self.node_of[node] = self.sizes[size]  # that of a layer before
                self._skip(self.names.skipped(_first(node)) + 1, _first(node))
            elif node.op != "placeholder":
                self.node_of[node] = self._made(node, self._node, node.meta, self.names)
            if node in self.node_of:
                self._note_size(self.node_of[node])

    def _node(self, node: fx.Node) -> Any:
        return self.results[node] if node in self.results else self.node_of[node]

    def _note_size(self, node: fx.Node) -> None:
        if (size := _size(node.meta.get("example_value"))) is not None:
            self.sizes.setdefault(size, node)

    # Placeholders ---------------------------------------------------------------------------------------------------

    def _placeholders(self, nodes: list[fx.Node], call_of: Mapping[fx.Node, Call]) -> None:
        """All placeholders, those of each layer where Dynamo would have them: after those of what comes before."""
        placeholders = [node for node in nodes if node.op == "placeholder"]
        order = {node: place for place, node in enumerate(placeholders)}
        after: dict[int, list[LayerCall]] = {}
        last = -1
        for node in nodes:
            last = max([last, *(order[used] for used in node.all_input_nodes if used in order)], default=-1)
            if node in call_of:
                after.setdefault(last, []).append(call_of[node][0])
        known = {_held(node): node for node in placeholders}
        for call in after.get(-1, ()):
            self._tensors(call, known)
        for place, node in enumerate(placeholders):
            self.node_of[node] = made = self.graph.placeholder(node.name)
            made.meta = node.meta
            self.places.append(place)
            self.held[_held(node)] = made
            for call in after.get(place, ()):
                self._tensors(call, known)

    def _tensors(self, call: LayerCall, known: Mapping[int, fx.Node]) -> None:
        """Placeholders for the tensors of a layer."""
        given = set(map(id, call.given))
        for place, tensor in enumerate(call.taken):
            key = id(tensor)
            if not isinstance(tensor, Tensor) or key in given or key in known or key in self.held:
                continue
            slot = self.slots[key]
            made = self.graph.placeholder(re.sub(r"\W+", "_", f"l_{slot.path}_"))
            first = self.first.setdefault((id(call.trace), place), made)
            if first is made:
                made.meta["example_value"] = self.mode.from_tensor(tensor, static_shapes=True)
            else:
                made.meta["alike"] = first, partial(self.mode.from_tensor, tensor, static_shapes=True)
            self.held[key] = made
            self.places.append(slot)

    # Layers ---------------------------------------------------------------------------------------------------------

    def _layer(self, mark: fx.Node, call: LayerCall, run: LayerRun, made: list[Tensor]) -> None:
        """The nodes of a layer."""
        trace, values = call.trace, run.values
        given = dict.fromkeys(tensors_in(mark.args))
        nodes = [self._node(node) for node in given]
        position = {id(tensor): place for place, tensor in enumerate(call.given)}
        here: dict[fx.Node, Any] = {}
        for node, tensor in zip(trace.placeholders, call.taken, strict=True):
            if isinstance(tensor, Tensor):
                here[node] = nodes[position[id(tensor)]] if id(tensor) in position else self.held[id(tensor)]
        for node, (place, dim) in trace.sizes.items():
            here[node] = self._size_of(here[trace.placeholders[place]], dim, values[node], mark)
        returned = zip((values[node] for node in trace.outputs), made, strict=True)
        layer = PlacedLayer(
            run, {inner: node for inner, node in here.items() if isinstance(node, fx.Node)}, tuple(returned)
        )
        modules = {str(key): str(id(call.layer.get_submodule(path))) for key, path in trace.paths.items()}
        names = _Names()
        for node in trace.module.graph.nodes:
            if node.op not in ("call_function", "call_method"):
                continue
            size = _size(values.get(node))
            if size in self.sizes:
                here[node] = self.sizes[size]  # as Dynamo does
                self._skip(names.skipped(_first(node)) + 1, _first(node))
                continue
            meta = dict(node.meta)
            meta["example_value"] = values[node]
            inside = {_moved(key, modules): where for key, where in (meta.get("nn_module_stack") or {}).items()}
            meta["nn_module_stack"] = {**(mark.meta.get("nn_module_stack") or {}), **inside}
            meta["stack_trace"] = (mark.stack_trace or "") + (node.stack_trace or "")
            here[node] = self._made(node, here.__getitem__, meta, names)
            self.layer_of[here[node]] = layer, node
            self._note_size(here[node])
        self.results[mark] = filled(trace.result, [*(here[node] for node in trace.outputs), *nodes])
        self._named(mark)

    def _part(self, node: fx.Node) -> None:
        """An element of what the op of a layer makes."""
        self.names.skipped(_first(node))
        self.results[node] = self.results[node.args[0]][node.args[1]]  # type: ignore[index]
        self._named(node)

    def _named(self, node: fx.Node) -> None:
        """Give the user's name of a result, which a node of the trace has, to the node that makes it here."""
        made = self.results[node]
        if not isinstance(made, fx.Node) or made.op == "placeholder":
            return
        if _base(node.name) != _base(_first(node)):
            skipped = self.names.skipped(node.name)
            if not made.meta.get("fxpipe_named"):
                self._skip(skipped, node.name)
                made._rename(_base(node.name))

    def _size_of(self, of: fx.Node, dim: int, value: Any, mark: fx.Node) -> Any:
        """The node of a size of an argument; a number, if it is one."""
        if (size := _size(value)) is None:
            return int(value)
        if size not in self.sizes:
            self.sizes[size] = made = self.graph.call_method("size", (of, dim))
            made.meta = {key: mark.meta[key] for key in ("stack_trace", "nn_module_stack") if key in mark.meta}
            made.meta["example_value"] = value
        return self.sizes[size]

    def _made(self, node: fx.Node, known: Callable[[fx.Node], Any], meta: dict[str, Any], names: _Names) -> fx.Node:
        """A copy of a node, named as Dynamo does: first after its function, then after the user's variable."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), known)
        first = _first(node)
        self._skip(names.skipped(first), first)
        made = self.graph.create_node(node.op, node.target, args, kwargs, _base(first))
        meta = dict(meta)
        if _base(node.name) != _base(first):
            self._skip(names.skipped(node.name), node.name)
            made._rename(_base(node.name))
            meta["fxpipe_named"] = True
        made.meta = meta
        return made

    def _skip(self, count: int, name: str) -> None:
        """Let names that Dynamo has given to nodes that it dropped count."""
        for _ in range(count):
            self.graph._graph_namespace.create_name(_base(name), None)


def _call_of(node: fx.Node, calls: Calls) -> Call:
    given = {id(argument.meta["example_value"]) for argument in tensors_in(node.args)}
    found = (id(made) for made in tensors_in(node.meta["example_value"]))
    return calls[next(key for key in found if key in calls and key not in given)]


def _is_part(node: fx.Node, results: Mapping[fx.Node, Any]) -> bool:
    """Whether the node takes an element of what the op of a layer makes."""
    first = node.args[0] if node.args else None
    return isinstance(first, fx.Node) and isinstance(results.get(first), tuple)


def _held(node: fx.Node) -> int:
    """The id of the tensor that a placeholder stands for; else that of the node."""
    argument = node.meta.get("grapharg")
    return id(argument.example) if argument is not None and isinstance(argument.example, Tensor) else id(node)


def _size(value: Any) -> Any:
    """The expression of a size that varies; None for other values."""
    return value.node.expr if isinstance(value, torch.SymInt) else None


def _base(name: str) -> str:
    """A name without the number that makes it the only one."""
    return re.sub(r"_\d+$", "", name)


@lru_cache(maxsize=1024)
def _start(base: str) -> str:
    """The first name that a graph gives after this one: `sum_1`, as `sum` is Python's."""
    return fx.Graph().create_node("placeholder", base, name=base).name


def _first(node: fx.Node) -> str:
    made = node.meta.get("source_fn_stack")
    return str(made[-1][0]) if made else node.name


def _moved(key: Any, modules: Mapping[str, str]) -> str:
    own, at, count = str(key).partition("@")
    return modules.get(own, own) + at + count
