"""The tables beside the papers': sizes by planning, speeds by simulation, on models small enough for a test."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import gpipe, torchgpipe
from benchmarks.models import ResNet, UNet
from benchmarks.planned import (
    AMOEBANET,
    FLOAT,
    UNET,
    Family,
    Need,
    Size,
    Training,
    fits,
    graph_of,
    largest,
    made,
    needs,
    parameters,
)
from benchmarks.simulated import (
    Parts,
    Setting,
    amoebanet_layers,
    box,
    busy,
    memory,
    memory_without_dependencies,
    our_plans,
    parts,
    resnet_layers,
    seconds,
    their_plan,
    throughput,
    timeline,
    unet_layers,
    without_dependencies,
    without_streams,
)
from fxpipe.capture import capture
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.legal_cuts import legal_cuts
from fxpipe.schedules.one_f_one_b import gpipe as schedule
from fxpipe.schedules.simulate.simulate import Hop, StageCost

# Each layer of width w: w squared weights, and a row of w goes in, out, and between.
CHAIN = Family(
    "chain",
    lambda depth, width: nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(depth))),
    (8,),
    8,
    copies=3,
)
# As the paper's, but with two levels in place of five.
SHALLOW = replace(UNET, make=lambda blocks, channels: UNet(blocks, channels, depth=2), sample=(3, 16, 16))


@pytest.fixture(scope="module")
def unet() -> Graph:
    return graph_of(SHALLOW, Size(1, 8))


# Memory


@pytest.mark.parametrize(
    ("family", "size"),
    [
        (SHALLOW, Size(1, 24)),
        pytest.param(replace(AMOEBANET, sample=(3, 64, 64)), Size(0, 32), marks=pytest.mark.slow),
    ],
    ids=["unet", "amoebanet"],
)
def test_a_graph_of_any_width_is_what_a_capture_gives(family: Family, size: Size) -> None:
    model, image = made(family, size)
    graph, captured = graph_of(family, size), capture(model, (image,))
    assert [op.type for op in graph.ops] == [op.type for op in captured.ops]
    assert [state.type for state in graph.states] == [state.type for state in captured.states]
    assert parameters(family, size) == sum(parameter.numel() for parameter in model.parameters())


def test_what_devices_need() -> None:
    chain = replace(CHAIN, sample=(8,))
    two, six = Training(2, batch=6, chunks=3), Training(1, batch=6, chunks=1, recompute=False)
    row = 8 * FLOAT
    assert parameters(chain, Size(2, 8)) == 128
    # Three micro-batches of two rows come in, and one is recomputed: the product saves what came in.
    assert needs(chain, Size(2, 8), two) == (Need(3 * 64 * FLOAT, 3 * 2 * row + 2 * row),) * 2
    # Nothing is recomputed: the inputs of both products, for all rows.
    assert needs(chain, Size(2, 8), six) == (Need(3 * 128 * FLOAT, 2 * 6 * row),)


@pytest.mark.parametrize("near", [8, 16, 24, 80])
def test_the_largest_is_found_from_anywhere(near: int) -> None:
    family = replace(CHAIN, make=lambda depth, width: widening(width), sample=(8,))
    training = Training(1, batch=1, chunks=1)
    least = max(need.total for need in needs(family, Size(1, 40), training))
    assert largest(family, Size(1, near), training, least) == Size(1, 40)
    assert largest(family, Size(1, near), training, least - 1) == Size(1, 32)
    assert largest(family, Size(1, near), training, 10) is None


def widening(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width, bias=False), nn.Linear(width, 8, bias=False))


def test_a_memory_table_has_theirs_ours_and_our_largest() -> None:
    family = replace(CHAIN, make=lambda depth, width: widening(width), sample=(8,))
    row = gpipe.Published("Pipeline-1", Size(1, 16), Training(1, 1, 1), "256", 3.0, None)
    memory = needs(family, Size(1, 32), row.training)[0].total
    lines = gpipe.memory_table(family, [row], memory, 1000).splitlines()[2:]
    assert [line.split()[:4] for line in lines] == [
        ["Pipeline-1", "(1,", "16)", "256"],
        ["(1,", "16)", "0.0M", "ours"],
        ["(1,", "32)", "0.0M", "ours"],
    ]
    assert [line.split()[-1] for line in lines] == ["no", "yes", "yes"]


def test_published_memory_is_of_models_we_have() -> None:
    for row in torchgpipe.UNET_MEMORY:
        assert row.activation_memory is not None
        assert row.activation_memory > 0
    assert not fits((Need(1, 2), Need(2, 2)), 3)


# Speed


def test_layers_are_counted_as_torchgpipe_counts_them(unet: Graph) -> None:
    assert (len(unet_layers(1, 2)), sum(unet_layers(1, 2))) == (29, len(unet.ops))
    assert len(unet_layers(5)) == sum(torchgpipe.ABLATION_BALANCE) == 241
    resnet = capture(ResNet((1, 2), width=8), (torch.randn(2, 3, 32, 32),))
    assert sum(resnet_layers((1, 2))) == len(resnet.ops)


@pytest.mark.slow
def test_cells_are_the_layers_of_amoebanet() -> None:
    graph = graph_of(replace(AMOEBANET, sample=(3, 64, 64)), Size(0, 16))
    layers = amoebanet_layers(graph)
    assert (len(layers), sum(layers)) == (6, len(graph.ops))  # stem, four reductions, classifier
    assert graph.ops[layers[0]].origin.module.startswith("cells.0.")
    assert not graph.ops[-layers[-1]].origin.module.startswith("cells")


@pytest.mark.parametrize(
    ("published", "layers"),
    [(torchgpipe.AMOEBANET_SPEED, 24), (torchgpipe.UNET_SPEED, 241), (torchgpipe.RESNET_SPEED, 370)],
)
def test_balances_have_all_layers(published: torchgpipe.Speeds, layers: int) -> None:
    for setting, balance, _ in published.values():
        assert (len(balance), sum(balance)) == (setting.devices, layers)


def test_their_cuts_are_where_they_say(unet: Graph) -> None:
    setting = Setting(3, 8, 4)
    decided = their_plan(unet, setting, unet_layers(1, 2), (5, 14, 10))  # two of these layers stash, and are no op
    assert [unet.ops[at].name for at in (0, 4, 17)] == [stage.ops[0] for stage in decided.stages]
    assert sum(len(stage.ops) for stage in decided.stages) == len(unet.ops)
    with pytest.raises(ValueError, match="28 layers of 29"):
        their_plan(unet, setting, unet_layers(1, 2), (4, 14, 10))


def test_their_cuts_go_to_legal_places() -> None:
    model = capture(ResNet((1, 1), width=8), (torch.randn(2, 3, 32, 32),))
    layers = resnet_layers((1, 1))
    legal = legal_cuts(model)
    for at in range(1, len(layers)):
        decided = their_plan(model, Setting(2, 8, 4), layers, (at, len(layers) - at))
        assert legal[len(decided.stages[0].ops)]


def test_what_each_part_is_worth(unet: Graph) -> None:
    setting, cluster = Setting(2, 16, 4), box(2)
    decided = our_plans(unet, setting, cluster)[0]
    full = parts(unet, decided, setting, cluster)
    relayed = parts(unet, decided, setting, cluster, portals=False)
    bare = without_streams(relayed)
    steps = [seconds(these) for these in (without_dependencies(bare), bare, relayed, full)]
    assert steps == sorted(steps, reverse=True)
    assert busy(full) >= busy(relayed) > busy(without_dependencies(relayed)) > 0
    # Without portals, a skip lies on every device on its way; on two devices there is none in between.
    assert memory(full) <= memory(relayed) < memory_without_dependencies(bare)


def test_without_streams_copies_are_work() -> None:
    cost = StageCost(forward=10.0, backward=20.0, checkpoint="except_last")
    these = without_streams(make_parts((cost, cost), (Hop(0, 1, 1.0, 2.0),)))
    # A copy there and one back, for each of both; the recomputation within B copies nothing.
    assert these.costs == (replace(cost, forward=11.0, backward=21.0),) * 2
    assert these.hops == ()


def test_without_dependencies_all_is_recomputed_first() -> None:
    cost = StageCost(forward=1.0, backward=2.0, checkpoint="except_last")
    these = without_dependencies(make_parts((cost, cost), ()))
    assert [action.short for action in these.schedule.devices[1]][8:] == ["B3", "B2", "B1", "B0"] * 2
    # One F, then on the last device 4 F, 3 R and a B; then stage 0 recomputes each when its gradient is there.
    assert seconds(these) == pytest.approx(1 + 4 + 3 + 2 + 4 * 2.75)


def test_without_dependencies_the_last_device_saves_all() -> None:
    cost = StageCost(1.0, 2.0, saved=100, taken=10, fixed=1000, checkpoint="except_last")
    assert memory_without_dependencies(make_parts((cost, cost), ())) == 1000 + 40 + 100 + 1000 + 40 + 400


def test_gpipes_time_is_broken_down() -> None:
    cost = StageCost(1.0, 2.0, checkpoint="always")
    even = make_parts((cost, cost), ())
    computing, recomputation, bubble, imbalance, rest = gpipe.breakdown(timeline(even), even.schedule)
    # 5 clocks of F, then 5 of R and B; recomputation fills what the first device would wait before its first backward.
    assert computing == pytest.approx(3 * recomputation)
    assert busy(even) == pytest.approx(computing + recomputation)
    assert bubble == pytest.approx(1 - computing - recomputation)
    assert (imbalance, rest) == (0, pytest.approx(0))
    slow = make_parts((cost, replace(cost, forward=2.0)), (Hop(0, 1, 0.5, 0.5),))
    *_, imbalance, rest = gpipe.breakdown(timeline(slow), slow.schedule)
    assert min(imbalance, rest) > 0


def make_parts(costs: tuple[StageCost, ...], hops: tuple[Hop, ...]) -> Parts:
    return Parts(schedule(len(costs), 4), costs, hops, tuple(box(len(costs)).labels))


def test_speed_tables(unet: Graph) -> None:
    published = {
        "baseline": (Setting(1, 4, 1, "never"), (29,), 10.0),
        "pipeline-2": (Setting(2, 16, 4), (14, 15), 15.0),
    }
    rows = torchgpipe.speed_table(unet, unet_layers(1, 2), published).splitlines()[2:]
    assert [rows[0].split()[at] for at in (0, 1, 3, 4, 6)] == ["baseline", "10.0", "1.00", "1.00", "1.00"]
    assert rows[1].split()[3] == "1.50"
    assert rows[1].split()[6] == f"{8 / 5 * 3 / 3.75:.2f}"
    assert throughput(unet, published["pipeline-2"][0]) > 0
