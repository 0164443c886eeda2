"""Stages that run through torch.compile: the same numbers, few compilations, and no silence where it cannot be done."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.errors import CompileError, PlanError
from tests.helpers.marks import mostly_slow, slow_in_turn
from tests.helpers.models import MODELS
from tests.helpers.transparency import assert_same, build, inputs, plain, step
from tests.whole.test_steps import one_step, reference, stepped


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor has compiled before this session, and a run that was killed has left half written, is not looked
    at."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


NAMES = ("tied transformer", "transformer with dropout", "resnet", "running max", "flatten time", "own function")
BATCHES = (8, 7, 2)  # in three micro-batches: full ones, uneven ones, and single samples
SCHEDULES = ("gpipe", "1f1b", "zb-h1")


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


def check_steps(
    name: str,
    schedule: str,
    backend: str,
    devices: int = 2,
    batches: Sequence[int] = BATCHES,
    tol: float = 1e-9,
    **options: Any,
) -> None:
    """Steps of a compiled pipe against the plain model, within `tol`, relative."""
    case = stepped(MODELS[name])
    model, twin = build(case), build(case)
    pipe = fxpipe.compile(twin, devices, 3, schedule=schedule, compile_stages=backend, **{**case.options, **options})

    def run(args: Any, kwargs: Any) -> Any:
        return pipe.step(*args, loss_fn=case.loss, outputs=True, **kwargs)

    try:
        for batch in batches:
            assert_same(one_step(case, twin, batch, run), reference(case, model, batch, 3), tol)
    finally:
        pipe.close()


@pytest.mark.parametrize(
    ("name", "schedule"), mostly_slow(zip(NAMES[3:], SCHEDULES, strict=True), lambda one: one[1] == SCHEDULES[0])
)
def test_compiled_steps_are_the_models(name: str, schedule: str) -> None:
    check_steps(name, schedule, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "checkpoint"),
    [
        ("flatten time", "zb-h1", "except_last"),
        ("transformer with dropout", "1f1b", "always"),
        ("own function", "zb-v", "never"),
    ],
)
def test_compiled_steps_with_backward_as_code_are_the_models(name: str, schedule: str, checkpoint: str) -> None:
    check_steps(name, schedule, "aot_eager", checkpoint=checkpoint, backward="code")


@pytest.mark.slow
def test_compiled_steps_with_replicas_are_the_models() -> None:
    check_steps("own function", "1f1b", "eager", devices=3, replicas=(2, 1))


@pytest.mark.parametrize(
    ("name", "batches", "schedules"),
    slow_in_turn(
        [
            ("own function", BATCHES, SCHEDULES),
            ("flatten time", BATCHES[:2], SCHEDULES),
            ("tied transformer", (9,), SCHEDULES[1:2]),
        ],
        3,
    ),
)
def test_steps_by_inductor_are_the_models(name: str, batches: Sequence[int], schedules: Sequence[str]) -> None:
    """In one process: what it compiles for the first schedule, three seconds for each kernel, is there for the others.
    Single samples are kernels of their own, once; the largest model runs in equal micro-batches under one schedule."""
    for schedule in schedules:
        check_steps(name, schedule, "inductor", batches=batches)


@pytest.mark.parametrize("backward", slow_in_turn(["code", "autograd"], 2))
def test_steps_of_convolutions_by_inductor_are_the_models(backward: str) -> None:
    # Inductor adds up in another order, which is all that is left of the gradient of a bias before a batch norm.
    check_steps("batch norm", "zb-h1", "inductor", batches=(6,), tol=1e-8, backward=backward)


@pytest.mark.long
def test_the_last_states_of_an_lstm_have_their_shape() -> None:
    check_steps("lstm", "1f1b", "aot_eager")


@pytest.mark.parametrize("name", slow_in_turn([name for name in list(MODELS)[::4] if name != "amoebanet"], 3))
def test_models_can_be_compiled(name: str) -> None:
    check_steps(name, "zb-h1", "aot_eager")


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("running max", "never"),
        ("running max", "always"),
        pytest.param("transformer with dropout", "always", marks=pytest.mark.slow),
        pytest.param("transformer with dropout", "never", marks=pytest.mark.slow),
    ],
)
def test_compiled_calls_are_the_models(name: str, checkpoint: str) -> None:
    case = MODELS[name]
    model, twin = build(case), build(case)
    pipe = fxpipe.compile(twin, 2, 3, checkpoint=checkpoint, compile_stages="aot_eager", **case.options)
    for batch in (8, 7):
        torch.manual_seed(batch)
        wanted = plain(case, model, *inputs(case, batch), 3)
        torch.manual_seed(batch)
        assert_same(step(case, twin, pipe, *inputs(case, batch)), wanted)
    pipe.close()


# How often ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = self.norm(torch.tanh(h))
        h = self.drop(h)
        h = self.head(h)
        return h.view(x.shape[0], 3)


def mean(y: Tensor) -> Tensor:
    return y.square().mean()


@pytest.mark.parametrize(
    ("schedule", "backward"),
    [
        pytest.param("gpipe", "autograd", marks=pytest.mark.slow),
        pytest.param("1f1b", "autograd", marks=pytest.mark.slow),
        ("zb-h1", "autograd"),
        ("zb-h1", "code"),
    ],
)
def test_sizes_and_steps_do_not_compile_again(schedule: str, backward: str) -> None:
    backend = Counting()
    pipe = fxpipe.compile(
        Net(), 2, 4, schedule=schedule, cut=["drop"], compile_stages=backend, backward=backward
    )  # fmt: skip
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

    def steps(*batches: int) -> int:
        before = len(backend.graphs)
        for batch in batches:
            optimizer.zero_grad()
            pipe.step(torch.arange(batch) % 10, loss_fn=mean)
            optimizer.step()
        return len(backend.graphs) - before

    # Two pieces (dropout stays outside of the second), with gradients and without; then for any size, and the first
    # once more, for a micro-batch that begins where the batch does. With backward as code the second stage has three
    # pieces, as dropout's mask is drawn between them, and the values for batch norm are counted; each half of backward
    # is one more.
    pieces = 2 if backward == "autograd" else 8
    assert steps(16) <= pieces * (2 if backward == "autograd" else 1)
    assert steps(16, 16) == 0
    assert steps(23) <= pieces * (3 if backward == "autograd" else 2)
    assert steps(23, 16, 12, 9, 33) == 0
    assert ("is not split" in pipe.explain()) == ((schedule, backward) == ("zb-h1", "autograd"))
    pipe.close()


def test_freezing_is_noticed() -> None:
    model = Net()
    pipe = fxpipe.compile(model, 2, 2, compile_stages="aot_eager")
    x = torch.arange(8)
    pipe.step(x, loss_fn=mean)
    model.zero_grad()
    model.head.requires_grad_(False)
    pipe.step(x, loss_fn=mean)
    assert model.head.weight.grad is None
    assert model.embed.weight.grad is not None
    pipe.close()


def test_autocast_is_the_callers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    pipe = fxpipe.compile(model, 2, 2, compile_stages="aot_eager")
    x = torch.randn(6, 8)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(pipe(x), model(x))
        torch.testing.assert_close(pipe(x), model(x))
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), model(x))
    pipe.close()


# What it says ---------------------------------------------------------------------------------------------------------


def test_explain_says_so() -> None:
    pipe = fxpipe.compile(Net(), 2, 2, schedule="zb-h1", compile_stages="eager", backward="autograd")
    pipe.step(torch.arange(4), loss_fn=mean)
    assert "stages compiled by eager; backward of a compiled stage is not split" in pipe.explain()
    assert "compiled" not in fxpipe.compile(Net(), 2, 2, example_inputs=torch.arange(4)).explain()
    pipe.close()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_error_of_the_models_is_its_own(backend: str) -> None:
    pipe = fxpipe.compile(Net(), 2, 2, cut=["drop"], compile_stages=backend)
    for _ in range(2):
        with pytest.raises(IndexError) as caught:
            pipe.step(torch.tensor([1, 2, 3, 11]), loss_fn=mean)
        (note,) = caught.value.__notes__
        assert note.startswith("stage 0, micro-batch 1, at test_compiled_stages.py:")
        assert note.endswith("h = self.embed(x)")
    pipe.step(torch.arange(4), loss_fn=mean)
    pipe.close()


def failing(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
    raise ValueError("no code for tanh here")


def test_a_backend_that_fails_is_an_error() -> None:
    pipe = fxpipe.compile(Net(), 2, 2, cut=["drop"], compile_stages=failing)
    with pytest.raises(CompileError, match=r"Stage0 cannot be compiled by failing: ValueError: no code for tanh here"):
        pipe.step(torch.arange(4), loss_fn=mean)
    pipe.close()


def test_a_stage_that_dynamo_refuses_is_an_error(tmp_path: Path) -> None:
    model = Net()
    pipe = fxpipe.compile(model, 2, 2, cut=["drop"], example_inputs=torch.arange(4))
    pipe.save(tmp_path)
    pipe.close()
    file = tmp_path / "stage0.py"
    text = file.read_text()
    edited = text.replace("import torch.nn.functional as F", "import time\n\nimport torch.nn.functional as F")
    lines = edited.splitlines(keepends=True)
    at = next(k for k, line in enumerate(lines) if "F.embedding" in line)
    lines.insert(at + 1, "        time.sleep(0)\n")
    file.write_text("".join(lines))
    loaded = fxpipe.load(tmp_path, model, compile_stages="eager")
    with (
        pytest.warns(UserWarning, match="time.sleep"),
        pytest.raises(
            CompileError, match=r"(?s)cannot be compiled by eager at test_compiled_stages.py:\d+  embed  h = self"
        ),
    ):
        loaded(torch.arange(4))
    loaded.close()
    plainly = fxpipe.load(tmp_path, model)
    plainly(torch.arange(4))
    plainly.close()


def test_a_loaded_package_compiles(tmp_path: Path) -> None:
    model, backend = Net().eval(), Counting()
    pipe = fxpipe.compile(model, 2, 2, example_inputs=torch.arange(4))
    pipe.save(tmp_path)
    pipe.close()
    loaded = fxpipe.load(tmp_path, model, compile_stages=backend)
    assert torch.equal(loaded(torch.arange(6)), model(torch.arange(6)))
    assert len(backend.graphs) >= 2
    loaded.close()


def test_a_name_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(PlanError, match=r"compile_stages is 'inducer': .*; did you mean 'inductor'\?"):
        fxpipe.compile(Net(), 2, 2, compile_stages="inducer")


@pytest.mark.slow
def test_a_pipe_that_is_gone_leaves_nothing() -> None:
    graphs = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(weakref.ref(graph))
        return graph.forward

    model = Net()
    pipe = fxpipe.compile(model, 2, 2, compile_stages=backend)
    pipe.step(torch.arange(4), loss_fn=mean)
    kinds = [weakref.ref(type(stage)) for stage in pipe.stages]
    del pipe
    gc.collect()
    gc.collect()  # what Dynamo held, which is free now
    assert [kind() for kind in kinds] == [None] * 2
    assert [graph() for graph in graphs] == [None] * len(graphs)


# What stays outside ---------------------------------------------------------------------------------------------------


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0 * self.fc.weight.sum():
            return self.fc(x)
        return -self.fc(x)


@pytest.mark.filterwarnings("ignore:.*is kept whole")
@pytest.mark.parametrize("name", ["opaque", "deferred batch norm"])
def test_what_only_python_can_do_stays(name: str) -> None:
    torch.manual_seed(0)
    inner = Router() if name == "opaque" else nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Sequential(inner), nn.Tanh(), nn.Linear(6, 3))
    twin, backend, x = copy.deepcopy(model), Counting(), torch.randn(8, 4)
    pipe = fxpipe.compile(twin, 1, 2, compile_stages=backend, deferred_batch_norm=name != "opaque")
    plainly = fxpipe.compile(model, 1, 2, deferred_batch_norm=name != "opaque")
    for _ in range(2):
        torch.testing.assert_close(pipe.step(x, loss_fn=mean), plainly.step(x, loss_fn=mean))
    for found, wanted in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)
    for found, wanted in zip(twin.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(found, wanted)
    assert len(backend.graphs) >= 2
    pipe.close()
    plainly.close()
