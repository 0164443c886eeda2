"""The model and its loss in one function, so that both are captured in one graph, and where the loss is in that graph.

Without a `loss_fn` the model returns its loss itself: a tensor, or an object or dict with a `loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import CaptureError
from fxpipe.ir.graph import Graph, Ref
from fxpipe.ir.types import TensorType

from .batch import batch_dims
from .hollow import Roots, has_attributes

LOSS_FN = "loss_fn"  # what the paths of the loss's own tensors begin with
DEPTH = 4  # how far a loss function is searched for modules
WRITE = "pass loss_fn=, a function of the output and the target, or let the model return its loss as `.loss`"


def model_and_loss(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[Any, ...],
    loss_fn: Callable[..., Any] | None,
    outputs: bool,
) -> tuple[Any, Any]:
    """The loss; and what the model returns, if that is asked for."""
    output = model(*args, **kwargs)
    loss = own_loss(output) if loss_fn is None else loss_fn(output, *targets)
    return loss, output if outputs else None


def own_loss(output: Any) -> Any:
    """The loss that the model returns, None if it returns none."""
    if isinstance(output, Tensor):
        return output
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        return output.get("loss")
    return loss


def name_loss(graph: Graph, own: bool) -> Graph:
    """The graph with its loss named: the first of the two things that it returns. `own`: the model computed it. Raises
    CaptureError if it is none."""
    loss, _ = graph.result
    who = f"{graph.model} returns" if own else "loss_fn returns"
    known = graph.types
    kind = known.get(loss.name) if isinstance(loss, Ref) else None
    if not isinstance(loss, Ref) or not isinstance(kind, TensorType):
        what = "no loss" if own else type(loss).__name__ + ", no tensor"
        raise CaptureError(f"{who} {what}; {WRITE if own else 'let it return the loss alone, a tensor'}")
    dims = batch_dims(kind)
    if (own and len(kind.shape) > 1) or (not dims and any(size != 1 for size in kind.shape)):
        advice = WRITE if own else "take the mean or the sum of it"
        raise CaptureError(f"{who} {kind}, which is neither one number nor one for each sample; {advice}")
    if not kind.grad:
        raise CaptureError(
            f"{who} a loss that needs no gradient; does any parameter, and is gradient computation switched on?"
        )
    return replace(graph, loss=loss.name)


def modules_in(loss_fn: Any, path: str = LOSS_FN, depth: int = 0) -> Roots:
    """The modules that a loss function is, or holds on to, and what the paths of their tensors begin with. It finds
    those in closures, defaults, partials, bound methods, and among the globals that a function names."""
    if isinstance(loss_fn, nn.Module):
        return {path: loss_fn}
    held: Mapping[str, Any] = {}
    if isinstance(loss_fn, partial):
        held = {"func": loss_fn.func, **{f"args.{i}": arg for i, arg in enumerate(loss_fn.args)}, **loss_fn.keywords}
    elif isinstance(loss_fn, MethodType):
        held = {"self": loss_fn.__self__, "func": loss_fn.__func__}
    elif isinstance(loss_fn, FunctionType):
        held = _held_by(loss_fn)
    found: dict[str, nn.Module] = {}
    for name, value in held.items() if depth < DEPTH else ():
        found |= modules_in(value, f"{path}.{name}", depth + 1)
    return found


def objects_in(loss_fn: Any) -> tuple[Any, ...]:
    """The plain object that a loss function is, or is a method of: it may keep count, or a log."""
    if isinstance(loss_fn, partial):
        return objects_in(loss_fn.func)
    owner = loss_fn.__self__ if isinstance(loss_fn, MethodType) else loss_fn
    return (owner,) if not isinstance(owner, FunctionType) and has_attributes(owner) else ()


def _held_by(function: FunctionType) -> dict[str, Any]:
    code = function.__code__
    held = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    held = {name: value for name, value in held.items() if isinstance(value, (nn.Module, partial))}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not yet filled
            continue
    return held | (function.__kwdefaults__ or {}) | dict(_defaults(function))


def _defaults(function: FunctionType) -> list[tuple[str, Any]]:
    """The default values of the arguments that may be given by position, by name."""
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return list(zip(names[len(names) - len(defaults) :], defaults, strict=True))
