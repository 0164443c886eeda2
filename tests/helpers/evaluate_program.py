"""What a program means: its stages run one after the other, each seeing only what it takes, owns and borrows.

The yardstick of the passes: after every one of them this gives what `evaluate` gives for the graph. One micro-batch,
no devices, no order of backward; autograd alone sees to the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from fxpipe.ir.graph.evaluate_graph import Draw, within
from fxpipe.ir.graph.graph import Op, map_leaves
from fxpipe.ir.program.program import OWN_DEVICE, Program, RuntimeCall, Stage


def evaluate_program(
    program: Program,
    inputs: Mapping[str, Any],
    states: Mapping[str, Any],
    draw: Draw = lambda number: nullcontext(),
    runtime: Mapping[str, Callable[..., Any]] | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """The value of every output, given those of the inputs and states (constants may be left out). Random ops run
    inside `draw(number)`; `runtime` has the functions that `RuntimeCall` names; the stages' own device is `device`."""
    graph, n = program.graph, len(program.stages)
    sizes = {size.name: inputs[size.input].shape[size.dim] for size in graph.sizes}
    tensors = {state.name: state.value for state in graph.states if state.kind == "constant"} | {**states}
    arrived: dict[int, dict[str, Any]] = {index: dict(sizes) for index in range(-1, n + 1)}
    arrived[-1] |= inputs
    for index in range(-1, n):
        values = arrived.pop(index)
        if index >= 0:
            values = evaluate_stage(program.stages[index], values, tensors, draw, runtime or {}, device)
        for move in program.moves:
            if move.source == index:
                arrived[move.target][move.value] = values[move.value]
    return {output.value: arrived[n][output.value] for output in graph.outputs}


def evaluate_stage(
    stage: Stage,
    taken: Mapping[str, Any],
    tensors: Mapping[str, Any],
    draw: Draw,
    runtime: Mapping[str, Callable[..., Any]],
    device: str,
) -> dict[str, Any]:
    """The value of every name of the stage, given those it takes, and the tensors of the model."""
    values = {name: taken[name] for name in stage.takes}
    values |= {name: tensors[name] for name in (*stage.states, *stage.borrows)}
    for op in stage.ops:
        values[op.name] = within(_concrete(op, runtime, device), values, draw)
    return values


def _concrete(op: Op, runtime: Mapping[str, Callable[..., Any]], device: str) -> Op:
    """The op with its marks replaced by what they stand for."""
    target = runtime[op.target.name] if isinstance(op.target, RuntimeCall) else op.target

    def place(leaf: Any) -> Any:
        return torch.device(device) if leaf is OWN_DEVICE else leaf

    return replace(op, target=target, args=map_leaves(op.args, place), kwargs=map_leaves(dict(op.kwargs), place))
