"""Devices in the arguments of ops: the device of capture becomes the device that each op runs on.

`torch.arange(n, device=x.device)` is captured with the device that x had then; a stage on another device needs its own
device there. The same holds for factory calls without a device, for the device type of `autocast`, and for `.cpu()` or
`.cuda()` where they give the device of capture. Other devices stay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .graph import Graph, Op, Region, map_leaves, target_name
from .ops import FACTORIES
from .value_types import TensorType


def capture_device(graph: Graph) -> torch.device | None:
    """The device of the model at capture: that of its first parameter, else input, else state, else value; None if it
    has no tensor."""
    parameters = tuple(state for state in graph.states if state.kind == "parameter")
    for values in (parameters, graph.inputs, graph.states, graph.ops):
        for value in values:
            if isinstance(value.type, TensorType):
                return torch.device(value.type.device)
    return None


def relocate(op: Op, device: torch.device, own: Any, kind: str) -> Op:
    """The op with `own` wherever it names `device`. `own` is a device or a mark for one; `kind` is its device type."""
    here = isinstance(op.type, TensorType) and torch.device(op.type.device) == device
    regions = tuple(_relocate_region(region, device, kind) for region in op.regions)
    op = op if regions == op.regions else replace(op, regions=regions)
    if here and op.target in ("cpu", "cuda"):
        others = {key: value for key, value in op.kwargs.items() if key != "device"}
        return replace(op, target="to", args=(op.args[0], own), kwargs=others)

    def change(leaf: Any) -> Any:
        return own if isinstance(leaf, torch.device) and _equal(leaf, device) else leaf

    args, kwargs = map_leaves(op.args, change), map_leaves(dict(op.kwargs), change)
    if op.target == "to" and len(args) > 1 and _names(args[1], device):
        args = (args[0], own, *args[2:])
    if _names(kwargs.get("device"), device):
        kwargs["device"] = own
    if here and kwargs.get("device") is None and target_name(op.target) in FACTORIES:
        kwargs["device"] = own
    return op if (args, kwargs) == (op.args, op.kwargs) else replace(op, args=args, kwargs=kwargs)


def _relocate_region(region: Region, device: torch.device, kind: str) -> Region:
    if region.kind != "autocast" or region.args[0] != device.type:
        return region
    return replace(region, args=(kind, *region.args[1:]))


def _names(name: Any, device: torch.device) -> bool:
    """Whether `name`, a text or the number of a GPU, names the device."""
    if type(name) is int:
        return (device.type, device.index) == ("cuda", name)
    if not isinstance(name, str):
        return False
    try:
        return _equal(torch.device(name), device)
    except RuntimeError:
        return False


def _equal(named: torch.device, device: torch.device) -> bool:
    """Whether two devices are equal; a `named` one without an index equals any of its type."""
    return named.type == device.type and named.index in (None, device.index)
