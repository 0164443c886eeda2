"""Dead ops go, and everything that one could see stays."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch.predispatch import _vmap_decrement_nesting, _vmap_increment_nesting

from fxpipe.ir.graph.dead_code import without_dead_ops
from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, State
from fxpipe.ir.graph.value_types import IN_VMAP, NO_VALUE, VMAP, TensorType, ValueType

ROW = TensorType("f32", ("b", 4), "cpu")
Target = Callable[..., Any] | str


def op(name: str, target: Target, *reads: str, writes: tuple[str, ...] = (), type: ValueType = ROW) -> Op:
    return Op(name, target, tuple(map(Ref, reads)), {}, type, Origin("net.py", 1, name, ""), (), writes)


def graph(*ops: Op, outputs: tuple[str, ...] = (), states: tuple[str, ...] = ()) -> Graph:
    named = tuple(State(name, f"norm.{name}", "buffer", ROW) for name in states)
    outs = tuple(Output(name, 0) for name in outputs or (ops[-1].name,))
    return Graph("Net", True, (Input("x", "x", ROW, 0),), (), named, ops, outs, ((Ref("x"),), {}), None)


def left(whole: Graph) -> list[str]:
    return [op.name for op in without_dead_ops(whole).ops]


def test_a_chain_that_nobody_reads_goes_whole() -> None:
    dead = graph(op("a", "neg", "x"), op("p", "neg", "x"), op("q", "neg", "p"), op("y", "neg", "a"))
    assert left(dead) == ["a", "y"]


def test_a_vmap_of_nothing_goes() -> None:
    outer, inner = (op(name, _vmap_increment_nesting, type=VMAP) for name in ("outer", "inner"))
    end, close = (op(name, _vmap_decrement_nesting, type=VMAP) for name in ("end", "close"))
    dead, last = op("dead", "neg", "x", type=IN_VMAP), op("y", "neg", "x")
    assert left(graph(outer, inner, dead, end, close, last)) == ["y"]
    assert left(graph(outer, last, inner, dead, end, close, outputs=("y",))) == ["outer", "y", "close"]


def test_nothing_dead_is_the_same_graph() -> None:
    alive = graph(op("a", "neg", "x"), op("y", "neg", "a"))
    assert without_dead_ops(alive) is alive


def test_all_outputs_are_read() -> None:
    assert left(graph(op("a", "neg", "x"), op("y", "neg", "x"), outputs=("y", "a"))) == ["a", "y"]


def test_a_write_lives_as_long_as_its_memory() -> None:
    a, v = op("a", "neg", "x"), op("v", "view", "a")
    seen = graph(a, v, op("w", "add_", "v", writes=("v", "a")), op("y", "neg", "a"))
    assert left(seen) == ["a", "v", "w", "y"]
    unseen = graph(a, v, op("w", "add_", "v", writes=("v",)), op("y", "neg", "x"))
    assert left(unseen) == ["y"]
    of_input = graph(op("w", "add_", "x", writes=("x",)), op("y", "neg", "x"))
    assert left(of_input) == ["w", "y"]


def test_a_written_buffer_outlives_the_call() -> None:
    count = op("count_1", "add_", "count", writes=("count",))
    assert left(graph(count, op("y", "neg", "x"), states=("count",))) == ["count_1", "y"]
    view = op("v", "view", "count")
    through = graph(view, op("w", "add_", "v", writes=("count", "v")), op("y", "neg", "x"), states=("count",))
    assert left(through) == ["v", "w", "y"]


def test_states_that_only_dead_ops_used_go_with_them() -> None:
    dead = graph(op("p", operator.mul, "x", "one"), op("y", operator.mul, "x", "two"), states=("one", "two"))
    assert [state.name for state in without_dead_ops(dead).states] == ["two"]


def test_what_is_called_for_its_effect_stays() -> None:
    def log(x: Tensor) -> Tensor:
        return x

    ok = op("ok", "all", "x")
    for effect in (
        op("e", torch._assert_async, "ok", type=NO_VALUE),
        op("e", torch.ops.aten._assert_async.msg, "ok"),
        op("e", log, "ok"),
    ):
        assert left(graph(ok, effect, op("y", "neg", "x"))) == ["ok", "e", "y"]
    assert left(graph(ok, op("e", torch.ops.aten.neg.default, "ok"), op("y", "neg", "x"))) == ["y"]


def test_draws_keep_their_numbers() -> None:
    first, second = replace(op("p", "bernoulli", "x"), draw=0), replace(op("y", "bernoulli", "x"), draw=1)
    assert [op.draw for op in without_dead_ops(graph(first, second)).ops] == [1]
