"""Portals: long values go straight, once per device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fxpipe.ir.program.program import Program
from fxpipe.passes import cut
from fxpipe.passes.pass_context import PassContext
from fxpipe.passes.portals import portals
from tests.helpers.nets import Chain, Skips, make, plan
from tests.helpers.pass_graphs import trace
from tests.helpers.same_program import assert_same, of_graph, of_program


class Fan(nn.Module):
    """The first value is used by every later stage."""

    def forward(self, x: Tensor) -> Tensor:
        a = torch.sin(x)
        b = a + 1
        c = a * b
        d = a - c
        return a / d


def moved(name: str, devices: tuple[str, ...]) -> list[tuple[int, int]]:
    graph = trace(Fan(), torch.rand(6, 4, dtype=torch.float64))
    chosen = plan(graph, *[1] * 5, devices=devices)
    program = portals(cut(graph, chosen), PassContext(chosen))
    return [(move.source, move.target) for move in program.moves if move.value == name]


def test_each_user_on_its_own_device_has_a_portal_of_its_own() -> None:
    assert moved("sin", ("a", "b", "c", "d", "e")) == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_the_first_user_on_a_device_hands_over_to_the_others() -> None:
    #    stage  0    1    2    3    4
    #           a -> b ----------> b
    #           a ------> c -> c
    assert moved("sin", ("a", "b", "c", "c", "b")) == [(0, 1), (0, 2), (1, 4), (2, 3)]


def test_a_user_on_the_makers_device_has_it_from_the_maker() -> None:
    assert moved("sin", ("a", "b", "a", "b", "a")) == [(0, 1), (0, 2), (0, 4), (1, 3)]


def test_inputs_come_straight_and_outputs_leave_straight() -> None:
    model, x = make(Skips)
    graph = trace(model, x)
    chosen = plan(graph, 2, 2, 2, 2)
    program = portals(cut(graph, chosen), PassContext(chosen))
    assert [str(move) for move in program.moves] == [
        "x  -1 -> 0",
        "x  -1 -> 3  portal",
        "tanh  0 -> 1",
        "tanh  0 -> 2  portal",
        "tanh  0 -> 3  portal",
        "tanh  0 -> 4  portal",
        "linear_1  1 -> 2",
        "exp  2 -> 3",
        "add_1  3 -> 4",
    ]


def test_numbers() -> None:
    model, x = make(Skips)
    graph = trace(model, x)
    for devices in (("a", "b", "a", "b"), ("a", "b", "b", "b"), ("a", "a", "a", "a")):
        chosen = plan(graph, 2, 2, 2, 2, devices=devices)
        assert_same(of_program(portals(cut(graph, chosen), PassContext(chosen)), model, x), of_graph(graph, model, x))


def test_without_relays_nothing_changes() -> None:
    model, x = make(Chain)
    graph = trace(model, x)
    chosen = plan(graph, 2, 3)
    program: Program = cut(graph, chosen)
    assert portals(program, PassContext(chosen)) is program


def test_golden(golden: Callable[[str, str], None]) -> None:
    model, x = make(Skips)
    graph = trace(model, x)
    chosen = plan(graph, 2, 2, 2, 2, devices=("cpu:0", "cpu:1", "cpu:2", "cpu:2"))
    golden("passes/portals.txt", str(portals(cut(graph, chosen), PassContext(chosen))))
