"""An object is whole when it is made. Later it gets no attribute that is no field of its class and that no `__init__`
sets, and loses none; if it is frozen, it does not change."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.helpers.set_attributes import MAKERS, Scope, Setting, Sources

from .test_imports import files

EXCEPTIONS = {
    "fxpipe.capture.twins.untraced_lists._Joining": "it is made in a trace, which follows the attribute set there",
    "fxpipe.runtime.microbatch.MicroBatch": "its attributes are the model's values, which come and go in a run",
    "fxpipe.runtime.stage.Scope": "its attributes are what the model holds, under the model's names",
}


def late(sources: Sources) -> Iterator[tuple[Scope, str]]:
    """The class of each object that code changes against the rule, and its attribute and the line."""
    for module in sources.modules.values():
        for scope in module.scopes():
            for setting in scope.settings:
                kinds = [kind for kind in scope.kinds(setting.target) if not _makes(scope, kind)]
                if kinds and _is_late(setting, kinds):
                    kind = min(kinds, key=lambda one: one.name)
                    yield kind, f"{kind.name}.{setting.name or '(computed)'}, {module.name}, line {setting.line}"


def _makes(scope: Scope, kind: Scope) -> bool:
    """Whether the code is that of a method that makes objects of a class."""
    return isinstance(scope.node, ast.FunctionDef) and scope.node.name in MAKERS and scope.above in kind.line


def _is_late(setting: Setting, kinds: list[Scope]) -> bool:
    """Whether the objects are of classes that do not have the attribute, or that are frozen. Each exception has a
    cause, and a method may be replaced by another function."""
    known = any(setting.name in {*kind.made, *kind.methods, *dir(BaseException)} for kind in kinds)
    return not known or setting.value is None or any(kind.frozen for kind in kinds)


@pytest.fixture(scope="module")
def sources() -> Sources:
    found = files()
    packages = frozenset(name for name, path in found.items() if path.name == "__init__.py")
    return Sources({name: path.read_text() for name, path in found.items()}, packages)


def test_no_attribute_appears_later_than_its_object(sources: Sources) -> None:
    found = [where for kind, where in late(sources) if not {one.name for one in kind.line} & EXCEPTIONS.keys()]
    assert not found, "\n".join(found)


def test_the_exceptions_are_needed(sources: Sources) -> None:
    assert {one.name for kind, _ in late(sources) for one in kind.line} >= EXCEPTIONS.keys()


def test_the_rule_looks_at_most_code(sources: Sources) -> None:
    """It knows the class of each `self`, and of many other objects."""
    settings = [
        (scope, one) for module in sources.modules.values() for scope in module.scopes() for one in scope.settings
    ]
    known = [one.target for scope, one in settings if scope.kinds(one.target)]
    assert len(known) > 1200
    assert sum(not isinstance(target, ast.Name) or target.id != "self" for target in known) > 100
    step = sources.modules["fxpipe.engines.common.step"].classes["Step"]
    assert {"plan", "kept", "stages", "sizes"} <= step.made.keys()


OURS = """
from dataclasses import dataclass, field
from typing import NamedTuple

class Plan:
    def __init__(self, rows):
        self.rows = rows

class Step(Plan):
    name: str
    replica = 0

    def __init__(self, plan: Plan, others: "list[Plan]"):
        super().__init__(1)
        self.plan, (self.own, *self.others) = plan, others

    def peer(self) -> Plan | None: ...

@dataclass
class Note:
    seconds: float
    plans: tuple[Plan, ...] = ()

@dataclass(frozen=True)
class Frozen:
    rows: int

class Row(NamedTuple):
    plan: Plan

def made(rows) -> Step: ...
"""


@pytest.mark.parametrize(
    ("code", "late_ones"),
    [
        ("class A(Step):\n  def begin(self): self.kept = {}", ["a.A.kept"]),
        ("class A(Step):\n  def begin(self): self.name = ''", ["a.A.name"]),  # declared, and never set
        ("class A(Step):\n  def begin(self): self.replica = 1", ["a.A.replica"]),  # the class's, not the object's
        ("class A:\n  def __init__(self): self.begin()\n  def begin(self): self.kept: dict = {}", ["a.A.kept"]),
        ("class A:\n  def begin(self):\n    def inner(): self.kept = {}", ["a.A.kept"]),
        ("class A:\n  def begin(self):\n    with x as self.kept: ...", ["a.A.kept"]),
        ("class A:\n  def begin(self):\n    for self.kept in x: ...", ["a.A.kept"]),
        ("class A:\n  def begin(self): (self.kept, self.sent), x = y", ["a.A.kept", "a.A.sent"]),
        ("class A:\n  def begin(self): self.kept += 1", ["a.A.kept"]),
        ("class A:\n  def begin(self, name): setattr(self, name, 1)", ["a.A.(computed)"]),
        ("class A:\n  def begin(self): setattr(self, 'kept', 1)", ["a.A.kept"]),
        ("class A:\n  def begin(self): vars(self)['kept'] = 1", ["a.A.kept"]),
        ("class A:\n  def begin(self): self.__dict__.update(x)", ["a.A.(computed)"]),
        ("class A(Step):\n  def begin(self): self.plan.kept = 1", ["b.Plan.kept"]),
        ("class A(Step):\n  def begin(self): self.others[0].plan = 1", []),  # of a type that code does not say
        ("class A(Note):\n  def begin(self): self.plans[0].kept = 1", ["b.Plan.kept"]),
        ("class A(Step):\n  def begin(self): del self.plan", ["a.A.plan"]),
        ("def f(step: Step): step.kept = 1", ["b.Step.kept"]),
        ("def f(step: 'Step | None'): step.kept = 1", ["b.Step.kept"]),
        ("def f(steps: list[Step]):\n  for step in steps: step.kept = 1", ["b.Step.kept"]),
        ("def f(steps: dict[str, Step]):\n  for step in steps.values(): step.kept = 1", ["b.Step.kept"]),
        ("def f():\n  step = Step(1, [])\n  step.kept = 1", ["b.Step.kept"]),
        ("def f():\n  if (step := made(1)): step.kept = 1", ["b.Step.kept"]),
        ("def f():\n  made(1).peer().kept = 1", ["b.Plan.kept"]),
        ("def f(row: Row): row.plan.kept = 1", ["b.Plan.kept"]),
        ("def f(note: Note): note.kept = 1", ["b.Note.kept"]),
        ("def f(value: Frozen): object.__setattr__(value, 'rows', 1)", ["b.Frozen.rows"]),
        ("class A(Frozen):\n  def f(self): object.__setattr__(self, 'rows', 1)", ["a.A.rows"]),
        ("class A(Step):\n  @classmethod\n  def f(cls):\n    made = cls(1)\n    made.kept = 1", ["a.A.kept"]),
    ],
)
def test_the_rule_sees_late_attributes(code: str, late_ones: list[str]) -> None:
    names = "Frozen, Note, Plan, Row, Step, made"
    found = late(Sources({"b": OURS, "p": f"from .b import {names}", "a": f"from p import {names}\n{code}"}))
    assert [where.split(",")[0] for _, where in found] == late_ones


@pytest.mark.parametrize(
    "code",
    [
        "class A(Step):\n  def begin(self): self.plan = self.rows = 1",
        "class A(Step):\n  def begin(self): self.own, self.peer = 1, 2",
        "class A(Frozen):\n  def __post_init__(self): object.__setattr__(self, 'half', self.rows // 2)",
        "class A(Step):\n  def __new__(cls):\n    made = super().__new__(cls)\n    made.kept = 1\n    return made",
        "class A(Step):\n  def __init__(self):\n    for name in x: object.__setattr__(self, name, x[name])\n"
        "  def begin(self): self.name = ''",
        "class A(Exception):\n  def begin(self): self.__cause__ = None",
        "class A:\n  @staticmethod\n  def forward(ctx, x): ctx.x = x",
        "def f(note: Note): note.seconds = 1.0",
        "def f(x): x.kept = 1",
    ],
)
def test_the_rule_lets_be_what_is_whole(code: str) -> None:
    assert not [*late(Sources({"b": OURS, "a": f"from b import Frozen, Note, Step\n{code}"}))]
