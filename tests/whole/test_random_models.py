"""Any model, cut anywhere, gives what it gave whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fxpipe.codegen.package.load_package import bind, load_package, unload
from fxpipe.codegen.package.package_files import constants, package, write
from fxpipe.codegen.scheduler.forward_scheduler import emit_scheduler
from fxpipe.ir.graph.dead_code import without_dead_ops
from fxpipe.ir.graph.legal_cuts import legal_cuts
from fxpipe.ir.graph.value_types import tensors
from fxpipe.ir.plan.plan import stage_of
from fxpipe.passes import lower
from tests.helpers.random_models import Example, GraphModel, example_of, examples
from tests.helpers.transparency import assert_same, build, inputs, plain, step

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


@settings(many, max_examples=30)
@given(examples())
def test_a_random_pipeline_is_its_model(example: Example) -> None:
    check(example)


def check_seeds(seeds: range) -> None:
    for seed in seeds:
        try:
            check(example_of(seed))
        except Exception as error:
            error.add_note(f"example_of({seed}) is {example_of(seed)}")
            raise


def test_random_pipelines_are_their_models() -> None:
    check_seeds(range(80))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_hundreds_of_random_pipelines_are_their_models(part: int) -> None:
    start = 200 * (part + 1)
    check_seeds(range(start, start + 200))


def test_the_generator_makes_what_pipelines_get_wrong() -> None:
    """Long skips, shared parameters, writes across a cut, random ops, several outputs: each in many of the examples."""
    found = Counter[str]()
    for seed in range(100):
        found.update(trait for trait, there in traits(example_of(seed)).items() if there)
    assert min(found.values()) >= 5, found
    assert len(found) == len(traits(example_of(0))), found


def traits(example: Example) -> dict[str, bool]:
    graph, plan, stages = example.graph, example.plan, stage_of(example.plan)
    readers = {op.name: {stages[o.name] for o in graph.ops if op.name in o.reads} for op in graph.ops}
    states = [name for op in graph.ops for name in {*op.reads} & {s.name for s in graph.states}]
    writes = [(op, name) for op in graph.ops for name in op.writes]
    devices = [stage.device for stage in plan.stages]
    passes: set[str] = set()
    lower(graph, plan, watch=lambda name, program: passes.add(name))
    return {
        "several stages": len(plan.stages) > 1,
        "long skip": any(max(s, default=0) > stages[name] + 1 for name, s in readers.items()),
        "several consumers": any(len(s - {stages[name]}) > 1 for name, s in readers.items()),
        "shared": len(states) > len(set(states)),
        "write across a cut": any(stages[op.name] != stages.get(name, -1) for op, name in writes),
        "write through a view": any(len(op.writes) > 1 for op in graph.ops),
        "write through a view of an input": any(len(op.writes) > 1 and name in "xy" for op, name in writes),
        "random": any(op.random for op in graph.ops),
        "dead ops": without_dead_ops(graph) is not graph,
        "a gradient stopped": "stop_gradients" in passes,
        "several outputs": len(graph.outputs) > 1,
        "an output not in the loss": bool(example.lost),
        "an input without gradient": not all(t.grad for i in graph.inputs for t in tensors(i.type) if t.dtype == "f64"),
        "a gradient to an input": any(t.grad for item in graph.inputs for t in tensors(item.type)),
        "one device, stages apart": any(
            devices[i] == devices[k] != devices[j] for i, j, k in combinations(range(len(devices)), 3)
        ),
        "another order": [op.name for op in graph.ops] != [name for stage in plan.stages for name in stage.ops],
        "several modes": len({stage.checkpoint for stage in plan.stages}) > 1,
        "small batch": example.batch < plan.chunks,
    }


def test_a_cut_never_parts_a_tuple_from_its_items() -> None:
    @settings(many, max_examples=25)
    @given(examples())
    def look(example: Example) -> None:
        names = [op.name for op in example.graph.ops]
        legal = [place for place, may in enumerate(legal_cuts(example.graph)) if may]
        for cut in legal:
            for op in example.graph.ops[cut:]:
                assert not any(name.startswith("chunk") and names.index(name) < cut for name in op.reads)

    look()
