"""What users do with `pipe.step`: accumulate, scale, freeze, hook, save and load, and mix it with calls of the pipe."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError, FxpipeError, InputError, PackageError
from fxpipe.ir.schedule.schedule import Action
from tests.helpers.marks import mostly_slow
from tests.helpers.transparency import split

SCHEDULES = ["gpipe", "1f1b", "zb-h1"]
CHUNKS = 4
generator = torch.Generator().manual_seed(1)
X = torch.randn(8, 8, dtype=torch.float64, generator=generator)
Y = torch.randn(8, 8, dtype=torch.float64, generator=generator)


class Net(nn.Module):
    """Three stages' worth; the first weight is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        h = torch.tanh(self.first(x))
        return F.linear(self.norm(self.middle(h)) + h, self.first.weight) * scale


Make = Callable[..., tuple[fxpipe.Pipe, nn.Module]]


@pytest.fixture
def make() -> Iterator[Make]:
    """A pipe, and a plain copy of its model."""
    made: list[fxpipe.Pipe] = []

    def pipe(kind: Callable[[], nn.Module] = Net, **options: Any) -> tuple[fxpipe.Pipe, nn.Module]:
        torch.manual_seed(0)
        model = kind().double()
        made.append(fxpipe.compile(model, **{"devices": 3, "chunks": CHUNKS, "schedule": "1f1b"} | options))
        return made[-1], copy.deepcopy(model)

    yield pipe
    for one in made:
        one.close()


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def same_gradients(pipe: nn.Module, plain: nn.Module) -> None:
    for (name, a), (_, b) in zip(pipe.named_parameters(), plain.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12, msg=name)


def plain_step(plain: nn.Module, x: Tensor = X, y: Tensor = Y) -> Tensor:
    loss = F.mse_loss(plain(x), y)
    loss.backward()
    return loss.detach()


def step(pipe: Any, x: Tensor = X, y: Tensor = Y, **more: Any) -> Any:
    return pipe.step(x, target=y, loss_fn=F.mse_loss, **more)


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False], ids=["optimizer before", "after"])
@pytest.mark.parametrize("schedule", mostly_slow(SCHEDULES, ("1f1b", "zb-h1").__contains__))
def test_training(make: Make, schedule: str, before: bool) -> None:
    """Several steps accumulate, as several backwards do, for batches of any size."""
    pipe, plain = make(schedule=schedule)
    if not before:
        close(step(pipe), plain_step(plain))
    ours, theirs = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (pipe, plain))
    for rows in (8, 7, 2, 1, 8):
        for factor in (1, 2):
            close(step(pipe, X[:rows] * factor, Y[:rows]), plain_step(plain, X[:rows] * factor, Y[:rows]))
            same_gradients(pipe, plain)
        for net, optimizer in ((pipe, ours), (plain, theirs)):
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    close(list(pipe.parameters()), list(plain.parameters()))


def test_steps_and_calls_in_turn(make: Make) -> None:
    pipe, plain = make()
    for _ in range(2):
        step(pipe)
        plain_step(plain)
        F.mse_loss(pipe(X), Y).backward()
        plain_step(plain)
        same_gradients(pipe, plain)
        with torch.no_grad():
            close(pipe(X), plain(X))


def test_a_step_inside_of_an_open_call(make: Make) -> None:
    """The graph of a call that is open keeps its own stages' tensors."""
    pipe, plain = make()
    y, wanted = pipe(X), plain(X)
    step(pipe)
    plain_step(plain)
    y.sum().backward()
    wanted.sum().backward()
    same_gradients(pipe, plain)


def test_the_gradients_are_the_users(make: Make) -> None:
    """Memory of one parameter's gradient is no other's, and a tensor that was there is added to in place."""
    pipe, plain = make()
    step(pipe)
    held = [p.grad for p in pipe.parameters()]
    assert len({grad.untyped_storage().data_ptr() for grad in held}) == len(held)
    assert not any(grad.requires_grad for grad in held)
    step(pipe)
    assert all(p.grad is grad for p, grad in zip(pipe.parameters(), held, strict=True))
    for _ in range(2):
        plain_step(plain)
    same_gradients(pipe, plain)


def test_eval_mode(make: Make) -> None:
    pipe, plain = make(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8)))
    step(pipe)
    pipe.zero_grad()
    plain.load_state_dict(pipe.state_dict())
    pipe.eval()
    plain.eval()
    close(step(pipe), plain_step(plain))
    same_gradients(pipe, plain)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_step(make: Make, context: Any) -> None:
    pipe, _ = make()
    with context(), pytest.raises(FxpipeError, match="computes gradients, which are switched off"):
        step(pipe)
    step(pipe)


def test_frozen_and_later_not(make: Make) -> None:
    pipe, plain = make()
    for frozen in (["first"], ["first", "middle"], [], ["norm"]):
        for net in (pipe, plain):
            net.zero_grad()
            net.requires_grad_(True)
            for name in frozen:
                net.get_submodule(name).requires_grad_(False)
        close(step(pipe), plain_step(plain))
        same_gradients(pipe, plain)


def test_nothing_to_train(make: Make) -> None:
    pipe, _ = make()
    pipe.requires_grad_(False)
    with pytest.raises(CaptureError, match="needs no gradient"):
        step(pipe)


# Hooks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_see_the_whole_gradient_once(make: Make, schedule: str) -> None:
    pipe, plain = make(schedule=schedule)
    seen: list[dict[str, list[Tensor]]] = [{}, {}]
    for net, found in zip((pipe, plain), seen, strict=True):
        for name, parameter in net.named_parameters():
            parameter.register_hook(lambda grad, n=name, f=found: f.setdefault(n, []).append(grad.clone()))
            parameter.register_post_accumulate_grad_hook(
                lambda p, n=name, f=found: f.setdefault(f"after {n}", []).append(p.grad.clone())
            )
    for _ in range(2):
        step(pipe)
        plain_step(plain)
    assert seen[0].keys() == seen[1].keys()
    assert {len(grads) for grads in seen[0].values()} == {2}
    close(seen[0], seen[1])
    same_gradients(pipe, plain)


def test_a_hook_that_changes_the_gradient(make: Make) -> None:
    pipe, plain = make()
    for net in (pipe, plain):
        net.first.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    step(pipe)
    plain_step(plain)
    same_gradients(pipe, plain)


def descend(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def test_an_optimizer_in_the_hooks(make: Make) -> None:
    """Each parameter is stepped as soon as its gradient is there, and the gradient let go."""
    pipe, plain = make()
    for net in (pipe, plain):
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
    for _ in range(3):
        close(step(pipe), plain_step(plain))
    close(list(pipe.parameters()), list(plain.parameters()))


# Inputs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rows", mostly_slow([8, 7], (7).__eq__))
def test_inputs_with_a_gradient(make: Make, schedule: str, rows: int) -> None:
    """A leaf with a hook, and a tensor that comes from a graph of the user's."""
    pipe, plain = make(schedule=schedule)
    torch.manual_seed(3)
    embed, twin = (nn.Linear(8, 8).double() for _ in range(2))
    twin.load_state_dict(embed.state_dict())
    found: list[list[Tensor]] = []
    for net, encoder, take in ((pipe, embed, step), (plain, twin, plain_step)):
        x, y = X[:rows].clone().requires_grad_(), Y[:rows].clone().requires_grad_()
        hooked: list[Tensor] = []
        x.register_hook(hooked.append)
        take(net, encoder(x), y)
        assert len(hooked) == 1
        found.append([x.grad, y.grad, *hooked, encoder.weight.grad, encoder.bias.grad])
    close(found[0], found[1])
    same_gradients(pipe, plain)


def test_an_input_for_every_micro_batch(make: Make) -> None:
    class Scaled(Net):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x) * scale

    pipe, plain = make(Scaled, batch_dim={"scale": None})
    scales = [torch.linspace(0, 1, 8, dtype=torch.float64).requires_grad_() for _ in range(2)]
    pipe.step(X, scales[0], target=Y, loss_fn=F.mse_loss)
    F.mse_loss(plain(X, scales[1]), Y).backward()
    close(scales[0].grad, scales[1].grad)
    same_gradients(pipe, plain)


def test_one_tensor_as_two_inputs(make: Make) -> None:
    pipe, plain = make()
    found = []
    for net, take in ((pipe, step), (plain, plain_step)):
        x = X.clone().requires_grad_()
        take(net, x, x)
        found.append(x.grad)
    close(found[0], found[1])


# Losses ---------------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class OwnLoss(Net):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Output:
        logits = super().forward(x)
        return Output(logits, None if labels is None else F.cross_entropy(logits, labels))


def test_a_model_that_returns_its_loss(make: Make) -> None:
    pipe, plain = make(OwnLoss)
    labels = torch.tensor([0, 1, 2, 3, -100, -100, 6, 7])
    loss, output = pipe.step(X, labels=labels, outputs=True)
    wanted = plain(X, labels=labels)
    wanted.loss.backward()
    assert type(output) is Output
    close((loss, output.loss, output.logits), (wanted.loss.detach(), wanted.loss.detach(), wanted.logits.detach()))
    assert not any(t.requires_grad for t in (loss, output.loss, output.logits))
    same_gradients(pipe, plain)


def nested_loss(output: Tensor, target: Any) -> Tensor:
    first, rest = target
    return F.mse_loss(output, first) + F.cross_entropy(output, rest["labels"]) * rest["weight"]


def test_nested_targets_and_keyword_arguments(make: Make) -> None:
    pipe, plain = make()
    labels = torch.arange(8)
    for weight in (1.0, 0.5):
        target = (Y, {"labels": labels, "weight": weight})
        loss = pipe.step(X, scale=2.0, target=target, loss_fn=nested_loss)
        wanted = nested_loss(plain(X, scale=2.0), target)
        wanted.backward()
        close(loss, wanted.detach())
        same_gradients(pipe, plain)


def test_unreduced(make: Make) -> None:
    """One loss for each sample: all of them come back, and the gradients are those of their sum."""
    pipe, plain = make()
    for rows in (8, 7):
        losses = pipe.step(X[:rows], target=torch.arange(rows), loss_fn=nn.CrossEntropyLoss(reduction="none"))
        wanted = F.cross_entropy(plain(X[:rows]), torch.arange(rows), reduction="none")
        wanted.sum().backward()
        close(losses, wanted.detach())
    same_gradients(pipe, plain)


class Proxy(nn.Module):
    """A loss with parameters and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output @ self.centres, target)


def test_a_loss_with_parameters(make: Make) -> None:
    pipe, plain = make()
    ours, theirs = Proxy(), Proxy()
    for _ in range(2):
        pipe.step(X, target=torch.arange(8), loss_fn=ours)
        theirs(plain(X), torch.arange(8)).backward()
    close(ours.centres.grad, theirs.centres.grad)
    assert ours.calls == 2 * CHUNKS
    same_gradients(pipe, plain)


# Precision ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_gradient_scaler(make: Make, schedule: str) -> None:
    pipe, plain = make(schedule=schedule)
    nets = (pipe, step), (plain, plain_step)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in nets]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net, _ in nets]
    bad = X.clone()
    bad[5, 3] = torch.inf
    for x in (X, bad, X, X, X):
        close(pipe.step(x, target=Y, loss_fn=F.mse_loss, scaler=scalers[0]), loss := F.mse_loss(plain(x), Y).detach())
        scalers[1].scale(F.mse_loss(plain(x), Y)).backward()
        same_or_both_odd(pipe, plain)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        close(list(pipe.parameters()), list(plain.parameters()))
    assert loss.isfinite()


def same_or_both_odd(pipe: nn.Module, plain: nn.Module) -> None:
    for a, b in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(
    ("schedule", "checkpoint"),
    mostly_slow(product(SCHEDULES, ["never", "always"]), [("1f1b", "always"), ("zb-h1", "never")].__contains__),
)
def test_autocast(make: Make, schedule: str, checkpoint: str) -> None:
    """Equal to the plain model's own micro-batches inside autocast, to the last bit."""
    pipe, plain = make(lambda: Net().float(), schedule=schedule, checkpoint=checkpoint)
    pipe.float()
    plain.float()
    x, y = X.float(), Y.float()
    losses = []
    # The order in which the micro-batches' gradients are added up.
    order = range(CHUNKS) if schedule != "gpipe" else reversed(range(CHUNKS))
    pieces = list(zip(split(x, CHUNKS, 0), split(y, CHUNKS, 0), strict=True))
    for i in order:
        with torch.autocast("cpu", torch.bfloat16):
            output = plain(pieces[i][0])
            loss = F.mse_loss(output, pieces[i][1])
        losses.append(loss)
        (loss / CHUNKS).backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss, output = pipe.step(x, target=y, loss_fn=F.mse_loss, outputs=True)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(loss, torch.stack(losses).mean().detach())
    for (name, a), (_, b) in zip(pipe.named_parameters(), plain.named_parameters(), strict=True):
        # A weight that is used by two stages is rounded to bfloat16 in each of them, and their gradients added after.
        tolerance = 1e-2 if name == "first.weight" else 1e-6
        torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance, msg=name)
    pipe.zero_grad()
    exact = step(pipe, x, y)
    assert exact != loss, "the context is part of the kind of call"


# Saved, copied, from several threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_saved_and_loaded(make: Make, tmp_path: Path, schedule: str) -> None:
    pipe, plain = make(schedule=schedule)
    wanted = step(pipe, outputs=True)
    pipe.save(tmp_path / "out")
    loaded = fxpipe.load(tmp_path / "out", plain)
    for more in ({}, {"loss_fn": F.mse_loss}):
        loaded.zero_grad()
        close(loaded.step(X, target=Y, outputs=True, **more), wanted)
        same_gradients(loaded, pipe)
    close(loaded.step(X[:7], target=Y[:7]), F.mse_loss(plain(X[:7]), Y[:7]).detach())
    loaded.step(X, target=Y, timeline=True)
    assert loaded.timeline.name == schedule
    assert "loss, output = pipe.step(x, target=target, outputs=True)" in (tmp_path / "out/__init__.py").read_text()
    with pytest.raises(InputError, match="saved after a step"):
        loaded(X)
    with pytest.raises(InputError, match="another kind of call"):
        loaded.step(X, 3.0, target=Y)
    with pytest.raises(InputError, match="another kind of call"):
        loaded.step(X)
    with torch.no_grad(), pytest.raises(FxpipeError, match="switched off"):
        loaded.step(X, target=Y)
    loaded.close()


def test_saved_without_outputs(make: Make, tmp_path: Path) -> None:
    pipe, plain = make()
    loss = step(pipe)
    pipe.save(tmp_path / "step")
    loaded = fxpipe.load(tmp_path / "step", plain)
    close(loaded.step(X, target=Y), loss)
    same_gradients(loaded, pipe)
    with pytest.raises(InputError, match="the loss alone"):
        loaded.step(X, target=Y, outputs=True)
    loaded.close()
    pipe(X)
    pipe.save(tmp_path / "call")
    loaded = fxpipe.load(tmp_path / "call", plain)
    with pytest.raises(InputError, match="saved after a call"):
        loaded.step(X, target=Y)
    loaded.close()


def test_saved_with_a_loss_that_has_parameters(make: Make, tmp_path: Path) -> None:
    pipe, plain = make()
    ours, theirs = Proxy(), Proxy()
    loss = pipe.step(X, target=torch.arange(8), loss_fn=ours)
    pipe.save(tmp_path / "out")
    loaded = fxpipe.load(tmp_path / "out", plain)
    with pytest.raises(PackageError, match=r"loss_fn\.centres: missing"):
        loaded.step(X, target=torch.arange(8))
    for again in (theirs, copy.deepcopy(theirs)):
        loaded.zero_grad()
        close(loaded.step(X, target=torch.arange(8), loss_fn=again), loss)
        close(again.centres.grad, ours.centres.grad)
        same_gradients(loaded, pipe)
        again.zero_grad()
    loaded.close()


def test_copies(make: Make) -> None:
    pipe, plain = make()
    step(pipe)
    other = copy.deepcopy(pipe)
    close(step(other), plain_step(plain))
    same_gradients(other, plain)
    same_gradients(pipe, plain)
    other.close()


@pytest.mark.parametrize("shared", [False, True], ids=["a pipe each", "one pipe"])
def test_two_threads(make: Make, shared: bool) -> None:
    pipes = [make()] * 2 if shared else [make(), make()]
    errors: list[BaseException] = []

    def work(pipe: fxpipe.Pipe) -> None:
        try:
            for rows in (8, 7, 8, 2, 8):
                step(pipe, X[:rows], Y[:rows])
                with torch.no_grad():
                    pipe(X)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(pipe,)) for pipe, _ in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors[0]
    for pipe, plain in pipes[: 1 if shared else 2]:
        for _ in range(2 if shared else 1):
            for rows in (8, 7, 8, 2, 8):
                plain_step(plain, X[:rows], Y[:rows])
        same_gradients(pipe, plain)


# Looking --------------------------------------------------------------------------------------------------------------


def recomputed(pipe: fxpipe.Pipe) -> set[tuple[int, int]]:
    """The stages and micro-batches that are computed again: not those whose backward follows at once."""
    modes = {stage.index: stage.checkpoint for stage in pipe.build.program.stages}
    last = {"never": -1, "except_last": CHUNKS - 2, "always": CHUNKS - 1}
    pairs = [pair for row in pipe.schedule.devices for pair in pairwise(row)]
    return {a[1:] for a, b in pairs if a.kind == "F" and a[1:] != b[1:] and a.micro_batch <= last[modes[a.stage]]}


TIMED = list(product(["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"], ["never", "except_last", "always"]))


@pytest.mark.parametrize(("schedule", "checkpoint"), mostly_slow(TIMED, TIMED[::4].__contains__))
def test_a_timeline(make: Make, schedule: str, checkpoint: str) -> None:
    pipe, plain = make(schedule=schedule, devices=2, checkpoint=checkpoint)
    step(pipe)
    with pytest.raises(fxpipe.FxpipeError, match="no step was timed yet"):
        pipe.timeline.draw("step.svg")
    step(pipe, timeline=True)
    for _ in range(2):
        plain_step(plain)
    same_gradients(pipe, plain)
    timeline = pipe.timeline
    assert (timeline.name, timeline.devices) == (schedule, ("cpu:0", "cpu:1"))
    done = [Action(span.kind, span.stage, span.micro_batch) for span in timeline.spans]
    assert len(done) == len(set(done))
    assert {action for action in done if action.kind != "R"} == set(pipe.schedule.place)
    assert {action[1:] for action in done if action.kind == "R"} == recomputed(pipe)
    for device, row in zip(timeline.devices, pipe.schedule.devices, strict=True):
        spans = sorted((span for span in timeline.spans if span.where == device), key=lambda span: span.start)
        assert [s for s in spans if s.kind != "R"] == sorted(
            (s for s in spans if s.kind != "R"), key=lambda s: row.index(Action(s.kind, s.stage, s.micro_batch))
        ), "the order of the schedule"
        assert all(one.end <= other.start for one, other in pairwise(spans))
    assert 0 <= timeline.bubble < 1
    assert all(peak > 0 for peak in timeline.high_water)
    assert "F" in {span.kind for span in timeline.spans}
    assert str(timeline)
