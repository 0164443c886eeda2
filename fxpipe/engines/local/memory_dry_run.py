"""What a step on CPU workers keeps in memory, known without computing anything: the step runs on fake tensors.

Fake tensors have shapes, element types and a memory of the right size that is not there, so autograd saves for backward
what it would save of real ones; but for LSTM, GRU and RNN, whose fused CPU kernels have a workspace of a size that
nobody tells, and for submodules that are kept whole, whose Python may look at values. The order in which a worker keeps
and lets go is that of its row, whoever it waits for, and all rows may run on one thread. What is counted is what a
timed step counts (`saved.py`): each memory once, from when autograd or a recomputation first keeps it until it is last
needed; parameters do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.engines.common.step_timer import StepTimer
from fxpipe.ir.timeline import Steps
from fxpipe.runtime.deferred_norms import discard
from fxpipe.runtime.written_buffers import instead


def without_memory(batch: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs of a step as they are remembered: tensors on the meta device."""
    return tuple(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
        if isinstance(x, Tensor)
        else x
        for x in batch
    )


def memory_of_step(engine: StepScheduler, batch: Sequence[Any], chunks: int) -> tuple[Steps, ...]:
    """The most bytes that each worker holds at once, as a timed step counts them. Inputs may be on the meta device.
    Raises whatever the model does where it needs the values of tensors."""
    mode, made = FakeTensorMode(allow_non_fake_inputs=True), dict[int, Tensor]()
    stages = [*engine.stages, *([] if engine.whole is None else [engine.whole])]

    def fake(x: Tensor) -> Tensor:
        if id(x) not in made:
            with mode:
                found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            made[id(x)] = found.requires_grad_(x.requires_grad)
        return made[id(x)]

    with ExitStack() as contexts:
        contexts.enter_context(torch.random.fork_rng(devices=[]))
        for stage in stages:
            contexts.callback(stage.find_differentiable)  # once its own tensors are back
            contexts.enter_context(instead(stage, {path: fake(stage.tensor(path)) for path in stage.states}))
            contexts.callback(discard, [stage])
            stage.find_differentiable()
        inputs = [fake(x) if isinstance(x, Tensor) else x for x in batch]
        timer = StepTimer()
        engine.attempt(inputs, chunks, None, timer, engine.alone)
        return timer.timeline(engine.schedule).memory
