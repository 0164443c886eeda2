"""Plans edited by hand: the round trip, a cut that is moved, and names that are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PlanError
from tests.helpers.marks import mostly_slow


class Net(nn.Module):
    """Layers that look alike, and an input that is needed again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        skip = x * 2
        for layer in self.layers:
            x = layer(x).relu() + x
        return self.head(x + skip)


X, TARGET = torch.linspace(-1, 1, 32).view(8, 4), torch.ones(8, 2)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def plan() -> dict[str, Any]:
    pipe = fxpipe.compile(net(), 2, 2, cut=["layers.2"], example_inputs=X.double())
    text = pipe.files["plan.json"]
    pipe.close()
    found: dict[str, Any] = json.loads(text)
    return found


def write(folder: Path, plan: dict[str, Any]) -> Path:
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder / "plan.json"


def test_a_cut_is_told_by_its_module_and_line(plan: dict[str, Any]) -> None:
    assert plan["stages"][1] == {
        "begins": "layers.2",
        "line": "test_plan_file.py:29  x = layer(x).relu() + x",
        "device": "cpu:1",
        "checkpoint": "except_last",
    }


@pytest.mark.parametrize(
    "begins",
    mostly_slow(
        ["layers.2", "layers.1", "layers.3", "relu_1", "x_2", "head", "test_plan_file.py:29"],
        ("layers.3", "relu_1", "head", "test_plan_file.py:29").__contains__,
    ),
)
def test_a_cut_that_is_moved(plan: dict[str, Any], begins: str, tmp_path: Path) -> None:
    plan["stages"][1]["begins"] = begins
    plain, model = net(), net()
    pipe = fxpipe.compile(model, plan=write(tmp_path, plan))
    for made, sums in ((plain(X.double()), plain), (pipe(X.double()), model)):
        made.square().sum().backward()
        assert sums.head.weight.grad is not None
    torch.testing.assert_close(pipe(X.double()), plain(X.double()), rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    again = fxpipe.compile(net(), plan=write(tmp_path, json.loads(pipe.files["plan.json"])), example_inputs=X.double())
    assert again.plan == pipe.plan
    model.zero_grad(), plain.zero_grad()
    loss = pipe.step(X.double(), target=TARGET.double(), loss_fn=nn.functional.mse_loss)
    want = nn.functional.mse_loss(plain(X.double()), TARGET.double())
    want.backward()
    torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    pipe.close(), again.close()


def test_a_cheap_op_may_run_elsewhere(tmp_path: Path) -> None:
    pipe = fxpipe.compile(net(), 2, 2, example_inputs=X.double())
    plan = json.loads(pipe.files["plan.json"])
    assert plan["stages"][1]["also"] == ["skip"]
    again = fxpipe.compile(net(), plan=write(tmp_path, plan), example_inputs=X.double())
    assert again.plan == pipe.plan
    pipe.close(), again.close()


@pytest.mark.parametrize(
    ("stage", "change", "says"),
    [
        (
            1,
            {"begins": "layers.9"},
            "begins is 'layers.9', which is no op, module or line of Net; did you mean",
        ),
        (1, {"begins": "haed"}, "did you mean 'head'"),
        (1, {"begins": "skip"}, "begins is 'skip', which does not come after"),
        (0, {"begins": "layers.1"}, "'skip', at .*, comes before it and is in no stage: write 'skip'"),
        (0, {"also": ["nothing"]}, "also names 'nothing', which is no op of Net"),
        (0, {"also": ["head"]}, "also names 'head', which is no op of Net"),
        (0, {"also": ["relu_3"]}, "before op"),
        (1, {"begin": "head"}, "begin is no field here: did you mean 'begins'"),
    ],
)
def test_places_that_cannot_be(
    plan: dict[str, Any], stage: int, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    plan["stages"][stage] |= change
    with pytest.raises(PlanError, match=says):
        fxpipe.compile(net(), plan=write(tmp_path, plan), example_inputs=X.double())


def test_another_model(plan: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the plan is for another model: its model is 'Net', and this one 'Linear'"):
        fxpipe.compile(nn.Linear(4, 4), plan=write(tmp_path, plan), example_inputs=X)
