"""Calls what Inductor has made of a piece directly, where the whole way there is known.

    piece(*args) ──▶ a kind of call that is known: its checks, then Inductor's function
         │ none fits
         └─────────▶ Dynamo's guards, AOTAutograd's wrappers, Inductor's function: recorded, it is known from now on

Dynamo checks at each call all that its code may depend on. For a small stage that takes several times as long as the
stage. A kind of call has exact sizes; of a pipe's micro-batches there are one or two. So what is between the piece and
Inductor's function becomes fixed: which argument goes where, which result comes from where, and the numbers, such as
sizes. Checked is what could change: types, sizes and strides of the arguments, numbers among them, torch's global state
and modes. Dynamo compiles as before, so one compilation serves all sizes.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxpipe.torch_internals.compiling.call_guards import GUARDS, compiles_as_usual, state_is_like_now, tensors_are_like
from fxpipe.torch_internals.compiling.inductor import INDUCTOR, checks_of_sizes, compile_fx, compile_inner, is_fallback
from fxpipe.torch_internals.op_modes import modes_are_active
from fxpipe.torch_internals.operator_classes import OpOverload, schema

MOST_KINDS = 8  # of calls of a piece; the least recent one is forgotten
ANOTHER = object()  # what a known kind of call returns for a call of another kind
# Products, into memory that Inductor lays out; constants; and sizes.
OWN = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "full", "scalar_tensor", "sym_size"))


class Run(NamedTuple):
    """One run of a function of Inductor's."""

    function: Callable[[list[Any]], Sequence[Any]]
    given: Sequence[Any]
    made: Sequence[Any]


class _Recording(threading.local):
    """The `runs` of the call that is recorded on this thread; None if none is."""

    def __init__(self) -> None:
        self.runs: list[Run] | None = None


_recording = _Recording()


class Recorded:
    """A function of Inductor's, whose runs are recorded where asked."""

    def __init__(self, function: Callable[[list[Any]], Sequence[Any]]) -> None:
        self.function = function

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if _recording.runs is None:
            return self.function(inputs)
        given = tuple(inputs)  # the function empties the list
        made = self.function(inputs)
        _recording.runs.append(Run(self.function, given, made))
        return made


def inductor(graph: fx.GraphModule, examples: Sequence[Any]) -> Any:
    """Inductor, as a backend of torch.compile. Functions that only compute results are recorded."""
    if not INDUCTOR.there:
        return compile_fx(graph, examples)

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        # Inductor's checks of sizes are for operators whose kernels choose the layout of their results.
        with checks_of_sizes(not all(map(_has_own_kernel, nodes))):
            made: Any = compile_inner(graph, inputs, **options)
        function = getattr(made, "current_callable", None)
        if function is not None and all(map(_only_computes, nodes)):
            made.current_callable = Recorded(function)
        return made

    return compile_fx(graph, examples, inner)


def _only_computes(node: fx.Node) -> bool:
    """Whether a node has no effect but its result, which its inputs alone decide."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return getattr(operator, getattr(target, "__name__", ""), None) is target  # on sizes
    return not schema(target).is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _has_own_kernel(node: fx.Node) -> bool:
    """Whether Inductor lays out the memory of the result of a node itself."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return _only_computes(node)
    tags = {torch.Tag.pointwise, torch.Tag.reduction}
    own = target.is_view or not tags.isdisjoint(target.tags) or schema(target).name in OWN
    return own and not is_fallback(target)


def recorded(run: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, list[Run]]:
    """The result of `run(*args)`, and the runs of Inductor's functions in it."""
    runs: list[Run] = []
    _recording.runs = runs
    try:
        return run(*args), runs
    finally:
        _recording.runs = None


def known_call(args: Sequence[Any], result: Any, runs: Sequence[Run]) -> Callable[..., Any] | None:
    """A function for more calls of the kind that gave `result`, in `runs`. It returns ANOTHER, and has done nothing,
    for arguments of another kind. None if something is between call and run that is not known."""
    if len(runs) != 1 or torch.is_grad_enabled() or not GUARDS.there or not _calm():
        return None
    [(run, given, made)], names = runs, [f"a{k}" for k in range(len(args))]
    tensors = {name: arg for name, arg in zip(names, args, strict=True) if isinstance(arg, Tensor)}
    numbers = {name: arg for name, arg in zip(names, args, strict=True) if name not in tensors}
    several = len({id(arg) for arg in tensors.values()}) < len(tensors)  # one tensor, given twice
    if several or not tensors or any(type(value) not in (int, bool, type(None)) for value in numbers.values()):
        return None
    places = {id(arg): name for name, arg in tensors.items()}
    results = {id(value): f"made[{k}]" for k, value in enumerate(made) if isinstance(value, Tensor)} | places
    passed, returned = _source(list(given), places), _source(result, results)
    if passed is None or returned is None:
        return None
    checks = [f"same({', '.join(tensors)})", "state()", "calm()"]
    checks += [f"type({name}) is {type(value).__name__} and {name} == {value}" if value is not None else
               f"{name} is None" for name, value in numbers.items()]  # fmt: skip
    code = f"def call({', '.join(names)}):\n if not ({' and '.join(checks)}):\n  return another\n"
    known: dict[str, Any] = {
        "same": tensors_are_like([*tensors.values()]), "state": state_is_like_now(), "calm": _calm,
        "another": ANOTHER, "run": run,
    }  # fmt: skip
    exec(f"{code} made = run({passed})\n return {returned}", known)
    call: Callable[..., Any] = known["call"]
    return call


def _calm() -> bool:
    """Whether no mode sees the ops of this thread, and torch.compile works as usual."""
    return not modes_are_active() and compiles_as_usual()


def _source(value: Any, places: Mapping[int, str]) -> str | None:
    """The source of a value, in which tensors are found at `places` by their id; None if there is none."""
    if isinstance(value, Tensor):
        return places.get(id(value))
    if type(value) in (list, tuple):
        items = [_source(item, places) for item in value]
        found = [item for item in items if item is not None]
        text = "".join(f"{item}, " for item in found)
        return None if len(found) < len(items) else f"[{text}]" if type(value) is list else f"({text})"
    return repr(value) if type(value) in (int, bool, type(None)) else None
