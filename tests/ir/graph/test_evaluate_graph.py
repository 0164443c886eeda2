"""Graphs built by hand, with their values."""

import operator

import torch
import torch.nn.functional as F

from fxpipe.ir.graph.check_graph import check
from fxpipe.ir.graph.evaluate_graph import evaluate, left_to_right
from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, Region, Size, State
from fxpipe.ir.graph.value_types import TensorType, ValueType

ROW = TensorType("f32", ("b", 2), "cpu")
HERE = Origin("net.py", 1, "", "")


def op(name, target, *args, type: ValueType = ROW, **kwargs):
    return Op(name, target, args, {}, type, HERE, **kwargs)


def graph(*ops, states=()):
    x, b, last = Input("x", "x", ROW, 0), Size("b", "x", 0), Ref(ops[-1].name)
    made = Graph("Net", True, (x,), (b,), states, ops, (Output(last.name, 0),), ((Ref("x"),), {}), last)
    check(made)
    return made


def test_methods_functions_states_and_sizes():
    weight = State("weight", "weight", "parameter", TensorType("f32", (2,), "cpu"))
    shape = (Ref("b"), 2)
    ops = op("h", operator.mul, Ref("x"), Ref("weight")), op("y", "view", Ref("h"), shape)
    values = evaluate(graph(*ops, states=(weight,)), {"x": torch.ones(3, 2)}, {"weight": torch.tensor([2.0, 3.0])})
    assert values["y"].tolist() == [[2.0, 3.0]] * 3
    assert values["b"] == 3


def test_setitem_stands_for_the_tensor_it_changed():
    ops = (
        op("h", "clone", Ref("x")),
        op("h_1", operator.setitem, Ref("h"), (slice(None), 0), 5.0, writes=("h",)),
        op("y", operator.add, Ref("h_1"), 1),
    )
    assert evaluate(graph(*ops), {"x": torch.ones(1, 2)}, {})["y"].tolist() == [[6.0, 2.0]]


def test_regions_hold():
    ops = (
        op("h", operator.mul, Ref("x"), 2, regions=(Region("grad", (False,)),)),
        op("y", F.linear, Ref("x"), Ref("x"), regions=(Region("autocast", ("cpu", torch.bfloat16, True, None)),)),
    )
    values = evaluate(graph(*ops), {"x": torch.ones(1, 2, requires_grad=True)}, {})
    assert not values["h"].requires_grad
    assert values["y"].requires_grad
    assert values["y"].dtype == torch.bfloat16


def test_random_ops_run_inside_their_draw():
    numbers = []

    def draw(number):
        numbers.append(number)
        return torch.random.fork_rng(devices=[])

    drop = op("y", F.dropout, Ref("x"), 0.5, True, draw=0)
    before = torch.get_rng_state()
    evaluate(graph(drop), {"x": torch.ones(1, 2)}, {}, draw)
    assert numbers == [0]
    assert torch.equal(before, torch.get_rng_state())


def test_constants_need_not_be_given():
    pi = State("pi", "pi", "constant", TensorType("f32", (), "cpu"), value=torch.tensor(3.0))
    assert evaluate(graph(op("y", operator.mul, Ref("x"), Ref("pi")), states=(pi,)), {"x": torch.ones(1, 2)}, {})[
        "y"
    ].tolist() == [[3.0, 3.0]]


def test_einsum_gets_its_order_back_when_the_last_thread_has_left() -> None:
    settings = torch.backends.opt_einsum
    assert settings.is_available()
    for before in (True, False):
        settings.enabled = before
        try:
            first, second = left_to_right(), left_to_right()
            first.__enter__()
            second.__enter__()
            assert not settings.enabled
            first.__exit__(None, None, None)
            assert not settings.enabled
            second.__exit__(None, None, None)
            assert settings.enabled == before
        finally:
            settings.enabled = True
