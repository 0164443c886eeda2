"""After `close()` a pipe says so, whatever it is asked; the model, with its parameters, goes on as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import FxpipeError

X = torch.randn(4, 6)


def loss_fn(out: Tensor) -> Tensor:
    return out.square().mean()


USES: dict[str, Callable[[Any, Path], object]] = {
    "call": lambda pipe, _: pipe(X),
    "call of another kind": lambda pipe, _: pipe(X[:, None]),
    "forward": lambda pipe, _: pipe.forward(X),
    "forward_only": lambda pipe, _: pipe.forward_only(X),
    "step": lambda pipe, _: pipe.step(X, loss_fn=loss_fn),
    "prepare": lambda pipe, _: pipe.prepare(X),
    "rehearse": lambda pipe, _: pipe.rehearse(X, loss_fn=loss_fn),
    "verify": lambda pipe, _: pipe.verify(X, loss_fn=loss_fn),
    "compare": lambda pipe, _: pipe.compare(),
    "explain": lambda pipe, _: pipe.explain(),
    "draw": lambda pipe, path: pipe.draw(path / "stages.svg"),
    "report": lambda pipe, path: pipe.report(path / "report.html"),
    "save": lambda pipe, folder: pipe.save(folder),
    "torch_stages": lambda pipe, _: pipe.torch_stages([0]),
    **{
        name: lambda pipe, _, name=name: getattr(pipe, name)
        for name in ("build", "stages", "scheduler", "plan", "schedule", "programs", "files", "trail")
    },
}


@pytest.mark.parametrize("used", [True, False], ids=["used", "new"])
def test_a_closed_pipe(used: bool, tmp_path: Path) -> None:
    pipe = fxpipe.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), 2, 2)
    if used:
        pipe.step(X, loss_fn=loss_fn, timeline=True)
        pipe(X)
    pipe.close()
    pipe.close()
    (tmp_path / "file").touch()
    for use, do in USES.items():
        with pytest.raises(FxpipeError, match="this pipe is closed; compile the model again"):
            print(use, do(pipe, tmp_path))
    assert pipe.state_dict().keys() == pipe.model.state_dict().keys()


def test_a_closed_package(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    pipe = fxpipe.compile(model, 2, 2, example_inputs=X)
    pipe.save(tmp_path / "out")
    pipe.close()
    loaded = fxpipe.load(tmp_path / "out", model)
    torch.testing.assert_close(loaded(X), model(X))
    loaded.close()
    loaded.close()
    for use in ("call", "forward", "forward_only", "step", "stages"):
        with pytest.raises(FxpipeError, match="pipe is closed; compile the model again, or load the package again"):
            print(use, USES[use](loaded, tmp_path))
