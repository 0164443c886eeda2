"""The presets are sound, and survive being written to JSON."""

import pytest

from fxpipe.ir.cluster import check, dump, load
from fxpipe.ir.clusters import PRESETS, preset

SIZES = {"A": 16, "B": 16, "C": 16, "p100": 16, "k80": 64, "p40": 8, "h100": 8}


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name):
    cluster = preset(name)
    check(cluster)
    assert len(cluster.devices) == SIZES[name]
    assert load(dump(cluster)) == cluster
    assert "GB/s" in str(cluster)


def test_unknown():
    with pytest.raises(ValueError, match="no cluster 'D'; there are A, B, C"):
        preset("D")
