"""At most two of our own ancestors: what differs by more than that is a value that is passed in."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from tests.project.test_imports import files

MOST = 2


def classes() -> Iterator[type]:
    """The classes of the package, each from the module that it is defined in."""
    for name in sorted(files().keys() - {"fxpipe.__main__"}):
        for value in vars(import_module(name)).values():
            if isinstance(value, type) and value.__module__ == name:
                yield value


def ancestors(kind: type) -> list[str]:
    return [base.__name__ for base in kind.__mro__[1:] if base.__module__.split(".")[0] == "fxpipe"]


def test_a_class_has_at_most_two_ancestors_of_ours() -> None:
    found = {f"{kind.__module__}.{kind.__qualname__}": ancestors(kind) for kind in classes()}
    assert len(found) > 200
    assert {name: above for name, above in found.items() if len(above) > MOST} == {}


def test_the_rule_counts_ours_alone() -> None:
    from fxpipe.capture.capture_errors import NoOps

    assert ancestors(NoOps) == ["CaptureError", "FxpipeError"]
