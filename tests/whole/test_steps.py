"""A step is the model's: loss, outputs, all gradients and buffers, for every model under every schedule.

Every model takes a few steps in one configuration, chosen so that over all models every pair of a schedule, a number of
devices and a checkpoint mode occurs: by default some of the models whose calls are slow (test_transparency.py); `slow`
runs the others, and all schedules and modes for each. Then schedules that nobody would write: whatever order is legal
gives the same gradients.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.capture import StepCapture
from fxpipe.codegen.package.load_package import bind, load_package, unload
from fxpipe.codegen.package.package_files import constants, write
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.schedule.schedule import Action, Schedule, dump_csv, needs, show
from fxpipe.pipe.build import build as whole_build
from fxpipe.pipe.build.call_binding import match, micro_batch_sizes
from fxpipe.pipe.build.local_cluster import local_cluster
from fxpipe.pipe.options.compile_options import Options, device_labels, every_device, stage_devices
from fxpipe.profiling import estimate
from fxpipe.runtime.microbatch import split_sizes
from fxpipe.schedules.make_schedule import SCHEDULES, Own
from tests.helpers.marks import mostly_slow, slow_in_turn
from tests.helpers.models import MODELS, Case
from tests.helpers.transparency import Result, assert_same, build, inputs, plain, shown

NAMES = tuple(name for name in SCHEDULES if name != "forward-only")
BATCHES = (8, 7, 2)
DEVICES = (1, 2, 3, 4)
CHECKPOINTS = ("never", "except_last", "always")
CHUNKS = (3, 8, 4, 1)
PARTS = 3  # micro-batches where many configurations share a capture
Config = tuple[str, int, str]
ALL: list[Config] = list(product(NAMES, DEVICES, CHECKPOINTS))


def configuration(index: int) -> Config:
    """What model number `index` runs: each schedule in turn, and the next time with other devices and another mode."""
    around, turn = divmod(index, len(NAMES))
    return NAMES[turn], DEVICES[(turn + around) % len(DEVICES)], CHECKPOINTS[around % len(CHECKPOINTS)]


def chunks_of(index: int) -> int:
    return CHUNKS[index % 3] if index % 10 else CHUNKS[-1]


def test_every_pair_of_settings_occurs() -> None:
    chosen = [configuration(index) for index in range(len(MODELS))]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert {(c[one], c[other]) for c in chosen} == {(c[one], c[other]) for c in ALL}


# The model's step, and the pipe's -------------------------------------------------------------------------------------


def first(output: Sequence[Tensor]) -> Tensor:
    return output[0]


def stepped(case: Case) -> Case:
    """The case with the loss that a step takes: one that is a sum over the samples, or the model's own mean."""
    return case if case.reduce is None else replace(case, loss=first)


def reference(case: Case, model: nn.Module, batch: int, chunks: int) -> Result:
    """The plain model, micro-batch by micro-batch, and the loss beside its output."""
    torch.manual_seed(batch)
    found = plain(case, model, *inputs(case, batch), chunks, deferred="deferred_batch_norm" in case.options)
    both = (case.loss(found.output), found.output)
    return replace(found, output=pytree.tree_map_only(Tensor, Tensor.detach, both))


Step = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Tensor, Any]]


def one_step(case: Case, model: nn.Module, batch: int, step: Step) -> Result:
    """All there is to compare after a step through the pipe."""
    args, kwargs = inputs(case, batch)
    model.zero_grad()
    torch.manual_seed(batch)
    output = step(args, kwargs)
    return shown(model, args, kwargs, output)


QUICK = (  # five schedules, 1 to 4 devices, each mode of recomputation
    "set item", "branches", "long skip", "random draws", "batch second", "nested outputs", "indices",
    "no grad", "pass through", "in place", "mixed precision", "two inputs", "constants", "tied weight", "running max",
)  # fmt: skip


@pytest.mark.parametrize(
    ("index", "name"),
    mostly_slow(enumerate(MODELS), lambda one: one[1] in QUICK),
    ids=[f"{name}: {configuration(i)}" for i, name in enumerate(MODELS)],
)
def test_a_step_is_the_models(index: int, name: str) -> None:
    case = stepped(MODELS[name])
    schedule, devices, checkpoint = configuration(index)
    chunks = chunks_of(index)
    model, twin = build(case), build(case)
    pipe = fxpipe.compile(twin, devices, chunks, schedule=schedule, checkpoint=checkpoint, **case.options)

    def step(args: Any, kwargs: Any) -> Any:
        return pipe.step(*args, loss_fn=case.loss, outputs=True, **kwargs)

    try:
        for batch in BATCHES:
            assert_same(one_step(case, twin, batch, step), reference(case, model, batch, chunks))
    finally:
        pipe.close()


# Many configurations of one capture -----------------------------------------------------------------------------------


@contextmanager
def steps_of(graph: Graph, model: nn.Module, options: Options, call: Any) -> Iterator[Step]:
    """Steps of a graph that was captured before."""
    given: dict[str, Any] = {}
    match(graph.call, call, given)
    flat = [given[item.name] for item in graph.inputs if item.path]
    cluster, sizes = local_cluster(every_device(options)), micro_batch_sizes(graph, flat, options.chunks)
    profile = estimate(graph, sizes, cluster.device(options.devices[0]))
    made = whole_build.build(graph, profile, sizes, cluster, options, None, {})
    with TemporaryDirectory() as folder:
        write(made.files, folder)
        package = load_package(folder)
        scheduler = bind(package, model, constants(made.program, made.whole))
        try:
            yield lambda args, kwargs: package.result(*scheduler.run(package.inputs(*args, **kwargs), options.chunks))
        finally:
            scheduler.close()
            unload(package)


def captured(case: Case, twin: nn.Module, batch: int, chunks: int) -> Graph:
    chunked = {key: value for key, value in case.options.items() if key in ("batch_dim", "reduce")}
    stepper = StepCapture(twin, sizes=lambda rows: split_sizes(rows, chunks), **chunked)
    return stepper.capture(*inputs(case, batch), loss_fn=case.loss, outputs=True)


@lru_cache(maxsize=1)
def graph_of(name: str) -> Graph:
    """The capture of a model's step, which takes most of the time of a test. It is kept for the next one: those of a
    model follow each other in one process (tests/conftest.py)."""
    case = stepped(MODELS[name])
    return captured(case, build(case), BATCHES[0], PARTS)


@lru_cache(maxsize=1)
def results_of(name: str) -> dict[int, Result]:
    """What the plain model gives by batch size, step after step: one model for all, as each step writes its buffers."""
    case = stepped(MODELS[name])
    model = build(case)
    return {batch: reference(case, model, batch, PARTS) for batch in BATCHES}


@pytest.mark.parametrize(("index", "name"), slow_in_turn(enumerate(MODELS), 3), ids=MODELS)
def test_every_schedule_and_mode_is_the_model(index: int, name: str) -> None:
    """Schedules and checkpoint modes, on one capture of each model: each sees all schedules, and three models together
    all pairs. Numbers of devices go round."""
    case, graph, wanted = stepped(MODELS[name]), graph_of(name), results_of(name)
    for turn, schedule in enumerate(NAMES, index):
        devices, checkpoint = DEVICES[turn % len(DEVICES)], CHECKPOINTS[turn % len(CHECKPOINTS)]
        twin = build(case)
        labels = stage_devices(device_labels(devices), schedule, None)
        if len(labels) > len(graph.ops):
            continue  # a stage has at least one
        options = Options(labels, PARTS, schedule=schedule, checkpoint=checkpoint)
        with steps_of(graph, twin, options, inputs(case, BATCHES[0])) as step:
            for batch in BATCHES:
                assert_same(one_step(case, twin, batch, step), wanted[batch])


# Any legal schedule ---------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A skip past most stages, a weight used at both ends, random numbers, an op written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.layers[0](x))
        x = self.drop(torch.sigmoid(self.layers[1](skip)))
        x = self.layers[2](x).mul_(2).tanh()
        x = self.drop(self.layers[3](x)) + skip
        x = torch.sin(self.layers[4](x)) * skip
        return torch.nn.functional.linear(x, self.layers[0].weight)


CASE = replace(MODELS["linear chain"], make=Net, random=True)
ROWS = 7


@cache
def known(chunks: int) -> tuple[Graph, Result]:
    """The graph, and what the plain model gives."""
    return captured(CASE, build(CASE), ROWS, chunks), reference(CASE, build(CASE), ROWS, chunks)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[tuple[str, ...], Schedule]:
    """Stages dealt to workers at random, and an order in which all actions can run, cut into the workers' rows."""
    stages, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    workers = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    dice: random.Random = draw(st.randoms(use_true_random=False))
    tasks = list(product(range(stages), range(chunks)))
    todo = [Action("F", *task) for task in tasks]
    todo += [Action(kind, *task) for task in tasks for kind in dice.choice(["B", "IW"])]
    everything = Schedule("random", (tuple(todo),))
    order: dict[Action, None] = {}
    while todo:
        action = dice.choice([action for action in todo if all(need in order for need in needs(everything, action))])
        order[action] = None
        todo.remove(action)
    labels = tuple([f"cpu:{worker}" for worker in workers])
    rows = [tuple([a for a in order if labels[a.stage] == label]) for label in dict.fromkeys(labels)]
    return labels, Schedule("random", tuple(rows))


def check_schedule(labels: tuple[str, ...], chunks: int, schedule: Own, checkpoint: str) -> None:
    graph, wanted = known(chunks)
    twin = build(CASE)
    options = Options(labels, chunks, schedule=schedule, checkpoint=checkpoint)
    with steps_of(graph, twin, options, inputs(CASE, ROWS)) as step:
        assert_same(one_step(CASE, twin, ROWS, step), wanted)


quick = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@quick
@given(schedules(), st.sampled_from(CHECKPOINTS), st.sampled_from(["value", "grid", "csv", "function"]))
def test_any_legal_schedule_gives_the_same_gradients(
    placed: tuple[tuple[str, ...], Schedule], checkpoint: str, form: str
) -> None:
    labels, schedule = placed
    forms: dict[str, Own] = {
        "value": schedule,
        "grid": show(schedule),
        "csv": dump_csv(schedule),
        "function": lambda stages, chunks: schedule,
    }
    check_schedule(labels, schedule.chunks, forms[form], checkpoint)


@pytest.mark.slow
@settings(quick, max_examples=150)
@given(schedules(), st.sampled_from(CHECKPOINTS))
def test_many_legal_schedules_give_the_same_gradients(
    placed: tuple[tuple[str, ...], Schedule], checkpoint: str
) -> None:
    check_schedule(placed[0], placed[1].chunks, placed[1], checkpoint)


class Borrower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.weight
        back = self.weight.t()
        return h.sin() @ back


def test_a_stage_that_only_borrows_is_recomputed_with_its_gradient() -> None:
    """It takes nothing with a gradient and owns nothing, so what it gave was once sent as if it had none."""
    model = Borrower()
    x = torch.randn(4, 4)
    model(x).sum().backward()
    wanted, model.weight.grad = model.weight.grad, None
    stages = [StagePlan(ops, f"cpu:{j}", "always") for j, ops in enumerate([("h",), ("back",), ("sin", "output")])]
    pipe = fxpipe.compile(model, plan=Plan("Borrower", tuple(stages), 2), reduce="sum")
    pipe.step(x, loss_fn=lambda y: y.sum())
    pipe.close()
    torch.testing.assert_close(model.weight.grad, wanted)
