"""Steps on a GPU, alone and beside the CPU. One GPU is enough: several stages share it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from tests.whole.test_steps import NAMES

pytestmark = pytest.mark.cuda

GPU = "cuda:0"
ALONE = [GPU] * 3
MIXED = [GPU, "cpu:0", GPU]
ENDS = ["cpu:0", GPU, "cpu:1"]


class Skip(nn.Module):
    """A skip over the middle, and a first weight that the end uses too."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.middle = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.first(x))
        h = skip
        for layer in self.middle:
            h = torch.relu(layer(h)) + h
        return F.linear(self.norm(h) + skip, self.first.weight)


@pytest.fixture
def compile() -> Iterator[Callable[..., fxpipe.Pipe]]:
    """`fxpipe.compile`, and every pipe closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(contextlib.closing(fxpipe.compile(*args, **options)))


def reference(model: nn.Module, x: Tensor, y: Tensor, chunks: int) -> Tensor:
    """The plain model, micro-batch by micro-batch."""
    total = torch.zeros((), dtype=x.dtype)
    for a, b in zip(x.tensor_split(chunks), y.tensor_split(chunks), strict=True):
        loss = F.mse_loss(model(a), b) * (len(a) / len(x))
        loss.backward()
        total += loss.detach()
    return total


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("devices", [ALONE, MIXED, ENDS], ids=" ".join)
def test_a_step_is_the_models(
    compile: Callable[..., fxpipe.Pipe], devices: Sequence[str], checkpoint: str, schedule: str
) -> None:
    torch.manual_seed(0)
    model = Skip().double()
    pipe = compile(copy.deepcopy(model), devices=devices, chunks=4, checkpoint=checkpoint, schedule=schedule)
    for batch in (16, 11):
        x, y = (torch.randn(batch, 16, dtype=torch.float64) for _ in range(2))
        x.requires_grad_()
        twin = x.detach().clone().requires_grad_()
        model.zero_grad()
        pipe.zero_grad()
        wanted = reference(model, x, y, 4)
        loss = pipe.step(twin, target=y, loss_fn=F.mse_loss)
        torch.testing.assert_close(loss.cpu(), wanted, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(twin.grad, x.grad, rtol=1e-7, atol=1e-10)
        for (name, a), (_, b) in zip(pipe.named_parameters(), model.named_parameters(), strict=True):
            assert a.grad is not None
            torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-7, atol=1e-10, msg=name)
        for (name, c), (_, d) in zip(pipe.named_buffers(), model.named_buffers(), strict=True):
            torch.testing.assert_close(c.cpu(), d, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("devices", [ALONE, MIXED], ids=" ".join)
def test_offload_changes_no_gradient(compile: Callable[..., fxpipe.Pipe], devices: Sequence[str]) -> None:
    torch.manual_seed(0)
    model = Skip(width=512).double()
    x, y = (torch.randn(64, 512, dtype=torch.float64) for _ in range(2))
    pipe = compile(copy.deepcopy(model), devices=devices, chunks=4, checkpoint="never", schedule="1f1b", offload=[0, 2])
    reference(model, x, y, 4)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    for (name, a), (_, b) in zip(pipe.named_parameters(), model.named_parameters(), strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-7, atol=1e-10, msg=name)


def test_a_measured_timeline_has_all_actions_and_transfers(compile: Callable[..., fxpipe.Pipe]) -> None:
    pipe = compile(Skip(width=256), devices=MIXED, chunks=4, checkpoint="always", schedule="1f1b")
    x = torch.randn(32, 256)
    for _ in range(2):
        pipe.step(x, target=x, loss_fn=F.mse_loss, timeline=True)
    timeline = pipe.timeline
    assert sum(span.kind == "F" for span in timeline.spans) == 12
    assert sum(span.kind == "B" for span in timeline.spans) == 12
    assert timeline.links
    assert all(span.seconds >= 0 for span in timeline.spans)
    assert min(timeline.high_water) > 0


def test_a_scaler(compile: Callable[..., fxpipe.Pipe]) -> None:
    model = Skip()
    pipe = compile(model, devices=ALONE, chunks=4, schedule="1f1b")
    optimizer = torch.optim.SGD(pipe.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    x = torch.randn(16, 16, device=GPU)
    with torch.autocast("cuda", dtype=torch.float16):
        pipe.step(x, target=x, loss_fn=F.mse_loss, scaler=scaler)
    scaled = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    scaler.unscale_(optimizer)
    for p, grad in zip((p for p in pipe.parameters() if p.grad is not None), scaled, strict=True):
        torch.testing.assert_close(p.grad, grad / 1024)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("backward", ["autograd", "code"])
@pytest.mark.parametrize("schedule", NAMES)
def test_the_host_does_not_wait_in_a_step(compile: Callable[..., fxpipe.Pipe], schedule: str, backward: str) -> None:
    """torch raises where the host waits for the device, from the second step on: the first builds what runs."""
    pipe = compile(Skip(width=64), devices=ALONE, chunks=6, schedule=schedule, backward=backward)
    x = torch.randn(48, 64, device=GPU)
    for turn in range(3):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            loss = pipe.step(x, target=x, loss_fn=F.mse_loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert loss.isfinite()
