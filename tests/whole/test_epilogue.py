"""Losses and outputs that need the whole batch: with any number of micro-batches, and in any way to run them, they and
all gradients are those of the plain model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import PlanError
from fxpipe.schedules.make_schedule import FORWARDS_FIRST, SCHEDULES
from tests.helpers.marks import mostly_slow

Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made


class Towers(nn.Module):
    """Contrastive learning, with the loss inside and a skip from the first stage to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 6), nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
        self.scale, self.center = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(6))
        self.register_buffer("margin", torch.tensor(0.1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        image = F.normalize(self.image(x) - self.center, dim=-1)
        text = F.normalize(self.text(x.sin()), dim=-1)
        logits = self.scale.exp() * text @ image.t() - self.margin * torch.eye(len(x))
        labels = torch.arange(len(x))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        return {"loss": loss + (image - self.center).var(0).sqrt().mean(), "logits": logits, "features": image}


class Balanced(nn.Module):
    """Experts, and how evenly they are used by the batch, beside a loss with labels that are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(8, 12), nn.Linear(12, 3), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        shares = self.router(h).softmax(-1)
        used = F.one_hot(shares.argmax(-1), 3).to(h.dtype).mean(0)
        labels = (10 * x[:, 0]).long().clamp(-1, 4)
        loss = F.cross_entropy(self.last(h * shares.amax(-1, keepdim=True)), labels, ignore_index=-1)
        return loss + 0.5 * (used * shares.mean(0)).sum()


def covariance(out: Tensor, target: Tensor) -> Tensor:
    centred = out - out.mean(0)
    found = centred.t() @ centred / (len(out) - 1)
    return F.mse_loss(out, target) + (found.square().sum() - found.diagonal().square().sum()) / 6


def correlation(out: Tensor, target: Tensor) -> Tensor:
    out, target = out.flatten() - out.mean(), target.flatten() - target.mean()
    return 1 - (out * target).sum() / (out.norm() * target.norm())


def triplets(out: Tensor, target: Tensor) -> Tensor:
    apart, same = torch.cdist(out, out), (target[:, 0] > 0)[:, None] == (target[:, 0] > 0)
    return F.relu((apart * same).amax(1) - apart.masked_fill(same, 1e9).amin(1) + 1).mean()


def dice(out: Tensor, target: Tensor) -> Tensor:
    out, there = out.sigmoid(), (target > 0).to(out.dtype)
    return 1 - (2 * (out * there).sum() + 1) / (out.sum() + there.sum() + 1)


def worst(out: Tensor, target: Tensor) -> Tensor:
    return torch.logsumexp((out - target).square().mean(1), 0)


def of_each(out: Tensor, target: Tensor) -> Tensor:
    """One for each sample, weighted by its rank in the batch."""
    losses = (out - target).square().mean(1)
    return losses * losses.detach().argsort().argsort() / len(out)


def unreadable(out: Tensor, target: Tensor) -> Tensor:
    hardest = sorted(range(len(out)), key=lambda at: -float((out[at] - target[at]).detach().square().sum()))[:2]
    return (out[hardest] - target[hardest]).square().sum().sqrt()


LOSSES: list[Loss] = [covariance, correlation, triplets, dice, worst, of_each, unreadable]


@pytest.fixture(autouse=True)
def in_double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@contextmanager
def silent() -> Iterator[None]:
    """Nothing is said but that a loss is kept whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "loss_fn is kept whole")
        yield


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_step(model: nn.Module, loss_fn: Loss | None, sizes: tuple[int, ...] = (7,), **options: Any) -> str:
    """Steps of a pipe of the model are those of the plain model. Returns the name of the schedule that they had."""
    plain = copy.deepcopy(model)
    with closing(fxpipe.compile(model, **{"devices": 2, "chunks": 3} | options)) as pipe:
        for samples in sizes:
            x, y = torch.randn(samples, 8), torch.randn(samples, 6)
            model.zero_grad()
            plain.zero_grad()
            output = plain(x)
            expected = output["loss"] if isinstance(output, dict) else output if loss_fn is None else loss_fn(output, y)
            expected.sum().backward()
            targets = {} if loss_fn is None else {"target": y, "loss_fn": loss_fn}
            loss, found = pipe.step(x, outputs=True, **targets)
            torch.testing.assert_close((loss, found), (expected.detach(), detached(output)))
            torch.testing.assert_close(gradients(model), gradients(plain))
            assert pipe.build.graph.epilogue is not None
        return pipe.schedule.name


def detached(output: Any) -> Any:
    return {key: value.detach() for key, value in output.items()} if isinstance(output, dict) else output.detach()


@pytest.mark.parametrize("backward", mostly_slow(["autograd", "code"], "code".__eq__))
@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda loss_fn: loss_fn.__name__)
def test_losses_of_the_whole_batch(loss_fn: Loss, backward: str) -> None:
    with silent():
        check_step(Net(), loss_fn, (7, 6), backward=backward)


CASES = product(["never", "except_last", "always", "selective"], [Towers, Balanced])
QUICK = [("except_last", Balanced), ("always", Towers), ("selective", Balanced)]


@pytest.mark.parametrize(("checkpoint", "model"), mostly_slow(CASES, QUICK.__contains__))
def test_losses_in_a_model(model: Callable[[], nn.Module], checkpoint: str) -> None:
    with silent():
        check_step(model(), None, checkpoint=checkpoint, backward="code")
        if checkpoint != "selective":
            check_step(model(), None, (7, 8), checkpoint=checkpoint, devices=3, chunks=2)


@pytest.mark.parametrize(
    "schedule",
    mostly_slow(
        sorted(SCHEDULES.keys() - {"forward-only"}),
        ("gpipe", "1f1b", "interleaved", "zb-h1", "looped-bfs").__contains__,
    ),
)
def test_forwards_come_first(schedule: str) -> None:
    if schedule in FORWARDS_FIRST:
        with silent():
            assert check_step(Towers(), None, schedule=schedule) == schedule
    else:
        with pytest.warns(
            UserWarning, match=f"not used: the order of schedule '{schedule}', as the loss needs the whole"
        ):
            assert check_step(Towers(), None, schedule=schedule) == "gpipe"


def test_the_fastest_schedule_is_one_of_them() -> None:
    with silent():
        assert check_step(Towers(), None, schedule="auto") in FORWARDS_FIRST


def test_an_order_of_the_users() -> None:
    with silent():
        check_step(Towers(), None, schedule="F0 F1 F2 B1 B2 B0\n. F0 F1 F2 B2 B0 B1")


def test_no_forward_is_beside_a_backward() -> None:
    model, x = Towers(), torch.randn(7, 8)
    with closing(fxpipe.compile(model, 2, 3, backward="code", overlap_pairs=True)) as pipe:
        torch.testing.assert_close(pipe.step(x), model(x)["loss"].detach())
        assert not pipe.schedule.pairs
        assert "overlapped pairs: none; the loss needs the whole batch" in pipe.explain()


def test_calls_are_differentiable() -> None:
    model = Towers()
    plain, x = copy.deepcopy(model), torch.randn(7, 8, requires_grad=True)
    with silent(), closing(fxpipe.compile(model, 2, 3)) as pipe:
        found, expected = pipe(x), plain(x)
        torch.testing.assert_close(found, expected)
        ours = torch.autograd.grad(sum(map(torch.sum, found.values())), [x, *model.parameters()])
        theirs = torch.autograd.grad(sum(map(torch.sum, expected.values())), [x, *plain.parameters()])
        torch.testing.assert_close(ours, theirs)
        model.eval()
        with torch.inference_mode():
            torch.testing.assert_close(pipe(x), plain(x))


def test_steps_that_add_up() -> None:
    model = Towers()
    plain, batches = copy.deepcopy(model), torch.randn(2, 7, 8)
    with closing(fxpipe.compile(model, 2, 3)) as pipe:
        for x in batches:
            pipe.step(x, accumulate=2)
            (plain(x)["loss"] / 2).backward()
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_a_scaled_step() -> None:
    model, x = Towers(), torch.randn(7, 8)
    plain, scaler = copy.deepcopy(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    with closing(fxpipe.compile(model, 2, 3)) as pipe:
        loss = pipe.step(x, scaler=scaler)
    expected = plain(x)["loss"]
    (8 * expected).backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_inputs_have_gradients() -> None:
    x, y = torch.randn(7, 8, requires_grad=True), torch.randn(7, 6)
    model = Net()
    with closing(fxpipe.compile(model, 2, 3)) as pipe:
        pipe.step(x, target=y, loss_fn=covariance)
    found = x.grad
    (expected,) = torch.autograd.grad(covariance(model(x), y), x)
    torch.testing.assert_close(found, expected)


def test_replicas_of_other_stages() -> None:
    with silent():
        check_step(Net(), covariance, devices=3, chunks=2, replicas=(2, 1))
    with (
        closing(fxpipe.compile(Net(), 3, 2, replicas=(1, 2))) as pipe,
        pytest.raises(
            PlanError,
            match=r"(?s)test_epilogue.py:\d+.*needs the whole batch, and replicas of the last stage have slices",
        ),
    ):
        pipe.step(torch.randn(8, 8), target=torch.randn(8, 6), loss_fn=covariance)


def test_a_plan_of_the_forward() -> None:
    """The loss is not in the plan, and what it needs of the first stage comes to the last one."""
    model, x = Net(), torch.randn(8, 8)

    def early(out: Tensor, inputs: Tensor) -> Tensor:
        return covariance(out, inputs[:, :6]) + inputs.var(0).sum()

    with silent(), closing(fxpipe.compile(model, 2, 4, example_inputs=x)) as drafted:
        plan = drafted.plan
    plain = copy.deepcopy(model)
    expected = early(plain(x), x)
    expected.backward()
    with silent(), closing(fxpipe.compile(model, plan=plan)) as pipe:
        torch.testing.assert_close(pipe.step(x, target=x, loss_fn=early), expected.detach())
        assert pipe.build.program.epilogue_stage == 1
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_a_failed_step_adds_no_gradients() -> None:
    def fails(out: Tensor, target: Tensor) -> Tensor:
        if float(out.detach()[0, 0]) > 1e9:
            raise ValueError("too large")
        return covariance(out, target)

    model, x, y = Net(), torch.randn(7, 8), torch.randn(7, 6)
    with warnings.catch_warnings(), closing(fxpipe.compile(model, 2, 3)) as pipe:
        warnings.simplefilter("ignore")
        pipe.step(x, target=y, loss_fn=fails)
        model.zero_grad()
        with torch.no_grad():
            model.layers[-1].bias += 1e10
        with pytest.raises(ValueError, match="too large"):
            pipe.step(x, target=y, loss_fn=fails)
        assert not any(grad is not None for grad in gradients(model).values())


def test_files_and_what_is_said(tmp_path: Path) -> None:
    model = Towers()
    x = torch.randn(7, 8)
    with closing(fxpipe.compile(model, 2, 3)) as pipe:
        loss = pipe.step(x)
        assert "logits = " in pipe.build.files["epilogue.py"]
        assert "to the epilogue" in pipe.build.files["stage1.py"]
        pipe.draw(tmp_path / "stages.svg")
        assert ">epilogue<" in (tmp_path / "stages.svg").read_text()
        assert "ops run once, on what all micro-batches give" in pipe.explain()
        report = pipe.verify(x)
        assert report.ok, str(report)
        pipe.step(x)
        pipe.save(tmp_path / "pipe")
    expected = [parameter.grad.clone() / 2 for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with closing(fxpipe.load(tmp_path / "pipe", model)) as loaded:
        torch.testing.assert_close(loaded.step(x), loss)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


def test_the_user_may_want_each_micro_batch() -> None:
    model, x, y = Net(), torch.randn(6, 8), torch.randn(6, 6)
    with closing(fxpipe.compile(model, 2, 3, reduce={"loss": "mean"})) as pipe:
        found = pipe.step(x, target=y, loss_fn=dice)
        assert pipe.build.graph.epilogue is None
    parts = zip(x.chunk(3), y.chunk(3), strict=True)
    torch.testing.assert_close(found, torch.stack([dice(model(one), two) for one, two in parts]).mean().detach())


def test_layers_behind_do_not_run_on_the_whole_batch() -> None:
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            made: Tensor = self.last(h - h.mean(0))
            return made

    with closing(fxpipe.compile(Behind(), 2, 3)) as pipe:
        with pytest.warns(fxpipe.MixedSamplesWarning, match=r"h.mean\(0\)"):
            pipe(torch.randn(6, 8))
        assert pipe.build.graph.epilogue is None
