"""One trace for calls with and without gradients: it is taken, and its guards are checked, as if there was no
`torch.no_grad()` or `torch.inference_mode()` around the call; its graph runs in the mode of the call.

What forward computes is the same in both, unless it asks for the mode, or does what is allowed in one only. Then there
is a trace for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable
from torch._guards import TracingContext

from fxpipe.capture.capture_errors import Refused
from fxpipe.errors import file_name

from .patched import GETATTR, knows, patched

KNOWN = knows(
    (TensorVariable, GETATTR),
    (TensorVariable, "call_method"),
    (TorchInGraphFunctionVariable, "call_function"),
)
# What tells forward of the mode: functions, and attributes and methods of tensors that it has made.
FUNCTIONS = (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_inference)
SIGN = "grad"  # is in what torch says of what is allowed without gradients only
OF_TENSORS = ("requires_grad", "grad_fn", "is_leaf", "is_inference")


class Mode(NamedTuple):
    """Whether gradients are on, and whether inference mode is."""

    grad: bool
    inference: bool


WITH_GRADIENTS = Mode(True, False)


def current_mode() -> Mode:
    """The mode of this thread."""
    return Mode(torch.is_grad_enabled(), torch.is_inference_mode_enabled())


@contextmanager
def in_mode(mode: Mode) -> Iterator[None]:
    """A context in this mode."""
    if mode == current_mode():
        yield
        return
    with torch.inference_mode(mode.inference), torch.set_grad_enabled(mode.grad):
        yield


class GradientMode:
    """How the traces of a model depend on the mode of a call.

    - `shared`: whether one trace serves all modes.
    - `asked`: the line of the last trace that asked for the mode; "" if none did.
    """

    def __init__(self) -> None:
        self.shared, self.asked = KNOWN, ""
        self.inside = False  # whether a layer is traced alone
        self._called_in = WITH_GRADIENTS

    @contextmanager
    def of_trace(self) -> Iterator[None]:
        """A context in the mode in which calls are traced and recognised."""
        before, self._called_in = self._called_in, current_mode()
        try:
            with in_mode(WITH_GRADIENTS if self.shared else self._called_in):
                yield
        finally:
            self._called_in = before

    def of_call(self) -> AbstractContextManager[None]:
        """A context in the mode of the call that is recognised."""
        return in_mode(self._called_in)

    def end(self, refused: Exception) -> bool:
        """Let there be a trace for each mode. Returns whether that may help a call that was refused."""
        ended = self.shared and current_mode() != WITH_GRADIENTS and (bool(self.asked) or SIGN in str(refused))
        self.shared = self.shared and not ended
        return ended

    def note(self, tx: Any) -> None:
        """The mode is asked for, if by the model: for a loss function there are always gradients."""
        if tx.nn_module_stack or self.inside:
            frame = TracingContext.extract_stack()[-1]
            self.asked = f"{file_name(frame.filename)}:{frame.lineno}"

    def check(self) -> None:
        """A trace has been taken. Raises Refused if it asked for the mode, and is not in that of the call."""
        if not self.shared or not self.asked:
            return
        if self._called_in != WITH_GRADIENTS:
            raise Refused(
                None, f"forward asks at {self.asked} whether gradients are on", "do the same with and without"
            )
        self.shared = False  # what has been traced is right with gradients


@contextmanager
def observed_mode(mode: GradientMode) -> Iterator[None]:
    """A context in which a trace of Dynamo's notes if forward asks for the mode."""
    if not mode.shared:
        yield
        return
    mode.asked = ""
    functions: Any = TorchInGraphFunctionVariable
    tensors: Any = TensorVariable
    calling, reading, using = functions.call_function, getattr(tensors, GETATTR), tensors.call_method

    def call_function(self: Any, tx: Any, *given: Any) -> Any:
        if self.value in FUNCTIONS:
            mode.note(tx)
        return calling(self, tx, *given)

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if name in OF_TENSORS and not self.source:
            mode.note(tx)
        return reading(self, tx, name)

    def call_method(self: Any, tx: Any, name: str, *given: Any) -> Any:
        if name in OF_TENSORS and not self.source:
            mode.note(tx)
        return using(self, tx, name, *given)

    with (
        patched(functions, call_function=call_function),
        patched(tensors, **{GETATTR: var_getattr, "call_method": call_method}),
    ):
        yield
