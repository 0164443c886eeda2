"""The tensors without data on which a stage is traced, and the state of torch meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.graph.evaluate_graph import within
from fxpipe.ir.graph.graph import Op, Region, called, map_leaves
from fxpipe.ir.graph.legal_cuts import ENTER_VMAP, LEAVE_VMAP
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.program.program import OWN_DEVICE
from fxpipe.passes.backward.tracing.fake_sizes import Sizes
from fxpipe.passes.backward.vmap_ops import Vmap
from fxpipe.runtime.autograd.contiguous_layout import inverse
from fxpipe.runtime.microbatch import checked_places


@contextmanager
def on_fake_tensors(sizes: Sizes) -> Iterator[None]:
    """All tensors are fake, autograd records, and nothing of the caller's context is left."""
    with ExitStack() as contexts:
        contexts.enter_context(torch.inference_mode(False))
        contexts.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                contexts.enter_context(torch.autocast(kind, enabled=False))
        contexts.enter_context(torch.autograd.set_multithreading_enabled(False))
        contexts.enter_context(sizes.fake)
        yield


def device_of(label: str) -> torch.device:
    """The device that a stage is traced on: workers of the CPU are one device."""
    return torch.device("cpu" if label.startswith("cpu") else label)


def empty(kind: TensorType, order: Sequence[int], sizes: Sizes, device: torch.device) -> Tensor:
    """A leaf of the type. `order`: its dimensions from the largest stride to the smallest; () if it is contiguous."""
    shape, dtype = sizes.shape(kind), getattr(torch, DTYPES[kind.dtype].torch)
    made = torch.empty([shape[dim] for dim in order or range(len(shape))], dtype=dtype, device=device)
    if order:
        made = made.permute(inverse(order)).detach()
    return made.requires_grad_(kind.grad)


def run_op(op: Op, values: Mapping[str, Any], around: tuple[Region, ...], device: torch.device) -> Any:
    """The value of an op of a stage on `device`, within its regions and those around all ops."""
    if op.target is checked_places:  # it returns the mask, which has values only in a run
        return values[op.args[0].name]
    if isinstance(op.target, Vmap):
        return _run_vmap(op.target, values, (*around, *op.regions), device)
    args, kwargs = map_leaves((op.args, dict(op.kwargs)), lambda leaf: device if leaf is OWN_DEVICE else leaf)
    alone = replace(op, args=args, kwargs=kwargs, regions=(*around, *op.regions), draw=None)
    return within(alone, values, lambda number: nullcontext())


def _run_vmap(vmap: Vmap, values: Mapping[str, Any], around: tuple[Region, ...], device: torch.device) -> Any:
    """The results of a vmap. An error leaves it, too: else the next ops of the thread would run in it."""
    made, leave, inside = dict(values), cast(Callable[[], Any], vmap.ops[-1].target), 0
    try:
        for op in vmap.ops:
            made[op.name] = run_op(op, made, around, device)
            inside += (called(op) == ENTER_VMAP) - (called(op) == LEAVE_VMAP)
    finally:
        for _ in range(inside):
            leave()
    found = tuple(made[name] for name in vmap.gives)
    return found[0] if len(found) == 1 else found or None
