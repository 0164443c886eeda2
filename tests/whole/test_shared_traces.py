"""A call after a step runs what was traced for the step, if that is sound: outputs, gradients, buffers and all else are
the plain model's, and nothing is captured. A plain step is what it was, though its trace has more."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import NO_TARGET, CallCapture, StepCapture
from fxpipe.ir.graph.graph import Graph
from fxpipe.runtime.microbatch import split_sizes
from tests.helpers.marks import mostly_slow
from tests.helpers.models import MODELS, Case
from tests.helpers.transparency import assert_same, build, finish, inputs, plain
from tests.whole.test_both_modes import captures

CHUNKS = 3
QUICK = ("tied transformer", "batch norm", "dropout", "counter")
# These change attributes of their modules or buffers of theirs, or are one op: their calls are captured by themselves.
ALONE = {"counter", "moving average", "lstm"}


def x(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Pipes:
    """Pipes whose captures are counted in `made`."""

    def __init__(self, made: list[Any]) -> None:
        self.made, self.all = made, list[Any]()

    def compile(self, model: nn.Module, **options: Any) -> Any:
        self.all.append(fxpipe.compile(model, **{"devices": 2, "chunks": CHUNKS} | options))
        return self.all[-1]

    def check(self, pipe: Any, *args: Any, shared: bool = True, known: bool = False) -> Any:
        """A call, its gradients and the buffers are the plain model's. `shared`: whether nothing is captured for it."""
        twin = copy.deepcopy(pipe.model)
        twin.zero_grad()
        pipe.zero_grad()
        count = len(self.made)
        found = pipe(*args)
        assert (len(self.made) == count) == shared
        assert (pipe._state.cache.call_capture.kind is None) == (shared and not known)
        wanted = twin(*args)
        torch.testing.assert_close(found, wanted)
        if isinstance(found, Tensor) and found.requires_grad:
            found.square().sum().backward()
            wanted.square().sum().backward()
        for one, other in zip(pipe.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        for one, other in zip(pipe.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(one, other)
        return found


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    with captures() as made:
        found = Pipes(made)
        yield found
    for pipe in found.all:
        pipe.close()


# All models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mostly_slow(MODELS, QUICK.__contains__, every=3))
def test_models_of_the_table(name: str, pipes: Pipes) -> None:
    case = MODELS[name]
    if "own-gradients" in case.traits or case.reduce is not None:
        pytest.skip("its step takes another loss")
    model = build(case)
    pipe = pipes.compile(model, **case.options)
    args, kwargs = inputs(case, 7)
    pipe.step(*args, loss_fn=case.loss, **kwargs)
    for training in (True, False):
        pipe.train(training)
        twin = copy.deepcopy(model)
        twin.zero_grad()
        model.zero_grad()
        args, kwargs = inputs(case, 7)
        torch.manual_seed(5)
        wanted = plain(case, twin, args, kwargs, CHUNKS, deferred="deferred_batch_norm" in case.options)
        args, kwargs = inputs(case, 7)
        torch.manual_seed(5)
        output = pipe(*args, **kwargs)
        if training:
            assert len(pipes.made) == (2 if name in ALONE else 1)
        assert_same(finish(case, model, args, kwargs, output), wanted, case.tol)


def graphs(case: Case) -> Iterator[tuple[StepCapture, Graph]]:
    """The captures of a plain step, whose trace has the model's outputs, and whose has not."""
    how = {key: value for key, value in case.options.items() if key in ("batch_dim", "reduce")}
    for whole in (True, False):
        capture = StepCapture(
            build(case), **how, sizes=partial(split_sizes, chunks=CHUNKS), dynamic=True, both_modes=True, whole=whole
        )
        args, kwargs = inputs(case, 7)
        yield capture, capture.capture(args, kwargs, NO_TARGET, case.loss, False)


def all_of(graph: Graph) -> tuple[Any, ...]:
    ops = [(op.name, str(op.args), op.writes, op.draw, op.type) for op in graph.ops]
    return str(graph), str(graph.totals), graph.inputs, graph.sizes, graph.conditions, graph.outputs, ops


@pytest.mark.parametrize("name", mostly_slow(MODELS, QUICK.__contains__, every=3))
def test_the_graph_of_a_plain_step_is_the_same(name: str) -> None:
    with captures() as made:
        (one, graph), (_, other) = graphs(MODELS[name])
    assert all_of(graph) == all_of(other)
    assert len(made) == 2
    assert one.call_capture.whole


# What a call may be ---------------------------------------------------------------------------------------------------


def test_nothing_is_captured(pipes: Pipes, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    pipe = pipes.compile(Net())
    with caplog.at_level(logging.INFO, logger="fxpipe"):
        pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)
        assert sum("capturing" in line for line in caplog.messages) == 1
        step = pipe.build
        pipes.check(pipe, x(6, 8))
        assert pipe.build.files["stage0.py"] == step.files["stage0.py"]
        assert pipe.build.plan.stages[1].ops == step.plan.stages[1].ops[:1]
        pipes.check(pipe, x(2, 8))  # fewer samples than micro-batches
        pipe.eval()
        pipes.check(pipe, x(7, 8))
        assert sum("capturing" in line for line in caplog.messages) == 1
    graph = pipe.build.graph
    assert ([item.path for item in graph.inputs], graph.loss, graph.result) == (["x"], None, graph.result)
    assert len(graph.ops) == 3
    assert "cpu:1" in pipe.explain()
    pipe.save(tmp_path / "saved")
    loaded = fxpipe.load(tmp_path / "saved", pipe.model)
    for rows in (6, 1):
        torch.testing.assert_close(loaded(x(rows, 8)), pipe.model(x(rows, 8)))
    loaded.close()


def test_the_graph_is_that_of_a_call() -> None:
    """But for the name of the last op, which is that of a variable of the captured function."""
    step = StepCapture(Net(), sizes=lambda rows: (rows,), whole=True)
    found: list[Graph] = []

    def run(graph: Graph, given: tuple[Any, ...]) -> tuple[Any, ...]:
        found.append(graph)
        return tuple(torch.ones(()) if graph.loss else torch.ones(6, 8) for _ in graph.outputs)

    step.step((x(6, 8),), {}, x(6, 8), F.mse_loss, False, run)
    assert step.call((x(6, 8),), {}, run) is not None
    own = CallCapture(Net(), sizes=lambda rows: (rows,)).capture((x(6, 8),), {})
    assert str(found[1]).replace("output", "linear_1") == str(own).replace("output", "linear_1")
    assert (found[1].inputs, found[1].sizes, found[1].conditions) == (own.inputs, own.sizes, own.conditions)
    assert [(op.writes, op.draw, op.type) for op in found[1].ops] == [(op.writes, op.draw, op.type) for op in own.ops]


def test_outputs_need_no_second_trace(pipes: Pipes) -> None:
    pipe = pipes.compile(Net())
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)
    loss, y = pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss, outputs=True)
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)
    assert len(pipes.made) == 1
    torch.testing.assert_close(y, pipe.model(x(6, 8)).detach())
    torch.testing.assert_close(loss, F.mse_loss(y, x(6, 8)))


@dataclass
class Found:
    hidden: Tensor
    parts: dict[str, Any]


class Nested(Net):
    def forward(self, x: Tensor, *, scale: Tensor, far: float = 1.0) -> Any:
        h = self.a(x) * scale
        return Found(h, {"y": self.b(h) * far, "x": x, "rows": x.shape[0], "w": self.a.weight})


def test_nests_and_keywords(pipes: Pipes) -> None:
    model = Nested()
    pipe = pipes.compile(model)
    how = {"scale": x(6, 1), "far": 0.5}
    pipe.step(x(6, 8), target={"y": x(6, 8)}, loss_fn=lambda found, t: F.mse_loss(found.parts["y"], t["y"]), **how)
    given = x(6, 8)
    found, wanted = pipe(given, **how), model(given, **how)
    assert len(pipes.made) == 1
    assert type(found) is Found
    torch.testing.assert_close(vars(found), vars(wanted))
    assert found.parts["x"] is given
    assert found.parts["w"] is model.a.weight


class OwnLoss(Net):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = super().forward(x)
        return {"loss": F.mse_loss(y, labels), "y": y}


def test_a_model_with_its_own_loss(pipes: Pipes) -> None:
    pipe = pipes.compile(OwnLoss())
    pipe.step(x(6, 8), x(6, 8))
    pipes.check(pipe, x(6, 8), x(6, 8))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def words(rows: int, length: int) -> Tensor:
    return torch.randint(0, 11, (rows, length), generator=torch.Generator().manual_seed(rows))


def test_other_lengths(pipes: Pipes) -> None:
    pipe = pipes.compile(Words())
    pipe.step(words(6, 5), target=words(6, 5), loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
    pipes.check(pipe, words(6, 5))
    pipes.check(pipe, words(7, 9))
    pipe.step(words(6, 6), target=words(6, 6), loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
    pipes.check(pipe, words(4, 3))


def test_the_target_is_an_argument(pipes: Pipes) -> None:
    pipe = pipes.compile(Net())
    given = x(6, 8)
    pipe.step(given, target={"same": given, "other": x(6, 8)}, loss_fn=lambda y, t: F.mse_loss(y, t["same"]))
    pipes.check(pipe, x(7, 8))


def test_no_target(pipes: Pipes) -> None:
    pipe = pipes.compile(Net())
    pipe.step(x(6, 8), loss_fn=lambda y: y.square().mean())
    pipes.check(pipe, x(7, 8))


def test_replaced_parameters(pipes: Pipes) -> None:
    pipe = pipes.compile(Net())
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)
    pipes.check(pipe, x(6, 8))
    pipe.model.a.weight = nn.Parameter(x(8, 8))
    pipes.check(pipe, x(6, 8))


def test_the_loss_has_tensors_of_its_own(pipes: Pipes) -> None:
    pipe, head, weight = pipes.compile(Net()), nn.Linear(8, 3), torch.rand(3)
    pipe.step(x(6, 8), target=words(6, 1)[:, 0] % 3, loss_fn=lambda y, t: F.cross_entropy(head(y), t, weight))
    pipes.check(pipe, x(7, 8))
    assert {state.path for state in pipe.build.graph.states} == {"a.weight", "a.bias", "b.weight", "b.bias"}


def test_dropout_draws_as_in_a_call_of_its_own(pipes: Pipes) -> None:
    found = []
    for step in (True, False):
        torch.manual_seed(0)
        pipe = pipes.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 8), nn.Dropout(0.4)))
        if step:
            pipe.step(x(6, 8), target=x(6, 8), loss_fn=lambda y, t: F.mse_loss(F.dropout(y, 0.3), t))
        torch.manual_seed(3)
        found.append((pipe(x(6, 8)), torch.get_rng_state()))
        assert (pipe._state.cache.call_capture.kind is None) == step
    torch.testing.assert_close(*found)


class Routed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x.sin()


@pytest.mark.filterwarnings("ignore:1 is kept whole")
def test_a_part_of_the_model_is_kept_whole(pipes: Pipes) -> None:
    pipe = pipes.compile(nn.Sequential(nn.Linear(8, 8), Routed(), nn.Linear(8, 8)), chunks=1)
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)
    for seed in (1, 2, 3):
        pipes.check(pipe, x(6, 8, seed=seed))
    pipe.eval()
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)


# What must be captured by itself --------------------------------------------------------------------------------------


def test_another_mode_is_captured_by_itself(pipes: Pipes) -> None:
    pipe = pipes.compile(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), chunks=1)
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)
    pipes.check(pipe, x(6, 8))
    pipe.eval()
    pipes.check(pipe, x(6, 8), shared=False)
    pipes.check(pipe, x(6, 8), known=True)
    pipe.train()
    pipes.check(pipe, x(6, 8), shared=False)  # a pipe that has captured a call captures all of them


def test_other_arguments_are_captured_by_themselves(pipes: Pipes) -> None:
    for given in (x(6, 2, 8), x(6, 8).requires_grad_()):
        pipe = pipes.compile(Net())
        pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)
        pipes.check(pipe, given, shared=False)
        assert given.grad is None or given.grad.abs().sum() > 0
        assert given.requires_grad == (given.grad is not None)


CONTEXTS: dict[str, tuple[Callable[[], Any], bool]] = {
    "no_grad": (torch.no_grad, True),
    "inference_mode": (torch.inference_mode, True),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), False),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_other_modes_of_torch(name: str, pipes: Pipes) -> None:
    context, shared = CONTEXTS[name]
    pipe = pipes.compile(Net())
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)
    with context():
        found, wanted = pipe(x(6, 8)), pipe.model(x(6, 8))
    torch.testing.assert_close(found, wanted)
    assert found.requires_grad == wanted.requires_grad
    assert (len(pipes.made) == 1) == shared
    pipes.check(pipe, x(6, 8), shared=shared)


def asks(y: Tensor, target: Tensor) -> Tensor:
    """A loss that asks whether there are gradients, which does not matter to the model."""
    return F.mse_loss(y, target) if y.requires_grad else y.sum() * 0


def test_a_loss_may_ask_for_gradients(pipes: Pipes) -> None:
    pipe = pipes.compile(Net())
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=asks)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x(6, 8)), pipe.model(x(6, 8)))
    assert len(pipes.made) == 1


class AsksForGradients(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if torch.is_grad_enabled() else y * 3


def test_a_model_that_asks_for_gradients(pipes: Pipes) -> None:
    pipe = pipes.compile(AsksForGradients())
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x(6, 8)), pipe.model(x(6, 8)))
    assert len(pipes.made) == 2


class CountsWords(nn.Module):
    """Returns its own loss, a mean over those of its words that count, beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(self.embed(ids))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_totals_of_the_model(pipes: Pipes) -> None:
    pipe = pipes.compile(CountsWords().double())
    for rows in (7, 6):
        ids = torch.arange(rows * 5).reshape(rows, 5) % 11
        labels = ids.masked_fill(ids > rows, -100)
        pipe.step(ids, labels)
        pipe.zero_grad()
        found = pipe(ids, labels)
        found["loss"].backward()
        twin = copy.deepcopy(pipe.model)
        twin.zero_grad()
        wanted = twin(ids, labels)
        wanted["loss"].backward()
        torch.testing.assert_close(found, wanted)
        for one, other in zip(pipe.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    assert len(pipes.made) == 1


class Flag:
    on = None

    def __init__(self) -> None:
        self.on = None


FLAG = Flag()


class SetsAFlag(Net):
    """Sets a flag for a while, which is nobody's attribute."""

    left: object = None

    def forward(self, x: Tensor) -> Tensor:
        FLAG.on = True
        y = super().forward(x)
        FLAG.on = self.left
        return y


def test_a_flag_that_is_set_back_changes_nothing(pipes: Pipes) -> None:
    pipe = pipes.compile(SetsAFlag())
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)
    assert len(pipes.made) == 1
    pipes.check(pipe, x(6, 8))
    assert FLAG.on is None


def test_wrong_arguments(pipes: Pipes) -> None:
    """The errors are those of a call, and speak of no target."""
    pipe = pipes.compile(Net())
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)
    for given, error in (((), TypeError), ((x(6, 8), x(6, 8)), TypeError), ((x(0, 8),), fxpipe.errors.InputError)):
        with pytest.raises(error) as raised:
            pipe(*given)
        assert "target" not in str(raised.value)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        pipe(x(6, 7))
    pipes.check(pipe, x(6, 8), shared=True)


def test_an_exception_of_the_run(pipes: Pipes) -> None:
    pipe = pipes.compile(Words())
    pipe.step(words(6, 5), loss_fn=lambda y: y.square().mean())
    with pytest.raises(IndexError, match="out of range"):
        pipe(words(6, 5) + 20)
    assert len(pipes.made) == 1
    pipes.check(pipe, words(6, 5))


class Counted:
    """An object that counts how often it computes a loss."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, y: Tensor, t: Tensor) -> Tensor:
        self.count += 1
        return F.mse_loss(y, t)

    def loss(self, y: Tensor, t: Tensor) -> Tensor:
        return self(y, t)


class Kept(nn.Module):
    """A loss with a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.ones(8))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        self.center.mul_(0.5)
        return F.mse_loss(y * self.center, t)


BOX: dict[str, Any] = {}
LAST: Any = None


def globally(y: Tensor, t: Tensor) -> Tensor:
    global LAST
    LAST = F.mse_loss(y, t)
    return LAST * 1


def into_a_dict(y: Tensor, t: Tensor) -> Tensor:
    BOX["last"] = F.mse_loss(y, t)
    return BOX["last"] * 1


def at_random(y: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(y, t) * random.randint(1, 3)


def by_branches(y: Tensor, t: Tensor) -> Tensor:
    BOX["count"] = BOX.get("count", 0) + 1
    return F.mse_loss(y, t) if t.sum() > 0 else F.l1_loss(y, t)


def state() -> tuple[Any, ...]:
    return dict(BOX), LAST, random.getstate()


@pytest.mark.filterwarnings("ignore:loss_fn is kept whole")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("loss", [globally, into_a_dict, at_random, by_branches, Counted(), Counted().loss])
@pytest.mark.parametrize("outputs", [False, True])
def test_a_loss_that_changes_something(outputs: bool, loss: Any, pipes: Pipes) -> None:
    BOX.clear()
    pipe = pipes.compile(Net(), reduce="mean")
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=loss, outputs=outputs)
    owner = getattr(loss, "__self__", loss)
    before, count = state(), getattr(owner, "count", None)
    pipes.check(pipe, x(6, 8), shared=False)
    assert state() == before
    assert getattr(owner, "count", None) == count


def test_a_loss_that_writes_its_buffer(pipes: Pipes) -> None:
    pipe, loss = pipes.compile(Net(), chunks=1), Kept()
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=loss)
    pipes.check(pipe, x(6, 8), shared=False)
    torch.testing.assert_close(loss.center, torch.full((8,), 0.5))


def test_a_loss_that_writes_a_buffer_of_the_model(pipes: Pipes) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    pipe = pipes.compile(model, chunks=1)
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=lambda y, t: F.mse_loss(model[1](y), t))
    pipes.check(pipe, x(6, 8), shared=False)


@pytest.mark.parametrize("view", [False, True])
def test_a_loss_that_writes_into_the_output(view: bool, pipes: Pipes) -> None:
    def loss(y: Tensor, t: Tensor) -> Tensor:
        part = y.view(-1) if view else y
        part.mul_(0.5)
        return F.mse_loss(part.view(t.shape), t)

    pipe = pipes.compile(Net())
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=loss)
    pipes.check(pipe, x(6, 8), shared=False)


OPTIONS: dict[str, dict[str, Any]] = {
    "transforms": {"transforms": [lambda graph: graph]},
    "passes": {"passes": [lambda program, context: program]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_under_which_a_call_is_captured(name: str, pipes: Pipes) -> None:
    pipe = pipes.compile(Net(), **OPTIONS[name])
    pipe.step(x(6, 8), target=x(6, 8), loss_fn=F.mse_loss)
    pipes.check(pipe, x(6, 8), shared=False)


# Plain steps of models that keep what they return ---------------------------------------------------------------------


class Keeps(Net):
    """Keeps its output, by itself or in an object, beside returning it."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last = self.make(y)
        return y


class Slotted:
    __slots__ = ("y",)

    def __init__(self, y: Tensor) -> None:
        self.y = y


MAKES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], int]] = {
    "itself": (lambda y: y, lambda kept: kept, 1),
    "a nest": (lambda y: {"y": [y]}, lambda kept: kept["y"][0], 1),
    "an object": (Slotted, lambda kept: kept.y, 2),
}


@pytest.mark.parametrize("name", MAKES)
def test_attributes_have_the_output(name: str, pipes: Pipes) -> None:
    make, kept, traces = MAKES[name]
    pipe = pipes.compile(Keeps(make))
    for seed in (1, 2):
        given = x(6, 8, seed=seed)
        pipe.step(given, target=given * 2, loss_fn=F.mse_loss)
        torch.testing.assert_close(kept(pipe.model.last).detach(), Net.forward(pipe.model, given).detach())
    assert len(pipes.made) == traces
    pipes.check(pipe, x(6, 8), shared=False)


def test_a_dict_has_the_output(pipes: Pipes) -> None:
    box: dict[str, Tensor] = {}

    def hook(module: nn.Module, args: Any, y: Tensor) -> None:
        box["y"] = y

    model = Net()
    model.register_forward_hook(hook)
    pipe = pipes.compile(model)
    for seed in (1, 2):
        given = x(6, 8, seed=seed)
        pipe.step(given, target=given * 2, loss_fn=F.mse_loss)
        torch.testing.assert_close(box["y"].detach(), model.forward(given).detach())


class Writes(Net):
    """Returns two values of one memory, of which the loss reads one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(self.a(x))
        part = y.view(-1, 4)
        part.add_(1)
        return y, part


class WritesAndKeeps(Writes):
    """Keeps the other one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.last, part = super().forward(x)
        return self.last, part


@pytest.mark.parametrize("kind", [Writes, WritesAndKeeps])
def test_writes_that_nobody_reads(kind: type[nn.Module]) -> None:
    case = Case(kind, lambda rows: ((x(rows, 8).double(),), {}), frozenset(), loss=lambda out: out[1].square().sum())
    (_, graph), (_, other) = graphs(case)
    assert all_of(graph) == all_of(other)


class Odd(Net):
    """Returns what cannot be built again."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (each for each in (y, y.sum(dim=1)))


def test_what_cannot_be_returned(pipes: Pipes) -> None:
    pipe = pipes.compile(Odd())
    loss = pipe.step(x(6, 8), target=x(6, 8), loss_fn=lambda y, t: F.mse_loss(next(y), t))
    torch.testing.assert_close(loss, F.mse_loss(next(pipe.model(x(6, 8))), x(6, 8)).detach())
