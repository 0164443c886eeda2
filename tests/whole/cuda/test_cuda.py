"""Pipelines on a GPU, alone and beside the CPU. One GPU is enough: several stages share it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.api.cli.main import main
from fxpipe.pipe.build.local_cluster import local_cluster
from tests.helpers.models import MODELS, Case
from tests.helpers.transparency import Result, assert_same, build, inputs, on_cpu, plain, shown

pytestmark = pytest.mark.cuda

GPU = "cuda:0"
ALONE = [GPU] * 4
MIXED = [GPU, "cpu:0", GPU]
MODES = ["never", "except_last", "always"]
NAMES = [
    "long skip", "skip ladder", "tied transformer", "batch norm", "in place", "masked", "constants", "encoder-decoder",
    "counter", "densenet",
]  # fmt: skip


@pytest.fixture
def compile() -> Iterator[Callable[..., fxpipe.Pipe]]:
    """`fxpipe.compile`, and every pipe closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(contextlib.closing(fxpipe.compile(*args, **options)))


def step(case: Case, model: nn.Module, pipe: nn.Module, args: Any, kwargs: Any) -> Result:
    """One training step of the pipe, its results on the CPU."""
    output = on_cpu(pipe(*args, **kwargs))
    pipe.zero_grad()
    case.loss(output).backward()
    found = shown(model, args, kwargs, output)
    return Result(output, on_cpu(found.gradients), on_cpu(found.buffers))


class Layers(nn.Module):
    """Some layers, with dropout if `p`."""

    def __init__(self, width: int = 8, depth: int = 6, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), self.p, True) if self.p else torch.tanh(layer(x))
        return x


# The model's numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("devices", [ALONE, MIXED], ids=" ".join)
@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_is_the_model(
    compile: Callable[..., fxpipe.Pipe], name: str, devices: Sequence[str], checkpoint: str
) -> None:
    case = MODELS[name]
    model, twin = build(case), build(case)
    pipe = compile(twin, devices=devices, chunks=3, checkpoint=checkpoint, **case.options)
    for batch in (8, 7, 2):
        wanted = plain(case, model, *inputs(case, batch), 3)
        assert_same(step(case, twin, pipe, *inputs(case, batch)), wanted, tol=1e-7)


@pytest.mark.parametrize("devices", [ALONE, MIXED], ids=" ".join)
def test_deferred_batch_norm(compile: Callable[..., fxpipe.Pipe], devices: Sequence[str]) -> None:
    case = MODELS["batch norm"]
    model, twin = build(case), build(case)
    pipe = compile(twin, devices=devices, chunks=3, checkpoint="always", deferred_batch_norm=True)
    for batch in (8, 7):
        wanted = plain(case, model, *inputs(case, batch), 3, deferred=True)
        assert_same(step(case, twin, pipe, *inputs(case, batch)), wanted, tol=1e-7)


@pytest.mark.parametrize("devices", [ALONE, MIXED, ["cpu:0", GPU]], ids=" ".join)
@pytest.mark.parametrize("home", ["cpu", GPU])
def test_inputs_from_any_device(compile: Callable[..., fxpipe.Pipe], devices: Sequence[str], home: str) -> None:
    model = Layers().double()
    twin = copy.deepcopy(model)
    pipe = compile(twin.to(home), devices=devices, chunks=3)  # wherever the model was
    for there in ("cpu", GPU):
        x = torch.randn(7, 8, dtype=torch.float64)
        taken = x.to(there, copy=True).requires_grad_()
        y = pipe(taken)
        assert y.device == pipe.stages[-1].device
        y.sum().backward()
        expected = model(x.requires_grad_())
        expected.sum().backward()
        torch.testing.assert_close(y.cpu(), expected)
        torch.testing.assert_close(taken.grad, x.grad.to(there))


def test_a_pinned_batch_may_be_overwritten(compile: Callable[..., fxpipe.Pipe]) -> None:
    model = Layers(256, 8)
    pipe = compile(copy.deepcopy(model), devices=ALONE, chunks=8)
    x = torch.randn(4096, 256).pin_memory()
    with torch.no_grad():
        expected, y = model(x), pipe(x)
    x.fill_(float("nan"))
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-3, atol=1e-4)


def test_on_the_callers_stream(compile: Callable[..., fxpipe.Pipe]) -> None:
    model = Layers(256, 8).double()
    pipe = compile(copy.deepcopy(model), devices=MIXED, chunks=4)
    x = torch.randn(64, 256, dtype=torch.float64)
    pipe(x)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        torch.cuda._sleep(20_000_000)
        taken = x.to(GPU).requires_grad_()
        y = pipe(taken)
        y.sum().backward()
        got = on_cpu((y, taken.grad))
    expected = model(x.requires_grad_())
    expected.sum().backward()
    torch.testing.assert_close(got, (expected, x.grad))


# Random numbers, precision, constants ---------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [ALONE, MIXED], ids=" ".join)
def test_dropout_is_the_same_again(compile: Callable[..., fxpipe.Pipe], devices: Sequence[str]) -> None:
    model, x = Layers(p=0.5).double(), torch.randn(8, 8, dtype=torch.float64)
    results = []
    for checkpoint in MODES:
        # The same cuts in all modes: a GPU draws other numbers than the CPU.
        cuts = [f"layers.{at}" for at in range(1, len(devices))]
        pipe = compile(copy.deepcopy(model), devices=devices, chunks=4, checkpoint=checkpoint, cut=cuts)
        torch.manual_seed(3)
        before = torch.cuda.get_rng_state(GPU)
        y = pipe(x)
        y.sum().backward()
        assert torch.equal(torch.cuda.get_rng_state(GPU), before)
        results.append((y.cpu(), [parameter.grad.cpu() for parameter in pipe.parameters()]))
    assert 0.3 < (results[0][0] == 0).double().mean() < 0.7
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_mixed_precision_with_a_scaler(compile: Callable[..., fxpipe.Pipe]) -> None:
    torch.manual_seed(0)
    model = Layers(64).to(GPU)
    pipe = compile(copy.deepcopy(model), devices=ALONE, chunks=4)
    x, target = torch.randn(32, 64, device=GPU), torch.rand(32, 64, device=GPU)
    losses = []
    for run in (pipe, model):
        optimizer, scaler = torch.optim.SGD(run.parameters(), lr=0.5), torch.amp.GradScaler("cuda")
        losses.append([])
        for _ in range(10):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                y = run(x)
            assert y.dtype == torch.float16
            loss = F.mse_loss(y.float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=1e-3)


def test_autocast_regions_are_those_of_the_stage(compile: Callable[..., fxpipe.Pipe]) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                h = self.a(x)
            return self.b(h.float())

    pipe = compile(Cast(), devices=[GPU, "cpu"], chunks=2)
    assert pipe(torch.randn(4, 8)).dtype == torch.float32
    assert 'torch.autocast("cuda", dtype=torch.bfloat16)' in pipe.stages[0].source


def test_constants_stay_where_they_are_and_are_followed(compile: Callable[..., fxpipe.Pipe]) -> None:
    class Shifted(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.ones(8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.shift) - self.shift

    model = Shifted()
    pipe = compile(copy.deepcopy(model), devices=MIXED, chunks=2)
    x = torch.randn(4, 8)
    for change in (1.0, 2.0):
        for run in (pipe, model):
            run.shift.mul_(change)
            run.eval() if change == 2.0 else run.train()
        torch.testing.assert_close(pipe(x).cpu(), model(x), rtol=1e-3, atol=1e-4)
    assert pipe.shift.device.type == "cpu"


# Streams and memory ---------------------------------------------------------------------------------------------------


def test_copies_have_streams_of_their_own(compile: Callable[..., fxpipe.Pipe]) -> None:
    pipe = compile(Layers(), devices=MIXED, chunks=3, checkpoint="never", cut=["layers.2", "layers.4"])
    pipe(torch.randn(6, 8)).sum().backward()
    streams = {key: pipe.scheduler.streams[key] for key in [(j, i) for j in (0, 2) for i in range(3)]}
    assert len({stream.stream_id for stream in streams.values()} - {torch.cuda.default_stream(GPU).stream_id}) == 6
    assert pipe.scheduler.streams[1, 0] is None


def peak(pipe: fxpipe.Pipe, x: Tensor) -> int:
    """Bytes of the GPU at the highest point of a step."""
    for _ in range(2):
        pipe.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(GPU)
        before = torch.cuda.memory_allocated(GPU)
        pipe(x).sum().backward()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(GPU) - before


def test_recomputation_saves_memory(compile: Callable[..., fxpipe.Pipe]) -> None:
    x = torch.randn(8 * 2048, 64, device=GPU)
    peaks = [peak(compile(Layers(64, 32), devices=ALONE, chunks=8, checkpoint=mode), x) for mode in MODES]
    never, except_last, always = peaks
    assert never > except_last >= always
    assert always < 0.5 * never


@pytest.mark.parametrize("devices", [ALONE, MIXED], ids=" ".join)
def test_memory_does_not_grow(compile: Callable[..., fxpipe.Pipe], devices: Sequence[str]) -> None:
    pipe = compile(Layers(p=0.1), devices=devices, chunks=4)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
    used = []
    for _ in range(100):
        optimizer.zero_grad()
        pipe(torch.randn(8, 8)).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated(GPU))
    assert max(used[-10:]) <= max(used[5:15])


def test_the_memory_of_the_device_is_known() -> None:
    assert local_cluster([GPU]).device(GPU).memory == torch.cuda.get_device_properties(GPU).total_memory


# Errors and the command -----------------------------------------------------------------------------------------------


def test_an_error_in_a_stage(compile: Callable[..., fxpipe.Pipe]) -> None:
    class Refuses(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.cholesky(super().forward(x)[:, :4].unflatten(1, (2, 2)) - 2)

    pipe = compile(Refuses(), devices=ALONE, chunks=2)  # a matrix with a negative diagonal has no root
    for _ in range(2):
        with pytest.raises(torch.linalg.LinAlgError) as caught:
            pipe(torch.zeros(8, 8))
        assert any("stage 3, micro-batch 0" in note for note in caught.value.__notes__)


def test_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--devices", ",".join(ALONE), "--steps", "3", "--out", str(tmp_path)]) == 0
    assert "gradients, pipe against plain model" in capsys.readouterr().out
