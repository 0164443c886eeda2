"""Profiles of models: estimated without weights, measured where they are, refused where that makes no sense."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import InputError, PlanError
from fxpipe.ir.cluster.cluster import Device
from fxpipe.ir.cluster.published_clusters import V100, dapple_a


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_estimated_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = net()
    x = torch.zeros(6, 8, device="meta")
    for device in (V100, dapple_a()):
        found = fxpipe.profile(model, x, device=device, batch=32)
        assert (found.source, found.batch, len(found.ops)) == ("estimated", 32, 3)
        assert [op.output for op in found.ops] == [32 * 16 * 4, 32 * 16 * 4, 32 * 4 * 4]
        assert found.at(6).ops == fxpipe.profile(model, x, device=device).ops
    assert isinstance(found, fxpipe.Profile)
    with pytest.raises(PlanError, match="meta device and cannot be run"):
        fxpipe.profile(model, x)


def test_measured_where_the_model_is() -> None:
    found = fxpipe.profile(net(), torch.zeros(6, 8), batch=2)
    assert (found.source, found.batch, found.device) == ("measured", 2, "cpu")
    assert all(op.forward > 0 for op in found.ops)
    assert found.ops[0].output == 2 * 16 * 4
    with pytest.raises(ValueError, match="measured at 2 samples"):
        found.at(4)
    with pytest.raises(InputError, match="batch is 7, and the arguments have 6"):
        fxpipe.profile(net(), torch.zeros(6, 8), batch=7)


@pytest.mark.parametrize("device", [None, V100], ids=["measured", "estimated"])
def test_a_loss_that_knows_the_whole_batch(device: object) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 5)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.linear(x), labels)

    made = fxpipe.profile(Masked(), torch.ones(4, 8), torch.tensor([0, -100, 1, 2]), device=device, batch=2)
    assert any(cost.forward > 0 for cost in made.ops)


def test_refusals() -> None:
    with pytest.raises(PlanError, match=r"takes an nn\.Module"):
        fxpipe.profile(torch.relu, torch.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="batch is 0"):
        fxpipe.profile(net(), torch.zeros(6, 8), batch=0)
    with pytest.raises(PlanError, match="'gpu' is not a device"):
        fxpipe.profile(net(), torch.zeros(6, 8), device="gpu")


def test_measured_profiles_calibrate_a_device() -> None:
    cpu = Device("cpu:0", 10**9, 1e15, 1e15)
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU()), torch.zeros(64, 256)
    measured = fxpipe.profile(model, x)
    found = measured.calibrated(cpu)
    guess = fxpipe.profile(model, x, device=found)
    assert 0 < found.matrices[0].efficiency < 1
    assert sum(op.forward + op.backward for op in guess.ops) == pytest.approx(
        sum(op.forward + op.backward for op in measured.ops), rel=0.5, abs=1e-4
    )
    with pytest.raises(ValueError, match="the profile is estimated; measure one"):
        guess.calibrated(cpu)


def test_what_is_measured_has_its_own_type() -> None:
    with pytest.raises(PlanError, match="dtype='bf16' is for estimates, and what runs here is measured as it is"):
        fxpipe.profile(net(), torch.zeros(6, 8), dtype="bf16")
