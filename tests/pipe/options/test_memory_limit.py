"""`memory_limit`: memory within the limit, and the model's own gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.plan.plan import CHECKPOINT_MODES
from fxpipe.pipe.build.build import predict
from tests.helpers.marks import mostly_slow

CHUNKS = 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.BatchNorm1d(8)).double()


def stepped(**options: Any) -> tuple[fxpipe.Pipe, list[Tensor]]:
    """A pipe after a step, and the gradients and buffers that this step has left."""
    plain = model()
    options = {"devices": 2, "chunks": CHUNKS, "deferred_batch_norm": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = fxpipe.compile(plain, **options)
        torch.manual_seed(1)
        x = torch.randn(16, 8, dtype=torch.float64)
        pipe.step(x, target=x, loss_fn=F.mse_loss, timeline=True)
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    assert len(gradients) == len(list(plain.parameters()))
    return pipe, [*gradients, *plain.buffers()]


def peaks(pipe: fxpipe.Pipe) -> tuple[int, ...]:
    return pipe.timeline.high_water


@pytest.mark.parametrize(
    ("schedule", "backward"),
    mostly_slow([("1f1b", "code"), ("zb-v", "code"), ("gpipe", "autograd")], lambda one: one[0] == "gpipe"),
)
def test_a_step_stays_within_the_limit(schedule: str, backward: str) -> None:
    options: dict[str, Any] = {"schedule": schedule, "backward": backward}
    full, expected = stepped(checkpoint="never", **options)
    little, again = stepped(checkpoint="always", **options)
    most, least = max(peaks(full)), max(peaks(little))
    assert most > least
    limit = (most + least) // 2
    pipe, found = stepped(memory_limit=limit, **options)
    assert {stage.checkpoint for stage in pipe.build.plan.stages} != {"never"}
    assert max(peaks(pipe)) <= limit
    if backward == "code":
        assert peaks(pipe) == predict(pipe.build, CHUNKS).high_water
    for one, same, other in zip(found, again, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(same, other, rtol=1e-12, atol=1e-12)
    text = pipe.explain()
    assert 'checkpoint="auto" chose ' in text
    assert f"of {limit:,} bytes ({'exact' if backward == 'code' else 'estimated'})" in text
    assert "chosen by memory: cpu:0 needs" in " ".join(pipe.files["stage0.py"].split())
    for each in (full, little, pipe):
        each.close()


@pytest.mark.parametrize(
    ("schedule", "share"), mostly_slow([("1f1b", 0.6), ("zb-v", 0.5)], lambda one: one[0] == "1f1b")
)
def test_no_fixed_mode_that_fits_is_faster(schedule: str, share: float) -> None:
    options: dict[str, Any] = {"schedule": schedule, "backward": "code"}
    fixed = {mode: stepped(checkpoint=mode, **options)[0] for mode in CHECKPOINT_MODES}
    least, most = max(peaks(fixed["always"])), max(peaks(fixed["never"]))
    limit = int(least + share * (most - least))
    pipe, _ = stepped(memory_limit=limit, **options)
    assert "selective" in [stage.checkpoint for stage in pipe.build.plan.stages]
    assert peaks(pipe) == predict(pipe.build, CHUNKS).high_water
    assert max(peaks(pipe)) <= limit
    fitting = [one for one in fixed.values() if max(peaks(one)) <= limit]
    assert pipe.build.timeline.makespan <= min(one.build.timeline.makespan for one in fitting)
    for each in (*fixed.values(), pipe):
        each.close()


def test_what_fits_is_kept() -> None:
    pipe, _ = stepped(memory_limit=10**9, schedule="1f1b")
    assert [stage.checkpoint for stage in pipe.build.plan.stages] == ["never", "never"]
    pipe.close()


@pytest.mark.slow
def test_the_least_that_would_do_is_said_and_does() -> None:
    with pytest.raises(PlanError, match=r"memory_limit is 10: whatever is recomputed, cpu:0 needs") as caught:
        stepped(memory_limit=10, backward="code", schedule="1f1b")
    least = int(str(caught.value).partition("memory_limit=")[2].split()[0])
    pipe, _ = stepped(memory_limit=least, backward="code", schedule="1f1b")
    assert max(peaks(pipe)) == least
    pipe.close()
    with pytest.raises(PlanError, match=f"write memory_limit={least} or more"):
        stepped(memory_limit=least - 1, backward="code", schedule="1f1b")


def test_evaluation_has_no_limit() -> None:
    pipe = fxpipe.compile(model().eval(), 2, 2, memory_limit=1)
    x = torch.randn(4, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x), model().eval()(x))
    pipe.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": "device"}, "CPU workers share the memory of the machine: write the bytes that each"),
        (
            {"memory_limit": "devise"},
            "write a whole number of at least 1, or 'device', as in .*; did you mean 'device'",
        ),
        ({"checkpoint": "always", "memory_limit": 5}, "checkpoint says it: leave out one of them"),
        ({"memory_limit": 0}, "memory_limit is 0: write"),
        ({"memory_limit": 9, "plan": lambda graph, sizes: None}, "a strategy does not have"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        fxpipe.compile(model(), 2, 2, **options)


@pytest.mark.slow
def test_a_cluster_has_its_own_limit() -> None:
    """Its memory is of parameters too, four times: 6 layers of 8 x 9 numbers, and a norm."""
    small = Cluster.of(["cpu:0", "cpu:1"])
    pipe, _ = stepped(devices=small, memory_limit="device")
    ((need, limit), _) = pipe.build.memory.values()
    assert limit == small.devices[0].memory
    assert need > 4 * 8 * 3 * 72
    pipe.close()
