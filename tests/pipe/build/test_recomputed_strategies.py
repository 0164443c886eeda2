"""Strategies that recompute groups of operators, or have several micro-batches, give the plain model's outputs and
gradients, and run as the search counts their memory: one micro-batch after the other, and what is recomputed in
segments of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.api.search import operators_of
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.published_clusters import preset
from fxpipe.ir.operators.operators import OperatorGraph, micro_batch
from fxpipe.ir.operators.strategy import Strategy
from fxpipe.pipe.results.searched import Searched
from fxpipe.planning.operators.expert_strategies import data_parallel, scattered
from fxpipe.planning.operators.strategy_space import groups
from tests.helpers.marks import mostly_slow
from tests.pipe.build.test_apply_strategy import SAMPLES, Convolutional, Mixed, loss_of

MODELS = {"convolutional": Convolutional, "mixed": Mixed}


def made(name: str) -> tuple[nn.Module, Tensor, OperatorGraph]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x = torch.randint(0, 7, (SAMPLES, 5)) if name == "mixed" else torch.randn(SAMPLES, 2, 6, 6).double()
    return model, x, operators_of(model, preset("p100:4"), (x,), None)


def check(name: str, number: int) -> None:
    """A random strategy, in a step or in a call and autograd."""
    (model, x, graph), rng = made(name), Random(number)
    many, devices = rng.choice((1, 2, 4)), rng.choice((1, 2, 3, 4))
    every = groups(graph)
    recomputed = tuple(group for group in every if rng.random() < 0.7) or every[:1]
    strategy = replace(scattered(micro_batch(graph, many), devices, rng), micro_batches=many, recomputed=recomputed)
    output = model(x)
    loss_of(output).backward()
    wanted = {key: one.grad.clone() for key, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    pipe = fxpipe.compile(model, plan=(graph, strategy), reduce="sum")
    if number % 3 == 2:
        found = pipe(x)
        loss_of(found).backward()
    else:
        loss, found = pipe.step(x, loss_fn=loss_of, outputs=True)
        torch.testing.assert_close(loss, loss_of(output).detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, output, rtol=1e-9, atol=1e-9, check_stride=False)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[key], rtol=1e-9, atol=1e-12)
    assert "always" in {stage.checkpoint for stage in pipe.build.program.stages}
    assert pipe.schedule.chunks == many
    pipe.close()


@pytest.mark.parametrize("number", mostly_slow(range(24), lambda number: number < 2))
@pytest.mark.parametrize("name", MODELS)
def test_random_strategies_are_exact(name: str, number: int) -> None:
    check(name, number)


def deep() -> tuple[nn.Module, Tensor, OperatorGraph]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())])
    x = torch.randn(8, 8)
    return model, x, operators_of(model, preset("p100:2"), (x,), None)


def test_segments_and_the_order_of_a_step() -> None:
    """Two groups of layers, each on both devices: a segment for each group and device, one micro-batch at a time."""
    model, x, graph = deep()
    layers = [operator.name for operator in graph if operator.kind != "input"]
    halves = (tuple(layers[:2]), tuple(layers[2:]))
    for recomputed, modes in ((halves, ["always"] * 2), (halves[:1], ["always", "never"]), ((), ["never"])):
        strategy = replace(data_parallel(micro_batch(graph, 2), 2), micro_batches=2, recomputed=recomputed)
        pipe = fxpipe.compile(model, plan=(graph, strategy))
        pipe.step(x, loss_fn=loss_of)
        for label, row in zip(("cpu:0", "cpu:1"), pipe.schedule.devices, strict=True):
            stages = [stage.checkpoint for stage in pipe.build.plan.stages if stage.device == label]
            assert stages[: len(modes)] == modes
            kinds = "".join(action.kind for action in row)
            each = len(kinds) // 4
            assert kinds == 2 * (each * "F" + each * "B"), "forward and backward of a micro-batch in turn"
        pipe.close()


def test_a_file_holds_what_is_recomputed_and_the_micro_batches(tmp_path: Path) -> None:
    model, x, graph = deep()
    strategy = replace(data_parallel(micro_batch(graph, 2), 2), micro_batches=2, recomputed=groups(graph))
    found = Searched(graph, preset("p100:2"), strategy)
    (tmp_path / "found.json").write_text(found.dump())
    plain = model(x)
    pipe = fxpipe.compile(model, plan=tmp_path / "found.json")
    torch.testing.assert_close(pipe(x), plain)
    assert pipe.options.chunks == 2
    assert pipe.options.place.strategy == strategy
    pipe.close()


def test_options_that_contradict_the_strategy() -> None:
    model, _, graph = deep()
    strategy = replace(data_parallel(micro_batch(graph, 2), 2), micro_batches=2, recomputed=groups(graph))
    with pytest.raises(PlanError, match="chunks is 4, and the strategy is for 2 micro-batches"):
        fxpipe.compile(model, plan=(graph, strategy), chunks=4)
    with pytest.raises(PlanError, match="checkpoint is 'always', and the strategy says what is recomputed"):
        fxpipe.compile(model, plan=(graph, strategy), checkpoint="always")
    with pytest.raises(PlanError, match="no such operator"):
        fxpipe.compile(model, plan=(graph, Strategy(strategy.configs, 2, (("nothing",),))))
