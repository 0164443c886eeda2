"""`pipe.verify`: that it finds nothing where nothing is wrong, and what is wrong where it is."""

from __future__ import annotations

import builtins
import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import FxpipeError
from tests.helpers.marks import mostly_slow
from tests.whole.test_deferred_norms import Whole

WIDTH = 6


class OwnLoss(nn.Module):
    """Ignores some labels, so that the loss is no mean over samples; draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.head = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.drop(torch.tanh(self.fc(x))))
        return {"loss": F.cross_entropy(logits, labels, ignore_index=0), "logits": logits}


class Pairs(nn.Module):
    """Mixes samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.b(x).t()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        y: Tensor = self.fc(x)
        return y


def chain(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), *middle, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )


def tied() -> nn.Sequential:
    model = chain()
    model[4].weight = model[0].weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": chain,
    "tied": tied,
    "dropout": lambda: chain(nn.Dropout(0.4), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)),
    "batch norm": lambda: chain(nn.BatchNorm1d(WIDTH)),
    "kept whole": lambda: chain(Whole(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))),
    "counts": lambda: chain(Counts()),
    "mixes": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Pairs()),
}


@pytest.fixture
def compile() -> Iterator[Any]:
    made: list[fxpipe.Pipe] = []

    def compile(model: nn.Module, chunks: int = 3, **options: Any) -> fxpipe.Pipe:
        made.append(fxpipe.compile(model, ["cpu", "cpu"], chunks, **options))
        return made[-1]

    yield compile
    for pipe in made:
        pipe.close()


def model_of(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]()


def batch(samples: int = 11) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(2))


def square(out: Tensor) -> Tensor:
    return out.square().mean()


@pytest.mark.filterwarnings("ignore:.*is kept whole", "ignore::fxpipe.MixedSamplesWarning")
@pytest.mark.parametrize("dtype", mostly_slow([torch.float32, torch.float64], lambda dtype: dtype == torch.float32))
@pytest.mark.parametrize("name", mostly_slow(MODELS, [*MODELS][::2].__contains__))
def test_all_is_well(compile: Any, name: str, dtype: torch.dtype) -> None:
    options = {"reduce": {"loss": "mean"}} if name == "mixes" else {}
    pipe = compile(model_of(name).to(dtype), schedule="1f1b", checkpoint="always", **options)
    if name == "mixes":
        x = batch(12).to(dtype)
        report = pipe.verify(x, loss_fn=square)
    else:
        x = batch().to(dtype).requires_grad_()
        report = pipe.verify(x, target=torch.zeros_like(x).detach(), loss_fn=F.mse_loss)
    assert report.ok, str(report)
    assert {one.way for one in report.compared} == {"call", "step"}
    assert f"{type(pipe.model).__name__}: ok. {len(report.compared)} results of call, step are" in str(report)
    assert x.grad is None


@pytest.mark.parametrize("deferred", [True, False])
def test_running_statistics_are_compared(compile: Any, deferred: bool) -> None:
    pipe = compile(model_of("batch norm"), deferred_batch_norm=deferred)
    report = pipe.verify(batch(), target=batch(), loss_fn=F.mse_loss)
    assert report.ok, str(report)
    assert {"buffer 2.running_mean", "buffer 2.num_batches_tracked"} <= {one.what for one in report.compared}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_of_the_models_own(compile: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, 2, 0, 0, 1, 2, 2, 0, 1, 1])
    report = compile(OwnLoss().to(dtype)).verify(batch().to(dtype), labels)
    assert report.ok, str(report)
    assert "loss" in [one.what for one in report.compared if one.way == "step"]


def test_without_a_loss_a_call_is_compared(compile: Any) -> None:
    report = compile(chain()).verify(batch())
    assert report.ok
    assert {one.way for one in report.compared} == {"call"}
    assert "no step was compared" in str(report)


def test_autocast_has_its_own_digits(compile: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report = compile(chain()).verify(batch(), target=batch(), loss_fn=F.mse_loss)
    assert report.ok, str(report)


def test_replicas(compile: Any) -> None:
    pipe = fxpipe.compile(chain(), 3, 2, replicas=(2, 1))
    report = pipe.verify(batch(12), target=batch(12), loss_fn=F.mse_loss)
    assert report.ok, str(report)
    assert {one.way for one in report.compared} == {"call", "step"}
    pipe.close()


def test_nothing_is_changed(compile: Any) -> None:
    model = chain(nn.Dropout(0.4), nn.BatchNorm1d(WIDTH))
    pipe = compile(model)
    x = batch().requires_grad_()
    pipe.step(x, target=batch(), loss_fn=F.mse_loss)
    grads = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in grads if g is not None]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    own, numbers, last = torch.get_rng_state(), random.getstate(), pipe.build
    pipe.verify(x, target=batch(), loss_fn=F.mse_loss)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(copies, grads, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(own, torch.get_rng_state())
    assert random.getstate() == numbers
    assert pipe.build is last


def broken(pipe: fxpipe.Pipe, stage: int, old: str, new: str) -> None:
    """Write something else into the file of a stage that runs."""
    kind = type(pipe.stages[stage])
    file = inspect.getfile(kind)
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new, 1))
    space: dict[str, Any] = {"__name__": kind.__module__}
    exec(builtins.compile(Path(file).read_text(), file, "exec"), space)
    kind.forward = space[kind.__name__].forward


@pytest.mark.parametrize("middle", [(), (nn.Dropout(0.4),), (nn.BatchNorm1d(WIDTH),)])
def test_a_broken_line_is_found(compile: Any, middle: tuple[nn.Module, ...], tmp_path: Path) -> None:
    pipe = compile(chain(*middle), cut=[str(2 + len(middle))])
    assert pipe.verify(batch(), target=batch(), loss_fn=F.mse_loss).ok
    pipe(batch())
    broken(pipe, 1, "torch.tanh(", "torch.sigmoid(")
    report = pipe.verify(batch(), target=batch(), loss_fn=F.mse_loss)
    assert not report.ok
    assert report.place is not None
    assert (report.place.stage, report.place.micro_batch) == (1, 0)
    assert "torch.sigmoid(" in report.place.line
    assert "stage1.py:" in report.place.line
    assert "they part in stage 1, micro-batch 0, op " in str(report)
    report.save(tmp_path / "report.txt")
    text = (tmp_path / "report.txt").read_text()
    for wanted in ("---- versions", f"torch {torch.__version__}", "---- devices", "---- options", "chunks = 3",
                   "---- plan", "---- schedule", "device 1", "torch.sigmoid("):  # fmt: skip
        assert wanted in text


class Wrong(torch.autograd.Function):
    """A backward that is not that of its forward in batches that are cut."""

    rows = 11

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = len(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 if ctx.rows == Wrong.rows else grad * 2.001


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Wrong.apply(self.fc(x))
        return y


def test_a_wrong_gradient_is_found(compile: Any) -> None:
    model = nn.Sequential(Doubles(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    pipe = compile(model, cut=["1"])
    report = pipe.verify(batch(), target=batch(), loss_fn=F.mse_loss)
    wrong = {one.what for one in report.compared if not one.ok}
    assert wrong == {"gradient of 0.fc.weight", "gradient of 0.fc.bias"}
    assert str(report.place).startswith("in backward of stage 0, ")


def test_a_hook_that_may_do_anything_is_refused(compile: Any) -> None:
    model = chain()
    model[0].weight.register_post_accumulate_grad_hook(lambda x: None)
    with pytest.raises(FxpipeError, match="remove it for the time of verify"):
        compile(model).verify(batch())
