"""Calls and steps of pipes on the test device, compared with the plain model, and checked for their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from tests.helpers.models import MODELS, Case, sequences
from tests.helpers.transparency import Result, assert_same, build, inputs, on_cpu, plain, shown
from tests.whole.test_steps import one_step, reference, stepped

from .simulated_device import checked

THREE = ["sim:0", "sim:1", "sim:2"]
ALONE = ["sim:0"] * 3
MIXED = ["sim:0", "cpu:0", "sim:1"]
ENDS = ["cpu:0", "sim:0", "cpu:1"]
PLACES = {"three": THREE, "alone": ALONE, "mixed": MIXED, "ends": ENDS}
MODES = ("never", "except_last", "always")
TOL = 1e-7


class GRU(nn.Module):
    """torch's GRU, two layers, one of them without bias: a kernel of its own, as LSTM has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.GRU(8, 6, batch_first=True), nn.GRU(6, 4, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.first(x)
        y, _ = self.last(torch.relu(y))
        return y


# Without those that draw random numbers (on each device other ones come), and large ones.
CASES = {name: case for name, case in MODELS.items() if not case.random and name not in ("amoebanet", "resnet")} | {
    "gru": Case(GRU, sequences, frozenset())
}


def on_host(result: Result) -> Result:
    return Result(on_cpu(result.output), on_cpu(result.gradients), on_cpu(result.buffers))


@contextmanager
def compiled(case: Case, devices: Sequence[str], **options: Any) -> Iterator[tuple[nn.Module, fxpipe.Pipe]]:
    """The model, and a pipe of it."""
    model = build(case)
    pipe = fxpipe.compile(model, **{"devices": devices, "chunks": 3, **case.options, **options})
    with closing(pipe):
        yield model, pipe


def check_calls(name: str, devices: Sequence[str], batches: Sequence[int] = (8, 7, 2), **options: Any) -> None:
    """Calls of a pipe with backward are the plain model's, and all accesses are ordered."""
    case = CASES[name]
    model, deferred = build(case), "deferred_batch_norm" in case.options
    with compiled(case, devices, **options) as (twin, pipe):
        for batch in batches:
            wanted = plain(case, model, *inputs(case, batch), 3, deferred=deferred)
            args, kwargs = inputs(case, batch)
            with checked():
                output = on_cpu(pipe(*args, **kwargs))
                pipe.zero_grad()
                case.loss(output).backward()
                found = on_host(shown(twin, args, kwargs, output))
            assert_same(found, wanted, TOL)


def check_steps(name: str, devices: Sequence[str], batches: Sequence[int] = (8, 7, 2), **options: Any) -> None:
    """The same for steps."""
    case = stepped(CASES[name])
    model = build(case)
    chunks = options.get("chunks", 3)
    with compiled(case, devices, **options) as (twin, pipe):

        def step(args: Any, kwargs: Any) -> Any:
            return pipe.step(*args, loss_fn=case.loss, outputs=True, **kwargs)

        for batch in batches:
            check_step(case, model, twin, step, batch, chunks)


def check_step(
    case: Case, model: nn.Module, twin: nn.Module, step: Callable[..., Any], batch: int, chunks: int
) -> None:
    wanted = reference(case, model, batch, chunks)
    with checked():
        found = one_step(case, twin, batch, step)
    assert_same(on_host(found), wanted, TOL)
