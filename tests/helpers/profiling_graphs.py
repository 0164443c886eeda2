"""Graphs of real modules by torch.fx, for the tests of profiling."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir.graph.check_graph import check
from fxpipe.ir.graph.evaluate_graph import call
from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, State
from fxpipe.ir.graph.value_types import ObjectType, TensorType, TupleType, ValueType

SHORT = {torch.float32: "f32", torch.float64: "f64", torch.int64: "i64", torch.bool: "bool"}


class _Flat(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return False


def type_of(value: Any) -> ValueType:
    if isinstance(value, Tensor):
        return TensorType(SHORT[value.dtype], tuple(value.shape), "cpu", value.requires_grad)
    if isinstance(value, (tuple, list)):
        return TupleType(tuple(map(type_of, value)))
    return ObjectType(type(value).__name__)


def trace(model: nn.Module, *inputs: Tensor) -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    """The graph, its inputs and its states by name.

    In-place ops are known by a trailing underscore or `inplace`; batch norm is in training."""
    traced = _Flat().trace(model)
    model_tensors = dict([*model.named_parameters(), *model.named_buffers()])
    given, states, ops, held, values, now = iter(inputs), {}, [], {}, {}, {}
    with torch.random.fork_rng():
        for node in traced.nodes:
            if node.op == "placeholder":
                held[node.name] = values[node.name] = next(given)
            elif node.op == "get_attr":
                tensor = model_tensors[node.target]
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                states[node.name] = State(node.name, node.target, kind, type_of(tensor))
                held[node.name] = tensor
                values[node.name] = tensor if kind == "parameter" else tensor.clone()
            elif node.op == "output":
                last = node.args[0].name
            else:
                op = _op(node, now, len(ops))
                values[op.name] = call(op, {n: v.clone() if n in op.writes else v for n, v in values.items()})
                ops.append(Op(*(getattr(op, f) for f in ("name", "target", "args", "kwargs")), type_of(values[op.name]),
                              op.origin, (), op.writes, op.draw))  # fmt: skip
                if op.writes and op.writes[0] not in states:
                    now[op.writes[0]] = now[node.args[0].name] = op.name
    names = [node.name for node in traced.nodes if node.op == "placeholder"]
    made = Graph(
        type(model).__name__, model.training, tuple(Input(n, n, type_of(held[n]), 0) for n in names), (),
        tuple(states.values()), tuple(ops), (Output(last, 0),), (), Ref(last),
    )  # fmt: skip
    check(made)
    return made, {n: held[n] for n in names}, {n: held[n] for n in states}


def _plain(nest: Any, now: dict[str, str]) -> Any:
    """The nest with its present name for each node, in ordinary lists and dicts."""
    if isinstance(nest, fx.Node):
        return Ref(now.get(nest.name, nest.name))
    if isinstance(nest, dict):
        return {key: _plain(value, now) for key, value in nest.items()}
    if isinstance(nest, (list, tuple)):
        return (list if isinstance(nest, list) else tuple)(_plain(value, now) for value in nest)
    return nest


def _op(node: fx.Node, now: dict[str, str], draw: int) -> Op:
    args, kwargs = _plain(node.args, now), _plain(node.kwargs, now)
    name = node.target if node.op == "call_method" else node.target.__name__
    inplace = name.endswith("_") or kwargs.get("inplace") or node.target in (operator.iadd, operator.setitem)
    writes = tuple(arg.name for arg in args[3:5]) if name == "batch_norm" else (args[0].name,) if inplace else ()
    stack = node.meta.get("nn_module_stack") or {}
    module = list(stack.values())[-1][0] if stack else ""
    random = draw if name in ("dropout", "rand_like") else None
    kind = ObjectType("unknown")
    return Op(
        node.name, node.target, args, kwargs, kind, Origin("net.py", 1, "", module), (),
        writes, random,
    )  # fmt: skip
