"""The model of a command, `model.py:make_model`, as a script imports it."""

from __future__ import annotations

import keyword
import sys
from pathlib import Path
from typing import NamedTuple

from fxpipe.errors import PlanError

TAKEN = frozenset(("torch", "fxpipe", "train"))  # what the script imports, and the script itself


class ModelImport(NamedTuple):
    """`from module import function`, with `folder` in the path."""

    folder: Path
    module: str
    function: str


def model_import(path: str) -> ModelImport:
    """Where a script finds the function at `path`. Raises PlanError if an import statement cannot name it.

    >>> model_import("nets/model.py:make_model")[1:]
    ('model', 'make_model')
    """
    file, _, function = path.rpartition(":")
    place = Path(file)
    for name in (place.stem, function):
        if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
            raise PlanError(
                f"{path!r} is a model that a script cannot import: {name!r} is no name in Python; rename it, as in "
                "model.py:make_model"
            )
    if place.suffix != ".py":
        raise PlanError(f"{path!r} is a model that a script cannot import: {place.name} does not end in .py; rename it")
    if place.stem in TAKEN or place.stem in sys.stdlib_module_names:
        raise PlanError(
            f"{path!r} is a model that a script cannot import: another module is called {place.stem!r}; rename "
            f"{place.name}, as to my_{place.name}"
        )
    return ModelImport(place.resolve().parent, place.stem, function)
