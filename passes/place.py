"""Makes the devices that the model names follow the stage.

A model written for one device says so in its factory calls: `torch.arange(n, device=x.device)` is captured with the
device x had. In a stage on another device that has to be the stage's own. So does the default device of a factory call
that names none, and `.cpu()` or `.cuda()` where they meant the device of capture. Other devices stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fxpipe.ir.graph import Graph, Op, map_leaves, target_name
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import OWN_DEVICE, Program, Stage
from fxpipe.ir.types import TensorType
from fxpipe.passes.wiring import changed_program

_FACTORIES = """
    arange bartlett_window blackman_window empty empty_strided eye full hamming_window hann_window kaiser_window
    linspace logspace ones rand randint randn randperm range scalar_tensor tensor tril_indices triu_indices zeros
"""
FACTORIES = frozenset(_FACTORIES.split())


def place(program: Program, plan: Plan) -> Program:
    """The program with `OWN_DEVICE` for the device of capture, wherever an op names it."""
    device = _capture_device(program.graph)
    if device is None:
        return program

    def placed(stage: Stage) -> Stage:
        return replace(stage, ops=tuple(_place(op, torch.device(device)) for op in stage.ops))

    return changed_program(program, map(placed, program.stages))


def _capture_device(graph: Graph) -> str | None:
    """Where the model was when it was captured: where its parameters are, or else its inputs, or else its values."""
    parameters = tuple(state for state in graph.states if state.kind == "parameter")
    for values in (parameters, graph.inputs, graph.states, graph.ops):
        for value in values:
            if isinstance(value.type, TensorType):
                return value.type.device
    return None


def _place(op: Op, device: torch.device) -> Op:
    own = isinstance(op.type, TensorType) and torch.device(op.type.device) == device
    if own and op.target in ("cpu", "cuda"):
        return replace(op, target="to", args=(op.args[0], OWN_DEVICE), kwargs=_without_device(op))

    def change(leaf: Any) -> Any:
        return OWN_DEVICE if isinstance(leaf, torch.device) and _equal(leaf, device) else leaf

    args, kwargs = map_leaves(op.args, change), map_leaves(dict(op.kwargs), change)
    if op.target == "to" and len(args) > 1 and _names(args[1], device):
        args = (args[0], OWN_DEVICE, *args[2:])
    if _names(kwargs.get("device"), device):
        kwargs["device"] = OWN_DEVICE
    if own and kwargs.get("device") is None and target_name(op.target) in FACTORIES:
        kwargs["device"] = OWN_DEVICE
    return op if (args, kwargs) == (op.args, op.kwargs) else replace(op, args=args, kwargs=kwargs)


def _without_device(op: Op) -> dict[str, Any]:
    return {key: value for key, value in op.kwargs.items() if key != "device"}


def _names(text: Any, device: torch.device) -> bool:
    """Whether the text is a name of the device."""
    if not isinstance(text, str):
        return False
    try:
        return _equal(torch.device(text), device)
    except RuntimeError:
        return False


def _equal(named: torch.device, device: torch.device) -> bool:
    """`cuda` without a number is any of them."""
    return named.type == device.type and named.index in (None, device.index)
