"""Statements are laid out as the formatter would."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.codegen.text.line_layout import WIDTH, Brackets, Doc, Infix, layout, prefix


def test_flat_then_one_line_then_one_per_line() -> None:
    def lines(size: int) -> list[str]:
        arguments = tuple(letter * size for letter in "abc")
        return layout(prefix("x = ", Brackets("f(", arguments, ")")))

    assert lines(3) == ["x = f(aaa, bbb, ccc)"]
    assert lines(34) == ["x = f(", "    " + ", ".join(letter * 34 for letter in "abc"), ")"]
    assert lines(40) == ["x = f(", *("    " + letter * 40 + "," for letter in "abc"), ")"]


def test_a_tuple_without_parentheses_gets_them_when_it_breaks() -> None:
    names = tuple(letter * 40 for letter in "abc")
    assert layout(Brackets("return ", ("a", "b"), "", "bare")) == ["return a, b"]
    assert layout(Brackets("return ", names, "", "bare")) == ["return (", *(f"    {name}," for name in names), ")"]


names = st.builds(lambda letter, size: letter * size, st.sampled_from("abcdxyz"), st.integers(1, 60))
numbers = st.integers(0, 10**9).map(str)
atoms = names | numbers


def nested(items: st.SearchStrategy[Doc]) -> st.SearchStrategy[Doc]:
    rows = st.lists(items, min_size=1, max_size=5).map(tuple)
    calls = st.builds(lambda head, row: Brackets(f"{head}(", row, ")"), names, rows)
    lists = rows.map(lambda row: Brackets("[", row, "]", "literal"))
    tuples = rows.map(lambda row: Brackets("(", row, ")", "literal"))
    subscripts = st.builds(lambda head, item: Brackets(f"{head}[", (item,), "]", "index"), names, names)
    return calls | lists | tuples | subscripts


right_sides = st.recursive(atoms, nested, max_leaves=12) | st.builds(Infix, names, st.just(" + "), names)


def test_as_the_formatter_does(linted: Callable[[str], None]) -> None:
    written: list[str] = []

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(names, right_sides, st.integers(0, 1))
    def write(target: str, right: Doc, depth: int) -> None:
        lines = layout(prefix(f"{target} = ", right), depth)
        if all(len(line) <= WIDTH for line in lines):
            written.extend(["if yes:", *lines] if depth else lines)

    write()
    assert len(written) > 300
    linted_text = "# ruff: noqa\n" + "\n".join(written) + "\n"
    linted(linted_text)
