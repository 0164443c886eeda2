"""A pipeline is the model: outputs, all gradients and buffers, for every model, cut and schedule of recomputation.

By default every model runs in a few configurations, chosen so that over all models every pair of a number of devices, a
number of micro-batches and a checkpoint mode occurs; `slow` runs the full product.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest
import torch

import fxpipe
from tests.models import MODELS
from tests.transparency import assert_same, build, inputs, plain, step

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


def cases(full: bool) -> list[Any]:
    return [
        pytest.param(name, config, id=f"{name}: {name_of(config)}")
        for index, (name, case) in enumerate(MODELS.items())
        for config in (ALL if full else configurations(index, "paper" in case.traits))
    ]


def check(name: str, config: Config, batches: Collection[int] = BATCHES, training: bool = True, **options: Any) -> None:
    """The pipeline's steps equal the model's, one batch size after another on the same pipe."""
    case = MODELS[name]
    devices, chunks, checkpoint = config
    model, twin = build(case, training=training), build(case, training=training)
    options = {**case.options, **options}
    pipe = fxpipe.compile(twin, devices=devices, chunks=chunks, checkpoint=checkpoint, **options)
    try:
        for batch in batches:
            torch.manual_seed(batch)
            wanted = plain(case, model, *inputs(case, batch), chunks, deferred="deferred_batch_norm" in options)
            torch.manual_seed(batch)
            assert_same(step(case, twin, pipe, *inputs(case, batch)), wanted)
        assert list(pipe.state_dict()) == list(model.state_dict())
    finally:
        pipe.close()


def test_every_pair_of_settings_occurs() -> None:
    chosen = [config for index in range(len(MODELS)) for config in configurations(index, heavy=False)]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert {(c[one], c[other]) for c in chosen} == {(c[one], c[other]) for c in ALL}


@pytest.mark.parametrize(("name", "config"), cases(full=False))
def test_a_pipeline_is_the_model(name: str, config: Config) -> None:
    check(name, config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), cases(full=True))
def test_every_configuration_is_the_model(name: str, config: Config) -> None:
    check(name, config)


@pytest.mark.parametrize("name", ["batch norm", "densenet", "resnet"])
@pytest.mark.parametrize("config", [(1, 3, "never"), (2, 8, "always"), (4, 3, "except_last")], ids=name_of)
def test_deferred_batch_norm_keeps_the_statistics_of_the_whole_batch(name: str, config: Config) -> None:
    check(name, config, deferred_batch_norm=True)


@pytest.mark.parametrize("name", [name for name, case in MODELS.items() if case.random or case.batch_norm])
def test_eval_is_the_model_in_eval(name: str) -> None:
    check(name, (2, 3, "always"), batches=[7], training=False)
