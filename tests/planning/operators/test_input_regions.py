"""What parts read of their inputs, by hand, and against a model that is really run."""

import pytest

from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.planning.operators.input_regions import reads
from fxpipe.planning.operators.models.operator_kinds import (
    concat,
    convolution,
    elementwise,
    embedding,
    features,
    flatten,
    image,
    linear,
    loss,
    lstm,
    matmul,
    pooling,
    scaled_dot_product,
    softmax,
    tokens,
)

IMAGE = image("image", 4, 6, 8, 8)
ALL = (0, 4), (0, 6), (0, 8), (0, 8)


def read(operator, region, *inputs):
    return reads(OperatorGraph("one", (*inputs, operator)), operator, region)


def test_a_convolution_reads_the_rows_around_and_all_channels():
    conv = convolution("conv", IMAGE, 10, 3, stride=2, padding=1)
    assert conv.sizes == (4, 10, 4, 4)
    assert read(conv, ((0, 2), (0, 5), (1, 3), (0, 4)), IMAGE) == (((0, 2), (0, 6), (1, 6), (0, 8)),)


def test_pooling_reads_its_own_channels():
    pool = pooling("pool", IMAGE, 2)
    assert read(pool, ((0, 4), (2, 4), (0, 2), (2, 4)), IMAGE) == (((0, 4), (2, 4), (0, 4), (4, 8)),)


def test_a_linear_layer_reads_all_channels_of_its_samples():
    x = features("x", 4, 6)
    assert read(linear("fc", x, 10), ((1, 2), (5, 10)), x) == (((1, 2), (0, 6)),)


def test_a_step_of_an_lstm_reads_all_of_the_state_before():
    x, h = features("x", 4, 6), features("h", 4, 8)
    assert read(lstm("step", x, h, 8), ((0, 2), (4, 8)), x, h) == (((0, 2), (0, 6)), ((0, 2), (0, 8)))


def test_concat_reads_of_each_what_it_gave():
    a, b = image("a", 4, 6, 8, 8), image("b", 4, 4, 8, 8)
    both = concat("both", (a, b))
    assert read(both, ((0, 4), (5, 8), (0, 8), (0, 8)), a, b) == (
        ((0, 4), (5, 6), (0, 8), (0, 8)),
        ((0, 4), (0, 2), (0, 8), (0, 8)),
    )
    nothing = read(both, ((0, 4), (0, 3), (0, 8), (0, 8)), a, b)[1][1]
    assert nothing[0] == nothing[1]


def test_flatten_reads_whole_channels():
    assert read(flatten("flat", IMAGE), ((0, 4), (96, 192)), IMAGE) == (((0, 4), (1, 3), (0, 8), (0, 8)),)
    assert read(flatten("flat", IMAGE), ((0, 4), (128, 192)), IMAGE) == (((0, 4), (2, 3), (0, 8), (0, 8)),)


def test_an_operand_of_size_one_is_read_whole():
    scale = image("scale", 4, 6, 1, 1)
    times = elementwise("times", IMAGE, scale)
    assert read(times, ((0, 4), (0, 3), (4, 8), (0, 8)), IMAGE, scale)[1] == ((0, 4), (0, 3), (0, 1), (0, 1))


def test_matmul_reads_rows_of_one_and_columns_of_the_other():
    a, b = features("a", 4, 6), features("b", 6, 8)
    assert read(matmul("ab", a, b), ((0, 2), (4, 8)), a, b) == (((0, 2), (0, 6)), ((0, 6), (4, 8)))


def test_what_is_summed_over_is_read_where_it_is_cut():
    """The region ends with the range of the summed dimension."""
    a, b = features("a", 4, 6), features("b", 6, 8)
    assert read(matmul("ab", a, b), ((0, 2), (4, 8), (3, 6)), a, b) == (((0, 2), (3, 6)), ((3, 6), (4, 8)))
    assert read(linear("fc", a, 10), ((1, 2), (5, 10), (0, 3)), a) == (((1, 2), (0, 3)),)
    words = tokens("words", 4, 5)
    assert read(embedding("embed", words, 100, 8), ((0, 2), (0, 5), (0, 8), (50, 100)), words) == (((0, 2), (0, 5)),)


def test_attention_reads_all_positions_of_keys_and_values():
    sequence = linear("q", elementwise("x", image("i", 2, 5, 8, 8)), 8)
    three = OperatorGraph("q", (sequence,)).operators[0]
    query = elementwise("q3", type(three)("q3", "input", (), three.output[:3]))
    attend = scaled_dot_product("attend", query, query, query, 1)
    region = (0, 1), (2, 3), (0, 4)
    assert reads(OperatorGraph("g", (query, attend)), attend, region) == (
        region,
        ((0, 1), (0, 5), (0, 4)),
        ((0, 1), (0, 5), (0, 4)),
    )


@pytest.mark.parametrize("make", [softmax, loss])
def test_what_is_reduced_is_read_whole(make):
    x = features("x", 4, 6)
    operator = make("over", x)
    region = ((1, 3), (0, 6))[: len(operator.output)]
    assert read(operator, region, x) == (((1, 3), (0, 6)),)
