"""numpy's functions of plain Python numbers, `np.sqrt(self.width)`, are numbers while a model is traced.

Dynamo puts each numpy function into the graph as an op that runs only inside Dynamo, even if all its arguments are
known. Here the function is computed during tracing: its result is a number, and the model may branch on it.

Arrays and functions of numpy.random are left to Dynamo.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fxpipe.torch_internals.capability import Capability, if_there

from .patched import patched

NUMPY_FUNCTIONS = Capability(
    what="calls of numpy's functions in a trace",
    names=(
        "torch._dynamo.variables.NumpyVariable.call_function",
        "torch._dynamo.variables.NumpyVariable.call_method",
        "torch._dynamo.variables.base.VariableTracker.build",
    ),
    since="2.5",
    without="models that call numpy's functions of plain numbers are kept whole or refused",
)
PLAIN = (bool, int, float)


@if_there(NUMPY_FUNCTIONS)
@contextmanager
def folding(floats: list[float]) -> Iterator[None]:
    """A context in which Dynamo computes numpy functions of plain numbers; float results are appended to `floats`."""
    from torch._dynamo import variables

    kind, build = variables.NumpyVariable, variables.base.VariableTracker.build
    tracing, tracing_method = kind.call_function, kind.call_method

    def folded(tx: Any, number: bool | int | float) -> Any:
        if type(number) is float:
            floats.append(number)
        return build(tx, number)

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        number = _number(self.value, args, kwargs)
        return tracing(self, tx, args, kwargs) if number is None else folded(tx, number)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:  # numpy.lcm.reduce
        number = _number(getattr(self.value, name, None), args, kwargs)
        return tracing_method(self, tx, name, args, kwargs) if number is None else folded(tx, number)

    with patched(kind, call_function=call, call_method=call_method):
        yield


def _number(function: Any, args: Any, kwargs: Any) -> bool | int | float | None:
    """What numpy's function makes of plain numbers, if it is a number, too."""
    numpy = sys.modules["numpy"]
    of = getattr(function, "__self__", function)
    if not isinstance(of, numpy.ufunc) and getattr(function, "__module__", None) != "numpy":
        return None
    if not all(x.is_python_constant() for x in (*args, *kwargs.values())):
        return None
    given = [x.as_python_constant() for x in args], {key: x.as_python_constant() for key, x in kwargs.items()}
    if not all(map(_is_plain, (*given[0], *given[1].values()))):
        return None
    try:
        found = function(*given[0], **given[1])
    except Exception:  # the model's own, which Dynamo reports with its line
        return None
    if isinstance(found, (numpy.float64, numpy.int64, numpy.bool_)):
        found = found.item()
    return found if type(found) in PLAIN else None


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else type(value) in PLAIN
