"""Speeds of products by element type: what is refused, and what a file keeps."""

from __future__ import annotations

import pytest

from fxpipe.ir.cluster.cluster import Cluster, Device, check, dump, load
from fxpipe.ir.cluster.matrix_speed import MatrixSpeed
from fxpipe.ir.cluster.published_clusters import preset

BF16 = MatrixSpeed("bf16", 4e12, 0.5)


def device(*speeds: MatrixSpeed, share: float = 1.0) -> Cluster:
    return Cluster((Device("a", 1, 1e12, 1e9, matrices=speeds, memory_efficiency=share),))


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        (device(MatrixSpeed("f12", 1.0)), "device a multiplies 'f12'; write one of f64, f32, tf32"),
        (device(BF16, BF16), "device a has two speeds for bf16"),
        (device(MatrixSpeed("bf16", 0.0)), "a figure that is not positive"),
        (device(MatrixSpeed("bf16", 1.0, 1.5)), "reaches 1.5 of its peak; write a share of at most 1"),
        (device(share=0.0), "device a reaches 0.0 of its bandwidth"),
    ],
)
def test_refused(cluster: Cluster, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check(cluster)


def test_a_file_keeps_them() -> None:
    cluster = device(BF16, MatrixSpeed("f8", 8e12), share=0.9)
    check(cluster)
    assert load(dump(cluster)) == cluster
    assert BF16.reached == 2e12


def test_presets_say_where_their_figures_are_from() -> None:
    for name in ("A", "a100", "h100", "b200"):
        assert all("data sheet" in one.source for one in preset(name).devices)
    assert "bf16 2.25e+03" in str(preset("b200"))
