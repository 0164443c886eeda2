"""Where a model may be cut, on the smallest graphs that say yes and no."""

from __future__ import annotations

import operator
from typing import Any

from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, State
from fxpipe.ir.graph.legal_cuts import glued, legal_cuts, spans, ties
from fxpipe.ir.graph.value_types import ObjectType, TensorType, TupleType, ValueType

ROW = TensorType("f32", ("b", 4), "cpu")
PAIR = TupleType((ROW, ROW))


def op(name: str, target: Any, *reads: str, writes: tuple[str, ...] = (), type: ValueType = ROW) -> Op:
    return Op(name, target, tuple(map(Ref, reads)), {}, type, Origin("net.py", 1, name, ""), (), writes)


def graph(*ops: Op, outputs: tuple[str, ...] = (), states: tuple[str, ...] = ()) -> Graph:
    named = tuple(State(name, f"norm.{name}", "buffer", ROW) for name in states)
    outs = tuple(Output(name, 0) for name in outputs or (ops[-1].name,))
    return Graph("Net", True, (Input("x", "x", ROW, 0),), (), named, ops, outs, ((Ref("x"),), {}), None)


def test_a_chain_may_be_cut_anywhere() -> None:
    chain = graph(op("a", "neg", "x"), op("b", "neg", "a"), op("c", "neg", "b"))
    assert glued(chain) == ()
    assert legal_cuts(chain) == (True, True, True, True)


def test_spans_are_where_values_live() -> None:
    #       0                    1                    2                       (the caller's reading counts not)
    skip = graph(op("a", "neg", "x"), op("b", "neg", "a"), op("c", operator.add, "b", "a"), outputs=("c", "b"))
    assert spans(skip) == {"x": (-1, 0), "a": (0, 2), "b": (1, 2), "c": (2, 2)}


def test_a_tuple_is_tied_to_all_its_readers() -> None:
    halves = graph(
        op("parts", "chunk", "x", type=PAIR),
        op("left", operator.getitem, "parts"),
        op("other", "neg", "x"),
        op("right", operator.getitem, "parts"),
        op("y", operator.add, "left", "right"),
    )
    assert glued(halves) == ((0, 3),)
    assert legal_cuts(halves) == (True, False, False, False, True, True)
    assert ties(halves)[0].reason == "parts is (f32[b, 4], f32[b, 4]), and only tensors and numbers move between stages"


def test_two_tuples_in_a_row_may_be_cut_between() -> None:
    twice = graph(
        op("p", "chunk", "x", type=PAIR),
        op("a", operator.getitem, "p"),
        op("q", "chunk", "a", type=PAIR),
        op("c", operator.getitem, "q"),
    )
    assert glued(twice) == ((0, 1), (2, 3))
    assert legal_cuts(twice) == (True, False, True, False, True)


def test_an_object_from_outside_ties_its_readers() -> None:
    config = graph(op("a", "neg", "x"), op("o", "make", "a", type=ObjectType("Config")), op("y", "use", "a", "o"))
    assert glued(config) == ((1, 2),)


def test_a_lone_value_may_be_written_in_a_later_stage() -> None:
    lone = graph(op("a", "neg", "x"), op("b", "add_", "a", writes=("a",)), op("c", "neg", "b"))
    assert glued(lone) == ()


def test_a_view_and_what_it_views_stay_with_the_write() -> None:
    #                                     view seen after the write
    view = graph(
        op("a", "neg", "x"), op("v", "view", "a"), op("b", "add_", "a", writes=("a", "v")), op("y", "mul", "v", "b")
    )
    assert glued(view) == ((0, 2),)  # v and b move on as they are
    dead = graph(
        op("a", "neg", "x"), op("v", "view", "a"), op("b", "add_", "a", writes=("a", "v")), op("y", "neg", "b")
    )
    assert glued(dead) == ()  # v is never read again


def test_a_value_that_is_read_by_its_old_name_stays_with_the_write() -> None:
    old = graph(op("a", "neg", "x"), op("b", "add_", "a", writes=("a",)), op("y", "mul", "a", "b"))
    assert glued(old) == ((0, 1),)
    returned = graph(op("a", "neg", "x"), op("b", "add_", "a", writes=("a",)), outputs=("a",))
    assert glued(returned) == ((0, 1),)


def test_who_reads_an_input_after_a_write_through_its_view_is_where_the_written_copy_is() -> None:
    through = graph(
        op("early", "neg", "x"),
        op("v", "view", "x"),
        op("w", "add_", "v", writes=("v", "x")),
        op("mid", "neg", "w"),
        op("y", "mul", "mid", "x"),
        op("z", "neg", "y"),
    )
    assert glued(through) == ((1, 4),)


def test_a_view_of_a_view_of_an_input_is_where_the_written_copy_is() -> None:
    """Cut before `w`, the stage would write a copy of `v`, and read `x` in a copy that nobody wrote."""
    through = graph(
        op("early", "neg", "x"),
        op("v", "view", "x"),
        op("w", "select", "v"),
        op("z", "add_", "w", writes=("w", "x")),
        op("y", "mul", "z", "x"),
    )
    assert glued(through) == ((1, 4),)


def test_two_views_of_memory_that_has_no_other_name() -> None:
    siblings = graph(
        op("a", "neg", "x"),
        op("v", "view", "a"),
        op("u", "view", "a"),
        op("w", "select", "v"),
        op("z", "add_", "w", writes=("w", "u")),
        op("y", "mul", "z", "u"),
    )
    assert glued(siblings) == ((1, 4),)  # a may cross: both views are then of one copy of it


def test_a_changed_buffer_keeps_all_its_users_in_one_stage() -> None:
    counted = graph(
        op("a", "neg", "x"),
        op("old", operator.mul, "a", "count"),
        op("b", "neg", "old"),
        op("count_1", "add_", "count", writes=("count",)),
        op("c", "neg", "b"),
        states=("count", "fixed"),
    )
    assert glued(counted) == ((1, 3),)
    assert ties(counted)[0].reason == "norm.count is changed in forward, so all that use it share one stage"


def test_batch_norm_writes_two_buffers_and_ties_nothing() -> None:
    norm = graph(
        op("a", "neg", "x"),
        op("y", "batch_norm", "a", "mean", "var", writes=("mean", "var")),
        op("z", "neg", "y"),
        states=("mean", "var"),
    )
    assert glued(norm) == ()


def test_ten_thousand_ops_are_quick() -> None:
    long = graph(*(op(f"a{i}", "neg", f"a{i - 1}" if i else "x") for i in range(10_000)))
    assert all(legal_cuts(long))
