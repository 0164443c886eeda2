"""A pipe on the test device: the plain model's outputs and gradients, and no access that nothing orders."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from contextlib import closing
from itertools import cycle, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.pipe.options.compile_options import Options, deal, device_labels, stage_devices
from tests.helpers.marks import mostly_slow
from tests.helpers.models import MODELS
from tests.helpers.transparency import build, inputs
from tests.whole.test_steps import NAMES as SCHEDULES
from tests.whole.test_steps import captured, stepped, steps_of

from .child_process import on_device
from .pipelines import CASES, MODES, PLACES, THREE, check_calls, check_step, check_steps
from .simulated_device import COUNT, KIND, checked, waits

pytestmark = pytest.mark.accelerator

QUICK = "long skip"
PLACED = tuple(product(MODES, PLACES))
OTHERS = [name for name in CASES if name != QUICK]
CALLS = [(QUICK, *placed) for placed in PLACED]
CALLS += [(name, *PLACED[i % len(PLACED)]) for i, name in enumerate(OTHERS)]
UNDER_ALL = [QUICK, "lstm", "complex", *(name for name in OTHERS[::2] if name not in ("lstm", "complex"))]
STEPS = [(QUICK, places) for places in PLACES]
STEPS += [
    (name, tuple(PLACES)[i % len(PLACES)])
    for i, name in enumerate(OTHERS)
    if name not in UNDER_ALL or name == "complex"
]


def quick(one: tuple[str, ...]) -> bool:
    return one[0] == QUICK and one[-1] in ("three", "mixed")


@pytest.mark.parametrize(("name", "checkpoint", "places"), mostly_slow(CALLS, quick, every=3))
@on_device
def test_calls(name: str, checkpoint: str, places: str) -> None:
    check_calls(name, PLACES[places], (8, 7), checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("name", "places"), mostly_slow(STEPS, lambda one: quick(one) or one[0] in ("complex", "gru"), 3)
)
@on_device
def test_steps(name: str, places: str) -> None:
    check_steps(name, PLACES[places], (8, 7), schedule="1f1b")


def test_there_are_enough_models() -> None:
    assert len(CASES) >= 50
    assert len(UNDER_ALL) >= 20


@pytest.mark.parametrize("name", mostly_slow(UNDER_ALL, lambda name: name == QUICK, every=3))
@on_device
def test_all_schedules(name: str) -> None:
    """On one capture."""
    case = stepped(CASES[name])
    graph = captured(case, build(case), 8, 4)
    for schedule, checkpoint in zip(SCHEDULES, cycle(MODES), strict=False):
        labels = stage_devices(("sim:0", "sim:1"), schedule, None)
        twin, options = build(case), Options(labels, 4, schedule=schedule, checkpoint=checkpoint)
        with steps_of(graph, twin, options, inputs(case, 8)) as step:
            check_step(case, build(case), twin, step, 8, 4)


@on_device
def test_weak_references_follow_what_has_moved() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    weight = model[0].weight
    held, y = weakref.ref(weight), model(x)
    with closing(fxpipe.compile(model, devices=["sim:0", "sim:1"], chunks=2)) as pipe:
        torch.testing.assert_close(pipe(x).cpu(), y)
        assert held() is weight is model[0].weight
        assert (weight.device.type, weight.requires_grad) == (KIND, True)


@pytest.mark.parametrize("replicas", mostly_slow([[2, 1], [1, 2], [2, 2]], lambda counts: counts != [2, 2]), ids=str)
@pytest.mark.parametrize("name", mostly_slow(("long skip", "constants", "weight norm"), lambda name: name == QUICK))
@on_device
def test_replicas(name: str, replicas: Sequence[int]) -> None:
    devices = [f"{KIND}:{index}" for index in range(sum(replicas))]
    check_steps(name, devices, chunks=4, schedule="1f1b", replicas=replicas)


@pytest.mark.parametrize("replicas", [(1, 2), (3, 1)], ids=str)
@pytest.mark.slow
@on_device
def test_replicas_under_all_schedules(replicas: tuple[int, ...]) -> None:
    case = stepped(MODELS["long skip"])
    ran = 0
    graph = captured(case, build(case), 8, 4)
    for schedule in SCHEDULES:
        groups = deal(tuple(f"{KIND}:{index}" for index in range(sum(replicas))), replicas)
        labels = stage_devices(tuple(groups), schedule, None)
        twin, options = build(case), Options(labels, 4, schedule=schedule, replicas=groups)
        with steps_of(graph, twin, options, inputs(case, 8)) as step:
            check_step(case, build(case), twin, step, 8, 4)
        ran += 1
    assert ran == len(SCHEDULES)


class Wide(nn.Module):
    """Its activations are large enough to be moved to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@on_device
def test_offload(schedule: str) -> None:
    torch.manual_seed(0)
    model = Wide().double()
    pipe = fxpipe.compile(Wide().double(), THREE, 2, schedule=schedule, checkpoint="never", offload=range(3))
    pipe.load_state_dict(model.state_dict())
    x, y = torch.randn(512, 64, dtype=torch.float64), torch.randn(512, 64, dtype=torch.float64)
    for _ in range(2):
        model.zero_grad()
        pipe.zero_grad()
        wanted = F.mse_loss(model(x), y)
        wanted.backward()
        with checked():
            loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
        torch.testing.assert_close(loss.cpu(), wanted)
        for (name, mine), own in zip(pipe.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), own.grad, msg=lambda text, name=name: f"{name}: {text}")
    pipe.close()


@on_device
def test_a_step_and_then_a_call() -> None:
    """The step has spread the tensors over devices; the call is captured as the model first was."""
    model, x = Wide(), torch.randn(8, 64)
    pipe = fxpipe.compile(Wide(), THREE, 2)
    pipe.load_state_dict(model.state_dict())
    with checked():
        pipe.step(x, loss_fn=lambda out: out.sum())
        torch.testing.assert_close(pipe(x).cpu(), model(x))
    pipe.close()


@on_device
def test_a_step_does_not_wait() -> None:
    """The host runs ahead of the device through the whole step."""
    pipe = fxpipe.compile(Wide(), THREE, 4, schedule="1f1b")
    x = torch.randn(32, 64)
    pipe.step(x, loss_fn=lambda out: out.sum())  # moves the parameters
    for _ in range(2):
        with checked():
            loss = pipe.step(x, loss_fn=lambda out: out.sum())
            assert waits() == [], waits()
            float(loss)
            assert len(waits()) == 1
    pipe.close()


@on_device
def test_dropout_is_the_same_again() -> None:
    torch.manual_seed(0)
    x, found = torch.randn(8, 64), []
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)) for _ in range(4)))
    for checkpoint in MODES:
        pipe = fxpipe.compile(copy.deepcopy(model), ["sim:0", "sim:1"], 4, checkpoint=checkpoint)
        torch.manual_seed(3)
        before = torch.sim.get_rng_state("sim:1")
        pipe.zero_grad()
        with checked():
            pipe.step(x, loss_fn=lambda out: out.square().sum())
        assert torch.equal(torch.sim.get_rng_state("sim:1"), before)
        found.append([parameter.grad.cpu() for parameter in pipe.parameters()])
        pipe.close()
    assert found[0][0].abs().sum() > 0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@on_device
def test_autocast_of_the_caller() -> None:
    model, x = Wide(), torch.randn(8, 64)
    pipe = fxpipe.compile(model, ["sim:0", "sim:1"], 2)
    with checked(), torch.autocast(KIND, torch.bfloat16):
        y = pipe(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert model.layers[0].weight.grad is not None
    pipe.close()


@on_device
def test_which_devices_are_meant() -> None:
    every = tuple(f"{KIND}:{index}" for index in range(COUNT))
    assert device_labels(KIND) == device_labels(COUNT) == every
    assert device_labels("sim:2") == ("sim:2",)
    assert device_labels(2) == every[:2]
    assert device_labels(COUNT + 1) == tuple(f"cpu:{index}" for index in range(COUNT + 1))
    with pytest.raises(PlanError, match="this machine has no CUDA device"):
        device_labels("cuda")
    pipe = fxpipe.compile(Wide(), 2, 2)
    assert pipe(torch.randn(4, 64)).device == torch.device("sim:1")
    pipe.close()
    with pytest.raises(PlanError, match=r"planned on sim:8, and this machine has 8 SIM devices"):
        fxpipe.compile(Wide(), ["sim:0", "sim:8"], 2)(torch.randn(4, 64))
