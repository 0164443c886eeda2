"""The picture of a program, of a small U-Net by hand."""

from __future__ import annotations

import operator
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace

from fxpipe.ir.graph.graph import Graph, Op, Origin, State
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.program.program import Loan, Move, Program, Stage
from fxpipe.viz.program_picture import draw

SVG = "{http://www.w3.org/2000/svg}"


def tensor(*shape: int) -> TensorType:
    return TensorType("f32", ("b", *shape), "cpu", grad=True)


def op(name: str, module: str) -> Op:
    return Op(name, operator.add, (), {}, tensor(1), Origin("unet.py", 1, "", module))


def parameter(name: str, *shape: int) -> State:
    return State(name, f"{name}.weight", "parameter", TensorType("f32", shape, "cpu", grad=True))


VALUES = {
    "image": tensor(1, 8, 8),
    "x": tensor(4, 4, 4),
    "h": tensor(4, 4, 4),
    "skip": tensor(4, 8, 8),
    "y": tensor(10),
}
STATES = (parameter("down", 4, 1, 3, 3), parameter("middle", 4, 4, 3, 3), parameter("head", 500, 3000))
STAGES = (
    Stage(
        0, "cuda:0", (op("conv", "down"), op("x", "")), ("image",), ("x", "skip"), ("down",), checkpoint="except_last"
    ),
    Stage(1, "cuda:1", tuple(op(f"o{i}", f"middle.{i}.conv") for i in range(9)), ("x",), ("h",), ("middle",)),
    Stage(2, "cuda:0", (op("cat", ""), op("y", "head")), ("h", "skip"), ("y",), ("head",), ("down",)),
)
MOVES = (
    Move("image", -1, 0), Move("x", 0, 1), Move("skip", 0, 2), Move("h", 1, 2), Move("y", 2, 3), Move("mask", -1, 2),
)  # fmt: skip
PROGRAM = Program(
    Graph("UNet", True, (), (), STATES, (), (), ((), {}), None),
    STAGES,
    MOVES,
    (Loan("down", 0, 2),),
    VALUES | {"mask": TensorType("bool", ("b", 8), "cpu")},
)


def texts(picture: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(picture).iter(f"{SVG}text")]


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("viz/unet.svg", draw(PROGRAM))


def test_what_it_says() -> None:
    said = texts(draw(PROGRAM))
    assert said[:2] == ["UNet", "3 stages on 2 devices, 1.50 M parameters, 1 portal"]
    for word in (
        "stage 1", "cuda:1", "2 ops, 36 parameters", "9 ops, 144 parameters", "2 ops, 1.50 M parameters",
        "recomputes all but the last", "x", "f32[b, 4, 4, 4]", "skip", "mask", "down.weight", "down", "cat", "head",
    ):  # fmt: skip
        assert word in said
    assert "middle.0-8" in said  # nine names would not fit


def test_replicas_are_on_the_card() -> None:
    middle = replace(STAGES[1], replicas=("cuda:2", "cuda:3"))
    said = texts(draw(replace(PROGRAM, stages=(STAGES[0], middle, STAGES[2]))))
    assert said[1].startswith("3 stages on 4 devices, ")
    assert "cuda:1-3" in said


def test_a_part_of_a_list_is_a_range() -> None:
    """Also where its items are several modules each, and with what is beside them."""
    parts = [f"blocks.{i}.{part}" for i in (6, 7) for part in ("norm", "attention.qkv", "attention.out", "mlp")]
    ops = tuple(op(f"o{at}", module) for at, module in enumerate([*parts, "norm", "blocks.11.norm"]))
    said = texts(draw(replace(PROGRAM, stages=(replace(STAGES[0], ops=ops), *STAGES[1:]))))
    start = said.index("blocks.6-7")
    assert said[start + 1 : start + 3] == ["norm", "blocks.11"]
    assert "blocks" not in said


def test_arcs() -> None:
    """A portal and an input above, one loan below; the longer of the first two above the other."""
    picture = ET.fromstring(draw(PROGRAM))
    paths = [(path.attrib["class"], path.attrib["d"]) for path in picture.iter(f"{SVG}path")]
    assert [class_ for class_, _ in paths] == ["arc-stroke", "flow-stroke", "loan-stroke"]  # the mask is an input
    level = [float(re.search(r"Q \S+ (\S+)", d)[1]) for _, d in paths]  # type: ignore[index]
    top = min(float(r.attrib["y"]) for r in picture.iter(f"{SVG}rect") if r.get("class") == "card")
    assert level[1] < level[0] < top < level[2]  # skip, mask and the loan; y grows downwards


def test_one_arc_for_all_that_go_the_same_way() -> None:
    """A mask for stages 2 and 3 is one arc with two ends; a second value that goes there too is named on it."""
    stages = (*STAGES, Stage(3, "cuda:1", (), (), (), ()))
    moves = (*MOVES[:-2], Move("mask", -1, 2), Move("mask", -1, 3), Move("ids", -1, 2), Move("ids", -1, 3))
    types = PROGRAM.types | {"ids": VALUES["image"]}
    picture = draw(Program(PROGRAM.graph, stages, moves, (), types))
    assert "mask, ids" in texts(picture)
    arcs = [path.attrib["d"] for path in ET.fromstring(picture).iter(f"{SVG}path")]
    assert sorted(d.count("V") - 1 for d in arcs) == [1, 2]  # ends: one of the skip, two of the mask


def test_one_stage() -> None:
    moves = (Move("image", -1, 0), Move("x", 0, 1))
    program = Program(PROGRAM.graph, STAGES[:1], moves, (), VALUES)
    assert "1 stage on 1 device, 36 parameters" in texts(draw(program))


def chain(n: int, *moves: Move, loans: tuple[Loan, ...] = ()) -> ET.Element:
    """The picture of n stages, each of which gives `h` to the next."""
    stages = tuple(Stage(i, f"cuda:{i}", (op(f"o{i}", f"layers.{i}"),), (), (), ()) for i in range(n))
    between = (Move("image", -1, 0), *(Move("h", i, i + 1) for i in range(n - 1)), Move("y", n - 1, n))
    return ET.fromstring(draw(Program(PROGRAM.graph, stages, (*between, *moves), loans, PROGRAM.types)))


def rows_of(picture: ET.Element) -> list[float]:
    """The tops of the cards."""
    return [float(r.attrib["y"]) for r in picture.iter(f"{SVG}rect") if r.get("class") == "card"]


def test_many_stages_stand_in_rows() -> None:
    for n, rows in ((2, 1), (4, 1), (8, 2), (9, 3), (16, 4), (32, 8)):
        picture = chain(n)
        assert float(picture.attrib["width"]) < 1600, n
        tops = rows_of(picture)
        assert (len(tops), len(set(tops))) == (n, rows)
        assert tops == sorted(tops)


def test_pills_stand_for_the_other_rows() -> None:
    said = texts(ET.tostring(chain(9), encoding="unicode"))
    pills = [text for text in said if text.startswith("stages ") or text in ("inputs", "outputs")]
    assert pills == ["inputs", "stages 3-8", "stages 0-2", "stages 6-8", "stages 0-5", "outputs"]
    assert said.count("h") == 8 + 2  # what goes from row to row is named in both
    assert [text for text in texts(ET.tostring(chain(5), encoding="unicode")) if "-4" in text] == ["stages 3-4"]


def test_what_goes_from_row_to_row() -> None:
    """Begins at its stage, passes over the rows between, arrives at its stage, and is named in each; values that pass a
    row together are one arc, but not those with another colour."""
    moves = (Move("skip", 1, 14), Move("x", 2, 13), Move("mask", -1, 13))
    picture = chain(16, *moves, loans=(Loan("down", 0, 15),))
    said = texts(ET.tostring(picture, encoding="unicode"))
    assert [said.count(name) for name in ("skip", "x", "skip, x", "mask", "down.weight")] == [2, 2, 2, 4, 4]
    arcs = [path.attrib["class"] for path in picture.iter(f"{SVG}path")]
    assert [arcs.count(f"{kind}-stroke") for kind in ("arc", "flow", "loan")] == [2 + 1 + 1 + 2, 4, 4]
    height = float(picture.attrib["height"])
    levels = [float(re.search(r"Q \S+ (\S+)", path.attrib["d"])[1]) for path in picture.iter(f"{SVG}path")]  # type: ignore[index]
    assert all(0 < level < height for level in levels)
    tops = rows_of(picture)
    for top in set(tops):  # no arc lies on a card
        assert not [level for level in levels if top - 10 < level < top + 100]
