"""explain() says what was chosen for each option that is "auto", and nothing of one that was said."""

from __future__ import annotations

import warnings
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe

X = torch.randn(16, 8)
REDUCE = 'reduce="auto" chose mean for loss: read from its ops'
SAID = {"checkpoint": "never", "reduce": "mean", "schedule": "gpipe"}


def net() -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(8, 8), nn.Tanh())))


def total(y: Tensor, x: Tensor) -> Tensor:
    return (y - x).square().sum()


def chosen(loss_fn: Any = F.mse_loss, **options: Any) -> list[str]:
    with closing(fxpipe.compile(net(), **{"devices": 2, "chunks": 4, **options})) as pipe:
        pipe.step(X, target=X, loss_fn=loss_fn)
        return [line for line in pipe.explain().splitlines() if '="auto" chose ' in line]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SAID, []),
        (SAID | {"reduce": "auto"}, [REDUCE]),
        (SAID | {"reduce": "auto", "chunks": 1}, []),
        (SAID | {"reduce": "auto", "loss_fn": total}, [REDUCE.replace("mean", "sum")]),
        (
            SAID | {"checkpoint": "auto"},
            ['checkpoint="auto" chose except_last for all stages: recomputed where that lowers the peak of what the '
             "device keeps"],
        ),
        (
            SAID | {"checkpoint": "auto", "schedule": "1f1b", "warmup": (2, 1)},
            ['checkpoint="auto" chose never for all stages: recomputing would not lower the peak of what a device '
             "keeps"],
        ),
        (
            SAID | {"schedule": "1f1b"},
            ['warmup="auto" chose 2, 1: as many forwards as keep the stages busy and fit into memory'],
        ),
        (SAID | {"schedule": "1f1b", "warmup": (3, 1)}, []),
        (
            SAID | {"schedule": "interleaved"},
            ['stages_per_device="auto" chose 2: as few as interleaved can have'],
        ),
        (SAID | {"schedule": "interleaved", "stages_per_device": 3}, []),
    ],
)  # fmt: skip
def test_a_line_each(options: dict[str, Any], expected: list[str]) -> None:
    assert chosen(**options) == expected


def test_the_schedule() -> None:
    first, *others = chosen(**SAID | {"schedule": "auto"})
    assert first.startswith('schedule="auto" chose ')
    assert first.endswith(": of 10 schedules the one with the shortest simulated step that fits into memory")
    assert all(line.startswith(("warmup", "stages_per_device")) for line in others)


def test_a_call_has_one_order() -> None:
    with closing(fxpipe.compile(net(), 2, 4, **SAID | {"schedule": "auto"}, example_inputs=X)) as pipe:
        assert 'schedule="auto" chose gpipe: a call has no other order' in pipe.explain().splitlines()


def test_a_plan_has_decided() -> None:
    with closing(fxpipe.compile(net(), 2, 4, schedule="1f1b")) as pipe:
        pipe.step(X, target=X, loss_fn=F.mse_loss)
        plan = pipe.plan
    assert chosen(devices=None, chunks=None, plan=plan) == [REDUCE]


def test_a_strategy_is_of_no_stages() -> None:
    found = fxpipe.search(net(), fxpipe.Cluster.of(["cpu:0", "cpu:1"]), example_inputs=X, budget=0.1)
    assert chosen(devices=None, chunks=2, plan=found) == [
        REDUCE, 'backward="auto" chose autograd: a plan that cuts operators has no generated backward'
    ]  # fmt: skip


def words(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y, target, ignore_index=1)


def test_a_mean_over_what_is_counted_in_the_whole_batch_is_said() -> None:
    with closing(fxpipe.compile(net(), 2, 4)) as pipe:
        pipe.step(X, target=torch.arange(16) % 8, loss_fn=words)
        (line,) = [line for line in pipe.explain().splitlines() if line.startswith("reduce=")]
    assert line == (
        'reduce="auto" chose sum for loss: read from its ops, in which each micro-batch divides by labels_counted, of '
        "the whole batch"
    )


class Whole(nn.Module):
    """Kept whole, because of a branch; the layer behind it too if it is `all`."""

    def __init__(self, all: bool) -> None:
        super().__init__()
        self.all, self.first, self.last = all, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x) if x.sum() < 1e9 else x


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole, self.last = Whole(True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.whole(x))
        return y


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (Whole(True), {"devices": 3, "schedule": "1f1b"}, "devices cpu:1, cpu:2; schedule='1f1b'"),
        (Whole(True), {"devices": 3, "replicas": (1, 2)}, "devices cpu:1, cpu:2"),
        (Whole(True), {"devices": 2, "schedule": "1f1b", "warmup": (2, 1)}, "devices cpu:1; schedule='1f1b'; warmup="),
        (Half(), {"devices": 4, "schedule": "1f1b"}, "devices cpu:2, cpu:3"),
        (Whole(True), {"devices": 1}, ""),
        (net(), {"devices": 3}, ""),
    ],
)
def test_what_is_not_used_of_the_options_is_said(model: nn.Module, options: dict[str, Any], expected: str) -> None:
    with warnings.catch_warnings(record=True) as found, closing(fxpipe.compile(model, chunks=4, **options)) as pipe:
        warnings.simplefilter("always")
        pipe(X)
        lines = [line for line in pipe.explain().splitlines() if line.startswith("not used")]
    texts = [str(one.message) for one in found if "not used" in str(one.message)]
    if not expected:
        assert not texts + lines
        return
    assert all(one.filename == __file__ for one in found)  # the user's line
    assert lines == [f"not used, as the model cannot be cut into more stages: {expected}"]
    assert texts[0].endswith(expected)
