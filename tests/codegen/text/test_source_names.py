"""Whatever the user's names and strings hold, they stay names and strings."""

import ast
import io
import tokenize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.codegen.text.source_names import (
    clip,
    code_comment,
    columns,
    doc_prose,
    identifier,
    member,
    prose,
    state_path,
    string,
)

NASTY = [
    '"',
    "'",
    '"""',
    "\\",
    "\\'",
    "\n",
    "\r\nimport os",
    "\x00",
    "\u2028",
    "\x0c",
    "\u202e",
    '\\"""',
    "{x}",
    "# noqa",
    "é",
]


@pytest.mark.parametrize("text", [*NASTY, '"); import os; ("', 'it\'s "both"'])
def test_strings_come_back(text: str) -> None:
    assert ast.literal_eval(string(text)) == text
    assert string(text).isascii()
    assert "\n" not in string(text)


@given(st.text())
def test_any_string_comes_back(text: str) -> None:
    assert ast.literal_eval(string(text)) == text


@given(st.text())
def test_a_comment_is_one_comment(text: str) -> None:
    for write in (prose, code_comment):
        source = f"# {write(text)}\nx = 1\n"
        tokens = [token.type for token in tokenize.generate_tokens(io.StringIO(source).readline)]
        assert tokens[0] == tokenize.COMMENT
        assert source.count("#") == 1
        assert ast.unparse(ast.parse(source)) == "x = 1"


@given(st.text())
def test_a_docstring_is_one_docstring(text: str) -> None:
    module = ast.parse(f'"""Stage on {doc_prose(text)}.\n"""\nx = 1\n')
    assert len(module.body) == 2
    assert ast.get_docstring(module) is not None


def test_the_users_comment_is_left_out() -> None:
    assert code_comment("x = self.fc(x)  # noqa: E501") == "x = self.fc(x)"
    assert code_comment("x = f('#1', x)  # type: ignore") == "x = f('\\x231', x)"


@given(st.text(min_size=1))
def test_variables_are_names(text: str) -> None:
    name = identifier(text)
    ast.parse(f"{name} = 1\ndel {name}")
    assert name.isidentifier()


@pytest.mark.parametrize("name", ["class", "input", "self", "torch", "F", "l", "draw", "None", "__x", "_"])
def test_variables_shadow_nothing(name: str) -> None:
    assert identifier(name) != name


def test_paths() -> None:
    assert state_path("layers.0.weight") == "self.layers[0].weight"
    assert state_path("01.x") == 'self["01"].x'
    assert state_path("device.train.weight") == 'self["device"]["train"].weight'
    assert state_path("a.class.__b") == 'self.a["class"]["__b"]'
    assert state_path('a"] + ["') == "self['a\"] + [\"']"
    assert member("x", "__secret") == 'getattr(x, "__secret")'


def test_clip_counts_columns() -> None:
    assert clip("short", 10) == "short"
    assert clip("a longer line", 10) == "a long ..."
    assert columns(clip("漢" * 20, 20)) <= 20
