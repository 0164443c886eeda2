"""The source of each flat argument of a traced graph: an argument of the user, its size, or a tensor of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch import Tensor, fx

from fxpipe.capture.call_arguments import Call, paths_of
from fxpipe.capture.twins.twin import Slot
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.graph import Input, Op, Size, State
from fxpipe.ir.graph.value_types import BATCH, ScalarType, TensorType, ValueType
from fxpipe.ir.unique_names import Names

from .dynamo import Traced
from .effects.observed_writes import memory
from .layers.layer_values import Known
from .size_names import usual_size
from .symbolic_sizes import first_symbols, symbol, text, type_of


@dataclass
class Builder:
    """What is known while a graph is built: the present name of every node's value, and the nodes of every tensor."""

    traced: Traced
    call: Call
    slots: Mapping[int, list[Slot]]
    modules: Mapping[str, str]
    named_sizes: Mapping[tuple[str, int], str]
    names: Names = field(default_factory=Names)
    of_node: dict[fx.Node, str] = field(default_factory=dict)
    nodes_of: dict[int, list[fx.Node]] = field(default_factory=dict)  # by the id of the tensor object
    symbols: dict[sympy.Symbol, str] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)  # the names of the parameters and buffers by their paths
    sizes: list[Size] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    first: dict[fx.Node, str] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    sharing: dict[int, list[fx.Node]] = field(default_factory=dict)  # by storage: the nodes whose values are in it
    state_of: dict[str, State] = field(default_factory=dict)
    types: dict[int, ValueType] = field(default_factory=dict)  # of what layers make, by the id of the first one
    last_read: dict[fx.Node, int] = field(default_factory=dict)  # the position of the last op that reads it
    returned: frozenset[fx.Node] = frozenset()
    vmaps: list[str] = field(default_factory=list)  # the ops that entered the vmaps which are open
    baked: str | None = None
    draws: int = 0


def add_inputs(build: Builder, placeholders: list[fx.Node], flat: tuple[Any, ...], env: dict[fx.Node, Any]) -> None:
    """Every tensor the user passed, whether the graph reads it or not, then numbers that vary; and the sizes."""
    at_leaf = {id(value): node for node, value in zip(placeholders, flat, strict=True) if isinstance(value, Tensor)}
    fakes: list[tuple[str, Any, int | None]] = []
    leaf_twins = {leaf.path: leaf.twin for leaf in build.call.leaves.values()}
    for leaf in build.call.leaves.values():
        node = at_leaf.get(id(leaf.twin))
        fakes.append((leaf.path, leaf.twin if node is None else env[node], leaf.batch_dim))
    for path, fake, dim in fakes:
        if dim is not None and (found := symbol(fake.shape[dim])) is not None:
            build.symbols |= dict.fromkeys((found, *first_symbols(fake.shape[dim])), BATCH)
        elif dim is not None and fake is not leaf_twins[path]:
            build.baked = path
    build.names.used.add(BATCH)
    batch_names = [build.names(leaf.path) for leaf in build.call.leaves.values()]
    for name, (path, fake, dim), leaf in zip(batch_names, fakes, build.call.leaves.values(), strict=True):
        for position, size in enumerate(fake.shape):
            found = symbol(size)
            if position == dim and not any(s.name == BATCH for s in build.sizes):
                build.sizes.append(Size(BATCH, name, position))
            elif found is not None and found not in build.symbols:
                build.symbols[found] = _add_size(build, name, path, type_of(fake, {}), position)
            if found is not None:  # a size that turned out to be equal to another has its name
                build.symbols |= dict.fromkeys(first_symbols(size), build.symbols[found])
        kind = type_of(fake, build.symbols)
        if dim is not None and id(leaf.twin) not in at_leaf and isinstance(kind, TensorType):
            kind = TensorType(kind.dtype, (*kind.shape[:dim], BATCH, *kind.shape[dim + 1 :]), kind.device, kind.grad)
        build.inputs.append(Input(name, path, kind, dim))
        if id(leaf.twin) in at_leaf:
            define(build, at_leaf[id(leaf.twin)], env, name)
    for position, (node, value) in enumerate(zip(placeholders, flat, strict=True)):
        _number(build, position, node, value, env)


def _number(build: Builder, position: int, node: fx.Node, value: Any, env: dict[fx.Node, Any]) -> None:
    """A placeholder that is a number: a size of a tensor, or an input of its own."""
    where = build.traced.names[position]
    found = symbol(env[node]) if not isinstance(value, Tensor) else None
    if not isinstance(where, str):
        size = text(env[node], build.symbols)
        needed = type(size) is not int or any(user.op == "output" for user in node.users)  # what is returned has a name
        name = _size_name(build, path_of(build.call, where[0]), where[1], found, needed)
        if name is None:
            env[node] = size
        else:
            build.of_node[node] = name
    elif not isinstance(value, Tensor) or _is_boxed(build, position, node):
        name = build.names(path_of(build.call, where))
        if found is not None:
            build.symbols[found] = name
        kind: ValueType = ScalarType("float" if isinstance(value, Tensor) else type(value).__name__)
        build.inputs.append(Input(name, path_of(build.call, where), kind, None))
        build.of_node[node] = name
        build.places[name] = position


def _size_name(build: Builder, path: str, dim: int, found: sympy.Symbol | None, needed: bool) -> str | None:
    """The name of a size of an argument; None if it has turned out to be a plain number, and no name is `needed`. The
    graph may read the size without reading the tensor; and that of the batch may have become a plain number since
    (`build.baked`), without a symbol."""
    item = next((item for item in build.inputs if item.path == path), None)
    if item is None:  # another argument that is the same tensor, which the trace has met first
        others = next((paths for paths in paths_of(build.call).values() if path in paths), [])
        item = next((item for item in build.inputs if item.path in others), None)
    if item is None:
        raise CaptureError(
            f"{path} has another size in dimension {dim} than in an earlier call, and only arguments may vary in size; "
            "pass it to forward as an argument"
        )
    name = build.symbols.get(found) if found is not None else None
    if name is None and dim == item.batch_dim:
        name = BATCH
    elif name is None and needed:
        name = _add_size(build, item.name, path, item.type, dim)
    if found is not None and name is not None:
        build.symbols[found] = name
    return name


def _add_size(build: Builder, item: str, path: str, kind: ValueType, dim: int) -> str:
    """The name of another size of an input: the model's own, or a usual one, if it has one."""
    usual = usual_size(kind, dim) if isinstance(kind, TensorType) else None
    if usual in build.names.used:
        usual = f"{item}_{usual}"
    name = build.names(build.named_sizes.get((path, dim)) or usual or f"{item}_size_{dim}")
    build.sizes.append(Size(name, item, dim))
    return name


def _is_boxed(build: Builder, position: int, node: fx.Node) -> bool:
    """Whether this is a Python float in a tensor, which the graph takes out again."""
    return build.traced.boxed[position] and all(user.target == "item" for user in node.users)


# How Dynamo spells an item of an argument whose class is a subclass of dict.
OF_DICT = re.compile(r"dict\.__getitem__\((L\['(args|kwargs)'\]\[([^][]*)\]), list\(dict\.keys\(\1\)\)\[(\d+)\]\)")


def _keyed(call: Call, item: re.Match[str]) -> str:
    """The same as `L['kwargs']['batch']['ids']`."""
    where, root, key, number = item.groups()
    value = call.args[int(key)] if root == "args" else call.kwargs[key.strip("'")]
    return f"{where}[{list(value)[int(number)]!r}]"


def path_of(call: Call, where: str) -> str:
    """The user's path for a source that Dynamo names L['args'][0] or L['model'].scale, also inside from_numpy(...)."""
    where = re.sub(r"^_+from_numpy\((.*)\)$", r"\1", where)
    where = OF_DICT.sub(lambda item: _keyed(call, item), where)
    found = re.match(r"L\['(args|kwargs|model|targets|loss_fn)'\](?:\[('[^']*'|\d+)\])?(.*)", where, re.DOTALL)
    if found is None:
        return where
    root, first, rest = found.groups()
    if root == "targets":
        return next(iter(call.target), "target") + rest
    if root == "loss_fn":
        return "loss_fn" + re.sub(
            r"\.__closure__\[(\d+)\]\.cell_contents", r".closure[\1]", where[len("L['loss_fn']") :]
        )
    if root == "model":
        return "self" + attributes(rest)
    positional = len(call.args)
    key = (first or "").strip("'")
    return (call.names[int(key)] if root == "args" and int(key) < positional else key) + rest


def size_of(call: Call, where: str | tuple[str, int]) -> str:
    """The user's name of a size, or another number, from Dynamo's name."""
    if isinstance(where, str):
        return path_of(call, where)
    path, dim = path_of(call, where[0]), where[1]
    cut = any(leaf.path == path and leaf.batch_dim == dim for leaf in call.leaves.values())
    return BATCH if cut else f"{path}.shape[{dim}]"


def attributes(where: str) -> str:
    """The user's path for attributes that Dynamo names ._modules['layers']._modules['0'].scale: .layers.0.scale."""
    path = re.sub(r"\.?(__dict__\[')?_(modules|parameters|buffers)('\])?", "", where)
    return re.sub(r"\['(\w+)'\]", r".\1", path)


def add_states(build: Builder, placeholders: list[fx.Node], flat: tuple[Any, ...], env: dict[fx.Node, Any]) -> None:
    """Placeholders that are the model's own: parameters, buffers, and whatever else it holds."""
    for position, (node, value) in enumerate(zip(placeholders, flat, strict=True)):
        if node in build.of_node or not isinstance(value, Tensor):
            continue
        if slots := build.slots.get(id(value)):
            define(build, node, env, add_state(build, slots, type_of(env[node], build.symbols)))
        else:
            where = build.traced.names[position]
            path = path_of(build.call, where if isinstance(where, str) else where[0])
            name = build.names(path.removeprefix("self."))
            kind = type_of(env[node], build.symbols)
            build.states.append(State(name, path.removeprefix("self."), "constant", kind, value=value))
            build.places[name] = position
            define(build, node, env, name)
    for node in build.traced.module.graph.nodes:
        if node.op == "get_attr":
            name = build.names(str(node.target))
            kind = type_of(env[node], build.symbols)
            value = getattr(build.traced.module, str(node.target))
            build.states.append(State(name, name, "constant", kind, value=value))
            define(build, node, env, name)


def add_state(build: Builder, slots: list[Slot], kind: ValueType) -> str:
    """The state of a parameter or buffer, under its first path."""
    first, *others = slots
    if first.path in build.held:  # the trace reached it in two ways, such as by the model and by a global variable
        return build.held[first.path]
    name = build.held[first.path] = build.names(first.path)
    build.states.append(State(name, first.path, first.kind, kind, tuple(slot.path for slot in others)))
    return name


def define(build: Builder, node: fx.Node, env: dict[fx.Node, Any], name: str) -> None:
    value = env[node]
    build.of_node[node] = name
    if isinstance(value, (Tensor, Known)):
        build.nodes_of.setdefault(id(value), []).append(node)
    for address in memory(value):
        build.sharing.setdefault(address, []).append(node)
