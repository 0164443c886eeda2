"""The memory that a step on CPU workers keeps, found without computing: the step runs on fake tensors.

Fake tensors have shapes, element types and a storage size, but no memory, so autograd saves the same tensors for
backward as it does of real ones. There are two exceptions: LSTM, GRU and RNN, whose fused CPU kernels have a workspace
of unknown size, and submodules that are kept whole, whose Python code may read values. A worker keeps and frees memory
in the order of its row, whatever the other workers do, so one thread can run all rows. The count is that of a timed
step (`saved_tensors.py`): each memory once, from when autograd or a recomputation first keeps it until it is last
needed; parameters do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.engines.common.step_timer import StepTimer
from fxpipe.ir.timeline import Timeline
from fxpipe.runtime.deferred_norms import discard
from fxpipe.runtime.written_buffers import instead
from fxpipe.torch_internals.tracing.tensors_without_memory import FakeTensorMode


def without_memory(batch: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs of a step, with tensors replaced by meta tensors of the same shape, strides and type."""
    return tuple(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
        if isinstance(x, Tensor)
        else x
        for x in batch
    )


def memory_of_step(engine: StepScheduler, batch: Sequence[Any], chunks: int) -> Timeline:
    """A timeline with the memory of each worker, as a timed step counts it; its times are those of the dry run.
    Inputs may be on the meta device. A model that needs the values of tensors raises its own error."""
    mode, made = FakeTensorMode(allow_non_fake_inputs=True), dict[int, Tensor]()

    def fake(x: Tensor) -> Tensor:
        if id(x) not in made:
            with mode:
                found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            made[id(x)] = found.requires_grad_(x.requires_grad)
        return made[id(x)]

    with ExitStack() as contexts:
        contexts.enter_context(torch.random.fork_rng(devices=[]))
        for stage in engine.all_stages:
            contexts.callback(stage.find_differentiable)  # runs after the stage's own tensors are back
            contexts.enter_context(instead(stage, {path: fake(stage.tensor(path)) for path in stage.states}))
            contexts.callback(discard, [stage])
            stage.find_differentiable()
        inputs = [fake(x) if isinstance(x, Tensor) else x for x in batch]
        timer = StepTimer()
        engine.attempt(inputs, chunks, None, timer, engine.alone)
        return timer.timeline(engine.schedule)
