"""Puts the nodes of a traced layer in place of each call of an equal one, with the tensors of that layer."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import _lazy_graph_module

from fxpipe.capture.tracing.dynamo import Traced
from fxpipe.capture.tracing.patches.layer_values import first_name
from fxpipe.capture.tracing.patches.record_layers import Copied, Made
from fxpipe.capture.tracing.unmade_tensors import MADE
from fxpipe.capture.twins.twin import Slot

Flat = tuple[Any, ...]


def inline_layers(traced: Traced, slots: Mapping[int, Slot]) -> tuple[Traced, Callable[[Flat], Flat]]:
    """The trace with layers in place of the marks of `copied_layer`, and a function from Dynamo's flat arguments to
    those of the new graph, which takes the tensors of these layers too. `slots`: of all tensors, by their ids."""
    if not any("copied" in node.meta for node in traced.module.graph.nodes):
        return traced, lambda flat: flat
    inlined = _Inlined(traced, slots)
    for node in traced.module.graph.nodes:
        node.meta.pop("copied", None)  # it holds modules, and torch may hold the graph
    places = inlined.places
    names = tuple("" if isinstance(place, Slot) else traced.names[place] for place in places)
    boxed = tuple(not isinstance(place, Slot) and traced.boxed[place] for place in places)

    def given(flat: Flat) -> Flat:
        return tuple(place.twin if isinstance(place, Slot) else flat[place] for place in places)

    # Its code is written when it runs, and in most captures it never does.
    kind = getattr(_lazy_graph_module, "_LazyGraphModule", fx.GraphModule)
    return replace(traced, module=kind(traced.module, inlined.graph), names=names, boxed=boxed), given


class _Inlined:
    """A graph with the layers in it.

    - `of`: its node for each of the trace's; `held`: its placeholders by the id of their tensor.
    - `sizes`: its sizes, by their expressions.
    - `places`: where the value of each placeholder comes from.
    """

    def __init__(self, traced: Traced, slots: Mapping[int, Slot]) -> None:
        self.mode, self.slots = traced.mode, slots
        self.graph = fx.Graph()
        self.of: dict[fx.Node, fx.Node] = {}
        self.held: dict[int, fx.Node] = {}
        self.places: list[int | Slot] = []
        self.sizes: dict[Any, fx.Node] = {}
        nodes = list(traced.module.graph.nodes)
        self._placeholders(nodes)
        outputs: dict[fx.Node, dict[fx.Node, fx.Node]] = {node: {} for node in nodes if "copied" in node.meta}
        for node in nodes:
            if "output" in node.meta:
                outputs[node.args[0]][node.meta["output"]] = node
        for node in nodes:
            if "copied" in node.meta:
                self._layer(node, node.meta["copied"], outputs[node])
            elif node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.of.__getitem__))
            elif node.op != "placeholder" and "output" not in node.meta:
                made = Made(node, node.args, node.kwargs, first_name(node), node.name)
                self.of[node] = self._made(made, self.of, node.meta)
            if node in self.of and (size := _size(node)) is not None:
                self.sizes.setdefault(size, self.of[node])

    def _placeholders(self, nodes: list[fx.Node]) -> None:
        """All placeholders, those of each layer where Dynamo would have them: after those of what comes before."""
        placeholders = [node for node in nodes if node.op == "placeholder"]
        known = {id(node.meta["grapharg"].example) for node in placeholders if "grapharg" in node.meta}
        after: dict[fx.Node | None, list[Copied]] = {}
        for node in nodes:
            if "copied" in node.meta:
                copied = node.meta["copied"]
                last = next((before for before in reversed(copied.there) if not before._erased), None)
                after.setdefault(last, []).append(copied)
        for copied in after.get(None, ()):
            self._tensors(copied, known)
        for place, node in enumerate(placeholders):
            self.of[node] = made = self.graph.placeholder(node.name)
            made.meta = node.meta
            self.places.append(place)
            argument = node.meta.get("grapharg")
            if argument is not None and isinstance(argument.example, Tensor):
                self.held[id(argument.example)] = made
            for copied in after.get(node, ()):
                self._tensors(copied, known)

    def _tensors(self, copied: Copied, known: set[int]) -> None:
        """Placeholders for the tensors of a copied layer."""
        for key in copied.layer.own.values():
            tensor = copied.pairs.tensors[key][1]
            if id(tensor) not in known:
                known.add(id(tensor))
                slot = self.slots[id(tensor)]
                made = self.graph.placeholder(re.sub(r"\W+", "_", f"l_{slot.path}_"))
                made.meta["alike"] = self.held[key], partial(self.mode.from_tensor, tensor, static_shapes=True)
                self.held[id(tensor)] = made
                self.places.append(slot)

    def _layer(self, mark: fx.Node, copied: Copied, outputs: Mapping[fx.Node, fx.Node]) -> None:
        """The nodes of a copied layer."""
        layer = copied.layer
        outside = (*layer.given, *layer.outer)
        given: Any = mark.args
        here = {node: self.of[now] for node, now in zip(outside, given, strict=True)}
        here |= {node: self.held[id(copied.pairs.tensors[key][1])] for node, key in layer.own.items()}
        modules = {str(id(first)): str(id(other)) for first, other in copied.pairs.modules}
        for made in layer.nodes:
            size = _size(made.node)
            if size in self.sizes or (made.node._erased and not _has_tensors(made.node)):
                # Dynamo has put the equal size in place of it that it had already; but names count on.
                self.graph._graph_namespace.create_name(_base(made.first), None)
                if size in self.sizes:
                    here[made.node] = self.sizes[size]
                continue
            meta = dict(made.node.meta)
            meta["nn_module_stack"] = _stack(mark, meta["nn_module_stack"], str(id(layer.module)), modules)
            meta["stack_trace"] = (mark.stack_trace or "") + (made.node.stack_trace or "")[len(layer.stack) :]
            meta["source_fn_stack"] = [(made.first, made.node.target)]
            here[made.node] = self._made(made, ChainMap(here, self.of), meta)
            user = outputs.get(made.node)
            if user is not None:
                here[made.node].meta[MADE] = user.meta["example_value"]
                self.of[user] = here[made.node]
                name = _base(user.name)
                if name != "_output":
                    here[made.node]._rename(name)

    def _made(self, made: Made, known: Mapping[fx.Node, fx.Node], meta: dict[str, Any]) -> fx.Node:
        """A copy of a node, named as Dynamo does: first after its function, then after the user's variable."""
        live = made.node
        args, kwargs = (made.args, made.kwargs) if live._erased else (live.args, live.kwargs)
        new, new_kwargs = fx.map_arg((args, kwargs), known.__getitem__)
        node = self.graph.create_node(live.op, live.target, new, new_kwargs, _base(made.first))
        if _base(made.name) != _base(made.first):
            node._rename(_base(made.name))
        node.meta = meta
        return node


def _size(node: fx.Node) -> Any:
    """The expression of a size; None for other nodes."""
    value = node.meta.get("example_value")
    return value.node.expr if isinstance(value, torch.SymInt) else None


def _has_tensors(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return any(isinstance(x, Tensor) for x in (value if isinstance(value, (tuple, list)) else (value,)))


def _base(name: str) -> str:
    """A name without the number that makes it the only one."""
    return re.sub(r"_\d+$", "", name)


def _stack(mark: fx.Node, stack: Mapping[str, Any], first: str, modules: Mapping[str, str]) -> dict[str, Any]:
    """The modules around a copied node: those around the call, then those of the layer."""
    keys = list(stack)
    start = next(place for place, key in enumerate(keys) if key.partition("@")[0] == first)
    found = dict(mark.meta.get("nn_module_stack") or {})
    for key in keys[start:]:
        own, at, count = key.partition("@")
        found[modules.get(own, own) + at + count] = stack[key]
    return found
