"""The model and its loss in one function, so that both are captured in one graph; and the loss in that graph.

Without a `loss_fn`, the model returns its loss: a tensor, or an object or dict with a `loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from fxpipe.batching.batch_facts import batch_dims
from fxpipe.batching.op_errors import at
from fxpipe.capture.opaque.losses_by_sample import by_sample, how_reduced
from fxpipe.capture.twins.attribute_changes import has_attributes
from fxpipe.capture.twins.twin import Roots
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.graph import Graph, Ref
from fxpipe.ir.graph.value_types import TensorType, ValueType
from fxpipe.ir.sample_lists import with_rows

from .nested_values import parts_of, spelled

LOSS_FN = "loss_fn"  # what the paths of the loss's own tensors begin with
DEPTH = 4  # how far a loss function is searched for modules
HOLDERS = (nn.Module, partial, MethodType, FunctionType)  # in which modules are found
WRITE = "pass loss_fn=, a function of the output and the target, or let the model return its loss as `.loss`"


def call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function that is captured for a call."""
    return model(*args, **kwargs)


def call_with_rows(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same where another input counts the rows of some."""
    return call_model(model, with_rows(args), with_rows(kwargs))


def model_and_loss(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[Any, ...],
    loss_fn: Callable[..., Any] | None,
    outputs: bool,
) -> tuple[Any, Any]:
    """The loss, and the model's result if `outputs`, else None."""
    output = model(*args, **kwargs)
    loss = own_loss(output) if loss_fn is None else loss_fn(output, *targets)
    if isinstance(loss_fn, KeptLoss) and loss_fn.how is not None and loss.dim() == 1:  # of each sample
        loss = loss.mean() if loss_fn.how == "mean" else loss.sum()
    return loss, output if outputs else None


def model_and_loss_with_rows(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[Any, ...],
    loss_fn: Callable[..., Any] | None,
    outputs: bool,
) -> tuple[Any, Any]:
    """The same where another input counts the rows of some. Its parameters are not `*rest`: Dynamo names the values in
    them by these names, as `path_of` reads them."""
    return model_and_loss(model, with_rows(args), with_rows(kwargs), with_rows(targets), loss_fn, outputs)


def function_for(loss: bool, counted: bool) -> Callable[..., Any]:
    """The function that is captured: a plain function of the model, args, kwargs, and the other fields of a
    `RequestedCall`, which uses its arguments and the globals of its module alone. `counted`: whether inputs count the
    rows of others."""
    if loss:
        return model_and_loss_with_rows if counted else model_and_loss
    return call_with_rows if counted else call_model


def own_loss(output: Any) -> Any:
    """The loss in the model's result; if there is none, the result itself."""
    if isinstance(output, Tensor):
        return output
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    return output if loss is None else loss


def name_loss(graph: Graph, own: bool) -> Graph:
    """The graph with `loss`: the first of its two results. `own`: the model computes the loss. Raises CaptureError
    unless it is a tensor with a gradient and one number, or one for each sample."""
    loss, _ = graph.result
    who = f"{graph.model} returns" if own else "loss_fn returns"
    known = graph.types
    kind = known.get(loss.name) if isinstance(loss, Ref) else None
    if not isinstance(loss, Ref) or not isinstance(kind, TensorType):
        raise CaptureError(f"{who} {_advice(graph, loss, own)}")
    origin = next((op.origin for op in graph.ops if op.name == loss.name), None)
    place = at(origin)
    dims = batch_dims(kind)
    if (own and len(kind.shape) > 1) or (not dims and any(size != 1 for size in kind.shape)):
        advice = WRITE if own else "take the mean or the sum of it"
        raise CaptureError(f"{place}{who} {kind}, which is neither one number nor one for each sample; {advice}")
    if not kind.grad:
        raise CaptureError(
            f"{place}{who} a loss that needs no gradient; compute it from parameters with requires_grad=True, without "
            "detach() or torch.no_grad()"
        )
    return replace(graph, loss=loss.name)


def _advice(graph: Graph, returned: Any, own: bool) -> str:
    """The end of an error: what is returned in place of a loss, and what to write."""
    types = graph.types
    if type(returned) in (int, float):  # its value is one of tensors without memory
        return "a number of Python's, no tensor; let it return the tensor, without .item() or float()"
    shown = spelled(returned, lambda part: str(types[part.name]) if isinstance(part, Ref) else None)
    path = _path_of_number(returned, types)
    if own:
        told = f"write loss_fn=lambda out: out{path}" if path else WRITE
        return f"{shown}, and no `.loss`; {told}"
    alone = f"write {path} of that" if path else "a tensor"
    return f"{shown}, no tensor; let it return the loss alone, {alone}"


def _path_of_number(value: Any, types: Mapping[str, ValueType]) -> str | None:
    """The path, as a user writes it, of a number with a gradient in the result; None if there is none."""
    if isinstance(value, Ref):
        kind = types[value.name]
        is_number = isinstance(kind, TensorType) and kind.grad and all(size == 1 for size in kind.shape)
        return "" if is_number else None
    found = ((path, _path_of_number(part, types)) for path, part in parts_of(value))
    return next((path + rest for path, rest in found if rest is not None), None)


class KeptLoss(nn.Module):
    """A loss function that cannot be traced, as a module, as only modules can be kept whole. `of`: the modules that
    the function refers to. Functions with the same code and modules, such as a new lambda in each step, share one.

    `how`: None, or its code shows that it is the "mean" or "sum" over single samples, whose losses are returned then.
    """

    def __init__(self, loss_fn: Any, of: Roots) -> None:
        super().__init__()
        self.loss_fn, self.how = loss_fn, how_reduced(loss_fn)
        for path, module in of.items():
            self.add_module(path.replace(".", "_"), module)

    def forward(self, *given: Any) -> Any:
        each = None if self.how is None else by_sample(self.loss_fn, given)
        return self.loss_fn(*given) if each is None else each


def code_of(loss_fn: Any) -> tuple[Any, ...]:
    """A key of a loss function: its code and its modules. Functions that differ only in other values share the key."""
    function = loss_fn
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    return getattr(function, "__code__", type(function)), *map(id, modules_in(loss_fn).values())


def modules_in(loss_fn: Any, path: str = LOSS_FN, depth: int = 0) -> Roots:
    """The modules of a loss function, by the prefix of their tensors' paths: itself, or those in its closure, defaults,
    partials, bound object, and the globals that it names."""
    if isinstance(loss_fn, nn.Module):
        model = vars(loss_fn).get("model")  # of a pipe, whose tensors are the model's
        return {path: model if isinstance(model, nn.Module) and model._modules is loss_fn._modules else loss_fn}
    held: Mapping[str, Any] = {}
    if isinstance(loss_fn, partial):
        held = {"func": loss_fn.func, **{f"args.{i}": arg for i, arg in enumerate(loss_fn.args)}, **loss_fn.keywords}
    elif isinstance(loss_fn, MethodType):
        held = {"self": loss_fn.__self__, "func": loss_fn.__func__}
    elif isinstance(loss_fn, FunctionType):
        held = _held_by(loss_fn)
    found: dict[str, nn.Module] = {}
    for name, value in held.items() if depth < DEPTH else ():
        if isinstance(value, HOLDERS):
            found |= modules_in(value, f"{path}.{name}", depth + 1)
    return found


def objects_in(loss_fn: Any) -> tuple[Any, ...]:
    """The plain object that a loss function is, or is a method of, which it may change (a counter, a log); or ()."""
    if isinstance(loss_fn, partial):
        return objects_in(loss_fn.func)
    owner = loss_fn.__self__ if isinstance(loss_fn, MethodType) else loss_fn
    return (owner,) if not isinstance(owner, FunctionType) and has_attributes(owner) else ()


def _held_by(function: FunctionType) -> dict[str, Any]:
    code, known = function.__code__, function.__globals__
    held = {name: known[name] for name in code.co_names if isinstance(known.get(name), (nn.Module, partial))}
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
