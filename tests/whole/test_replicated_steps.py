"""A step with replicated stages is the model's: loss, outputs, all gradients and buffers, under every schedule.

A few models, chosen for what crosses between their stages, run in configurations that go round, so that every pair of
a number of replicas and a schedule occurs: four of them by default, the others with `slow`, which also runs some of the
configurations for each model whose samples do not see each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, islice, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.pipe.options.compile_options import Options, deal, device_labels, stage_devices
from tests.helpers.marks import mostly_slow, slow_in_turn
from tests.helpers.models import MODELS
from tests.helpers.transparency import assert_same, build, inputs
from tests.whole.test_steps import BATCHES, CHECKPOINTS, NAMES, captured, one_step, reference, stepped, steps_of

REPLICAS = ((1, 2), (2, 1), (2, 2), (2, 3), (3, 2))
PAIRS = list(product(REPLICAS, NAMES))
CHUNKS = 4  # of 7 samples: 2, 2, 2, 1; of 2 samples: 1, 1, so that most replicas have nothing to do
FEW = (
    "long skip", "branches", "tied transformer", "weight norm", "in place", "numbers", "positions", "own loss",
    "constants", "experts",
)  # fmt: skip
QUICK = ("long skip", "in place", "numbers", "constants")
ALONE = [name for name, case in MODELS.items() if not (case.random or {"buffers", "paper"} & case.traits)]


def configurations(index: int, count: int = 5) -> Iterable[tuple[tuple[int, ...], str]]:
    return islice(cycle(PAIRS), index * count, (index + 1) * count)


def test_every_pair_of_replicas_and_schedule_occurs() -> None:
    assert {config for index in range(len(FEW)) for config in configurations(index)} == set(PAIRS)


def options_of(replicas: tuple[int, ...], schedule: str, checkpoint: str) -> Options:
    replica_groups = deal(device_labels(sum(replicas)), replicas)
    labels = stage_devices(tuple(replica_groups), schedule, None)
    return Options(labels, CHUNKS, schedule=schedule, checkpoint=checkpoint, replicas=replica_groups)


def check(name: str, configs: Iterable[tuple[tuple[int, ...], str]], checkpoints: Iterable[str]) -> int:
    """How many of the configurations run, all on one capture, and equal the model; the others are refused."""
    case, ran = stepped(MODELS[name]), 0
    model = build(case)
    wanted = {batch: reference(case, model, batch, CHUNKS) for batch in BATCHES}
    graph = captured(case, build(case), BATCHES[0], CHUNKS)
    for (replicas, schedule), checkpoint in zip(configs, cycle(checkpoints), strict=False):
        twin, options = build(case), options_of(replicas, schedule, checkpoint)
        if len(options.devices) > len(graph.ops):
            continue  # a stage has at least one
        try:
            with steps_of(graph, twin, options, inputs(case, BATCHES[0])) as step:
                for batch in BATCHES:
                    assert_same(one_step(case, twin, batch, step), wanted[batch])
        except PlanError as error:
            if "cannot be cut between samples" not in str(error):
                raise
            continue
        assert list(twin.state_dict()) == list(model.state_dict())
        ran += 1
    return ran


@pytest.mark.parametrize(("index", "name"), mostly_slow(enumerate(FEW), lambda one: one[1] in QUICK), ids=FEW)
def test_a_replicated_step_is_the_models(index: int, name: str) -> None:
    assert check(name, configurations(index), CHECKPOINTS) == 5


@pytest.mark.parametrize(("index", "name"), slow_in_turn(enumerate(ALONE), 3), ids=ALONE)
def test_replicas_of_every_model(index: int, name: str) -> None:
    assert check(name, configurations(index), CHECKPOINTS)


class Decides(nn.Module):
    """Kept whole, and another thing for a slice of a micro-batch than for all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum().item() > 0 else x


@pytest.mark.filterwarnings("ignore:.*is kept whole, and")
def test_a_submodule_kept_whole_that_gets_slices_is_told() -> None:
    # Of what is positive all samples go one way, so that no run shows what others might.
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus(), Decides())
    pipe = fxpipe.compile(model, devices=3, chunks=2, replicas=(1, 2))
    x = torch.randn(8, 4)
    with pytest.warns(
        fxpipe.MixedSamplesWarning, match=r"2 is kept whole, because of .*\.py:\d+ .* leave out the replicas"
    ):
        pipe.step(x, target=x, loss_fn=F.mse_loss)
