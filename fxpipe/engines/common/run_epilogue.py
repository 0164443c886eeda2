"""The epilogue of a step: what needs the whole batch runs once, when the stage that it takes from has run all its
forwards, and its gradients are cut into those of the micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.runtime.microbatch import gather
from fxpipe.torch_internals.autograd_engine import add_gradients

from .gradient_scale import Scale, scaled
from .scheduler_base import Batches
from .step_contract import StepEngine


class Epilogue(NamedTuple):
    """What the epilogue of a step has computed.

    - `values`: what it gives.
    - `gradients`: those of what it takes, by name, for each micro-batch; None where none is needed.
    """

    values: tuple[Any, ...]
    gradients: Mapping[str, Sequence[Tensor | None]]


def run_epilogue(m: Batches, engine: StepEngine, scale: Scale | None) -> Epilogue:
    """Run the epilogue on the outputs of all micro-batches, which must be there, and its backward if the loss is in it.
    Gradients are multiplied by `scale`."""
    gives, takes = engine.epilogue
    given = {name: [getattr(micro_batch, name) for micro_batch in m] for name in takes}
    ways = {name: (dim, reduce) for name, dim, reduce in engine.outputs if name in given}
    known = {name: gather(values, *ways[name], m.sizes) for name, values in given.items()}
    trained = gives.index(engine.trained) if engine.trained and m.grad else None
    graded = (
        [] if trained is None else [name for name in takes if name in engine.gradients[engine.epilogue_stage].gives]
    )
    known |= {name: known[name].detach().requires_grad_() for name in graded}
    with torch.set_grad_enabled(bool(graded)):
        values = engine.run_epilogue(known)
        if trained is not None and values[trained].requires_grad:
            add_gradients([values[trained]], [_root(values[trained], scale)])
    found = {name: _cut(m, known[name].grad, given[name], *ways[name]) for name in graded}
    return Epilogue(tuple(value.detach() if isinstance(value, Tensor) else value for value in values), found)


def _root(loss: Tensor, scale: Scale | None) -> Tensor:
    """The gradient with which backward begins: of the loss, or of the sum of those of all samples, scaled."""
    if scale is None:
        return torch.ones_like(loss)
    return scaled(torch.full_like(loss, 1 / scale.accumulate), scale)


def _cut(
    m: Batches, grad: Tensor | None, pieces: Sequence[Tensor], dim: int | None, reduce: str | None
) -> Sequence[Tensor | None]:
    """The gradient of a joined value, for each micro-batch."""
    if grad is None:
        return [None for _ in pieces]
    if dim is not None:
        return torch.split(grad, [piece.shape[dim] for piece in pieces], dim)
    if reduce == "same":  # the first is taken
        return [grad, *(None for _ in pieces[1:])]
    return [grad if reduce == "sum" else grad * (size / m.total) for size in m.sizes]
