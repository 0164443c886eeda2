"""By default a stage recomputes as little as lets its device keep no more than with "except_last", in steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.ir.plan.plan import with_modes
from tests.helpers.marks import mostly_slow

X, Y = (torch.randn(16, 8, dtype=torch.float64) for _ in range(2))
CPUS = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")


def net() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)) for _ in range(8))
    return nn.Sequential(*blocks).double()


def stepped(
    model: nn.Module, stages: int, schedule: str, modes: Sequence[str] | None = None, **options: Any
) -> tuple[tuple[int, ...], list[str], int]:
    """The most bytes that each device kept in a step, the mode of each stage, and the number of recomputations.
    `modes`: those to run with, in a plan that is else the default one."""
    if modes is not None:
        with closing(fxpipe.compile(copy.deepcopy(model), CPUS[:stages], 8, schedule=schedule)) as pipe:
            pipe.step(X, target=Y, loss_fn=F.mse_loss)
            given: dict[str, Any] = {"plan": with_modes(pipe.plan, modes)}
    else:
        given = {"devices": CPUS[:stages], "chunks": 8, "schedule": schedule}
    with closing(fxpipe.compile(model, backward="code", **given, **options)) as pipe:
        pipe.step(X, target=Y, loss_fn=F.mse_loss, timeline=True)
        again = sum(span.kind == "R" for span in pipe.timeline.spans)
        return pipe.timeline.high_water, [stage.checkpoint for stage in pipe.plan.stages], again


@pytest.mark.parametrize(
    "schedule", mostly_slow(["gpipe", "1f1b", "interleaved", "zb-h1"], ("1f1b", "zb-h1").__contains__)
)
@pytest.mark.parametrize("stages", mostly_slow([2, 4], (2).__eq__))
def test_no_recomputation_that_saves_nothing(stages: int, schedule: str) -> None:
    plain = net()
    model = copy.deepcopy(plain)
    least, _, most = stepped(copy.deepcopy(plain), stages, schedule, checkpoint="except_last")
    peaks, modes, again = stepped(model, stages, schedule)
    assert all(peak <= limit for peak, limit in zip(peaks, least, strict=True))
    assert again <= most
    faster = {"never": [], "selective": ["never"], "except_last": ["never", "selective"]}
    for stage, less in ((stage, less) for stage, mode in enumerate(modes) for less in faster[mode]):
        others = [less if at == stage else mode for at, mode in enumerate(modes)]
        more, _, _ = stepped(copy.deepcopy(plain), stages, schedule, modes=others)
        assert any(peak > limit for peak, limit in zip(more, least, strict=True))
    F.mse_loss(plain(X), Y).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


def test_two_stages_of_1f1b_recompute_nothing() -> None:
    assert stepped(net(), 2, "1f1b")[1:] == (["never", "never"], 0)
    assert stepped(net(), 2, "1f1b", checkpoint="except_last")[1:] == (["except_last", "except_last"], 7)


def test_what_is_cheap_is_recomputed_where_that_keeps_no_more() -> None:
    model, same = net(), net()
    same.load_state_dict(model.state_dict())
    least, _, most = stepped(model, 4, "1f1b", checkpoint="except_last")
    peaks, modes, again = stepped(same, 4, "1f1b")
    assert "selective" in modes
    assert all(peak <= limit for peak, limit in zip(peaks, least, strict=True))
    assert again < most / 2
    for one, other in zip(same.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


def test_calls_are_another_order_and_recompute_what_saves_there() -> None:
    with closing(fxpipe.compile(net(), CPUS[:2], 8, schedule="1f1b")) as pipe:
        pipe.step(X, target=Y, loss_fn=F.mse_loss)
        assert {stage.checkpoint for stage in pipe.plan.stages} == {"never"}
        pipe(X).sum().backward()
        assert {stage.checkpoint for stage in pipe.plan.stages} == {"except_last"}


def test_one_micro_batch_is_not_recomputed() -> None:
    with closing(fxpipe.compile(net(), CPUS[:2], 1, example_inputs=X)) as pipe:
        assert {stage.checkpoint for stage in pipe.plan.stages} == {"never"}
