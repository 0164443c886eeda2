"""Devices: that of capture becomes the stage's own, all others stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, Region
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.program.program import OWN_DEVICE
from fxpipe.passes import cut
from fxpipe.passes.pass_context import PassContext
from fxpipe.passes.relocate_devices import relocate_devices
from tests.helpers.nets import Chain, Masked, make, plan
from tests.helpers.pass_graphs import trace
from tests.helpers.same_program import assert_same, of_graph, of_program

X = Ref("x")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def placed(captured: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: str = "") -> Op:
    """The op after `relocate_devices`, in a model captured on one device, with a result there or on another."""
    row, out = TensorType("f32", ("b", 4), captured), TensorType("f32", ("b", 4), result or captured)
    op = Op("y", target, args, kwargs, out, Origin("net.py", 1, "", ""))
    graph = Graph("Net", True, (Input("x", "x", row, 0),), (), (), (op,), (Output("y", 0),), ((X,), {}), Ref("y"))
    return relocate_devices(cut(graph, plan(graph, 1)), PassContext(plan(graph, 1))).stages[0].ops[0]


def cpu() -> torch.device:
    return torch.device("cpu")


FOLLOW = [
    ("cpu", torch.arange, (4,), {"device": cpu()}, {"device": OWN_DEVICE}),
    ("cpu", torch.arange, (4,), {"device": "cpu"}, {"device": OWN_DEVICE}),
    ("cpu", torch.arange, (4,), {"device": None}, {"device": OWN_DEVICE}),
    ("cpu", torch.zeros, ((4,),), {}, {"device": OWN_DEVICE}),
    ("cuda:0", torch.zeros, ((4,),), {"device": "cuda"}, {"device": OWN_DEVICE}),
    ("cuda:0", torch.zeros, ((4,),), {"device": torch.device("cuda:0")}, {"device": OWN_DEVICE}),
    ("cuda:0", torch.zeros, ((4,),), {"device": 0}, {"device": OWN_DEVICE}),
    ("cpu", torch.as_tensor, (4,), {}, {"device": OWN_DEVICE}),
    ("cpu", torch.fft.fftfreq, (4,), {}, {"device": OWN_DEVICE}),
]


@pytest.mark.parametrize(("captured", "target", "args", "before", "after"), FOLLOW)
def test_factory_calls_follow_the_stage(
    captured: str, target: Any, args: tuple[Any, ...], before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert placed(captured, target, args, before).kwargs == after


def test_to_follows_the_stage() -> None:
    assert placed("cpu", "to", (X, cpu()), {}).args == (X, OWN_DEVICE)
    assert placed("cpu", "to", (X, "cpu", torch.float32), {}).args == (X, OWN_DEVICE, torch.float32)
    assert placed("cpu", "to", (X,), {"device": cpu(), "dtype": torch.float32}).kwargs["device"] is OWN_DEVICE
    moved = placed("cuda:0", "cuda", (X,), {"non_blocking": True})
    assert (moved.target, moved.args, moved.kwargs) == ("to", (X, OWN_DEVICE), {"non_blocking": True})


def test_a_device_deep_inside_the_arguments_follows_the_stage() -> None:
    assert placed("cpu", "use", (X, [{"on": cpu()}]), {}).args == (X, [{"on": OWN_DEVICE}])


@pytest.mark.parametrize(
    ("captured", "named", "label", "after"),
    [("cpu", "cpu", "cuda:1", "cuda"), ("cuda:0", "cuda", "cpu:2", "cpu"), ("cpu", "cuda", "cpu:0", "cuda")],
)
def test_autocast_follows_the_stage(captured: str, named: str, label: str, after: str) -> None:
    row = TensorType("f32", ("b", 4), captured)
    region = Region("autocast", (named, torch.bfloat16, True, None))
    op = Op("y", "relu", (X,), {}, row, Origin("net.py", 1, "", ""), regions=(region,))
    graph = Graph("Net", True, (Input("x", "x", row, 0),), (), (), (op,), (Output("y", 0),), ((X,), {}), Ref("y"))
    one = plan(graph, 1)
    one = replace(one, stages=tuple(replace(stage, device=label) for stage in one.stages))
    (placed,) = relocate_devices(cut(graph, one), PassContext(one)).stages[0].ops
    assert placed.regions == (Region("autocast", (after, torch.bfloat16, True, None)),)


def test_other_devices_stay() -> None:
    for args, kwargs in [((4,), {"device": cpu()}), ((4,), {"device": "cpu"}), ((4,), {})]:
        op = placed("cuda:0", torch.arange, args, kwargs, result="cpu")  # a model on a GPU that wants this on the CPU
        assert (op.args, op.kwargs) == (args, kwargs)
    assert placed("cuda:0", "cpu", (X,), {}, result="cpu").target == "cpu"
    assert placed("cuda:0", "to", (X, "cuda:1"), {}, result="cuda:1").args == (X, "cuda:1")
    assert placed("cpu", "to", (X, torch.float32), {}).args == (X, torch.float32)


def test_numbers() -> None:
    model, x = make(Masked)
    graph = trace(model, x)
    program = relocate_devices(cut(graph, plan(graph, 8, 8)), PassContext(plan(graph, 8, 8)))
    assert_same(of_program(program, model, x), of_graph(graph, model, x))


def test_without_devices_nothing_changes() -> None:
    model, x = make(Chain)
    graph = trace(model, x)
    before = cut(graph, plan(graph, 2, 3))
    assert relocate_devices(before, PassContext(plan(graph, 2, 3))) is before


def test_golden(golden: Callable[[str, str], None]) -> None:
    model, x = make(Masked)
    graph = trace(model, x)
    golden(
        "passes/relocate_devices.txt", str(relocate_devices(cut(graph, plan(graph, 16)), PassContext(plan(graph, 16))))
    )
