"""The picture of a plan."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise

from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.viz.plan_picture import draw

SVG = "{http://www.w3.org/2000/svg}"
STAGES = (
    StagePlan(("embed", "a" * 40), "cuda:0", "always", offload=True),
    StagePlan(("head",), "cuda:1", "selective", replicas=("cuda:2", "cuda:3"), tensor_parallel=2),
    StagePlan((), "cuda:4", "never"),
)


def texts(picture: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(picture).iter(f"{SVG}text")]


def test_what_it_says() -> None:
    picture = draw(Plan("net <1>", STAGES, 8, "1f1b"))
    assert texts(picture) == [
        "net <1>", "3 stages, 8 micro-batches, 1f1b",
        "stage 0", "cuda:0", "2 ops", "embed … …" + "a" * 25, "recomputes, offloads",
        "stage 1", "cuda:1-3", "1 op", "head", "recomputes what is cheap, each op over 2",
        "stage 2", "cuda:4", "0 ops", "recomputes nothing",
    ]  # fmt: skip
    assert "<title>cuda:1, cuda:2, cuda:3</title>" in picture


def test_cards_do_not_overlap() -> None:
    rects = [r for r in ET.fromstring(draw(Plan("net", STAGES, 8))).iter(f"{SVG}rect") if r.get("class") == "card"]
    edges = [(float(r.attrib["x"]), float(r.attrib["x"]) + float(r.attrib["width"])) for r in rects]
    assert len(edges) == 3
    assert all(right < left for (_, right), (left, _) in pairwise(edges))


def test_many_stages_stand_in_rows() -> None:
    """Each arrow but the first of a row has a card before it."""
    stages = tuple(StagePlan((f"op{i}",), f"cuda:{i}", "never") for i in range(16))
    picture = ET.fromstring(draw(Plan("net", stages, 8)))
    assert float(picture.attrib["width"]) <= 1250
    rects = [r for r in picture.iter(f"{SVG}rect") if r.get("class") == "card"]
    rows = [float(r.attrib["y"]) for r in rects]
    assert rows == sorted(rows)
    assert len(set(rows)) == 3
    assert max(rows) + 112 < float(picture.attrib["height"])
    heads = [node.attrib["points"] for node in picture.iter(f"{SVG}polygon")]
    assert len(heads) == 15 + 2
    assert all(float(points.partition(",")[0]) < float(picture.attrib["width"]) for points in heads)
