"""Steps of more boxes than a picture has room for: what is drawn, how wide it is, and that no text is on another."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import pytest

from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.timeline import Span, Timeline, even
from fxpipe.schedules.make_schedule import make, placement
from fxpipe.schedules.one_f_one_b import gpipe, one_f_one_b
from fxpipe.schedules.simulate.simulate import Hop, StageCost, simulate
from fxpipe.viz import comparison_picture
from fxpipe.viz.folded_timeline import typical
from fxpipe.viz.svg_elements import SHADES, shade, text_width
from fxpipe.viz.timeline_picture import draw

SVG = "{http://www.w3.org/2000/svg}"
MANY = 256


def named(name: str, devices: int, chunks: int = MANY) -> Schedule:
    return make(name, placement(name, [f"device {d}" for d in range(devices)]), chunks)


def step(chunks: int = MANY) -> Timeline:
    """With memory, links and recomputation."""
    costs = [StageCost(0.002, 0.004, saved=4_000_000, taken=500_000, fixed=1_000_000, checkpoint="except_last")] * 3
    hops = [Hop(0, 1, 0.0005, 0.0005, "x"), Hop(1, 2, 0.0005, 0.0005, "h"), Hop(0, 2, 0.001, 0.001, "skip")]
    return simulate(gpipe(3, chunks), costs, hops, devices=("cuda:0", "cuda:1", "cuda:2"))


def operators() -> Timeline:
    """One micro-batch of very many short actions, and a backward that begins early."""
    spans = [Span("a", i, i + 1, "F" if i < 20 else "B", 0, 0, f"op{i}") for i in range(5000)]
    return Timeline("operators", ("a",), tuple(spans))


STEPS: dict[str, Timeline | Schedule] = {
    "1f1b": one_f_one_b(4, MANY),
    "gpipe": step(),
    "interleaved": named("interleaved", 8),
    "zb-h1": named("zb-h1", 16),
    "one device": one_f_one_b(1, 1000),
    "operators": operators(),
    "long names": even(gpipe(2, 400), labels=("V100:0-3, " * 12, "b")),
    "4096 micro-batches": one_f_one_b(2, 4096),
}


@dataclass(frozen=True)
class Text:
    """A text, and where it is from left to right."""

    text: str
    left: float
    right: float
    y: float


def texts(picture: str) -> Iterator[Text]:
    for node in ET.fromstring(picture).iter(f"{SVG}text"):
        text = "".join(node.itertext())
        wide = text_width(text, float(node.attrib["font-size"]))
        x = float(node.attrib["x"]) - wide * {"middle": 0.5, "end": 1.0}.get(node.get("text-anchor", ""), 0.0)
        yield Text(text, x, x + wide, float(node.attrib["y"]))


def boxes(picture: str) -> list[ET.Element]:
    return [rect for rect in ET.fromstring(picture).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def words(picture: str) -> list[str]:
    return [text.text for text in texts(picture)]


def overlapping(picture: str) -> Sequence[tuple[str, str]]:
    close = [(a, b) for a, b in combinations(texts(picture), 2) if abs(a.y - b.y) < 8]
    return [(a.text, b.text) for a, b in close if a.left < b.right and b.left < a.right]


@pytest.mark.parametrize("name", STEPS)
def test_no_text_is_on_another(name: str) -> None:
    assert not overlapping(draw(STEPS[name]))


@pytest.mark.parametrize("name", STEPS)
def test_all_is_inside_of_the_page(name: str) -> None:
    picture = draw(STEPS[name])
    width, height = (float(ET.fromstring(picture).attrib[side]) for side in ("width", "height"))
    assert all(text.left >= 0 and text.right <= width and 0 < text.y < height for text in texts(picture))
    for box in boxes(picture):
        assert 0 <= float(box.attrib["x"]) <= float(box.attrib["x"]) + float(box.attrib["width"]) <= width


@pytest.mark.parametrize("name", STEPS)
def test_boxes_can_be_seen(name: str) -> None:
    """Those that a part cuts off may be narrower."""
    wide = sorted(float(box.attrib["width"]) for box in boxes(draw(STEPS[name])) if box.attrib["height"] == "30")
    assert wide[len(wide) // 4] >= 2.9
    assert len(draw(STEPS[name])) < 400_000


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("viz/gpipe_folded.svg", draw(step(100), title="GPipe, 100 micro-batches"))


def test_few_boxes_are_drawn_as_they_are() -> None:
    assert "whole step" not in words(draw(one_f_one_b(4, 64)))
    assert "whole step" in words(draw(one_f_one_b(4, MANY)))


def test_the_parts_and_what_is_between_them() -> None:
    said = words(draw(one_f_one_b(4, MANY)))
    assert {"fill", "middle, from 382.5", "end, from 765"} <= set(said)
    assert said.count("370.5 not drawn") == 2  # 12 + 370.5 + 12 + 370.5 + 12 are the 777 of the step
    assert {"fill", "middle", "end"} <= set(said[said.index("whole step") :])


def test_the_middle_is_the_turn_if_that_is_not_in_the_first_part() -> None:
    hints = ["".join(box.itertext()) for box in boxes(draw(step()))]
    for told in ("forward of stage 2, micro-batch 255,", "backward of stage 0, micro-batch 255,"):
        assert any(hint.startswith(told) for hint in hints)


def test_the_first_part_has_the_way_of_the_first_micro_batch_and_back() -> None:
    fill = [box for box in boxes(draw(one_f_one_b(8, MANY))) if float(box.attrib["x"]) < 320]
    hints = ["".join(box.itertext()) for box in fill]
    assert any(hint.startswith("forward of stage 7, micro-batch 0,") for hint in hints)
    assert any(hint.startswith("backward of stage 0, micro-batch 0,") for hint in hints)


def test_the_overview_has_the_shares_of_each_kind() -> None:
    """In the steady part of 1F1B a third of the time is forward, and a device has no idle time."""
    root = ET.fromstring(draw(one_f_one_b(4, MANY)))
    areas = [path.attrib["d"] for path in root.iter(f"{SVG}path") if path.get("fill") == shade("F", 0.5)]
    assert len(areas) == 4
    heights = [float(at) for at in areas[0].split(" V ")[10].split(" H ")[:1]]
    base = float(areas[0].split()[2])
    assert base - heights[0] == pytest.approx(16 / 3, abs=0.6)


def test_a_step_of_one_device_and_one_of_nothing() -> None:
    assert "whole step" in words(draw(STEPS["one device"]))
    assert "whole step" not in words(draw(Timeline("nothing", ("a",), (Span("a", 1, 1, "F", 0, 0),))))


def test_typical() -> None:
    assert typical(even(one_f_one_b(2, 8))) == 1
    assert typical(Timeline("nothing", ("a",), ())) == 0
    long = (Span("a", 0, 0.01, "F", 0, 0), Span("a", 1, 100, "B", 0, 0))
    assert typical(Timeline("one long", ("a",), long)) == 99


def test_timelines_below_each_other() -> None:
    short, long = step(8), replace(step(16), name="long")
    picture = comparison_picture.draw([("first", short), ("second", long)], "two")
    said = words(picture)
    assert not overlapping(picture)
    assert {"two", "on one scale of time", "shade and number: micro-batch 0 to 15"} <= set(said)
    assert sum(word.startswith(("first: step", "second: step")) for word in said) == 2
    first = [float(box.attrib["width"]) for box in boxes(picture) if "forward of stage 0" in "".join(box.itertext())]
    assert max(first) == pytest.approx(min(first), abs=0.02)
    other = words(comparison_picture.draw([("first", short), ("second", step(64))], "two"))
    assert "each on a scale of its own; heights are shares of the time" in other


def test_long_timelines_below_each_other_are_bars() -> None:
    picture = comparison_picture.draw([("first", step()), ("second", step())], "two")
    assert not overlapping(picture)
    assert not boxes(picture)
    assert not {word for word in words(picture) if word == "transfer" or "shade" in word}
    assert {path.get("fill") for path in ET.fromstring(picture).iter(f"{SVG}path")} >= {
        shade(kind, 0.5) for kind in SHADES if kind in "FBR"
    }
