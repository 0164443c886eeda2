"""Submodules that torch.jit, torch.compile and torch.export have made: each is one op or traced through, and the
pipeline is still what the model is."""

import copy
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PackageError, PlanError
from tests.helpers.marks import mostly_slow

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is kept whole"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
WIDTH = 6
script: Callable[..., Any] = torch.jit.script


class Block(nn.Module):
    """Attributes and a method for those around it, a buffer that forward writes, a result with a dict."""

    width: int

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.width = WIDTH

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        if bool(self.fc.weight.sum() > 1e6):
            x = x + 1
        self.calls = self.calls + 1
        return {"y": torch.tanh(self.fc(x)) * scale, "x": x * 2}

    @torch.jit.export
    def linear(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Around(nn.Module):
    def __init__(self, inner, use=lambda inner, x: inner(x)):
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, 3)
        self.use = use

    def forward(self, x):
        return self.head(self.use(self.inner, self.first(x)).relu())


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))


def exported() -> nn.Module:
    batch = ({0: torch.export.Dim.AUTO},)
    return torch.export.export(layers(), (torch.randn(4, WIDTH),), dynamic_shapes=batch).module()


def held(inner: nn.Module, x: Tensor) -> Tensor:
    found = inner(x, scale=2.0)
    return found["y"] * found["x"] * inner.width


MADE: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "script": (lambda: script(layers()), lambda inner, x: inner(x)),
    "trace": (lambda: torch.jit.trace(layers(), torch.randn(2, WIDTH)), lambda inner, x: inner(x)),
    "with attributes": (lambda: script(Block()), held),
    "method": (lambda: script(Block()), lambda inner, x: inner.linear(x)),
    "layer by layer": (lambda: script(layers()), lambda inner, x: inner[2](inner[1](inner[0](x)))),
    "inside": (lambda: script(Block()), lambda inner, x: inner.fc(inner(x)["y"])),
    "twice": (lambda: script(layers()), lambda inner, x: inner(inner(x))),
    "compile": (lambda: torch.compile(layers(), backend="eager"), lambda inner, x: inner(x)),
    "export": (exported, lambda inner, x: inner(x)),
}


def models(made: str) -> tuple[nn.Module, nn.Module]:
    """A model and its like: torch copies scripted parameters such that they are no leaves."""
    make, use = MADE[made]
    model, like = Around(make(), use), Around(make(), use)
    like.load_state_dict(model.state_dict())
    return model.double(), like.double()


def check(made: str, chunks: int, how: str, rows: int = 7, **options: Any) -> None:
    model, like = models(made)
    x, target = torch.randn(rows, WIDTH, dtype=torch.float64), torch.randn(rows, 3, dtype=torch.float64)
    expected = like(x)
    F.mse_loss(expected, target).backward()
    with closing(fxpipe.compile(model, 2, chunks, **options)) as pipe:
        if how == "call":
            result = pipe(x)
            torch.testing.assert_close(result, expected)
            F.mse_loss(result, target).backward()
        else:
            loss = pipe.step(x, target=target, loss_fn=F.mse_loss)
            torch.testing.assert_close(loss, F.mse_loss(expected, target).detach())
        assert list(pipe.state_dict()) == list(like.state_dict())
        for (name, mine), (path, other) in zip(pipe.named_parameters(), like.named_parameters(), strict=True):
            assert name == path
            torch.testing.assert_close(mine.grad, other.grad)


WAYS = mostly_slow(
    [("script", "call"), ("trace", "call"), *((made, "step") for made in MADE)],
    lambda way: way[1] == "call" or way[0] in ("script", "trace", "inside", "method"),
)


@pytest.mark.parametrize(("made", "how"), WAYS)
def test_results_and_gradients_are_those_of_the_model(made: str, how: str) -> None:
    check(made, 3, how)


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": 1},
        {"chunks": 2, "checkpoint": "always", "schedule": "1f1b"},
        {"chunks": 3, "checkpoint": "except_last", "schedule": "gpipe"},
        {"chunks": 2, "backward": "code"},
    ],
)
def test_options(options: dict[str, Any]) -> None:
    check("script", how="step", **options)


def test_only_submodules_that_are_called_are_named() -> None:
    with closing(fxpipe.compile(Around(script(layers())), 2, 2)) as pipe:
        with pytest.warns(UserWarning, match=r"^inner is kept whole: .* it is made by torch.jit.script") as told:
            pipe(torch.randn(4, WIDTH))
        assert "# opaque: it is made by torch.jit.script" in pipe.stages[0].source
    assert len(told) == 1


@pytest.mark.parametrize("make", [script, lambda model: torch.jit.trace(model, torch.randn(2, WIDTH))])
def test_a_model_that_is_compiled_itself_is_one_op(make: Callable[..., nn.Module]) -> None:
    model, x = make(layers()), torch.randn(4, WIDTH)
    with closing(fxpipe.compile(model, 2, 2)) as pipe:
        with pytest.warns(UserWarning, match="nothing is pipelined"):
            torch.testing.assert_close(pipe(x), model(x))


def test_changes_of_the_model_count() -> None:
    model = Around(script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))))
    x = torch.randn(4, WIDTH)
    with closing(fxpipe.compile(model, 2, 2)) as pipe:
        assert not torch.equal(pipe(x), pipe(x))
        model.inner.eval()
        torch.testing.assert_close(pipe(x), model(x))
        linear = next(model.inner.children())
        linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        torch.testing.assert_close(pipe(x), model(x))
        linear.bias.requires_grad_(False)
        pipe(x).sum().backward()
        assert linear.weight.grad is not None
        assert linear.bias.grad is None
        model.double()
        torch.testing.assert_close(pipe(x.double()), model(x.double()))


def test_recomputation_draws_the_same_numbers() -> None:
    grads = []
    for checkpoint in ("always", "never"):
        torch.manual_seed(0)
        model = Around(script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))))
        x = torch.randn(4, WIDTH)
        with closing(fxpipe.compile(model, 2, 2, checkpoint=checkpoint)) as pipe:
            torch.manual_seed(1)
            pipe.step(x, loss_fn=torch.sum)
        grads.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:BatchNorm uses the statistics")
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_buffers_are_written_once_for_each_micro_batch(checkpoint: str) -> None:
    model, like = (Around(script(nn.BatchNorm1d(WIDTH))) for _ in range(2))
    like.load_state_dict(model.state_dict())
    x = torch.randn(6, WIDTH)
    for part in x.chunk(3):
        like(part)
    with closing(fxpipe.compile(model, 2, 3, checkpoint=checkpoint)) as pipe:
        pipe.step(x, loss_fn=torch.sum)
    for mine, other in zip(model.buffers(), like.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


def test_norms_in_compiled_code_are_told_and_cannot_be_deferred() -> None:
    model, x = Around(script(nn.BatchNorm1d(WIDTH))), torch.randn(6, WIDTH)
    with closing(fxpipe.compile(model, 2, 3)) as pipe, pytest.warns(UserWarning, match="BatchNorm uses .* in inner:"):
        pipe(x)
    with closing(fxpipe.compile(model, 2, 3, deferred_batch_norm=True)) as pipe:
        with pytest.raises(PlanError, match=r"inner is made by torch.jit.*without deferred_batch_norm"):
            pipe(x)
        torch.testing.assert_close(pipe.eval()(x), model.eval()(x))


def test_frozen_modules_have_no_mode() -> None:
    model, x = Around(torch.jit.freeze(script(layers().eval()))), torch.randn(4, WIDTH)
    with closing(fxpipe.compile(model, 2, 2)) as pipe:
        torch.testing.assert_close(pipe(x), model(x))


def test_verify_and_copies() -> None:
    model, _ = models("script")
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    with closing(fxpipe.compile(model, 2, 2)) as pipe, closing(copy.deepcopy(pipe)) as other:
        assert pipe.verify(x, target=x[:, :3], loss_fn=F.mse_loss).ok
        torch.testing.assert_close(other(x), pipe(x))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        torch.testing.assert_close(pipe(x), model(x))
        assert not other(x).any()


def test_packages_know_the_compiled_code(tmp_path: Any) -> None:
    model, like = models("trace")
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    with closing(fxpipe.compile(model, 2, 2)) as pipe:
        expected = pipe(x)
        pipe.save(tmp_path / "package")
    torch.testing.assert_close(fxpipe.load(tmp_path / "package", like)(x), expected)
    without = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH))
    another = Around(torch.jit.trace(without, torch.randn(2, WIDTH)), model.use).double()
    with pytest.raises(PackageError, match=r"inner\.1\.graph"):
        fxpipe.load(tmp_path / "package", another)
