"""Strategies: written, read back, and refused where they do not fit."""

import pytest

from fxpipe.ir.dataclass_json import read, write
from fxpipe.ir.operators.operators import Dimension, Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy, by_name, check, cut, of_names, regions, summed_regions

X = Operator("x", "input", (), (Dimension("sample", 5, "S"), Dimension("channel", 6)))
FC = Operator("fc", "linear", ("x",), (Dimension("sample", 5, "S"), Dimension("channel", 8, "P")), 12.0, 56)
GRAPH = OperatorGraph("small", (X, FC))
SUM = Operator(
    "sum", "linear", ("fc",), (Dimension("sample", 5, "S"), Dimension("channel", 4, "P")), 16.0, 36, summed=8
)
FED = Config((1, 1), (0,))
STRATEGY = Strategy((FED, Config((2, 2), (0, 1, 2, 3))))


def test_a_cut_in_words():
    assert [cut(operator, config) for operator, config in zip(GRAPH, STRATEGY.configs, strict=True)] == [
        "whole",
        "sample/2 channel/2",
    ]


def test_parts_are_numbered_with_the_last_dimension_running_fastest():
    assert regions(FC, STRATEGY.configs[1]) == (
        ((0, 3), (0, 4)),
        ((0, 3), (4, 8)),
        ((3, 5), (0, 4)),
        ((3, 5), (4, 8)),
    )


def test_holders_add_up_what_is_summed_or_have_copies():
    """The number of the holder runs fastest."""
    config = Config((1, 2), (0, 1, 2, 3), 2)
    assert cut(SUM, config) == "channel/2 summed/2"
    assert cut(FC, config) == "channel/2 copies/2"
    assert regions(SUM, config) == (((0, 5), (0, 2)),) * 2 + (((0, 5), (2, 4)),) * 2
    assert [region[-1] for region in summed_regions(SUM, config)] == [(0, 4), (4, 8)] * 2
    assert [region[-1] for region in summed_regions(FC, config)] == [(0, 0)] * 4


def test_is_read_back_as_it_was_written():
    copies = STRATEGY.replace(1, Config((2, 1), (0, 1, 2, 3), 2))
    for strategy in (STRATEGY, copies):
        assert of_names(GRAPH, read(dict[str, Config], write(by_name(GRAPH, strategy))), 4) == strategy


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config((1,), (0,)), "has 2 dimensions, but its config has degrees for 1"),
        (Config((6, 1), (0,) * 6), "sample of size 5 cannot be cut into 6 parts"),
        (Config((0, 1), ()), "sample of size 5 cannot be cut into 0 parts"),
        (Config((2, 1), (0,)), "has 2 parts, but 1 devices are named"),
        (Config((2, 1), (0, 4)), "is put on device 4; there are devices 0 to 3"),
        (Config((2, 1), (0, 1), 0), "has 0 holders of each region"),
        (Config((2, 1), (0, 1), 2), "has 4 parts, but 2 devices are named"),
    ],
)
def test_refuses(config, message):
    with pytest.raises(ValueError, match=message):
        check(GRAPH, STRATEGY.replace(1, config), 4)


def test_holders_are_no_more_than_there_is_to_sum():
    graph = OperatorGraph("sums", (X, FC, SUM))
    start = Strategy((FED, Config((1, 1), (0,)), Config((1, 1), (0,) * 8, 8)))
    check(graph, start, 4)
    with pytest.raises(ValueError, match="'sum' sums over 8 numbers, which cannot be cut for 9 holders"):
        check(graph, start.replace(2, Config((1, 1), (0,) * 9, 9)), 4)
    with pytest.raises(ValueError, match="'x' is fed in, so it has no copies; write holders=1"):
        check(graph, start.replace(0, Config((1, 1), (0, 1), 2)), 4)


def test_what_has_no_role_is_not_cut():
    with pytest.raises(ValueError, match="'x': channel cannot be cut; it can be in sample"):
        check(GRAPH, STRATEGY.replace(0, Config((1, 2), (0, 1))), 4)


def test_heads_are_not_cut_apart():
    """Channels of three heads of four: (0, 6) is one and a half."""
    three = Operator("mix", "scaled_dot_product", ("x",), (Dimension("channel", 12, "A", step=4),))
    graph = OperatorGraph("heads", (X, three))
    check(graph, Strategy((FED, Config((3,), (0, 1, 0)))), 2)
    with pytest.raises(ValueError, match="12 is cut between multiples of 4, so not into 2 equal parts"):
        check(graph, Strategy((FED, Config((2,), (0, 1)))), 2)


def test_a_strategy_has_a_config_for_each_operator():
    with pytest.raises(ValueError, match="2 operators, but the strategy has 1 configs"):
        check(GRAPH, Strategy((FED,)), 4)
    with pytest.raises(ValueError, match="do not have the same operators: fc"):
        of_names(GRAPH, {"x": Config((1, 1), (0,))}, 4)
