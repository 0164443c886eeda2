"""Replaces ops that split a batch into samples and join them again by one op.

    torch.cat(list(x))           cat([x[0], x[1]])   in the trace of two samples:   x.flatten(0, 1).clone()
    torch.stack([*x])            stack([x[0], x[1]])                                x.clone()

Such a trace has an op for each sample, so it is valid for one batch size only. If samples are changed in between, the
ops stay, and are refused with their line (`baked_batch_size.py`). `clone` is there because `cat` makes a copy too.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

JOINS = {torch.cat: True, torch.concat: True, torch.concatenate: True, torch.stack: False}


def rejoin(module: fx.GraphModule, rows: int) -> None:
    """Replace every join of all `rows` samples of a value, in their order, in place."""
    for node in list(module.graph.nodes):
        whole = _taken_apart(node, rows) if node.op == "call_function" and node.target in JOINS else None
        if whole is None:
            continue
        with module.graph.inserting_before(node):
            flat = module.graph.call_method("flatten", (whole, 0, 1)) if JOINS[node.target] else whole
            copy = module.graph.call_method("clone", (flat,))
        for made in {flat, copy} - {whole}:
            made.meta.update(node.meta)
        parts = list(node.all_input_nodes)
        node.replace_all_uses_with(copy)
        for unused in (node, *(part for part in parts if part.users.keys() <= {node})):
            module.graph.erase_node(unused)


def _taken_apart(node: fx.Node, rows: int) -> fx.Node | None:
    """The value whose samples the op joins along the first dimension, all and in order; None for other ops."""
    given: dict[str, Any] = dict(zip(("tensors", "dim"), node.args, strict=False)) | dict(node.kwargs)
    parts = given.get("tensors")
    if given.keys() - {"tensors", "dim"} or given.get("dim", 0) != 0 or not isinstance(parts, (list, tuple)):
        return None
    if len(parts) != rows or not all(isinstance(x, fx.Node) and x.target is operator.getitem for x in parts):
        return None
    whole = parts[0].args[0]
    value = whole.meta.get("example_value")
    in_order = [x.args for x in parts] == [(whole, i) for i in range(rows)]
    return whole if in_order and isinstance(value, Tensor) and value.shape[0] == rows else None
