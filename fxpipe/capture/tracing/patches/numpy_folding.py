"""numpy's functions of plain Python numbers, `np.sqrt(self.width)`, are numbers while a model is traced.

Dynamo puts each numpy function into the graph as an op that runs only inside Dynamo, even if all its arguments are
known. Here the function is computed during tracing: its result is a number, and the model may branch on it.

Arrays and functions of numpy.random are left to Dynamo. torch treats numbers of numpy and Python differently in one
case: `torch.tensor(np.sqrt(2))` is f64, `torch.tensor(2 ** 0.5)` is f32. So a graph that makes tensors of numbers is
refused if numpy returned a float.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.misc import NumpyVariable

from fxpipe.capture.capture_errors import Refused, line_of, modules_around

from .patched import patched

PLAIN = (bool, int, float)
MAKERS = ("tensor", "as_tensor", "asarray", "scalar_tensor")


@contextmanager
def folding(floats: list[float]) -> Iterator[None]:
    """A context in which Dynamo computes numpy functions of plain numbers; float results are appended to `floats`."""
    tracing, tracing_method = NumpyVariable.call_function, NumpyVariable.call_method

    def folded(number: bool | int | float) -> Any:
        if type(number) is float:
            floats.append(number)
        return ConstantVariable.create(number)

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        number = _number(self.value, args, kwargs)
        return tracing(self, tx, args, kwargs) if number is None else folded(number)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:  # numpy.lcm.reduce
        number = _number(getattr(self.value, name, None), args, kwargs)
        return tracing_method(self, tx, name, args, kwargs) if number is None else folded(number)

    with patched(NumpyVariable, call_function=call, call_method=call_method):
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


def made_of_floats(graph: fx.Graph) -> Refused | None:
    """The refusal of the first op that makes a tensor of Python's floats, of a type that it takes from them."""
    for node in graph.nodes:
        makes = node.op == "call_function" and getattr(node.target, "__name__", "") in MAKERS
        if makes and node.kwargs.get("dtype") is None and _has_float(node.args):
            advice = "give torch.tensor a dtype, or numpy's function a tensor, as in torch.sqrt"
            return Refused(line_of(node), "it makes a tensor of a number of numpy's", advice, modules_around(node))
    return None


def _has_float(nest: Any) -> bool:
    return any(map(_has_float, nest)) if isinstance(nest, (list, tuple)) else type(nest) is float
