"""Any model, cut anywhere, gives what it gave whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fxpipe.codegen.load import bind, load_package, unload
from fxpipe.codegen.package import constants, package, write
from fxpipe.codegen.scheduler import emit_scheduler
from fxpipe.ir.plan import stage_of
from fxpipe.passes import lower
from tests.random_models import Example, GraphModel, examples, legal_cuts
from tests.transparency import assert_same, build, inputs, plain, step

many = settings(
    max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@contextmanager
def pipeline_of(model: GraphModel, example: Example) -> Iterator[Callable[..., Any]]:
    """The pipeline of the example's graph and plan, with the model's tensors: called as the model is."""
    program = lower(example.graph, example.plan)
    files = package(program, example.plan, emit_scheduler(program, example.plan.chunks))
    with TemporaryDirectory() as folder:
        write(files, folder)
        module = load_package(folder)
        scheduler = bind(module, model, constants(program))
        try:
            yield lambda *args: module.result(*scheduler.run(args, example.plan.chunks))
        finally:
            scheduler.close()
            unload(module)


def check(example: Example) -> None:
    case = example.case
    model, twin = build(case), build(case)
    assert isinstance(twin, GraphModel)
    torch.manual_seed(3)
    wanted = plain(case, model, *inputs(case, example.batch), example.plan.chunks)
    with pipeline_of(twin, example) as pipe:
        torch.manual_seed(3)
        assert_same(step(case, twin, pipe, *inputs(case, example.batch)), wanted)


@many
@given(examples())
def test_a_random_pipeline_is_its_model(example: Example) -> None:
    check(example)


@pytest.mark.slow
@settings(many, max_examples=5000, derandomize=False)
@given(examples())
def test_five_thousand_random_pipelines_are_their_models(example: Example) -> None:
    check(example)


def test_the_generator_makes_what_pipelines_get_wrong() -> None:
    """Long skips, shared parameters, writes across a cut, random ops, several outputs: each in many of the examples."""
    found: dict[str, int] = {}

    @settings(many, max_examples=150)
    @given(examples())
    def look(example: Example) -> None:
        graph, stages = example.graph, stage_of(example.plan)
        readers = {op.name: {stages[o.name] for o in graph.ops if op.name in o.reads} for op in graph.ops}
        states = [name for op in graph.ops for name in {*op.reads} & {s.name for s in graph.states}]
        writes = [(op, name) for op in graph.ops for name in op.writes]
        traits = {
            "several stages": len(example.plan.stages) > 1,
            "long skip": any(max(s, default=0) > stages[name] + 1 for name, s in readers.items()),
            "several consumers": any(len(s - {stages[name]}) > 1 for name, s in readers.items()),
            "shared": len(states) > len(set(states)),
            "write across a cut": any(stages[op.name] != stages.get(name, -1) for op, name in writes),
            "random": any(op.random for op in graph.ops),
            "several outputs": len(graph.outputs) > 1,
            "small batch": example.batch < example.plan.chunks,
        }
        for trait, there in traits.items():
            found[trait] = found.get(trait, 0) + there

    look()
    assert min(found.values()) >= 8, found


def test_a_cut_never_parts_a_tuple_from_its_items() -> None:
    @settings(many, max_examples=50)
    @given(examples())
    def look(example: Example) -> None:
        names = [op.name for op in example.graph.ops]
        for cut in legal_cuts(example.graph):
            for op in example.graph.ops[cut:]:
                assert not any(name.startswith("chunk") and names.index(name) < cut for name in op.reads)

    look()
