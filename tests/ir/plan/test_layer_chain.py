"""Chains: sums, scaling, JSON, and what is refused."""

import pytest

from fxpipe.ir.dataclass_json import read, write
from fxpipe.ir.plan.layer_chain import Chain, Layer, check, scaled

CHAIN = Chain("m", 4, (Layer("a", 1.0, 2.0, 10, 100, 8), Layer("b", 3.0, 4.0, 20, 200, 16)))


def test_running_sums():
    assert CHAIN.forwards == (0, 1, 4)
    assert CHAIN.backwards == (0, 2, 6)
    assert CHAIN.parameters == (0, 10, 30)
    assert CHAIN.saved == (0, 100, 300)
    assert CHAIN.cuts == (0, 8, 0)  # what the last layer gives goes to nobody


def test_scaled_keeps_parameters():
    assert scaled(CHAIN, 8).layers[1] == Layer("b", 6.0, 8.0, 20, 400, 32)
    with pytest.raises(ValueError, match="0 samples"):
        scaled(CHAIN, 0)


def test_json_round_trip():
    assert read(Chain, write(CHAIN)) == CHAIN


def test_print():
    assert str(CHAIN).splitlines()[0] == "m, 2 layers, batch 4"
    assert str(CHAIN).splitlines()[2].split() == ["a", "1", "s", "2", "s", "10", "B", "100", "B", "8", "B"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": "m", "batch": 1, "layers": [{"name": "a"}]}'])
def test_text_that_is_not_a_chain(text):
    with pytest.raises(ValueError, match=r"not JSON|: write"):
        read(Chain, text)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (Chain("m", 1, ()), "m has no layers"),
        (Chain("m", 0, CHAIN.layers), "for 0 samples"),
        (Chain("m", 1, (Layer("a", -1, 1),)), "'a' of m has a cost"),
        (Chain("m", 1, (Layer("a", 1, float("nan")),)), "'a' of m has a cost"),
    ],
)
def test_refused(chain, message):
    with pytest.raises(ValueError, match=message):
        check(chain)
