"""Blocks: the layers a user would count."""

import operator

from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref
from fxpipe.ir.graph.module_blocks import blocks
from fxpipe.ir.graph.value_types import TensorType

ROW = TensorType("f32", ("b", 2), "cpu")


def chain(*modules: str) -> Graph:
    """A chain of ops, one for each module path."""
    names = ["x", *(f"y{at}" for at in range(len(modules)))]
    ops = tuple(
        Op(name, operator.neg, (Ref(before),), {}, ROW, Origin("net.py", 1, "", module))
        for before, name, module in zip(names, names[1:], modules, strict=False)
    )
    return Graph("Net", True, (Input("x", "x", ROW, 0),), (), (), ops, (Output(names[-1], 0),), (), Ref(names[-1]))


def listing(*modules: str) -> list[tuple[str, int]]:
    return [(block.path, len(block)) for block in blocks(chain(*modules))]


def test_the_children_of_a_sequential():
    assert listing("0", "1", "2", "2") == [("0", 1), ("1", 1), ("2", 2)]


def test_down_to_the_first_number():
    paths = ("embed.word", "layers.0.a", "layers.0.b.1", "layers.1.a", "head.norm", "head.out")
    assert listing(*paths) == [("embed", 1), ("layers.0", 2), ("layers.1", 1), ("head", 2)]


def test_ops_between_modules_belong_to_the_block_before_and_leading_ones_to_the_first():
    assert listing("", "", "down", "", "up", "") == [("down", 4), ("up", 2)]


def test_a_module_called_twice_is_two_blocks():
    assert listing("a", "b", "a") == [("a", 1), ("b", 1), ("a", 1)]


def test_no_modules_at_all():
    assert listing("", "") == [("", 2)]
    assert blocks(chain()) == ()
