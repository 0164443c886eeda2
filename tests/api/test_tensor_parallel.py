"""`fxpipe.plan` with tensor parallelism: what it decides, shows, keeps and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.api.tensor_parallel import degrees_of
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster, Link
from fxpipe.ir.cluster.published_clusters import dapple_b, h100s, k80s
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.pipe.results import planned

WIDTH, PAIRS = 8192, 3


class Wide(nn.Module):
    """Layers whose weights are much larger than the activations of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 * PAIRS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.fixture(scope="module")
def found() -> fxpipe.Planned:
    with torch.device("meta"):
        model, x = Wide(), torch.zeros(1, 16, WIDTH)
    return fxpipe.plan(model, h100s(2), 1, example_inputs=(x,), tensor_parallel="auto", time_limit=120)


def test_a_single_sample_is_shared_by_a_server(found: fxpipe.Planned) -> None:
    """Replicas have no samples to share, and a pipeline has nothing to overlap."""
    planned.check(found)
    times = {one.size: one.seconds for one in found.tried if one.seconds is not None}
    assert list(times) == [1, 2, 4, 8]
    assert {stage.tensor_parallel for stage in (*found.layers.stages, *found.plan.stages)} == {8}
    assert found.seconds == pytest.approx(times[8]) == pytest.approx(min(times.values()))
    assert times[8] < times[1] / 3
    own = sum(one.parameters for one in found.chain.layers)
    assert own == pytest.approx(2 * PAIRS * 4 * WIDTH**2 / 8, rel=0.01)
    assert len(found.memory) in (8, 16)
    assert len(set(found.memory.values())) == len(found.layers.stages)


def test_it_is_explained(found: fxpipe.Planned) -> None:
    text = found.explain()
    assert "tensor parallel 8" in text
    assert "  1  " in text.partition("tensor parallel\n")[2]
    assert "how devices share ops" in text
    assert "linear  " in text
    assert "H100:0-7" in text


def test_it_is_kept_in_a_file(found: fxpipe.Planned, tmp_path: Path) -> None:
    found.save(tmp_path / "plan.json")
    assert planned.load(tmp_path / "plan.json") == found


def test_what_cannot_be_shared_is_refused() -> None:
    chain = Chain("m", 1, (Layer("a", 1.0, 1.0),))
    with pytest.raises(PlanError, match="nothing tells how the layers of a Chain could be cut"):
        fxpipe.plan(chain, "k80", 1, tensor_parallel=2)
    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.zeros(4, 8)
    with pytest.raises(PlanError, match="tensor_parallel=2: no server has 2 devices"):
        fxpipe.plan(model, dapple_b(), 4, example_inputs=(x,), tensor_parallel=2)
    unlike = Cluster(
        (*k80s(1).devices, *h100s(1).devices),
        (Link(("node 0", "server 0"), 1e9, 1e-6),),
        (*k80s(1).switches, *h100s(1).switches),
    )
    with pytest.raises(PlanError, match="tensor_parallel=2: devices of several kinds"):
        fxpipe.plan(model, unlike, 4, example_inputs=(x,), tensor_parallel=2)


def test_a_size_without_a_plan_is_told() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.zeros(4, 8)
    found = fxpipe.plan(model, h100s(1), 4, example_inputs=(x,), tensor_parallel=(1, 16))
    assert all(stage.tensor_parallel == 1 for stage in found.layers.stages)
    assert "tensor_parallel=16: no server has 16 devices" in found.explain()


def test_the_sizes_that_are_tried() -> None:
    assert degrees_of("auto", h100s(2)) == (1, 2, 4, 8)
    assert degrees_of("auto", dapple_b()) == (1,)
    assert degrees_of(3, h100s(2)) == (3,)
    assert degrees_of([4, 2, 2], h100s(2)) == (2, 4)
