"""After every pass the program computes what the graph computes: outputs, all gradients, buffers."""

from __future__ import annotations

import logging
import operator
from dataclasses import replace
from time import process_time

import pytest
from torch import nn

from fxpipe.ir.graph.check_graph import check
from fxpipe.ir.graph.graph import Output, Ref
from fxpipe.ir.program.program import Program
from fxpipe.passes import PASSES, PassContext, lower
from tests.helpers.nets import NETS, Chain, Masked, finest, make, plan
from tests.helpers.pass_graphs import trace
from tests.helpers.same_program import assert_repeatable, assert_same, of_graph, of_program

TRAIL = ("cut", *(run.__name__ for run in PASSES))


@pytest.mark.parametrize("net", NETS)
def test_equals_the_graph_after_every_pass(net: type[nn.Module]) -> None:
    model, x = make(net)
    graph = trace(model, x)
    check(graph)
    expected = of_graph(graph, model, x)
    trail: dict[str, Program] = {}
    lower(graph, finest(graph), trail.__setitem__)
    for name, program in trail.items():
        assert_same(of_program(program, model, x), expected), name


@pytest.mark.parametrize("net", NETS)
def test_stages_can_run_again(net: type[nn.Module]) -> None:
    model, x = make(net)
    graph = trace(model, x)
    assert_repeatable(lower(graph, finest(graph)), model, x)


@pytest.mark.parametrize("net", NETS)
def test_the_graph_is_the_model(net: type[nn.Module]) -> None:
    # The converter of these tests is itself tested: outputs equal the model's.
    model, x = make(net)
    graph = trace(model, x)
    if net.__name__ == "Dropping":
        model, graph = model.eval(), trace(model.eval(), x)
    found = of_graph(graph, model, x)
    expected = model(x.clone())
    values = {"dict": lambda: expected.values(), "tuple": lambda: expected}
    listed = values.get(type(expected).__name__, lambda: (expected,))()
    assert_same({str(i): found[o.value].detach() for i, o in enumerate(graph.outputs)},
                {str(i): v.detach() for i, v in enumerate(listed)})  # fmt: skip


def test_the_trail_shows_only_passes_that_changed_something() -> None:
    model, x = make(Chain)
    graph = trace(model, x)
    seen: list[str] = []
    lower(graph, plan(graph, 2, 3), lambda name, program: seen.append(name))
    assert seen == ["cut"]  # neighbours only, nothing shared, nothing cheap, no buffers, no recomputation
    model, x = make(Masked)
    graph = trace(model, x)
    lower(graph, finest(graph), lambda name, program: seen.append(name))
    assert seen[1:] == [
        "cut",
        "portals",
        "recompute_cheap",
        "tie_weights",
        "relocate_devices",
        "copy_on_write",
        "recompute",
    ]


def test_a_pass_that_breaks_the_program_is_named() -> None:
    model, x = make(Chain)
    graph = trace(model, x)

    def forget(program: Program, context: PassContext) -> Program:
        return Program(program.graph, program.stages, (), (), program.types)

    with pytest.raises(ValueError, match=r"after forget: stage 0 takes \['x'\], which no move brings"):
        lower(graph, plan(graph, 2, 3), passes=(forget,))


def test_time_per_pass_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model, x = make(Chain)
    graph = trace(model, x)
    with caplog.at_level(logging.DEBUG, "fxpipe"):
        lower(graph, plan(graph, 2, 3))
    assert [record.message.split(":")[0] for record in caplog.records] == list(TRAIL)
    assert caplog.records[-1].message.endswith(" ms, nothing to do")


def test_ten_thousand_ops_are_quick() -> None:
    # tanh of tanh of tanh ..., each also added to the one a hundred before: skips everywhere
    model, x = make(Chain)
    graph = trace(model, x)
    tanh = graph.ops[1]
    ops = list(graph.ops[:2])
    for i in range(5_000):
        far = ops[-100].name if i > 100 else tanh.name
        ops.append(replace(tanh, name=f"t{i}", args=(Ref(ops[-1].name),)))
        ops.append(replace(tanh, name=f"a{i}", target=operator.add, args=(Ref(ops[-1].name), Ref(far))))
    long = replace(graph, ops=tuple(ops), outputs=(Output(ops[-1].name, 0),), result=Ref(ops[-1].name))
    start = process_time()
    lower(long, plan(long, *[1250] * 7, len(ops) - 7 * 1250))
    assert process_time() - start < 5
