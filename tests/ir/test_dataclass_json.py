"""Dataclasses as JSON: the round trip, and what is refused with which words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.ir.dataclass_json import at_least, check, from_plain, one_of, parse, read, to_plain, write


class Point(NamedTuple):
    x: int
    y: float


@dataclass(frozen=True)
class Part:
    name: str
    at: tuple[Point, ...] = ()
    side: Literal["left", "right"] = "left"


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    count: Annotated[int, at_least(1, 9)] = 1
    mode: Annotated[str, one_of("a", "b")] = "a"
    names: Mapping[str, tuple[int, bool]] | None = None
    anything: Any = None


WHOLE = Whole((Part("p", (Point(1, 2.5),)), Part("q", side="right")), 3, names={"x": (1, True)})


def test_a_file_has_an_item_a_line() -> None:
    assert write(WHOLE, 2) == (
        "{\n"
        ' "parts": [\n'
        '  {"name": "p", "at": [[1, 2.5]], "side": "left"},\n'
        '  {"name": "q", "side": "right"}\n'
        " ],\n"
        ' "count": 3,\n'
        ' "mode": "a",\n'
        ' "names": {\n'
        '  "x": [1, true]\n'
        " }\n"
        "}\n"
    )
    assert read(Whole, write(WHOLE)) == WHOLE
    check(WHOLE)


@given(st.lists(st.builds(Part, st.text(st.characters(exclude_categories=["Cs"])), st.just(()))), st.integers(1, 9))
def test_round_trip(parts: list[Part], count: int) -> None:
    whole = Whole(tuple(parts), count)
    for depth in range(5):
        assert read(Whole, write(whole, depth)) == whole


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parts": None}, "parts is null: write a list, as in [...]"),
        ({"parts": [{}]}, "parts[0].name is missing: write text in quotes"),
        ({"parts": [{"name": 3}]}, "parts[0].name is 3: write text in quotes"),
        ({"parts": [{"name": "\ud800"}]}, r"""parts[0].name is "\ud800": write text that Unicode knows"""),
        ({"parts": [{"nam": "x"}]}, "parts[0].nam is no field here: did you mean 'name'?"),
        ({"parts": ["x"]}, """parts[0] is "x": write an object with 'name', 'at', 'side'"""),
        ({"parts": [{"name": "", "at": [[1]]}]}, "parts[0].at[0] is [1]: write a list of 2"),
        ({"parts": [{"name": "", "at": [[1.0, 2]]}]}, "parts[0].at[0][0] is 1.0: write a whole number"),
        ({"parts": [{"name": "", "at": [[True, 2]]}]}, "parts[0].at[0][0] is true: write a whole number"),
        ({"parts": [{"name": "", "side": "up"}]}, """parts[0].side is "up": write one of 'left', 'right'"""),
        ({"count": 2.5}, "count is 2.5: write a whole number"),
        ({"count": "2"}, 'count is "2": write a whole number'),
        ({"count": 10}, "count is 10: write a whole number from 1 to 9"),
        ({"count": 10**40}, f"count is {10**40}: write a whole number"),
        ({"mode": "c"}, """mode is "c": write one of 'a', 'b'"""),
        ({"names": {"x y": [1, 2]}}, 'names["x y"][1] is 2: write true or false'),
        ({"names": []}, "names is []: write an object, as in {...}"),
        ({"strange": 1}, "strange is no field here: there are parts, count, mode, names, anything"),
    ],
)
def test_the_place_and_the_value_are_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as found:
        from_plain(Whole, to_plain(WHOLE) | change)
    assert str(found.value).startswith(says)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 250


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON: Expecting value: line 1 column 1"),
        ("[" * 100_000, "too many lists or objects within each other"),
        ('{"a": ' * 100_000, "too many lists or objects within each other"),
        ('{"count": NaN}', "NaN is no number of JSON: write a finite number"),
        ('{"count": -Infinity}', "-Infinity is no number of JSON"),
        ('{"count": 1, "count": 2}', 'the key "count" comes twice in an object'),
        ("9" * 5000, "digits"),
    ],
)
def test_text_that_is_none(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_a_value_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ValueError, match="count is 0: write a whole number from 1 to 9"):
        check(Whole((), 0))
    with pytest.raises(ValueError, match=r"parts\[0\].at\[0\]\[1\] is NaN: write a finite number"):
        check(Whole((Part("p", (Point(1, float("nan")),)),)))
    with pytest.raises(ValueError, match=r"parts is a set: write a list"):
        check(Whole({1}))  # type: ignore[arg-type]
