"""The model's own exceptions: if a call cannot be captured because the model or its loss raises on these inputs, the
user gets that exception, with its type and traceback, instead of Dynamo's error.

    CaptureError ──▶ run the plain model on a few samples
                       │ runs: raise the CaptureError
                       └ raises: run it on all samples, as the user would
                            │ raises: raise that exception, with a note
                            └ runs: the model needs the whole batch: raise an error that says how the batch is cut
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from fxpipe.batching.op_errors import at
from fxpipe.capture.twins.script_twin import forward_signature
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.dtypes import short_name

from .call_arguments import Call, Leaf
from .capture_errors import failed
from .model_with_loss import KeptLoss
from .nested_values import change, spelled

Attempt = Callable[[Callable[..., Any], int], None]


class Plain:
    """A function that runs in place of the captured one, on twins with copies of the model's tensors.

    - `loss_fn`, `given`: the loss function and its arguments, for the note.
    - `began`: whether the model has begun to run, so that later errors are its own.
    """

    def __init__(self) -> None:
        self.loss_fn: Any = None
        self.given: tuple[Any, ...] = ()
        self.began = False

    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        targets: tuple[Any, ...] = (),
        loss_fn: Any = None,
        outputs: bool = False,
    ) -> None:
        self.loss_fn, self.given, self.began = None, (), True
        output = model(*args, **kwargs)
        if loss_fn is not None:
            self.loss_fn = loss_fn.loss_fn if isinstance(loss_fn, KeptLoss) else loss_fn
            self.given = output, *targets
            loss_fn(*self.given)


def diagnosed(refused: CaptureError, model: nn.Module, call: Call, attempt: Attempt) -> Exception:
    """The exception to raise for a refused call: the model's own, or a more precise error, or `refused`.
    `attempt(function, samples)` calls the function, in place of the captured one, with `samples` samples."""
    reals = [*model.parameters(), *model.buffers(), *(leaf.real for leaf in call.leaves.values())]
    if any(x.is_meta or nn.parameter.is_lazy(x) for x in reals):
        return refused
    plain, name = Plain(), type(model).__name__

    def error_for(samples: int) -> Exception | None:
        plain.began = False
        try:
            attempt(plain, samples)
        except Exception as error:
            if plain.began:  # else there is no memory for the copies
                return error.with_traceback(_users_part(error.__traceback__))
        return None

    batch = call.batch or 0
    few = min(call.rows or 0, batch)
    error = error_for(few)
    if error is None:
        other = error_for(few + 1) if batch and "it raises" in str(refused) else None
        if other is not None:
            return _no_batch(model, call, few, few + 1, other)
        error = error_for(batch) if few < batch and getattr(refused, "steered", False) else None
        if error is None:
            return refused
        few = batch  # a value in another sample is the reason
    if few < batch:
        whole = error_for(batch)
        if whole is None:
            return _no_batch(model, call, batch, few, error)
        if type(whole) is type(error):  # else there may be no memory for the whole batch
            error, few = whole, batch
        else:
            error_for(few)  # what the note shows is of these samples
    _add_notes(error, plain, name, call, few)
    return error


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's code on."""
    while trace is not None and trace.tb_frame.f_code is not Plain.__call__.__code__:
        trace = trace.tb_next
    return None if trace is None else trace.tb_next


def _no_batch(model: nn.Module, call: Call, runs: int, fails: int, error: Exception) -> CaptureError:
    """The error for a model that runs on some number of samples, and not on another."""
    where, name = failed(error, "").where, type(model).__name__
    cut = [leaf for leaf in call.leaves.values() if leaf.batch_dim is not None]
    shown = " and ".join(f"dimension {leaf.batch_dim} of {leaf.path}, {typed(leaf.real)}," for leaf in cut)
    # The first one is most likely to have samples, and the target has as many; the fewer dimensions, the less likely.
    others = [leaf for leaf in cut[1:] if re.split(r"[.\[]", leaf.path)[0] not in call.target]
    path = min(reversed(others or cut[:1]), key=lambda leaf: leaf.real.dim()).path
    advice = (
        f"If {path} has no batch, write batch_dim={{{path!r}: None}}: every micro-batch gets all of it. If {name} "
        f"needs a batch of {runs}, write chunks=1"
    )
    for parameter in forward_signature(model).parameters.values():
        default = parameter.default
        if isinstance(default, Tensor) and call.batch in default.shape[:1] and parameter.name not in call.names:
            advice = (
                f"The default of {parameter.name}, {typed(default)}, has the size of the batch and is not cut: pass it "
                f"in the call, as in pipe(..., {parameter.name}={parameter.name})"
            )
    return CaptureError(
        f"{at(where)}{shown} was taken for the batch, and {name}, which runs on {runs} sample{'s' * (runs > 1)}, does "
        f"not run on {fails}: it raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}\n{advice}"
    )


def _add_notes(error: Exception, plain: Plain, name: str, call: Call, samples: int) -> None:
    """Add notes to the model's own exception: that fxpipe was capturing, the arguments, and what may be wrong."""
    few = f" ({samples} of the {call.batch} samples)" if call.batch and samples != call.batch else ""
    if not plain.given:
        leaves = [leaf for leaf in call.leaves.values() if re.split(r"[.\[]", leaf.path)[0] not in call.target]
        given = ", ".join(f"{leaf.path} {_cut_type(leaf, samples)}" for leaf in leaves)
        error.add_note(
            f"while fxpipe captured {name}; without fxpipe it raises the same" + (f", given {given}{few}" * bool(given))
        )
        return
    output, *targets = plain.given
    shown = f"output {typed(output)}" + "".join(f" and target {typed(target)}" for target in targets)
    error.add_note(
        f"while fxpipe captured {name} with its loss; without fxpipe the loss raises the same, given {shown}{few}"
    )
    called = getattr(plain.loss_fn, "__name__", type(plain.loss_fn).__name__)
    called = "loss_fn" if called == "<lambda>" else called
    if not _takes(plain.loss_fn, plain.given):
        if targets:
            error.add_note("it is called as loss_fn(output, target): write a function of these two")
        else:
            error.add_note(
                "it is called as loss_fn(output), for the step was given no target: write "
                "pipe.step(x, target=y, loss_fn=loss_fn)"
            )
    elif not isinstance(output, Tensor) and (path := first_tensor(output)):
        rest = ", target" * bool(targets)
        error.add_note(
            f"the model returns no tensor: write loss_fn=lambda output{rest}: {called}(output{path}{rest}), with "
            "whatever of the output the loss is made of"
        )


def _takes(function: Any, given: tuple[Any, ...]) -> bool:
    """Whether a function's signature accepts these arguments; True if it has none."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*given)
    except TypeError:
        return False
    return True


# Values in a line -----------------------------------------------------------------------------------------------------


def _cut_type(leaf: Leaf, samples: int) -> str:
    shape = list(leaf.real.shape)
    if leaf.batch_dim is not None:
        shape[leaf.batch_dim] = samples
    return f"{short_name(leaf.real.dtype)}{shape}"


def typed(value: Any) -> str:
    """A value in a line, with the types of the tensors in it.

    >>> import torch
    >>> typed({"logits": torch.ones(2, 3), "states": (None, torch.ones(2))})
    "{'logits': f32[2, 3], 'states': (None, f32[2])}"
    """
    return spelled(value, lambda x: f"{short_name(x.dtype)}{list(x.shape)}" if isinstance(x, Tensor) else None)


def first_tensor(value: Any) -> str:
    """How a user writes the first tensor in a nest, after its name; "" if there is none.

    >>> import torch
    >>> first_tensor({"states": None, "logits": (torch.ones(2),)})
    "['logits'][0]"
    """
    found: dict[str, Tensor] = {}
    change(value, found.setdefault)
    return next(iter(found), "")
