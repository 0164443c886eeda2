"""Any placement of ops runs: every op of every model on a device drawn at random, with the model's own gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.errors import InputError, PlanError
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.planning.stages.device_segments import blocks
from fxpipe.planning.stages.op_order import requirements
from tests.helpers.models import MODELS, Case
from tests.helpers.transparency import Result, assert_same, build, inputs, plain, shown, step

# Each model runs one of these, the next model the next: devices, micro-batches, recomputation, schedule.
SETTINGS = [
    (2, 1, "never", "gpipe"),
    (3, 3, "except_last", "1f1b"),
    (4, 2, "always", "zb-h1"),
    (2, 3, "always", "1f1b"),
    (3, 2, "never", "zb-h2"),
]
NAMES = [name for name, case in MODELS.items() if "paper" not in case.traits and case.reduce is None]
QUICK = {"tied weight", "batch norm", "dropout", "in place after a fork", "nested outputs", "own function"}


def anywhere(devices: int, seed: int) -> Callable[[Graph, Mapping[str, int]], Placed]:
    """Places what must stay together on a device drawn at random."""

    def place(graph: Graph, sizes: Mapping[str, int]) -> Placed:
        rng = Random(seed)
        drawn = ((rng.randrange(devices), block) for block in blocks(graph, requirements(graph)))
        return Placed(graph, {graph.ops[at].name: device for device, block in drawn for at in block})

    return place


def stepped(case: Case, model: nn.Module, pipe: fxpipe.Pipe, batch: int) -> Result:
    """A step of the pipe, as `plain` tells it."""
    args, kwargs = inputs(case, batch)
    model.zero_grad()
    _, output = pipe.step(*args, loss_fn=case.loss, outputs=True, **kwargs)
    return shown(model, args, kwargs, output)


def detached(result: Result) -> Result:
    output = pytree.tree_map_only(Tensor, Tensor.detach, result.output)
    return Result(output, result.gradients, result.buffers)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_ops_run_where_they_are_put(name: str) -> None:
    """Half of the models by a call of the pipe and autograd, the others by a step."""
    case, index = MODELS[name], NAMES.index(name)
    devices, chunks, checkpoint, schedule = SETTINGS[index % len(SETTINGS)]
    options: dict[str, Any] = {"reduce": "sum", **case.options}
    options |= {"checkpoint": checkpoint, "schedule": schedule, "plan": anywhere(devices, index)}
    model, twin = build(case), build(case)
    pipe = fxpipe.compile(twin, devices, chunks, **options)
    try:
        torch.manual_seed(3)
        wanted = plain(case, model, *inputs(case, 6), chunks)
        torch.manual_seed(3)
        if index % 2:
            assert_same(stepped(case, twin, pipe, 6), detached(wanted), case.tol)
        else:
            assert_same(step(case, twin, pipe, *inputs(case, 6)), wanted, case.tol)
        assert list(pipe.state_dict()) == list(model.state_dict())
    finally:
        pipe.close()


def by_device(devices: Mapping[str, int]) -> Callable[[Graph, Mapping[str, int]], Placed]:
    return lambda graph, sizes: Placed(graph, {op.name: devices.get(op.name, 0) for op in graph.ops})


def test_devices_in_a_line_are_stages_of_a_pipeline() -> None:
    """With 1F1B, the first device runs ahead of the second, as it does in any pipeline."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    place = by_device({"output": 1, "loss": 1})
    pipe = fxpipe.compile(model, devices=2, chunks=3, plan=place, schedule="1f1b", checkpoint="never")
    pipe.step(torch.randn(6, 4), loss_fn=lambda y: y.sum())
    assert [" ".join(action.short for action in row) for row in pipe.schedule.devices] == [
        "F0 F1 B0 F2 B1 B2",
        "F0 B0 F1 B1 F2 B2",
    ]
    pipe.close()


def test_batches_are_cut_evenly() -> None:
    pipe = fxpipe.compile(nn.Linear(4, 4), devices=2, chunks=3, plan=by_device({}))
    assert pipe(torch.randn(6, 4)).shape == (6, 4)
    assert pipe(torch.randn(9, 4)).shape == (9, 4)
    with pytest.raises(InputError, match="a batch of 7 cannot be cut into 3 micro-batches of one size"):
        pipe(torch.randn(7, 4))
    pipe.close()


def test_a_device_that_is_not_there() -> None:
    pipe = fxpipe.compile(nn.Linear(4, 4), devices=2, plan=anywhere(20, 0))
    with pytest.raises(PlanError, match=r"is on device \d+; there are devices 0 to 1"):
        pipe(torch.randn(6, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cut": [1, 1]}, "cut is given, and the strategy says where everything runs"),
        ({"replicas": (2,)}, "replicas is given, and the strategy says"),
        ({"schedule": "zb-v"}, "schedule is 'zb-v'; with a strategy, write one of gpipe, 1f1b"),
        ({"schedule": "f1b1"}, "schedule is 'f1b1': write"),
        ({"checkpoint": {0}}, "checkpoint is of stages, which a strategy does not have"),
        ({"devices": None}, "say on which devices the function places ops"),
        ({"devices": ["cpu:0", "cpu:0"]}, "a strategy has a number for each device"),
        ({"plan": 3}, "plan is 3: write the path"),
    ],
)
def test_options_that_make_no_sense_with_a_strategy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        fxpipe.compile(nn.Linear(4, 4), **{"devices": 2, "plan": by_device({}), **options}).prepare(torch.ones(2, 4))
