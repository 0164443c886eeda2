"""The picture of a timeline: where its boxes stand, what it says, and one golden."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

from fxpipe.ir.schedule.schedule import parse
from fxpipe.ir.timeline import KEPT, Span, Timeline
from fxpipe.schedules.one_f_one_b import gpipe, one_f_one_b
from fxpipe.schedules.simulate.simulate import Hop, StageCost, simulate
from fxpipe.viz.svg_elements import SHADES, THEMES, ink_on, shade, text_width
from fxpipe.viz.timeline_picture import draw
from fxpipe.viz.timeline_rows import ticks

SVG = "{http://www.w3.org/2000/svg}"


def step(chunks: int = 4) -> Timeline:
    costs = [StageCost(0.002, 0.004, saved=4_000_000, taken=500_000, fixed=1_000_000, checkpoint="except_last")] * 3
    hops = [Hop(0, 1, 0.0005, 0.0005, "x"), Hop(1, 2, 0.0005, 0.0005, "h"), Hop(0, 2, 0.001, 0.001, "skip")]
    return simulate(gpipe(3, chunks), costs, hops, devices=("cuda:0", "cuda:1", "cuda:2"))


def boxes(picture: str) -> list[ET.Element]:
    """The rectangles of spans: those that say what they are."""
    return [rect for rect in ET.fromstring(picture).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def texts(picture: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(picture).iter(f"{SVG}text")]


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("viz/gpipe.svg", draw(step(), title="GPipe, 3 stages"))


def test_same_bytes_every_time() -> None:
    assert draw(step()) == draw(step())


def test_boxes_are_where_spans_are() -> None:
    timeline = step()
    found = boxes(draw(timeline))
    assert len(found) == len(timeline.spans)
    first = next(b for b in found if "forward of stage 0, micro-batch 0" in "".join(b.itertext()))
    last = next(b for b in found if "backward of stage 0, micro-batch 0" in "".join(b.itertext()))
    scale = float(first.attrib["width"]) + 1  # pixels of 2 ms; a box leaves a pixel to the next
    x = float(first.attrib["x"]) + scale * (timeline.end - 0.004) / 0.002
    assert float(last.attrib["x"]) == pytest.approx(x, abs=0.1)
    assert float(last.attrib["width"]) + 1 == pytest.approx(2 * scale, abs=0.02)


def test_what_it_says() -> None:
    said = texts(draw(step(), title="a <title> & more"))
    assert said[0] == "a <title> & more"
    assert said[1].startswith("step 4")
    for word in ("cuda:0", "cuda:0 → cuda:2", "forward", "backward", "recompute", "transfer"):
        assert word in said
    assert "shade and number: micro-batch 0 to 3" in said
    assert sum(word.endswith(" MB") for word in said) == 3


def test_what_is_not_known_is_left_out() -> None:
    assert not [word for word in texts(draw(gpipe(2, 3))) if "→" in word or word.endswith((" MB", " s"))]


def test_stage_numbers_where_a_device_has_several() -> None:
    turn = parse("0F0 3F0 3B0 0B0 \n 1F0 2F0 2B0 1B0", name="turn")
    said = texts(draw(turn))
    assert "00" in said  # micro-batch 0, stage 0
    assert "03" in said
    assert any("small number: stage" in word for word in said)
    assert "0" in texts(draw(gpipe(2, 2)))


def test_a_stage_number_stays_in_its_box() -> None:
    """Boxes from narrow to wide: first without a number, then with that of the micro-batch, then with small ones."""
    ends = [0, *accumulate(range(1, 40))]
    spans = tuple(Span("a", start, end, "F", at % 2, at) for at, (start, end) in enumerate(pairwise(ends)))
    picture = draw(Timeline("wider and wider", ("a",), spans))
    edges = [(float(one.attrib["x"]), float(one.attrib["width"])) for one in boxes(picture)]
    sizes = []
    for node in (node for node in ET.fromstring(picture).iter(f"{SVG}text") if "pointer-events" in node.attrib):
        small = node.find(f"{SVG}tspan")
        x, wide = edges[int(node.text or "")]
        size, lower = float(node.attrib["font-size"]), 0.0 if small is None else float(small.attrib["font-size"])
        needs = text_width(node.text or "", size)
        needs += 0.0 if small is None else text_width(small.text or "", lower) + 1.5
        assert needs + 1.9 <= wide
        if small is not None:
            assert float(node.attrib["x"]) == pytest.approx(x + (wide - needs) / 2, abs=0.02)
        sizes.append((size, lower))
    assert {(12, 8), (10, 8), (8, 6.5), (8, 0)} <= set(sizes)


def test_a_peak_alone_is_a_line() -> None:
    """Nothing says when it was."""
    memory = (((0.0, 6_340_000),), step().memory[1], step().memory[2])
    picture = ET.fromstring(draw(replace(step(), memory=memory)))
    assert len(list(picture.iter(f"{SVG}path"))) == 2 * 2  # area and outline of the other devices
    (line,) = (line for line in picture.iter(f"{SVG}line") if line.attrib["class"] == "loan-stroke")
    assert line.attrib["y1"] == line.attrib["y2"]
    assert "peak 6.34 MB" in texts(draw(replace(step(), memory=memory)))


def test_what_memory_counts_is_said() -> None:
    assert texts(draw(replace(step(), counts=KEPT)))[1].endswith("; below each row: kept for backward")
    assert texts(draw(step()))[1].count(";") == 0


def test_memory_begins_with_the_first_action() -> None:
    later = tuple((at + 0.01, held) for at, held in step().memory[0])
    picture = draw(replace(step(), memory=(later, *step().memory[1:])))
    path = next(path.attrib["d"] for path in ET.fromstring(picture).iter(f"{SVG}path"))
    points = [tuple(map(float, point.split())) for point in path.removeprefix("M ").removesuffix(" Z").split(" L ")]
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(points))  # steps, no slopes
    assert points[0][1] == points[1][1] == points[2][1]


def test_a_measured_run_may_start_at_any_time() -> None:
    later = [replace(span, start=span.start + 7, end=span.end + 7) for span in step().spans]
    memory = tuple(tuple((at + 7, held) for at, held in steps) for steps in step().memory)
    moved = boxes(draw(replace(step(), spans=tuple(later), memory=memory)))
    for a, b in zip(moved, boxes(draw(step())), strict=True):
        assert float(a.attrib["x"]) == pytest.approx(float(b.attrib["x"]), abs=0.02)


def test_hostile_names() -> None:
    evil = '"/><script>alert(1)</script>&'
    timeline = simulate(gpipe(2, 1), [StageCost(1, 2)] * 2, [Hop(0, 1, 1, 1, evil)], devices=(evil, "b"))
    picture = draw(replace(timeline, name=evil))
    assert "<script" not in picture
    assert evil in texts(picture)


def test_empty_and_large() -> None:
    ET.fromstring(draw(Timeline("nothing", (), ())))
    ET.fromstring(draw(Timeline("nothing", ("a",), ())))
    assert len(boxes(draw(one_f_one_b(16, 64)))) == 2 * 16 * 64


def test_it_follows_a_light_or_dark_page() -> None:
    picture = draw(gpipe(2, 2))
    light, dark = picture.split("prefers-color-scheme: dark")
    assert THEMES["light"]["page"] in light
    assert THEMES["dark"]["page"] in dark


def luminance(color: str) -> float:
    channels = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("kind", SHADES)
def test_numbers_can_be_read_on_every_shade(kind: str) -> None:
    """Contrast of at least 4 to 1, by the formula of the Web Content Accessibility Guidelines."""
    for micro_batch in range(65):
        color = shade(kind, micro_batch / 64)
        light, dark = sorted((luminance(color), luminance(ink_on(color))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4 or kind == "T"  # transfers have no number


# How linear light looks to those who lack one of three kinds of cones (Machado, Oliveira and Fernandes, 2009).
SIGHTS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def lab(color: str, sight: str) -> tuple[float, float, float]:
    """The colour in CIE Lab, where 1 is about the least difference that can be seen."""
    linear = [luminance(f"#{color[at : at + 2] * 3}") for at in (1, 3, 5)]
    seen = [min(1, max(0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in SIGHTS[sight]]
    rows = ((0.4339, 0.3763, 0.1899), (0.2126, 0.7152, 0.0722), (0.0178, 0.1095, 0.8729))  # XYZ over that of white
    x, y, z = (sum(a * b for a, b in zip(row, seen, strict=True)) ** (1 / 3) for row in rows)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(("kind", "other"), [("R", "T"), *((new, old) for new in "RT" for old in "FBIWA")])
def test_recomputation_and_transfers_look_like_nothing_else(kind: str, other: str, sight: str) -> None:
    for position in (0, 0.5, 1):
        assert math.dist(lab(shade(kind, position), sight), lab(shade(other, position), sight)) > 10


@pytest.mark.parametrize("kind", "RT")
@pytest.mark.parametrize("theme", THEMES)
def test_recomputation_and_transfers_stand_out_on_light_and_dark_pages(kind: str, theme: str) -> None:
    track = luminance(THEMES[theme]["track"])
    for position in (0, 1):
        light, dark = sorted((luminance(shade(kind, position)), track), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 1.9


def test_ticks() -> None:
    assert ticks(0, 5) == [0]
    assert ticks(10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.0123, 4) == [0, 0.005, 0.01]
    assert ticks(1e-7, 4) == [0, 5e-8, 1e-7]
    assert 3 <= len(ticks(97.3, 8)) <= 9
