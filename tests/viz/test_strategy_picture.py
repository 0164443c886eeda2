"""The picture of a strategy: a small network by hand, and the layouts."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

from fxpipe.ir.cluster.published_clusters import preset
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy
from fxpipe.planning.operators.expert_strategies import data_parallel, expert, krizhevsky
from fxpipe.planning.operators.models.convolutional_networks import alexnet, inception
from fxpipe.planning.operators.models.graph_builder import Draft
from fxpipe.planning.operators.models.operator_kinds import concat, convolution, flatten, image, linear
from fxpipe.planning.operators.models.recurrent_networks import nmt
from fxpipe.planning.operators.operator_costs import estimated
from fxpipe.planning.operators.simulate_strategy import timeline
from fxpipe.viz import timeline_picture
from fxpipe.viz.strategy_picture import draw

SVG = "{http://www.w3.org/2000/svg}"
FOUR = preset("p100:4")


def branches() -> OperatorGraph:
    add = Draft()
    x = add(image("image", 8, 3, 8, 8))
    left = add(convolution("left", x, 4, 3, padding=1))
    right = add(convolution("right", add(convolution("narrow", x, 2, 1)), 4, 3, padding=1))
    x = add(flatten("flat", add(concat("join", (left, right)))))
    add(linear("fc", x, 10))
    return add.graph("Branches")


STRATEGY = Strategy(
    (
        Config((1, 1, 1, 1), (0,)),
        Config((4, 1, 1, 1), (0, 1, 2, 3)),
        Config((1, 1, 1, 1), (3,)),
        Config((1, 2, 2, 1), (0, 1, 2, 3)),
        Config((2, 1, 1, 1), (0, 2)),
        Config((2, 1), (1, 1)),
        Config((2, 2), (0, 1, 2, 3)),
    )
)


def boxes(picture: str) -> dict[str, list[tuple[float, float, str]]]:
    """For each operator the parts of its box: left, top and colour."""
    found = {}
    for group in ET.fromstring(picture).iter(f"{SVG}g"):
        title = group.find(f"{SVG}title")
        assert title is not None
        parts = [p.attrib for p in group.iter(f"{SVG}rect") if "fill" in p.attrib]
        found[(title.text or "").split(",")[0]] = [(float(p["x"]), float(p["y"]), p["fill"]) for p in parts]
    return found


def test_golden_of_the_front_page(golden: Callable[[str, str], None]) -> None:
    """AlexNet's convolutions cut by sample, the large linear layers by channel."""
    graph = alexnet()
    golden("viz/alexnet.svg", draw(graph, krizhevsky(graph, 4), FOUR, facts="sample parallel, then channel parallel"))


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("viz/strategy_picture.svg", draw(branches(), STRATEGY, FOUR, facts="1.2 ms a step"))


def test_samples_are_cut_across_and_all_else_down() -> None:
    drawn = boxes(draw(branches(), STRATEGY, FOUR))
    assert "image" not in drawn
    x, y, colors = (list(column) for column in zip(*drawn["left"], strict=True))
    assert x == sorted(set(x))
    assert len(set(y)) == 1
    assert len(set(colors)) == 4
    assert len({x for x, _, _ in drawn["right"]}) == 1
    assert len({y for _, y, _ in drawn["right"]}) == 4
    assert [color for _, _, color in drawn["right"]] == colors
    # Two by two: the first sample's parts, one below the other, then the second's.
    corners = [(x, y) for x, y, _ in drawn["fc"]]
    assert corners == sorted(corners)
    assert len({x for x, _ in corners}) == len({y for _, y in corners}) == 2
    assert len({color for _, _, color in drawn["flat"]}) == 1


def test_an_operator_stands_right_of_all_that_it_reads() -> None:
    graph = inception()
    drawn = boxes(draw(graph, data_parallel(graph, 4), FOUR, width=100_000))
    assert len(drawn) == 121
    for operator in graph:
        for name in operator.inputs:
            if name in drawn:
                assert drawn[name][0][0] < drawn[operator.name][0][0]
    assert len({(parts[0][0], parts[0][1]) for parts in drawn.values()}) == 121


def test_boxes_go_on_in_the_next_line() -> None:
    graph = alexnet()
    drawn = boxes(draw(graph, data_parallel(graph, 4), FOUR, width=500))
    lines = sorted({parts[0][1] for parts in drawn.values()})
    assert len(lines) == 3
    assert max(parts[0][0] for parts in drawn.values()) < 500


def test_unrolled_networks_are_grids() -> None:
    graph = nmt(8, 4, 3, vocab=11, width=8)
    picture = draw(graph, expert(graph, 4), FOUR)
    drawn = boxes(picture)
    rows = {name.rpartition(".")[0]: parts[0][1] for name, parts in drawn.items()}
    layers = ["embed", "lstm0", "lstm1"]
    order = [f"{side}.{layer}" for side in ("source", "target") for layer in layers] + ["attention", "softmax"]
    assert sorted(rows, key=lambda name: rows[name]) == order
    columns = {name.rpartition(".")[2]: parts[0][0] for name, parts in drawn.items()}
    assert sorted(columns, key=lambda name: columns[name]) == ["0", "1", "2", "3"]
    assert all(parts[0][1] == rows[name.rpartition(".")[0]] for name, parts in drawn.items())


def test_a_timeline_names_the_operators() -> None:
    """There are no micro-batches to number."""
    cluster = preset("p100:1")
    graph = alexnet()
    picture = timeline_picture.draw(timeline(graph, cluster, data_parallel(graph, 1), estimated()))
    told = ["".join(node.itertext()) for node in ET.fromstring(picture).iter(f"{SVG}text")]
    assert {"conv2 0", "conv5 0"} <= set(told)
    assert "<title>forward conv2 0</title>" in picture
    assert not any("micro-batch" in text for text in told)


def test_every_device_has_its_colour() -> None:
    graph = alexnet()
    for cluster in (FOUR, preset("k80")):
        picture = draw(graph, data_parallel(graph, len(cluster.devices)), cluster)
        legend = re.findall(r'fill="(#\w+)"', "".join(line for line in picture.splitlines() if 'height="12"' in line))
        assert len(set(legend)) == len(cluster.devices)
