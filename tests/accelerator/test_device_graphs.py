"""Stages as device graphs, on the test device: the same numbers, fewer launches, and no access out of order."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.pipe.build.compiled.device_graphs import NAME, WARMUP, Recorded, refusal

from .child_process import on_device
from .pipelines import THREE, check_calls, check_steps
from .simulated_device import checked, launches

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch has no graphs for other devices yet"),
]


def total(output: Tensor) -> Tensor:
    return output.sum()


class Layers(nn.Sequential):
    def __init__(self, layers: int = 4) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(layers)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "checkpoint"),
    [("long skip", "1f1b", "except_last"), ("in place", "zb-v", "always")],
)
@on_device
def test_steps(name: str, schedule: str, checkpoint: str) -> None:
    before = launches()
    check_steps(name, THREE[:2], (8,) * 4, schedule=schedule, checkpoint=checkpoint, compile_stages=NAME)
    assert launches() > before


@pytest.mark.slow
@on_device
def test_calls() -> None:
    before = launches()
    check_calls("batch norm", THREE[:2], (8, 7) * 3, compile_stages=NAME)
    assert launches() > before


@pytest.mark.slow
@on_device
def test_results_outlive_later_launches_and_parameters_change() -> None:
    """GPipe: all micro-batches wait for their backward at once; an optimizer changes the parameters between steps."""
    model, twin = Layers(), Layers().to("sim:0")
    x, y = torch.randn(24, 8), torch.randn(24, 8)
    own, mine = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    pipe = fxpipe.compile(twin, THREE[:2], 8, schedule="gpipe", checkpoint="never", compile_stages=NAME)
    with closing(pipe):
        for step in range(5):
            own.zero_grad()
            mine.zero_grad()
            wanted = F.mse_loss(model(x), y)
            wanted.backward()
            with checked():
                before = launches()
                loss = pipe.step(x.to("sim:0"), target=y.to("sim:0"), loss_fn=F.mse_loss)
                torch.testing.assert_close(loss.cpu(), wanted.detach())
            for found, expected in zip(twin.parameters(), model.parameters(), strict=True):
                assert found.grad is not None
                torch.testing.assert_close(found.grad.cpu(), expected.grad)
            own.step()
            mine.step()
            if step > 2:
                assert launches() - before >= 2 * 2 * 8  # forward and backward, two stages


@pytest.mark.slow
@on_device
def test_random_numbers_are_those_without_graphs() -> None:
    found: list[list[Tensor]] = []
    for options in ({"compile_stages": NAME}, {}):
        torch.manual_seed(0)
        model = nn.Sequential(*Layers(2), nn.Dropout(0.5), *Layers(2), nn.Dropout(0.2), nn.Linear(8, 8)).to("sim:0")
        x = torch.randn(12, 8)
        with closing(fxpipe.compile(model, THREE[:2], 4, schedule="1f1b", **options)) as pipe:
            before = launches()
            with checked():
                losses = [pipe.step(x, loss_fn=total).cpu() for _ in range(4)]
            assert (launches() > before) == bool(options)
            found.append([*losses, *(p.grad.cpu() for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 4
    for mine, own in zip(*found, strict=True):
        torch.testing.assert_close(mine, own)


@pytest.mark.slow
@on_device
def test_a_function_is_recorded_for_each_size_and_again_where_an_argument_has_moved() -> None:
    device = torch.device("sim:1")
    calls: list[torch.Size] = []

    def double(args: list[Tensor]) -> list[Tensor]:
        calls.append(args[0].shape)
        return [args[0] * args[1], args[1], args[1].t()]

    run, weight = Recorded(double, device), torch.randn(3, 3, device=device)
    with checked():
        for _ in range(WARMUP + 3):
            for rows in (1, 3):
                x = torch.randn(rows, 3, device=device)
                product, same, view = run([x, weight])
                torch.testing.assert_close(product.cpu(), x.cpu() * weight.cpu())
                assert same is weight
                assert view.data_ptr() == weight.data_ptr()
                torch.testing.assert_close(view.cpu(), weight.cpu().t())
        assert len(calls) == 2 * (WARMUP + 1)
        weight = torch.randn(3, 3, device=device)
        product, *_ = run([x, weight])
        torch.testing.assert_close(product.cpu(), x.cpu() * weight.cpu())
        first = run([x, weight])[0]
        second = run([2 * x, weight])[0]
        torch.testing.assert_close(2 * first.cpu(), second.cpu())  # the first is not overwritten


@pytest.mark.slow
@on_device
def test_what_needs_the_host_is_refused() -> None:
    run = Recorded(lambda args: [args[0].masked_select(args[0] > 0)], torch.device("sim:0"))
    x = torch.randn(4, device="sim:0")
    for _ in range(WARMUP):
        run([x])
    with pytest.raises(RuntimeError, match="needs the host, which a graph does not wait for"):
        run([x])
    run = Recorded(lambda args: [args[0] + 1], torch.device("sim:0"))  # the thread can record all the same
    for _ in range(WARMUP + 1):
        torch.testing.assert_close(run([x])[0].cpu(), x.cpu() + 1)


def test_devices_without_graphs_are_refused() -> None:
    for labels in (["cpu:0", "cpu:1"], 2):
        with pytest.raises(
            PlanError, match=r"compile_stages is 'device_graphs', and cpu.* has no graphs: they are for"
        ):
            fxpipe.compile(Layers(), labels, 2, compile_stages=NAME)
    assert refusal(torch.device("cuda:0")) is None


def test_graphs_of_torch_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'cudagraphs': such graphs keep results .* compile_stages='device_graphs'"):
        fxpipe.compile(Layers(), 2, 2, compile_stages="cudagraphs")


@pytest.mark.slow
@on_device
def test_a_stage_on_the_cpu_beside_others_is_refused() -> None:
    with pytest.raises(PlanError, match="cpu:0 has no graphs"):
        fxpipe.compile(Layers(), ["sim:0", "cpu:0"], 2, compile_stages=NAME)
