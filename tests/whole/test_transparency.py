"""A pipeline is the model: outputs, all gradients and buffers, for every model, cut and schedule of recomputation.

Every model runs in a few configurations, chosen so that over all models every pair of a number of devices, a number of
micro-batches and a checkpoint mode occurs: by default some of the models whose steps are slow (test_steps.py); `slow`
runs the others, and the full product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.codegen.package.load_package import bind, load_package, unload
from fxpipe.codegen.package.package_files import constants, write
from fxpipe.ir.graph.graph import Graph
from fxpipe.pipe.build import build as whole_build
from fxpipe.pipe.build.call_binding import match, micro_batch_sizes
from fxpipe.pipe.build.local_cluster import local_cluster
from fxpipe.pipe.options.compile_options import Options, device_labels
from fxpipe.profiling import estimate
from tests.helpers.marks import mostly_slow, slow_in_turn
from tests.helpers.models import MODELS
from tests.helpers.transparency import Result, assert_same, build, inputs, plain, step

# Batches that every number of micro-batches divides, that none does, and that are smaller than most.
BATCHES = (8, 7, 2)
DEVICES = (1, 2, 3, 4)
CHUNKS = (1, 3, 8)
CHECKPOINTS: tuple[str | tuple[int, ...], ...] = ("never", "except_last", "always", (1,))
Config = tuple[int, int, str | tuple[int, ...]]
# One device has no stage 1 to recompute.
ALL: list[Config] = [config for config in product(DEVICES, CHUNKS, CHECKPOINTS) if config[0] > 1 or config[2] != (1,)]


def configurations(index: int, heavy: bool) -> list[Config]:
    """What model number `index` runs: each number of devices once, with the rest going round from model to model."""
    chosen = []
    for turn, devices in enumerate(DEVICES):
        chunks = CHUNKS[(index + turn) % len(CHUNKS)]
        checkpoint = CHECKPOINTS[(index // len(CHUNKS) + turn) % len(CHECKPOINTS)]
        if devices > 1 or index % 4 == 0:
            chosen.append((devices, chunks, checkpoint))
    return chosen[-1:] if heavy else chosen


def name_of(config: Config) -> str:
    devices, chunks, checkpoint = config
    return f"{devices} devices, {chunks} chunks, {checkpoint if isinstance(checkpoint, str) else 'stage 1'}"


def check(
    name: str, config: Config, batches: Collection[int] = BATCHES, training: bool = True, **options: Any
) -> Graph:
    """The pipeline's steps equal the model's, one batch size after another on the same pipe. Returns what it has
    captured for the first."""
    case = MODELS[name]
    devices, chunks, checkpoint = config
    model, twin = build(case, training=training), build(case, training=training)
    options, graphs = {**case.options, **options}, list[Graph]()
    pipe = fxpipe.compile(twin, devices=devices, chunks=chunks, checkpoint=checkpoint, **options)
    try:
        for batch in batches:
            torch.manual_seed(batch)
            wanted = plain(case, model, *inputs(case, batch), chunks, deferred="deferred_batch_norm" in options)
            torch.manual_seed(batch)
            assert_same(step(case, twin, pipe, *inputs(case, batch)), wanted)
            graphs.append(pipe.build.graph)
        assert list(pipe.state_dict()) == list(model.state_dict())
    finally:
        pipe.close()
    return graphs[0]


def test_every_pair_of_settings_occurs() -> None:
    chosen = [config for index in range(len(MODELS)) for config in configurations(index, heavy=False)]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert {(c[one], c[other]) for c in chosen} == {(c[one], c[other]) for c in ALL}


QUICK = (
    "lstm by hand", "skip ladder", "batch norm", "dropout", "linear chain", "own function", "optional inputs",
    "named tuple output", "tied module", "in place after a fork", "own loss", "complex", "masked",
)  # fmt: skip


@pytest.mark.parametrize(("index", "name"), mostly_slow(enumerate(MODELS), lambda one: one[1] in QUICK), ids=MODELS)
def test_a_pipeline_is_the_model(index: int, name: str) -> None:
    """One configuration all the way from the user's call, the others on what that has captured."""
    first, *others = configurations(index, "paper" in MODELS[name].traits)
    graph = check(name, first)
    for config in others:
        check_captured(name, graph, config)


@lru_cache(maxsize=1)
def graph_of(name: str) -> Graph:
    """The capture of a model's call, kept for the next test: those of a model follow each other in one process."""
    case = MODELS[name]
    chunked = {key: value for key, value in case.options.items() if key in ("batch_dim", "reduce")}
    return capture(build(case), *inputs(case, BATCHES[0]), **chunked)


@lru_cache(maxsize=len(CHUNKS))
def results_of(name: str, chunks: int) -> list[Result]:
    """What the plain model gives, batch after batch: one model for all, as each call writes its buffers."""
    case, found = MODELS[name], []
    model = build(case)
    for batch in BATCHES:
        torch.manual_seed(batch)
        found.append(plain(case, model, *inputs(case, batch), chunks))
    return found


@contextmanager
def pipeline_of(graph: Graph, model: nn.Module, config: Config, call: Any) -> Iterator[Callable[..., Any]]:
    """A pipeline for a graph that was captured before, called as the model is."""
    devices, chunks, checkpoint = config
    found: dict[str, Any] = {}
    match(graph.call, call, found)
    flat = [found[item.name] for item in graph.inputs if item.path]
    labels = device_labels(devices)
    modes = checkpoint if isinstance(checkpoint, str) else frozenset(checkpoint)
    sizes, cluster = micro_batch_sizes(graph, flat, chunks), local_cluster(labels)
    profile = estimate(graph, sizes, cluster.device(labels[0]))
    made = whole_build.build(graph, profile, sizes, cluster, Options(labels, chunks, checkpoint=modes), None, {})
    with TemporaryDirectory() as folder:
        write(made.files, folder)
        package = load_package(folder)
        scheduler = bind(package, model, constants(made.program))
        try:
            yield lambda *args, **kwargs: package.result(*scheduler.run(package.inputs(*args, **kwargs), chunks))
        finally:
            scheduler.close()
            unload(package)


def check_captured(name: str, graph: Graph, config: Config) -> None:
    """As `check`, for a graph that was captured before."""
    case = MODELS[name]
    twin = build(case)
    with pipeline_of(graph, twin, config, inputs(case, BATCHES[0])) as pipe:
        for batch, wanted in zip(BATCHES, results_of(name, config[1]), strict=True):
            torch.manual_seed(batch)
            try:
                assert_same(step(case, twin, pipe, *inputs(case, batch)), wanted)
            except Exception as error:
                error.add_note(f"{name_of(config)}, batch of {batch}")
                raise


@pytest.mark.parametrize(("index", "name"), slow_in_turn(enumerate(MODELS), 3), ids=MODELS)
def test_every_configuration_is_the_model(index: int, name: str) -> None:
    """On one capture of each model: six models together see the full product; that of many hundred ops sees a
    tenth."""
    graph = graph_of(name)
    for config in ALL[index % 6 :: 10 if name == "amoebanet" else 6]:
        check_captured(name, graph, config)


@pytest.mark.parametrize("name", mostly_slow(["batch norm", "densenet", "resnet"], "batch norm".__eq__))
@pytest.mark.parametrize("config", [(1, 3, "never"), (2, 8, "always"), (4, 3, "except_last")], ids=name_of)
def test_deferred_batch_norm_keeps_the_statistics_of_the_whole_batch(name: str, config: Config) -> None:
    check(name, config, deferred_batch_norm=True)


EVAL = [name for name, case in MODELS.items() if case.random or (case.batch_norm and name != "amoebanet")]


@pytest.mark.parametrize("name", mostly_slow(EVAL, EVAL[::6].__contains__))
def test_eval_is_the_model_in_eval(name: str) -> None:
    check(name, (2, 3, "always"), batches=[7], training=False)
