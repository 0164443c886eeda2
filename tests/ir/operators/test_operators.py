"""Operators and their graphs: written, read back, and refused where they are not in order."""

from dataclasses import replace

import pytest

from fxpipe.ir.dataclass_json import read, write
from fxpipe.ir.operators.operators import Dimension, Operator, OperatorGraph, check, show

X = Operator("x", "input", (), (Dimension("sample", 4, "S"), Dimension("channel", 6)))
FC = Operator("fc", "linear", ("x",), (Dimension("sample", 4, "S"), Dimension("channel", 8, "P")), 12.0, 56)
GRAPH = OperatorGraph("small", (X, FC))


def test_prints_a_row_for_each_operator():
    assert show(GRAPH).splitlines() == [
        "operator    kind    inputs    output                   weights",
        "x           input             sample 4 S, channel 6",
        "fc          linear  x         sample 4 S, channel 8 P  56",
    ]


def test_is_read_back_as_it_was_written():
    pool = Operator("pool", "pool2d", ("fc",), FC.output, window=(3, 3), stride=(2, 2), padding=(0, 0))
    graph = OperatorGraph("small", (X, FC, pool))
    assert read(OperatorGraph, write(graph)) == graph


def test_knows_its_edges_and_weights():
    graph = OperatorGraph("two", (X, FC, replace(FC, name="again", shared="fc")))
    assert graph.edges == ((0, 1, 0), (0, 2, 0))
    assert graph.weights == 56
    with pytest.raises(KeyError, match="no operator 'fd'"):
        graph.operator("fd")


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ((), "has no operators"),
        ((X, X), "operator 'x' of small: the name comes twice"),
        ((FC, X), "'fc' of small reads 'x', which does not come before it"),
        ((X, replace(FC, kind="magic")), "is of kind 'magic'; there are attention,"),
        ((X, replace(FC, output=())), "no output dimensions"),
        ((X, replace(FC, output=(Dimension("sample", 0, "S"),))), "dimension sample 0 S; sizes are positive"),
        ((X, replace(FC, work=-1.0)), "negative cost"),
        (
            (X, FC, replace(FC, name="fd", shared="fc", weights=8)),
            "has 8 weights, but shares them with 'fc', which has 56",
        ),
    ],
)
def test_refuses(operators, message):
    with pytest.raises(ValueError, match=message):
        check(OperatorGraph("small", operators))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x", "element": 4, "operators": [{"name": "x"}]}'])
def test_text_that_is_no_graph_is_refused(text):
    with pytest.raises(ValueError, match=r"not JSON|: write"):
        read(OperatorGraph, text)
