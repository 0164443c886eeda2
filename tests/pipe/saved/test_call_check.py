"""A saved package is for one kind of call and one loss: others are refused with what it was made for, before anything
runs. What is damaged is an error that names the file."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import InputError, PackageError
from fxpipe.pipe.saved.loss_fingerprint import rows
from tests.helpers.marks import mostly_slow

X, Y = torch.randn(4, 3, 6), torch.randn(4, 6)


class Model(nn.Module):
    """Its number of rows is part of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: float = 1.0, extra: dict[str, Tensor] | None = None) -> Tensor:
        x = self.b(torch.tanh(self.a(x.reshape(-1, 6))).view(-1, x.shape[1], 6)).sum(1) * scale
        return x if extra is None else x + extra["bias"]


class Looks(nn.Module):
    """Decides by a size that varies."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(x)))
        return (x * 2 if x.shape[1] > 4 else x).sum(1)


def saved(folder: Path, model: nn.Module, *calls: Any, **options: Any) -> Any:
    """A package of the last of these calls, loaded."""
    pipe = fxpipe.compile(model, devices=2, chunks=2, **options)
    for args, kwargs in calls:
        pipe(*args, **kwargs)
    pipe.save(folder)
    pipe.close()
    return fxpipe.load(folder, model)


def test_the_same_call_with_any_batch(tmp_path: Path) -> None:
    model = Model()
    loaded = saved(tmp_path, model, ((X,), {"scale": 2.0}))
    for batch in (4, 5, 8, 1):
        x = torch.randn(batch, 3, 6)
        torch.testing.assert_close(loaded(x, scale=2.0), model(x, scale=2.0))


OTHERS = {
    "size": ((torch.randn(4, 6, 6),), {}, r"x is float32\[4, 6, 6\], .*saved for float32\[b, 3, 6\]"),
    "type": ((X.double(),), {}, r"x is float64\[4, 3, 6\], .*saved for float32\[b, 3, 6\]"),
    "dimensions": ((torch.randn(4, 6),), {}, r"x is float32\[4, 6\], .*saved for float32\[b, 3, 6\]"),
    "no tensor": ((2.0,), {}, r"x is 2.0, .*saved for float32\[b, 3, 6\]"),
    "number": ((X,), {"scale": 3.0}, "scale=1.0"),
    "structure": ((X,), {"extra": {"bias": Y}}, "extra=None"),
    "none": ((), {}, "missing 1 required positional argument: 'x'"),
    "more": ((X, 1.0, None, 5), {}, "positional argument"),
    "other name": ((X,), {"shift": 1.0}, "unexpected keyword argument 'shift'"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_call_is_refused(tmp_path: Path, other: str) -> None:
    args, kwargs, message = OTHERS[other]
    loaded = saved(tmp_path, Model(), ((X,), {"scale": 1.0, "extra": None}))
    with pytest.raises(InputError, match=message):
        loaded(*args, **kwargs)


def test_another_structure_is_refused(tmp_path: Path) -> None:
    loaded = saved(tmp_path, Model(), ((X,), {"extra": {"bias": Y}}))
    torch.testing.assert_close(loaded(X, extra={"bias": Y}), loaded.model(X, extra={"bias": Y}))
    for extra in ({"bias": Y, "more": Y}, {}, None, [Y], 3, {"bias": None}):
        with pytest.raises(InputError):
            loaded(X, extra=extra)


def test_a_size_that_varies_has_conditions(tmp_path: Path) -> None:
    """What the model decided by is in the package, and so is what Dynamo takes for granted of sizes."""
    model = Looks()
    loaded = saved(tmp_path, model, *(((torch.randn(4, size, 6),), {}) for size in (7, 6)))
    for size in (5, 6, 9):
        x = torch.randn(4, size, 6)
        torch.testing.assert_close(loaded(x), model(x))
    for size in (4, 2, 1):
        with pytest.raises(InputError, match=rf"saved for calls with seq > 4, and here seq = {size}"):
            loaded(torch.randn(4, size, 6))
    assert "def conditions(seq):" in (tmp_path / "__init__.py").read_text()


class Batch(Looks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(x))).sum(1)
        return x * 2 if x.shape[0] > 2 else x


def test_a_model_that_looks_at_the_batch(tmp_path: Path) -> None:
    model = Batch()
    loaded = saved(tmp_path, model, ((torch.randn(8, 3, 6),), {}))
    loaded(torch.randn(12, 3, 6))
    with pytest.raises(InputError, match="b > 2, and here b = 2; b is the size of a micro-batch"):
        loaded(torch.randn(4, 3, 6))


def test_train_and_eval(tmp_path: Path) -> None:
    loaded = saved(tmp_path, Model(), ((X,), {}))
    with pytest.raises(InputError, match="saved for training"):
        loaded.eval()(X)


# The loss -------------------------------------------------------------------------------------------------------------


def weighted(alpha: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: alpha * F.mse_loss(output, target)


class Smooth:
    """A loss that keeps count, beside what it computes with."""

    def __init__(self, beta: float) -> None:
        self.beta, self.name, self.calls = beta, "mine", 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.smooth_l1_loss(output, target, beta=self.beta)


FACTOR = 2.0


def with_global(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) * FACTOR


def step_saved(folder: Path, model: nn.Module, loss_fn: Any) -> Any:
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    pipe.step(X, target=Y, loss_fn=loss_fn)
    pipe.save(folder)
    pipe.close()
    return fxpipe.load(folder, model)


SCALE = torch.rand(6)
LOSSES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {  # the same each time, and another one
    "function": (lambda: F.mse_loss, lambda: F.l1_loss),
    "closure": (lambda: weighted(0.5), lambda: weighted(0.7)),
    "module": (lambda: nn.SmoothL1Loss(beta=0.5), lambda: nn.SmoothL1Loss(beta=0.6)),
    "code": (lambda: lambda a, b: (a - b).square().mean(), lambda: lambda a, b: (a - b).abs().mean()),
    "partial": (lambda: partial(F.mse_loss, reduction="mean"), lambda: partial(F.mse_loss, reduction="sum")),
    "object": (lambda: Smooth(0.5), lambda: Smooth(0.6)),
    "default": (lambda: lambda a, b, c=2: c * F.mse_loss(a, b), lambda: lambda a, b, c=3: c * F.mse_loss(a, b)),
    "tensor": (
        lambda: (lambda s: lambda a, b: (s * (a - b)).square().mean())(SCALE.clone()),
        lambda: (lambda s: lambda a, b: (s * (a - b)).square().mean())(SCALE + 1),
    ),
}


@pytest.mark.parametrize("kind", mostly_slow(LOSSES, [*LOSSES][::2].__contains__))
def test_only_its_own_loss(tmp_path: Path, kind: str) -> None:
    same, other = LOSSES[kind]
    model = Model()
    loaded = step_saved(tmp_path, model, same())
    wanted = same()(model(X), Y).detach()
    torch.testing.assert_close(loaded.step(X, target=Y), wanted)
    torch.testing.assert_close(loaded.step(X, target=Y, loss_fn=same()), wanted)
    with pytest.raises(InputError, match=r"^loss_fn.* and this package was saved with .*, or leave loss_fn out$"):
        loaded.step(X, target=Y, loss_fn=other())


def test_a_global_of_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = step_saved(tmp_path, Model(), with_global)
    loaded.step(X, target=Y, loss_fn=with_global)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    with pytest.raises(InputError, match=r"loss_fn\.FACTOR is 3\.0, and this package was saved with 2\.0"):
        loaded.step(X, target=Y, loss_fn=with_global)


def test_a_loss_of_the_models_own(tmp_path: Path) -> None:
    class Own(Model):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x).square().mean()

    pipe = fxpipe.compile(Own(), devices=2, chunks=2)
    pipe.step(X)
    pipe.save(tmp_path)
    loaded = fxpipe.load(tmp_path, pipe.model)
    loaded.step(X)
    with pytest.raises(InputError, match=r"loss_fn is function torch\.nn.functional.mse_loss, .* saved with None"):
        loaded.step(X, loss_fn=F.mse_loss)


def test_a_loss_that_changed_before_it_was_saved(tmp_path: Path) -> None:
    loss, pipe = Smooth(0.5), fxpipe.compile(Model(), devices=2, chunks=2)
    pipe.step(X, target=Y, loss_fn=loss)
    loss.beta = 0.7
    with pytest.raises(PackageError, match=r"loss_fn\.beta has changed"):
        pipe.save(tmp_path)


def test_rows_can_be_read() -> None:
    assert rows(F.mse_loss) == (("loss_fn", "function torch.nn.functional.mse_loss"),)
    found = dict(rows(nn.CrossEntropyLoss(label_smoothing=0.1)))
    assert found["loss_fn"] == "class torch.nn.modules.loss.CrossEntropyLoss"
    assert found["loss_fn.label_smoothing"] == "0.1"
    assert re.fullmatch(r"function <lambda> [0-9a-f]{12}", dict(rows(weighted(0.5)))["loss_fn"])
    assert "loss_fn.calls" not in dict(rows(Smooth(1.0)))
    assert "loss_fn.name" not in dict(rows(Smooth(1.0)))
    assert rows(pickle.loads(pickle.dumps(Smooth(1.0)))) == rows(Smooth(1.0))


# Damage ---------------------------------------------------------------------------------------------------------------

DAMAGES: dict[str, tuple[str, Callable[[str], str | None], str]] = {
    "stage is missing": ("stage1.py", lambda _: None, r"stage1\.py is not there, which .*__init__\.py:\d+ imports"),
    "stage is cut off": ("stage1.py", lambda text: text[: text.index("forward(") + 9], r"stage1\.py:\d+ cannot be"),
    "scheduler is empty": ("scheduler.py", lambda _: "", r"__init__\.py:\d+ cannot be imported, ImportError"),
    "init is cut off": (
        "__init__.py",
        lambda text: text[: text.index("# The model")],
        r"__init__\.py does not say INPUTS",
    ),
    "init is empty": ("__init__.py", lambda _: "", r"__init__\.py is of format 1, and this fxpipe reads \d"),
    "other format": ("__init__.py", lambda text: re.sub("FORMAT = .*", "FORMAT = 99", text), "is of format 99"),
    "no such name": ("stage0.py", lambda text: text.replace("(Stage)", "(Stag)"), r"stage0\.py:\d+ cannot .*NameError"),
    "model is missing": ("model.json", lambda _: None, r"model\.json cannot be read: .*No such file"),
    "model is cut off": ("model.json", lambda text: text[: len(text) // 2], r"model\.json cannot be read: not JSON"),
    "model is empty": (
        "model.json",
        lambda _: '{"python": "3.11", "classes": {}, "modules": {}}',
        r"model\.json does not say the class of every module",
    ),
    "constants are cut off": ("constants.pt", lambda text: text[: len(text) // 2], r"constants\.pt cannot be read"),
    "constants are text": ("constants.pt", lambda _: "nothing", r"constants\.pt cannot be read"),
}


class Constant(Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = [torch.rand(6)]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * self.table[0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_package_names_the_file(tmp_path: Path, damage: str) -> None:
    name, change, message = DAMAGES[damage]
    model = Constant()
    saved(tmp_path, model, ((X,), {})).close()
    file = tmp_path / name
    text = change(file.read_text(encoding="latin-1"))
    file.unlink() if text is None else file.write_text(text, encoding="latin-1")
    with pytest.raises(PackageError, match=message):
        fxpipe.load(tmp_path, model)
