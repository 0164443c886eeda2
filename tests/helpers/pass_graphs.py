"""Graphs for the tests of passes, from plain modules: traced by torch.fx, typed and aliased by one real run.

As in a captured graph, an op's type says whether the tensor had a gradient in the end: a write through a view may bring
one.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, Size, State
from fxpipe.ir.graph.value_types import ObjectType, ScalarType, TensorType, TupleType, ValueType

SHORT = {torch.float64: "f64", torch.float32: "f32", torch.int64: "i64", torch.bool: "bool", torch.int32: "i32"}
RANDOM = {"dropout", "rand_like"}


class _Proxy(fx.Proxy):
    """A proxy that takes `x[i] = v`."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


class _Tracer(fx.Tracer):
    """Traces into every module, so that only functions and methods are left."""

    proxy_buffer_attributes = True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def trace(model: nn.Module, *inputs: Tensor) -> Graph:
    """The graph of `model(*inputs)`, with dimension 0 of the first input as the batch size `b`."""
    return _Reading(model, inputs).graph()


class _Reading:
    """One walk over an fx graph that runs each node and writes it down as an op."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.model, self.batch = model, inputs[0].shape[0]
        self.nodes = list(_Tracer().trace(model).nodes)
        self.waiting = iter(inputs)
        self.values: dict[str, Any] = {}  # by fx node name
        self.names: dict[str, Ref] = {}  # fx node name -> the name that now stands for it
        self.inputs: list[Input] = []
        self.states: dict[str, State] = {}  # by path
        self.held: dict[str, Tensor] = {}  # every named tensor, to see which ones an op writes
        self.ops: list[Op] = []
        self.outputs: list[Output] = []
        self.result: Any = None
        self.sized = False

    def graph(self) -> Graph:
        for position, node in enumerate(self.nodes):
            getattr(self, f"_{node.op}")(node, position)
        sizes = (Size("b", self.inputs[0].name, 0),) if self.sized else ()
        call = (tuple(Ref(i.name) for i in self.inputs), {})
        name = type(self.model).__name__
        inputs, states, outputs = tuple(self.inputs), tuple(self.states.values()), tuple(self.outputs)
        ops = tuple(replace(op, type=self._type(self.values[op.name])) for op in self.ops)
        return Graph(name, self.model.training, inputs, sizes, states, ops, outputs, call, self.result)

    def _placeholder(self, node: fx.Node, position: int) -> None:
        value = next(self.waiting).clone()
        self._hold(node.name, node.name, value)
        batched = value.shape[:1] == (self.batch,)
        self.inputs.append(Input(node.name, node.name, self._type(value), 0 if batched else None))

    def _get_attr(self, node: fx.Node, position: int) -> None:
        path = str(node.target)
        value = operator.attrgetter(path)(self.model)
        if path not in self.states:
            buffers = dict(self.model.named_buffers(remove_duplicate=False))
            kind = "parameter" if isinstance(value, nn.Parameter) else "buffer" if path in buffers else "constant"
            held = value if kind == "constant" else None
            name = path.replace(".", "_")
            self.states[path] = State(name, path, kind, self._type(value), value=held)
            self._hold(node.name, name, value.detach().clone().requires_grad_(value.requires_grad))
        self.names[node.name] = Ref(self.states[path].name)
        self.values[node.name] = self.held[self.states[path].name]

    def _call_function(self, node: fx.Node, position: int) -> None:
        if self._is_batch_size(node):
            self.sized = True
            self.names[node.name], self.values[node.name] = Ref("b"), self.batch
        elif any(not self._is_batch_size(user) for user in node.users) or not _is_shape(node):
            self._op(node, position)
        else:
            self.values[node.name] = None

    _call_method = _call_function

    def _op(self, node: fx.Node, position: int) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n.name])
        before = {name: (value._version, value.detach().clone()) for name, value in self.held.items()}
        written_first = args[0] if args else None
        torch.default_generator.manual_seed(0)
        target: Any = node.target
        result = getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)
        result = written_first if target is operator.setitem else result
        alive = {self.names[n.name].name for later in self.nodes[position + 1 :] for n in later.all_input_nodes
                 if n.name in self.names}  # fmt: skip
        alive |= {state.name for state in self.states.values()}
        changed = [  # batch norm changes its running statistics without a new version
            name
            for name, (version, value) in before.items()
            if self.held[name]._version != version or not torch.equal(self.held[name], value)
        ]
        direct = [self.names[n.name].name for n in node.all_input_nodes if self.values[n.name] is result]
        writes = tuple(name for name in changed if name in alive or name in direct)
        refs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.names[n.name])
        ref_args, ref_kwargs = _plain(refs)
        draw = sum(op.random for op in self.ops) if _is_random(node) else None
        origin = Origin("net.py", position, node.name, "")
        kind = self._type(result)
        regions = ()
        self.ops.append(Op(node.name, target, ref_args, ref_kwargs, kind, origin, regions, writes, draw))
        if writes:  # all later uses of the tensor have the op's name
            named = {name for name, ref in self.names.items() if ref.name not in {s.name for s in self.states.values()}}
            self.names |= {name: Ref(node.name) for name in named if self.values[name] is result}
        self._hold(node.name, node.name, result)

    def _output(self, node: fx.Node, position: int) -> None:
        self.result = fx.node.map_arg(node.args[0], lambda n: self.names[n.name])
        for name in dict.fromkeys(self.names[n.name].name for n in node.all_input_nodes):
            self.outputs.append(Output(name, 0))

    def _hold(self, node: str, name: str, value: Any) -> None:
        self.values[node] = value
        self.names[node] = Ref(name)
        if isinstance(value, Tensor):
            self.held[name] = value

    def _is_batch_size(self, node: fx.Node) -> bool:
        if node.target == "size":
            return node.args[1:] == (0,)
        return node.target is operator.getitem and _is_shape(node.args[0]) and node.args[1] == 0

    def _type(self, value: Any) -> ValueType:
        if isinstance(value, Tensor):
            shape = tuple("b" if dim == 0 and size == self.batch else size for dim, size in enumerate(value.shape))
            return TensorType(SHORT[value.dtype], shape, str(value.device), value.requires_grad)
        if isinstance(value, (int, float)):
            return ScalarType(type(value).__name__)
        if isinstance(value, (tuple, list)) and all(isinstance(item, Tensor) for item in value):
            return TupleType(tuple(self._type(item) for item in value))
        return ObjectType(type(value).__name__)


def _plain(nest: Any) -> Any:
    """The nest in Python's own containers, not those of torch.fx."""
    if isinstance(nest, (tuple, list)):
        return (tuple if isinstance(nest, tuple) else list)(map(_plain, nest))
    return {key: _plain(value) for key, value in nest.items()} if isinstance(nest, dict) else nest


def _is_shape(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is getattr and node.args[1] == "shape"


def _is_random(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", node.target)
    return name in RANDOM and node.kwargs.get("training", True) is True


def state_values(graph: Graph, model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by state name."""
    return {state.name: operator.attrgetter(state.path)(model) for state in graph.states}
