"""A step is the model's: loss, outputs, all gradients and buffers, for every model under every schedule.

By default every model takes a few steps in one configuration, chosen so that over all models every pair of a schedule,
a number of devices and a checkpoint mode occurs; `slow` runs the full product. Then schedules that nobody would write:
whatever order is legal gives the same gradients.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
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
from fxpipe import street
from fxpipe.capture import Stepper
from fxpipe.codegen.load import bind, load_package, unload
from fxpipe.codegen.package import constants, write
from fxpipe.ir.graph import Graph
from fxpipe.ir.schedule import Action, Schedule, dump_csv, needs, show
from fxpipe.machine import local_cluster
from fxpipe.options import Options, device_labels, stage_devices
from fxpipe.pipe import match, micro_batch_sizes
from fxpipe.profiling import estimate
from fxpipe.runtime.microbatch import split_sizes
from fxpipe.schedules.make import SCHEDULES, Own
from tests.models import MODELS, Case
from tests.transparency import Result, assert_same, build, inputs, plain

NAMES = tuple(name for name in SCHEDULES if name != "forward-only")
BATCHES = (8, 7, 2)
DEVICES = (1, 2, 3, 4)
CHECKPOINTS = ("never", "except_last", "always")
CHUNKS = (3, 8, 4, 1)
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


# The model's step, and the pipe's ---------------------------------------------------------------------------------------


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
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    gradients |= {f"input {index}": leaf.grad for index, leaf in enumerate(leaves)}
    return Result(output, gradients, {name: buffer.clone() for name, buffer in model.named_buffers()})


@pytest.mark.parametrize(
    ("index", "name"), list(enumerate(MODELS)), ids=[f"{name}: {configuration(i)}" for i, name in enumerate(MODELS)]
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


# Many configurations of one capture -------------------------------------------------------------------------------------


@contextmanager
def steps_of(graph: Graph, model: nn.Module, options: Options, call: Any) -> Iterator[Step]:
    """Steps of a graph that was captured before."""
    given: dict[str, Any] = {}
    match(graph.call, call, given)
    flat = [given[item.name] for item in graph.inputs if item.path]
    cluster, sizes = local_cluster(options.devices), micro_batch_sizes(graph, flat, options.chunks)
    profile = estimate(graph, sizes, cluster.device(options.devices[0]))
    made = street.build(graph, profile, sizes, cluster, options, None)
    with TemporaryDirectory() as folder:
        write(made.files, folder)
        package = load_package(folder)
        scheduler = bind(package, model, constants(made.program, made.totals))
        try:
            yield lambda args, kwargs: package.result(
                *scheduler.run(package.inputs(*args, **kwargs), options.chunks)
            )
        finally:
            scheduler.close()
            unload(package)


def captured(case: Case, twin: nn.Module, batch: int, chunks: int) -> Graph:
    chunked = {key: value for key, value in case.options.items() if key in ("batch_dim", "reduce")}
    stepper = Stepper(twin, sizes=lambda rows: split_sizes(rows, chunks), **chunked)
    return stepper.capture(*inputs(case, batch), loss_fn=case.loss, outputs=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_configuration_is_the_model(name: str) -> None:
    """The full product, on one capture of each model, which takes most of the time otherwise."""
    case, chunks = stepped(MODELS[name]), 3
    wanted: dict[int, Result] = {}
    model = build(case)
    for batch in BATCHES:
        wanted[batch] = reference(case, model, batch, chunks)
    graph = captured(case, build(case), BATCHES[0], chunks)
    for schedule, devices, checkpoint in ALL:
        twin = build(case)
        labels = stage_devices(device_labels(devices), schedule, None)
        options = Options(labels, chunks, schedule=schedule, checkpoint=checkpoint)
        with steps_of(graph, twin, options, inputs(case, BATCHES[0])) as step:
            for batch in BATCHES:
                assert_same(one_step(case, twin, batch, step), wanted[batch])
