"""Options of pipes on the test device: strategies, compiled stages, backward as code, a GradScaler."""

from __future__ import annotations

import copy
from contextlib import closing
from random import Random

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.api.search import operators_of
from fxpipe.ir.cluster.published_clusters import preset
from fxpipe.planning.operators.expert_strategies import scattered
from tests.helpers.marks import slow_in_turn
from tests.helpers.transparency import build, inputs
from tests.pipe.build.test_apply_strategy import CASES
from tests.whole.test_tensor_parallel import loss, planned

from .child_process import on_device
from .pipelines import check_calls, check_steps
from .simulated_device import KIND, checked

pytestmark = [pytest.mark.accelerator, pytest.mark.slow]

DEVICES = [f"{KIND}:{index}" for index in range(4)]
SAMPLES = 4


def squares(output: Tensor) -> Tensor:
    return output.square().sum()


@pytest.mark.parametrize(("name", "seed"), [("convolutional", 2), ("convolutional", 3), ("mixed", 4)])
@on_device
def test_random_strategies(name: str, seed: int) -> None:
    """By a call and by steps; parts of an operator's values go between any two devices."""
    case = CASES[name]
    plain, args = build(case), inputs(case, SAMPLES)[0]
    wanted = squares(plain(*args))
    wanted.backward()
    graph, random = operators_of(plain, preset("p100:4"), args, SAMPLES), Random(seed)
    for schedule in ("gpipe", "1f1b"):
        model = build(case)
        strategy = (graph, scattered(graph, len(DEVICES), random))
        with closing(fxpipe.compile(model, DEVICES, plan=strategy, schedule=schedule, reduce="sum")) as pipe:
            with checked():
                if schedule == "gpipe":
                    loss = squares(pipe(*args))
                    loss.backward()
                else:
                    loss = pipe.step(*args, loss_fn=squares)
            torch.testing.assert_close(loss.detach().cpu(), wanted.detach())
            for key, parameter in model.named_parameters():
                mine, own = parameter.grad, plain.get_parameter(key).grad
                assert mine is not None, key
                torch.testing.assert_close(mine.cpu(), own, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", slow_in_turn(["long skip", "tied transformer", "batch norm"], 3))
@on_device
def test_compiled_stages(name: str) -> None:
    """By a backend that compiles the graphs of autograd, and runs their ops as they are. In calls, the compiled
    backwards of two devices run at the same time now and then."""
    check_calls(name, DEVICES[:2], (8, 7) * 4, compile_stages="aot_eager")
    check_steps(name, DEVICES[:2], (8, 7), compile_stages="aot_eager", schedule="zb-h1")


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("long skip", "zb-h1"), ("tied transformer", "1f1b"), ("batch norm", "zb-v"), ("lstm by hand", "1f1b")],
)
@on_device
def test_backward_as_code(name: str, schedule: str) -> None:
    check_steps(name, DEVICES[:2], (8, 7), backward="code", schedule=schedule)


@pytest.mark.parametrize(
    ("name", "how"),
    [("joined", "two stages of two"), ("blocks", "one stage of two recomputes"), ("image", "two replicas of two")],
)
@on_device
def test_plans_with_tensor_parallelism(name: str, how: str) -> None:
    model, x, found = planned(name, how, kind=KIND)
    plain, size = copy.deepcopy(model), found.layers.micro_batches
    for part in x.tensor_split(size):
        (loss(plain(part)) / size).backward()
    with closing(fxpipe.compile(model, plan=found)) as pipe, checked():
        total = pipe.step(x, loss_fn=lambda output: loss(output)).cpu()
        assert {stage.device for stage in pipe.plan.stages} == set(DEVICES)
    torch.testing.assert_close(total, sum(loss(plain(part)) / size for part in x.tensor_split(size)).detach())
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        torch.testing.assert_close(parameter.grad.cpu(), plain.get_parameter(key).grad, rtol=1e-9, atol=1e-12)


@on_device
def test_a_gradient_scaler() -> None:
    """A step whose gradients are infinite changes nothing; the others are the plain model's."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    twin, x = copy.deepcopy(model), torch.randn(8, 8)
    own, mine = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, twin))
    scaler = torch.amp.GradScaler(KIND)
    with closing(fxpipe.compile(twin, DEVICES[:2], 2, schedule="1f1b")) as pipe:
        for batch in (x, x * float("inf"), x):
            mine.zero_grad()
            before = scaler.get_scale()
            with checked():
                loss = pipe.step(batch, loss_fn=squares, scaler=scaler)
                scaler.step(mine)
                scaler.update()
            if batch is not x:
                assert scaler.get_scale() == before / 2
                continue
            own.zero_grad()
            wanted = squares(model(x))
            wanted.backward()
            own.step()
            torch.testing.assert_close(loss.cpu(), wanted.detach())
    for key, parameter in twin.named_parameters():
        torch.testing.assert_close(parameter.detach().cpu(), model.get_parameter(key).detach())
