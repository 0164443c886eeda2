"""What Dynamo's own runs of ops show, so that these ops need not run again.

Dynamo runs each op that it traces once on fake tensors. With symbolic sizes a run takes milliseconds, because torch
composes it of other ops in Python. So its effects are observed there. The record stands for another run only if that
would be the same one: the same function of the very same tensors, and of equal literals.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.torch_internals.compiling.dynamic_sizes import depends_on_data
from fxpipe.torch_internals.tracing.tensors_without_memory import FakeTensor
from fxpipe.torch_internals.tracing.trace_context import op_runs

from .numbers_asked import NumbersAsked, ValueOf
from .observed_writes import Effects, as_fake, memory, tensors_in

RAN = "fxpipe_ran"  # the place of a record in a node's `meta`
SYMBOLIC = (torch.SymBool, torch.SymInt, torch.SymFloat)
# Where the functions are that depend on their arguments alone. Others, such as a custom op's, run each time.
HOMES = (torch, torch.nn.functional, torch.special, torch.linalg, torch.fft, operator)


@dataclass
class Trace:
    """All runs of one graph. `reliable`: whether every tensor still is what it was at its first run: no op changed its
    sizes, its memory, or whether it needs a gradient."""

    reliable: bool = True


@dataclass(frozen=True, eq=False)
class Ran:
    """The run of one op.

    - `called`: the op, its function, its arguments and whether gradients were enabled.
    - `value`: what it made.
    - `written`: the memory of its arguments, or of what it made, that it wrote.
    - `random`: whether it drew random numbers.
    """

    trace: Trace
    called: tuple[Any, ...]
    value: Any
    written: tuple[int, ...]
    random: bool


@contextmanager
def recorded_runs(value_of: ValueOf) -> Iterator[None]:
    """A context in which Dynamo keeps in `meta` of each node how it ran the op. `value_of`: as in numbers_asked.py."""
    traces: weakref.WeakKeyDictionary[fx.Graph, Trace] = weakref.WeakKeyDictionary()  # that of a layer is another one

    def run_node(running: Any, tracer: Any, node: fx.Node, args: Any, kwargs: Any, nnmodule: Any) -> Any:
        trace = traces.setdefault(node.graph, Trace())
        numbers = NumbersAsked(node)
        while True:
            before = _flags(args, kwargs)
            with Effects() as effects, numbers if numbers.tensors else nullcontext():
                try:
                    value = as_fake(running(tracer, node, args, kwargs, nnmodule))
                    break
                except Exception:
                    if not numbers.asked:
                        raise
            args, kwargs = numbers.answered(args, kwargs, value_of)
        if effects.reshaped or before is None or before != _flags(args, kwargs):
            trace.reliable = False
        elif depends_on_arguments(node) and _is_plain(value) and not torch.is_inference_mode_enabled():
            own = {address for tensor in tensors_in((args, kwargs, value)) for address in memory(tensor)}
            written = tuple(address for address in effects.written if address in own)
            node.meta[RAN] = Ran(trace, _called(node, args, kwargs), value, written, effects.random)
        return value

    with op_runs(run_node):
        yield


def recorded(node: fx.Node, args: Any, kwargs: Any) -> Ran | None:
    """The record of this run of a node; None if the node must run."""
    ran: Ran | None = node.meta.get(RAN)
    if ran is None or not ran.trace.reliable or not _same(ran.called, _called(node, args, kwargs)):
        return None
    return ran


def depends_on_arguments(node: fx.Node) -> bool:
    """Whether the function of an op is known to depend on its arguments only."""
    if node.op == "call_method":
        return True
    name = getattr(node.target, "__name__", "")
    return any(getattr(home, name, None) is node.target for home in HOMES)


def _called(node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, ...]:
    return node.op, node.target, tuple(args), dict(kwargs), torch.is_grad_enabled()


def _is_plain(value: Any) -> bool:
    """Whether this is a fake tensor, or several: no number, and without sizes that depend on data."""
    if isinstance(value, (tuple, list)) and type(value) is not torch.Size:
        return bool(value) and all(map(_is_plain, value))
    return type(value) is FakeTensor and value.constant is None and not depends_on_data(value)


def _flags(args: Any, kwargs: Any) -> list[tuple[Any, ...]] | None:
    """What an op can change of its arguments besides their contents; None if torch does not tell."""
    try:
        return [
            (id(tensor), tensor.requires_grad, tensor.is_leaf, tensor.dim(), *memory(tensor))
            for tensor in tensors_in((args, kwargs))
        ]
    except RuntimeError:  # a view made without gradients, of memory that was then written with them
        return None


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same: tensors and objects the very same, numbers and literals equal."""
    if one is other:
        return True
    if isinstance(one, Tensor) or type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, slice):
        return _same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    if isinstance(one, SYMBOLIC):
        return one.node is other.node
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)  # 0.0 == -0.0
    return isinstance(one, (bool, int, str, torch.dtype, torch.device)) and bool(one == other)
