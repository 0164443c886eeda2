"""Calls and steps in training and in evaluation, with and without gradients, in any order: results, gradients, buffers
and random numbers are those of the plain model in each mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, product
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from benchmarks.first_call import GPT2, WORDS, loss
from fxpipe.capture.capture_call import CallCapture
from fxpipe.errors import InputError
from fxpipe.pipe.build import build_cache
from tests.helpers.marks import mostly_slow
from tests.helpers.models import MODELS
from tests.helpers.transparency import assert_same, build, finish, inputs, plain

X = torch.randn(7, 5, 8, generator=torch.Generator().manual_seed(1))
ORDERS = {"train first": (True, False, True), "eval first": (False, True, False)}


@contextmanager
def captures() -> Iterator[list[Any]]:
    """The traces that are made in this context."""
    made: list[Any] = []
    own = CallCapture.captured

    def capture(self: CallCapture, traced: Any) -> Any:
        made.append(traced)
        return own(self, traced)

    with mock.patch.object(CallCapture, "captured", capture):
        yield made


class Attention(nn.Module):
    """Attention as libraries of transformers write it."""

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.attn_dropout, self.resid_dropout, self.attention_dropout = nn.Dropout(p), nn.Dropout(p), p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_dropout.p if self.training else 0.0)
        y = attend(self, q, k, y, dropout=0.0 if not self.training else self.attention_dropout)
        return x + self.resid_dropout(self.out(y))


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    weights = F.softmax(q @ k.transpose(1, 2) / 3, dim=-1)
    return F.dropout(weights, p=dropout, training=module.training) @ v


def probability(module: Any) -> float:
    return module.p if module.training else 0.0


class Returned(nn.Module):
    """A conditional expression that a function returns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.p = nn.Linear(8, 8), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x), probability(self)) * 2


class Every(nn.Module):
    """All kinds of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drops = nn.Sequential(nn.Dropout1d(0.3), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3))
        self.inner = nn.Dropout(0.3, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout2d(self.drops(self.a(x)).unsqueeze(1), 0.2, self.training).squeeze(1)
        return self.b(self.inner(torch.tanh(y)))


DROPS = {"attention": lambda: nn.Sequential(*(Attention() for _ in range(4))), "returned": Returned, "every": Every}
DROPS |= {"no dropout": lambda: nn.Sequential(*(Attention(0.0) for _ in range(3)))}


class Branches(nn.Module):
    """Does something else in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.a(x))
        return self.b(y) if self.training else y


class Counts(nn.Module):
    """Computes with the flag."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.a(x)) * (1 + self.training)


class Chooses(nn.Module):
    """Chooses a number for something else than a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.s = nn.Linear(8, 8), 3.0

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.a(x), 0.5, self.training) * (self.s if self.training else 2.0)


class Both(nn.Module):
    """Chooses by an expression with two conditions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.p = nn.Linear(8, 8), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.a(x), self.p if self.training and self.p > 0 else 0.0, bool(self.training))


class Leaky(nn.Module):
    """Gives the flag to another function than a dropout, by position; `Norms` does so by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.lstm, self.drop = nn.Linear(8, 8), nn.LSTM(8, 8, 2, dropout=0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.lstm(self.a(x).transpose(0, 1))[0].transpose(0, 1))


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("var", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(self.bn(self.a(x)), self.mean, self.var, training=self.training)
        return self.drop(y)


class Written(nn.Module):
    """Writes into what a dropout gives: in evaluation, that is its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.drop(y)
        z += 1
        return y * z


class Twice(nn.Module):
    """Returns a value before and after a dropout, and an argument dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return y, self.drop(y), self.drop(x)


class Recomputed(nn.Module):
    """Has a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        return self.b(checkpoint(lambda y: self.drop(self.a(y)).tanh(), x, use_reentrant=False))


SPECIFIC = (Branches, Counts, Chooses, Both, Leaky, Norms, Written, Twice, Recomputed)


def check(model: nn.Module, twin: nn.Module, pipe: Any, training: bool | None, same_numbers: bool = False) -> None:
    """A call and its gradients are the plain model's. In evaluation no random numbers are drawn."""
    for one in (twin, pipe):
        if training is not None:
            one.train(training)
        one.zero_grad()
    torch.manual_seed(3)
    found = pipe(X)
    after = torch.get_rng_state()
    if any(part.training for part in model.modules()) and not same_numbers:
        assert found is not None
        return
    torch.manual_seed(3)
    wanted = twin(X)
    assert torch.equal(after, torch.get_rng_state())
    for results in (found, wanted):
        sum(y.square().sum() for y in (results if isinstance(results, tuple) else (results,))).backward()
    torch.testing.assert_close(found, wanted)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "order"),
    mostly_slow(
        zip(["dropout", "attention dropout", "random draws", "batch norm", "resnet"], cycle(ORDERS)),
        lambda one: one[0] != "resnet",
    ),
)
def test_models_of_the_table(name: str, order: str) -> None:
    case = MODELS[name]
    model, twin = build(case), build(case)
    pipe = fxpipe.compile(model, devices=2, chunks=3)
    for training in ORDERS[order]:
        twin.train(training)
        pipe.train(training)
        args, kwargs = inputs(case, 7)
        torch.manual_seed(5)
        wanted = plain(case, twin, args, kwargs, 3)
        args, kwargs = inputs(case, 7)
        torch.manual_seed(5)
        output = pipe(*args, **kwargs)
        assert_same(finish(case, model, args, kwargs, output), wanted)
        twin.zero_grad()
        model.zero_grad()
    pipe.close()


QUICK = [("attention", "train first"), ("every", "eval first"), ("returned", "eval first")]


@pytest.mark.parametrize(("name", "order"), mostly_slow(product(DROPS, ORDERS), QUICK.__contains__))
def test_a_capture_for_each_mode(name: str, order: str) -> None:
    model = DROPS[name]()
    twin = copy.deepcopy(model)
    with captures() as made:
        pipe = fxpipe.compile(model, devices=2, chunks=3)
        for training in (*ORDERS[order], *ORDERS[order]):
            check(model, twin, pipe, training, same_numbers=name == "no dropout")
    assert len(made) == 2
    pipe.close()


@pytest.mark.filterwarnings("ignore:(?s).*the model asks for checkpoints of activations")
@pytest.mark.parametrize(("kind", "order"), list(zip(SPECIFIC, cycle(ORDERS))))
def test_what_differs_between_the_modes(kind: type[nn.Module], order: str) -> None:
    model = kind()
    twin = copy.deepcopy(model)
    pipe = fxpipe.compile(model, devices=2, chunks=1)
    for training in ORDERS[order]:
        check(model, twin, pipe, training)
        assert pipe.build.graph.training == training
        if training:
            twin.load_state_dict(model.state_dict())  # with the statistics of norms
    pipe.close()


@pytest.mark.filterwarnings("ignore:(?s).*the model asks for checkpoints of activations")
@pytest.mark.parametrize("kind", mostly_slow([None, *SPECIFIC], lambda kind: kind in (None, Branches, Norms)))
def test_training_draws_as_before(kind: type[nn.Module] | None) -> None:
    """What a pipe computes in training is the same whether or not it has run in evaluation."""
    found = []
    for before in (True, False):
        torch.manual_seed(0)
        model = Attention() if kind is None else kind()
        pipe = fxpipe.compile(model, devices=2, chunks=1)
        if not before:
            pipe.eval()(X)
        pipe.train()
        torch.manual_seed(1)
        y = pipe(X)
        sum(one.square().sum() for one in (y if isinstance(y, tuple) else (y,))).backward()
        found.append((y, [x.grad for x in model.parameters()], torch.get_rng_state()))
        pipe.close()
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_steps_of_gpt2() -> None:
    torch.manual_seed(0)
    model = GPT2(3)
    twin = copy.deepcopy(model)
    ids, target = (torch.randint(0, WORDS, (8, 16)) for _ in range(2))
    with captures() as made:
        pipe = fxpipe.compile(model, devices=2, chunks=4, schedule="1f1b")
        pipe.step(ids, target=target, loss_fn=loss)
        for one in (model, twin):
            one.zero_grad()
            one.eval()
        before = torch.get_rng_state()
        found = pipe.step(ids, target=target, loss_fn=loss)
        assert torch.equal(before, torch.get_rng_state())
        wanted = loss(twin(ids), target)
        wanted.backward()
        torch.testing.assert_close(found, wanted)
        for x, y in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(x.grad, y.grad)
        pipe.train()
        pipe(ids)
        pipe.eval()
        torch.testing.assert_close(pipe(ids), twin(ids))
        assert len(made) == 4
        for training in (True, False):
            pipe.train(training)
            pipe.step(ids, target=target, loss_fn=loss)
            pipe(ids)
        assert len(made) == 4
    pipe.close()


class Plain(nn.Sequential):
    """Has no dropout at all."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


@pytest.mark.parametrize("order", ORDERS)
def test_a_model_without_dropouts_is_planned_once_after_training(order: str, tmp_path: Path) -> None:
    model = Plain()
    twin = copy.deepcopy(model)
    with captures() as made, mock.patch.object(build_cache, "build", wraps=build_cache.build) as built:
        pipe = fxpipe.compile(model, devices=2, chunks=3)
        for training in ORDERS[order]:
            check(model, twin, pipe, training, same_numbers=True)
            assert pipe.build.graph.training is training
            folder = tmp_path / str(training)
            pipe.save(folder, overwrite=True)
            check(model, twin, fxpipe.load(folder, model), training, same_numbers=True)
    assert len(made) == 1
    assert built.call_count == (1 if ORDERS[order][0] else 2)
    pipe.close()


def test_a_frozen_part() -> None:
    """A part in evaluation stays so, and the rest follows the model."""
    model = nn.Sequential(*(Attention() for _ in range(4)))
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one.train()
        one[1].eval()
    with captures() as made:
        pipe = fxpipe.compile(model, devices=2, chunks=3)
        check(model, twin, pipe, None)
        check(model, twin, pipe, False)
        assert len(made) == 2
        pipe.train()
        model[1].eval()
        model[2].resid_dropout.eval()  # another part than before
        pipe(X)
        assert len(made) == 3
        assert sum("False" in str(op.args) for op in pipe.build.graph.ops if "dropout" in op.name) >= 1
        check(model, twin, pipe, False)
    pipe.close()


def test_all_frozen_but_the_model() -> None:
    model = nn.Sequential(Attention(), Attention())
    twin = copy.deepcopy(model)
    pipe = fxpipe.compile(model, devices=2, chunks=1)
    pipe(X)
    for one in (model, twin):
        for part in one:
            part.eval()
    assert model.training
    torch.testing.assert_close(pipe(X), twin(X))
    model.eval()
    torch.testing.assert_close(pipe(X), twin(X))
    for part in model:
        part.train()
    torch.manual_seed(2)
    one = pipe(X)
    torch.manual_seed(3)
    assert not torch.equal(one, pipe(X))
    pipe.close()


class Reads(nn.Module):
    """Reads the flag of another module."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other, self.a = other, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.a(x), 0.5, self.other.training)


def test_the_flag_of_another_module() -> None:
    model = Reads(nn.Linear(2, 2))
    twin = copy.deepcopy(model)
    pipe = fxpipe.compile(model, devices=1, chunks=1)
    pipe(X)
    model.other.eval()
    twin.eval()
    torch.testing.assert_close(pipe(X), twin(X))
    model.train()
    model.training = False  # the model's own alone
    torch.manual_seed(2)
    one = pipe(X)
    torch.manual_seed(3)
    assert not torch.equal(one, pipe(X))
    pipe.eval()
    torch.testing.assert_close(pipe(X), twin(X))
    pipe.close()


class Switches(nn.Module):
    """Sets flags in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.drop.eval()
        return self.drop(self.a(x))


def test_flags_that_forward_sets() -> None:
    model = Switches()
    pipe = fxpipe.compile(model, devices=1, chunks=1)
    for training in (True, False, True):
        pipe.train(training)
        torch.testing.assert_close(pipe(X), model.a(X))
        assert not model.drop.training
    pipe.close()


def test_the_loss_function_has_a_flag_too() -> None:
    class Loss(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return F.dropout(y, 0.5, self.training).square().mean()

    model, criterion = Attention(), Loss()
    pipe = fxpipe.compile(model, devices=2, chunks=1)
    pipe.step(X, loss_fn=criterion)
    pipe.eval()
    torch.manual_seed(2)
    one = pipe.step(X, loss_fn=criterion)  # it is still in training
    torch.manual_seed(3)
    assert not torch.equal(one, pipe.step(X, loss_fn=criterion))
    criterion.eval()
    torch.testing.assert_close(pipe.step(X, loss_fn=criterion), criterion(model(X)))
    pipe.close()


class Later(nn.Module):
    """Drops out in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.a(x), 0.5, not self.training)


@pytest.mark.parametrize("backward", ["autograd", "code"])
def test_dropout_in_evaluation_only(backward: str) -> None:
    """It has a seed of its own, so that a recomputation draws the same again."""
    model = Later().eval()
    pipe = fxpipe.compile(model, devices=1, chunks=3, backward=backward, checkpoint="always")
    for training in (False, True, False):
        pipe.train(training)
        pipe.zero_grad()
        y = pipe(X)
        assert pipe.build.graph.ops[-1].random is not training
        y.sum().backward()
        # The gradient of the bias counts what was not dropped out, each twice.
        kept = (y.detach() != 0).sum(dim=(0, 1)) * (1.0 if training else 2.0)
        torch.testing.assert_close(model.a.bias.grad, kept)
    pipe.close()


@pytest.mark.parametrize("mode", [True, False])
def test_a_saved_package_is_for_its_mode(mode: bool, tmp_path: Path) -> None:
    model = Attention()
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    pipe.train(mode)
    pipe(X)
    pipe.save(tmp_path / "out")
    pipe.close()
    loaded = fxpipe.load(tmp_path / "out", model)
    assert loaded.training == mode
    assert torch.allclose(loaded(X), copy.deepcopy(model).eval()(X)) is not mode
    kind = "training" if mode else "evaluation"
    with pytest.raises(InputError, match=rf"saved for {kind}; save another one after pipe.train\(\) or pipe.eval"):
        loaded.train(not mode)(X)
    loaded.close()


# With and without gradients -------------------------------------------------------------------------------------------


class Asks(nn.Module):
    """Asks whether gradients are on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).tanh())
        y = y * 2 if torch.is_grad_enabled() else y * 3
        return y * 5 if y.requires_grad else y * 7


class Encoder(nn.Module):
    """One fused op in evaluation without gradients, many else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8, 0.1, batch_first=True) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
NETS: dict[str, Callable[[], nn.Module]] = {"asks": Asks, "encoder": Encoder, "norms": Norms}
NETS |= {"layers": lambda: nn.Sequential(*(Asks() for _ in range(4)))}


@pytest.mark.parametrize(
    ("name", "seed"), mostly_slow(product(NETS, range(4)), [("asks", 0), ("norms", 0)].__contains__)
)
def test_modes_in_any_order(name: str, seed: int) -> None:
    rng = Random(f"{name} {seed}")
    torch.manual_seed(seed)
    model = NETS[name]()
    twin = copy.deepcopy(model)
    pipe = fxpipe.compile(model, devices=2, chunks=1)
    turns = [(step, mode, at) for step in (True, False) for mode in (True, False) for at in CONTEXTS]
    for step, training, context in rng.sample(turns, len(turns)):
        for one in (pipe, twin):
            one.train(training)
            one.zero_grad()
            for part in one.modules():
                if isinstance(part, (nn.Dropout, nn.MultiheadAttention)):
                    part.eval()  # which draws as the plain model only then
        if step:
            with CONTEXTS["autocast" if context == "autocast" else "grad"]():
                found = pipe.step(X, loss_fn=mean)
                wanted = mean(twin(X))
            wanted.backward()  # type: ignore[no-untyped-call]
        else:
            with CONTEXTS[context]():
                found, wanted = pipe(X), twin(X)
            assert found.requires_grad is wanted.requires_grad
            if wanted.requires_grad:
                found.float().square().sum().backward()
                wanted.float().square().sum().backward()
        torch.testing.assert_close(found, wanted.detach() if step else wanted)
        for x, y in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(x.grad, y.grad)
        for x, y in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(x, y)
    pipe.close()


def mean(y: Tensor) -> Tensor:
    return y.float().square().mean()
