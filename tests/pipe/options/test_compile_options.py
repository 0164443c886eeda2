"""What is no option, or no value of one, is refused in one line: the value, what it may be, an example, the nearest."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.pipe.options import option_table
from fxpipe.pipe.options.compile_table import COMPILE
from fxpipe.pipe.options.option_forms import Option, as_text

X = torch.randn(4, 4)
CHAIN = Chain("m", 8, (Layer("a", 1e-3, 2e-3, 1e6), Layer("b", 1e-3, 2e-3, 1e6)))
FUNCTIONS: list[tuple[Callable[..., Any], dict[str, Option], set[str]]] = [
    (fxpipe.compile, COMPILE, {"model"}),
    (fxpipe.plan, option_table.PLAN, {"what", "example_inputs"}),
    (fxpipe.search, option_table.SEARCH, {"what", "example_inputs"}),
    (fxpipe.profile, option_table.PROFILE, {"model"}),
    (fxpipe.load, option_table.LOAD, {"folder", "model", "group"}),
]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.mark.parametrize(("function", "options", "others"), FUNCTIONS, ids=lambda one: getattr(one, "__name__", ""))
def test_the_table_has_every_option(function: Callable[..., Any], options: dict[str, Option], others: set[str]) -> None:
    """Also, what an option is where it is left out is a value that it may have."""
    parameters = [one for one in signature(function).parameters.values() if one.kind.name[:4] != "VAR_"]
    assert {one.name for one in parameters} == options.keys() | others
    for one in parameters:
        if one.name in options and one.default is not Parameter.empty:
            options[one.name].take(one.default)


@pytest.mark.parametrize("options", [options for _, options, _ in FUNCTIONS] + [option_table.STEP])
def test_examples_are_values(options: dict[str, Option]) -> None:
    """In Python and, where text can say it, on the command line."""
    for option in options.values():
        if option.example is not None:
            option.take(option.example)
            if any(form.read is not None for form in option.forms):
                assert option.read(as_text(option.example)) == option.take(option.example)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"checkpoint": 3},
            "checkpoint is 3: write 'auto', 'never', 'selective', 'except_last', 'always', or a set of stages",
        ),
        ({"checkpoint": 7}, "checkpoint is 7: write"),
        ({"checkpoint": "allways"}, "checkpoint is 'allways': write .*; did you mean 'always'?"),
        ({"chunks": 2.5}, "chunks is 2.5: write a whole number from 1 to 4096, as in chunks=8"),
        ({"chunks": "2"}, "chunks is '2': write a whole number"),
        ({"chunks": True}, "chunks is True: write a whole number"),
        ({"cut": 2}, "cut is 2: write 'time', 'memory', a list with the number of blocks of each stage, or a list"),
        ({"cut": [1.5, 2]}, r"cut is \[1.5, 2\]: write"),
        ({"cut": "times"}, "did you mean 'time'?"),
        ({"warmup": 3}, r"warmup is 3: write 'auto', or a list of counts, as in warmup=\(3, 1\)"),
        ({"offload": 0}, "offload is 0: write a set of stages"),
        ({"replicas": 2}, r"replicas is 2: write a list of counts of at least 1, as in replicas=\(2, 1\)"),
        ({"replicas": (2, 0)}, r"replicas is \(2, 0\): write"),
        ({"stages_per_device": 0}, "stages_per_device is 0: write 'auto', or a whole number of at least 1"),
        (
            {"cut": "head"},
            r"cut is 'head': write .*, or a list of the modules that begin a stage, as in cut=\['enc",
        ),
        ({"schedule": "1F1B"}, "schedule is '1F1B': write 'gpipe', .*; did you mean '1f1b'?"),
        ({"schedule": 3}, "schedule is 3: write .*, a grid such as .*, a Schedule, or a function that makes one"),
        ({"profile": "measured"}, "did you mean 'measure'?"),
        ({"batch_dim": "0"}, "batch_dim is '0': write a dimension, or a dict of a dimension, 'items', fxpipe.rows"),
        ({"batch_dim": {"x": "0"}}, "batch_dim is {'x': '0'}: write"),
        ({"reduce": "median"}, "reduce is 'median': write 'auto', 'mean', 'sum', 'cat', or a dict of"),
        ({"reduce": {"loss": "maen"}}, "reduce is {'loss': 'maen'}: write .*; did you mean 'mean'?"),
        ({"batch_dim": {"x": "itms"}}, "did you mean 'items'?"),
        ({"warmup": "atuo"}, "did you mean 'auto'?"),
        ({"backward": "cod"}, "did you mean 'code'?"),
        ({"deferred_batch_norm": "yes"}, "deferred_batch_norm is 'yes': write True or False"),
        ({"compile_stages": 1}, "compile_stages is 1: write True or False, the name of a backend"),
        ({"plan": 5}, "plan is 5: write the path of a JSON file, what fxpipe.plan, fxpipe.search or replan returned, "),
        ({"plan": nn.Linear}, "plan is the class Linear: write"),
        ({"timeout": "60"}, "timeout is '60': write a number of seconds above 0"),
        ({"dump": 1}, "dump is 1: write the path of a folder"),
        ({"devices": -2}, "devices is -2: write a count of at least 1, a list of devices, a device, or a Cluster"),
        ({"devices": 2.0}, "devices is 2.0: write a count"),
        ({"devices": "cdua"}, r"'cdua' in devices is not a device: .*; did you mean 'cuda'\?"),
        ({"devices": "cuda:0,cuda:1"}, r"is not a device: did you mean devices=\['cuda:0', 'cuda:1'\]\?$"),
        ({"devices": "2"}, r"'2' in devices is not a device: did you mean devices=2\?$"),
        ({"devices": None}, r"devices is missing: say how many, as in fxpipe.compile\(model, devices=4, chunks=8\)"),
        ({"chunks": None}, "chunks is missing: say how many, as in"),
        ({"chunks": None, "devices": None}, "^say how many, as in"),
        ({"checkpoint": "all"}, "checkpoint is 'all': .*; did you mean 'always'\\?"),
        ({"checkpoint": True}, "checkpoint is True: .*; did you mean 'always'\\?"),
        ({"checkpoint": False}, "checkpoint is False: .*; did you mean 'never'\\?"),
        ({"memory_limit": "8GB"}, r"memory_limit is '8GB': .*; did you mean 8 \* 10\*\*9\?"),
        ({"warmup": (2, 1)}, "^warmup is for schedule='1f1b' and '1f1b-late', and schedule is 'gpipe'"),
        ({"devices": "xpu"}, "devices is 'xpu', and this machine has no XPU device: write devices=4 for CPU workers"),
        ({"devices": ["cdua:0", "cpu"]}, r"'cdua:0' in devices is not a device: .*; did you mean 'cuda:0'\?"),
        ({"devices": [0, 1]}, r"devices is \[0, 1\]: write"),
        ({"chunk": 4}, r"fxpipe.compile has no option 'chunk'; did you mean 'chunks'\?"),
        ({"device": 2}, r"fxpipe.compile has no option 'device'; did you mean 'devices'\?"),
        ({"optimizer_sharding": "zero1"}, r"no option 'optimizer_sharding'; that is an option of fxpipe\.plan$"),
        ({"loss_fn": torch.sum}, r"no option 'loss_fn'; that is an option of pipe\.step$"),
        ({"microbatches": 4}, r"no option 'microbatches'; did you mean 'chunks'\?"),
        ({"micro_batches": 4}, r"no option 'micro_batches'; did you mean 'chunks'\?"),
        ({"strategy": "s.json"}, r"no option 'strategy'; did you mean 'plan'\?"),
        ({"balance": [2, 1]}, r"no option 'balance'; did you mean 'cut'\?"),
        ({"split_at": ["2"]}, r"no option 'split_at'; did you mean 'cut'\?"),
        ({"checkpoint_mode": "never"}, r"no option 'checkpoint_mode'; did you mean 'checkpoint'\?"),
        ({"colour": 2}, r"fxpipe.compile has no option 'colour'; it has devices, chunks, example_inputs"),
    ],
)
def test_compile(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        fxpipe.compile(model(), **{"devices": 2, "chunks": 2} | options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fxpipe.plan(CHAIN, "B", 64.5), "batch_size is 64.5: write a whole number"),
        (lambda: fxpipe.plan(CHAIN, "B", 64, planer="dapple"), "fxpipe.plan has no option 'planer'; did you mean 'pl"),
        (lambda: fxpipe.plan(CHAIN, "B", 64, planner="dappel"), "planner is 'dappel': .* did you mean 'dapple'"),
        (lambda: fxpipe.plan(CHAIN, "k800", 64), "cluster is 'k800': .*; did you mean 'k80'"),
        (lambda: fxpipe.plan(CHAIN, "B", 64, all_reduce="begin"), "all_reduce is 'begin': write 'end', 'overlap'"),
        (lambda: fxpipe.plan(CHAIN, "B", 64, recompute="no"), "recompute is 'no': write 'auto', or True or False"),
        (lambda: fxpipe.plan(CHAIN, "B", 64, time_limit=0), "time_limit is 0: write a number of seconds above 0"),
        (lambda: fxpipe.plan(CHAIN, "B", 64, parameter_copies="4"), "parameter_copies is '4': write a number above 0"),
        (lambda: fxpipe.plan(CHAIN, "B", 64, optimizer_sharding=1), "optimizer_sharding is 1: write 'none', 'zero1', "),
        (lambda: fxpipe.search(model(), "k80:2", 64.5, example_inputs=X), "batch_size is 64.5: write a whole number"),
        (lambda: fxpipe.search(model(), "k80:2", batch=8, example_inputs=X), "did you mean 'batch_size'"),
        (lambda: fxpipe.plan(CHAIN, "B", 64, chunks=8), "'chunks'; that is an option of fxpipe.compile"),
        (lambda: fxpipe.plan(CHAIN, "B", 64, microbatches=8), "did you mean 'micro_batches'"),
        (lambda: fxpipe.search(model(), "k80:2", example_inputs=X, methods="mcmc"), "did you mean 'method'"),
        (lambda: fxpipe.search(model(), "k80:2", example_inputs=X, method="mcm"), "did you mean 'mcmc'"),
        (lambda: fxpipe.search(model(), "k80:2", example_inputs=X, budget=float("nan")), "budget is nan: write"),
        (lambda: fxpipe.profile(model(), X, device=4), "device is 4: write a device, or a Device or Cluster"),
        (lambda: fxpipe.profile(model(), X, batch="8"), "batch is '8': write a whole number"),
        (lambda: fxpipe.load("folder", model(), compile_stages="inducto"), "did you mean 'inductor'"),
        (
            lambda: fxpipe.load("folder", model(), timout=3),
            "load has no option 'timout'; did you mean 'timeout'",
        ),
        (lambda: fxpipe.profile(model(), X, device="cdua"), "did you mean 'cuda'"),
        (
            lambda: fxpipe.plan(CHAIN, "B", 64).simulate("zb-h11"),
            "no schedule 'zb-h11'.*; did you mean 'zb-h1'",
        ),
    ],
)
def test_the_other_functions(call: Callable[[], object], message: str) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    pipe = fxpipe.compile(model(), numpy.int64(2), numpy.int32(2), cut=numpy.array([2, 1]).tolist())
    assert torch.allclose(pipe(X), pipe.model(X), atol=1e-6)
    assert type(pipe.options.chunks) is int
    pipe.close()


@pytest.mark.parametrize("function", [fxpipe.compile, lambda one: fxpipe.profile(one, X)])
def test_a_pipe_is_no_model(function: Callable[[nn.Module], object]) -> None:
    pipe = fxpipe.compile(model(), 2, 2)
    with pytest.raises(PlanError, match=r"model is a pipe already; give the model in it, as in fxpipe.*\(pipe.model"):
        function(pipe)
    with pytest.raises(PlanError, match=r"0 of Sequential is a pipe, .* as in model.0 = model.0.model"):
        function(nn.Sequential(pipe, nn.Linear(4, 4)))
    with pytest.raises(PlanError, match="model is of type Tensor; fxpipe"):
        function(X)  # type: ignore[arg-type]


def test_a_pipe_is_no_part_of_another() -> None:
    """Neither where it is put into the model later, nor where the loss calls it."""
    teacher, pipe = fxpipe.compile(model(), 2, 2), fxpipe.compile(model(), 2, 2)
    with pytest.raises(
        fxpipe.CaptureError, match=r"(?s)teacher\(.*it calls a pipe, .*write `plain = pipe.model` before"
    ):
        pipe.step(X, target=X, loss_fn=lambda out, x: (out - teacher(x)).square().mean())
    plain = teacher.model
    own = pipe.step(X, target=X, loss_fn=lambda out, x: (out - plain(x)).square().mean())
    torch.testing.assert_close(own, (pipe.model(X) - plain(X)).square().mean().detach())
    pipe.model[0] = teacher
    with pytest.raises(PlanError, match=r"0 of Sequential is a pipe, .* as in model.0 = model.0.model"):
        pipe(X)
    pipe.close(), teacher.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": "yes"}, "outputs is 'yes': write True or False, as in outputs=True"),
        ({"timeline": 1}, "timeline is 1: write True or False"),
        ({"scaler": 2.0}, "scaler is 2.0: write a torch.amp.GradScaler"),
        ({"accumulate": 0}, "accumulate is 0: write a whole number"),
    ],
)
def test_step(options: dict[str, Any], message: str) -> None:
    pipe = fxpipe.compile(model(), 2, 2)
    with pytest.raises(PlanError, match=message):
        pipe.step(X, loss_fn=torch.sum, **options)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    pipe.close()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("los_fn", "step's loss_fn="),
        ("targets", "step's target="),
        ("timelin", "step's timeline="),
        ("imput", "'input'"),
    ],
)
def test_names_of_a_step(name: str, near: str) -> None:
    """What is no option of a step goes to the model, whose own TypeError has a note."""
    pipe = fxpipe.compile(model(), 2, 2)
    args = () if name == "imput" else (X,)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'") as raised:
        pipe.step(*args, **{name: X})
    assert f"did you mean {near}?" in "\n".join(raised.value.__notes__)
    pipe.close()
