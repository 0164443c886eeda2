"""Statements of generated code, as values and as text."""

import ast

import pytest

from fxpipe.codegen.text.line_layout import WIDTH
from fxpipe.codegen.text.statements import BLANK, Assign, Block, Call, Comment, Delete, apart, called_functions, text_of


@pytest.mark.parametrize(
    "targets", [("m.y",), ("m.lent." + "very_long_name_" * 7,), ("m.a", "m.b"), ("m." + "n" * 60,) * 2]
)
def test_what_is_assigned(targets):
    lines = text_of([Assign(targets, Call("give", ("1", "self.stages[0].weight")))])
    names = ", ".join(targets)
    text = "".join(line.strip() for line in lines).replace(",)", ")")
    # One target gets the value itself, several get its parts.
    expected = [f"{left} = give(1,self.stages[0].weight)" for left in (names, f"({names.replace(' ', '')})")]
    assert text.replace("1, ", "1,") in expected[: len(targets)]


def test_blocks_are_indented_and_groups_apart():
    inner = Block("if m.grad:", (Comment("why"), Assign((), Call("join", ("token", "y")), "a remark")))
    method = Block("def f(self, y: int) -> None:", (inner, Delete(("y",)), Delete(())))
    assert text_of([Block("class A:", apart([["a = 1"], [], [method]]))]) == [
        "class A:",
        "    a = 1",
        "",
        "    def f(self, y: int) -> None:",
        "        if m.grad:",
        "            # why",
        "            join(token, y)  # a remark",
        "        del y",
    ]


def test_what_does_not_fit_is_cut_or_left_out():
    (rule,) = text_of([Comment("stage 0", rule=True)], 1)
    assert rule.startswith("    # stage 0 ---")
    assert len(rule) == WIDTH
    (comment,) = text_of([Comment("word " * 40)], 2)
    assert len(comment) <= WIDTH
    assert comment.endswith(" ...")
    place = "m[i]." + "x" * 90
    assert text_of([Delete((place,), "used for the last time")], 2) == [f"        del {place}"]
    many = text_of([Delete(tuple("x" * 40 for _ in range(3)), "used for the last time")])
    assert many == ["del (", *["    " + "x" * 40 + ","] * 3, ")"]
    assert all(len(line) <= WIDTH for line in text_of([Assign(("y",), Call("f", ("x" * 60,) * 2))], 3))


def test_calls_are_found_in_blocks_and_assignments_alone():
    body = (
        Assign(("x",), Call("fork", ("y",))),
        Comment("join(x)"),
        BLANK,
        "wait(x)",
        Block("if x:", (Call("f", ()),)),
    )
    assert set(called_functions(body)) == {"fork", "f"}
    assert ast.parse("\n".join(text_of(body)))
