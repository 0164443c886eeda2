"""A traced graph as tools for torch.fx know them, and back.

    the trace                                   the view
      s77                                         x = placeholder
      l_args_0_                                   b = x.size(0)
      l_self_modules_fc_parameters_weight_        fc.weight = get_attr, the model's own parameter
      linear = F.linear(l_args_0_, ...)           linear = F.linear(x, fc.weight, fc.bias)

Ops keep their names and `meta`: the user's line as "stack_trace", their value as "example_value" and as "val".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.capture.call_arguments import Call
from fxpipe.capture.tracing.dynamo import Traced
from fxpipe.capture.tracing.placeholders import path_of
from fxpipe.capture.twins.twin import Slot
from fxpipe.ir.program.attribute_paths import attribute_path
from fxpipe.ir.unique_names import Names

LINES = ("stack_trace", "nn_module_stack", "source_fn_stack")  # where a node comes from


def own_values(module: fx.GraphModule) -> None:
    """Give every placeholder its value: that of a copied layer's tensor is only made when it is needed."""
    for node in placeholders(module):
        if "alike" in node.meta:
            node.meta["example_value"] = node.meta.pop("alike")[1]()


class Mistake(ValueError):
    """What is wrong with the graph that a transform returned."""


@dataclass(frozen=True)
class View:
    """The view of a traced graph.

    - `module`: it, with the model's own tensors as attributes; `attributes`: what these are, by path.
    - `inputs`: the places of its placeholders in the trace, by name.
    - `held`: the places of the model's tensors, by attribute; `parameters`: those that are read and are parameters.
    - `sizes`: the places of sizes, by the name of the input and the dimension.
    """

    traced: Traced
    module: fx.GraphModule
    attributes: Mapping[str, Any]
    inputs: Mapping[str, int]
    held: Mapping[str, int]
    parameters: frozenset[str]
    sizes: Mapping[tuple[str, int], int]


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def view_of(traced: Traced, flat: Sequence[Any], call: Call, slots: Sequence[Slot]) -> View:
    """The view of a graph that was traced with these flat arguments."""
    graph, names = fx.Graph(), Names()
    attributes: dict[str, Any] = {}
    new: dict[fx.Node, fx.Node] = {}
    inputs: dict[str, int] = {}
    held: dict[str, int] = {}
    sizes: dict[tuple[str, int], int] = {}
    parameters: set[str] = set()
    slot_of = {id(x): slot for slot in reversed(slots) for x in (slot.twin, slot.real) if x is not None}
    old = placeholders(traced.module)
    rows = list(zip(range(len(old)), old, flat, traced.names, strict=True))

    def take(place: int, node: fx.Node, wish: str) -> None:
        name = names(wish)
        new[node] = graph.placeholder(name)
        inputs[name] = place

    def hold(place: int, node: fx.Node, path: str, value: Any, kind: str = "constant") -> None:
        path = attribute_path(path, attributes)
        attributes[path], held[path] = value, place
        new[node] = graph.get_attr(path)
        if node.users and kind == "parameter":
            parameters.add(path)

    for place, node, value, _ in rows:
        if isinstance(value, Tensor) and id(value) in call.leaves:
            take(place, node, call.leaves[id(value)].path)
    for place, node, value, where in rows:
        slot = slot_of.get(id(value)) if isinstance(value, Tensor) and node not in new else None
        if node in new:
            continue
        if slot is not None:
            hold(place, node, slot.path, value if slot.real is None else slot.real, slot.kind)
        elif isinstance(value, Tensor) and not traced.boxed[place]:
            path = path_of(call, where if isinstance(where, str) else where[0]).removeprefix("self.")
            hold(place, node, path, value)
        elif isinstance(where, tuple) and (owner := _owner(rows, new, where[0])) is not None:
            new[node] = graph.call_method("size", (owner, where[1]))
            sizes[owner.name, where[1]] = place
        else:
            take(place, node, path_of(call, where if isinstance(where, str) else f"{where[0]}_{where[1]}"))
    for node in old:
        _describe(new[node], node)
    for node in traced.module.graph.nodes:
        if node.op != "placeholder":
            new[node] = graph.node_copy(node, new.__getitem__)
            _describe(new[node], node)
        if node.op == "get_attr":
            attributes[str(node.target)] = _attribute(traced.module, str(node.target))
    module = fx.GraphModule(attributes, graph)
    return View(traced, module, attributes, inputs, held, frozenset(parameters), sizes)


def trace_of(view: View, found: fx.GraphModule, line: str = "") -> Traced:
    """The view with this graph, as a trace again, with the same flat arguments. `line`: the stack trace of ops that
    have none. Raises Mistake if its inputs or the model's tensors in it are not those of the view."""
    old = placeholders(view.traced.module)
    graph, module = fx.Graph(), fx.GraphModule(nn.Module(), fx.Graph())
    new: dict[fx.Node, fx.Node] = {}
    made = []
    for node in old:
        made.append(graph.node_copy(node))
        if "grapharg" in node.meta:
            made[-1].meta["grapharg"] = node.meta["grapharg"]
    given = [str(node.target) for node in placeholders(found)]
    if sorted(given) != sorted(view.inputs):
        raise Mistake(f"has the inputs {', '.join(given) or 'none'}, not {', '.join(view.inputs) or 'none'}")
    for node in found.graph.nodes:
        if node.op == "placeholder":
            new[node] = made[view.inputs[str(node.target)]]
        elif node.op == "get_attr":
            new[node] = _held(view, found, node, made, graph, module)
        elif (size := _size(node, view)) is not None:
            new[node] = made[size]
        elif node.op == "call_module":
            raise Mistake(
                f"calls the module {node.target}, which is not the model's; write a call of a function, as in "
                "graph.call_function(torch.nn.functional.relu, (x,))"
            )
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
            _place(new[node], line)
    module.graph = graph
    if lost := view.parameters - {path for path, place in view.held.items() if made[place].users}:
        raise Mistake(f"does not read the parameter {min(lost)}, which would get no gradient; keep an op that reads it")
    return replace(view.traced, module=module)


def _held(
    view: View, found: fx.GraphModule, node: fx.Node, made: list[fx.Node], graph: fx.Graph, module: fx.GraphModule
) -> fx.Node:
    """The node for an attribute: of the model, or one that the transform has added, which is a constant."""
    path = str(node.target)
    try:
        value = _attribute(found, path)
    except AttributeError:
        raise Mistake(f"reads {path}, which is no attribute of the GraphModule") from None
    if path in view.held:
        if value is not view.attributes[path]:
            raise Mistake(f"replaces {path}, which is the model's; add a buffer of another name, and read that")
        return made[view.held[path]]
    if isinstance(value, nn.Parameter) and value.requires_grad:
        raise Mistake(
            f"adds the parameter {path}, which no optimizer would know of; register it as a buffer, or in the model"
        )
    if isinstance(value, Tensor) and value.is_meta:
        raise Mistake(f"adds {path}, a tensor without values")
    if isinstance(value, nn.Module) and not isinstance(value, fx.GraphModule):
        raise Mistake(f"reads the module {path}; write calls of functions")
    name = path.replace(".", "_")
    setattr(module, name, value)
    return graph.get_attr(name)


def _size(node: fx.Node, view: View) -> int | None:
    """The place of the size that a node computes, if it is one that the trace has."""
    kinds = ("size", torch.ops.aten.sym_size.int)
    if node.target not in kinds or len(node.args) != 2 or not isinstance(node.args[0], fx.Node):
        return None
    owner, dim = node.args
    if not isinstance(owner, fx.Node) or owner.op != "placeholder" or not isinstance(dim, int):
        return None
    return view.sizes.get((str(owner.target), dim))


def _place(node: fx.Node, line: str) -> None:
    """Give an op that a transform has made the line of the transform, and the module that all ops are in which it
    reads."""
    if any(name in node.meta for name in LINES):
        return
    node.meta["stack_trace"] = line
    stacks = [one.meta["nn_module_stack"] for one in node.all_input_nodes if one.meta.get("nn_module_stack")]
    if stacks:
        levels = zip(*(stack.items() for stack in stacks), strict=False)
        node.meta["nn_module_stack"] = dict(
            level[0] for level in takewhile(lambda level: len(dict(level)) == 1, levels)
        )


def _describe(new: fx.Node, old: fx.Node) -> None:
    new.meta = dict(old.meta)
    if "example_value" in old.meta:
        new.meta["val"] = old.meta["example_value"]


def _owner(
    rows: Sequence[tuple[int, fx.Node, Any, Any]], new: Mapping[fx.Node, fx.Node], source: str
) -> fx.Node | None:
    """The placeholder of the view for the tensor that comes from `source`."""
    nodes = (new.get(node) for _, node, value, where in rows if where == source and isinstance(value, Tensor))
    return next((node for node in nodes if node is not None and node.op == "placeholder"), None)


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


Transform = Callable[[fx.GraphModule], fx.GraphModule]


def values(nest: Any) -> Iterator[Any]:
    """The leaves of what a graph returns."""
    if isinstance(nest, (tuple, list)):
        for item in nest:
            yield from values(item)
    else:
        yield nest
