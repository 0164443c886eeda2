"""Modes of torch's around a call, which a pipeline cannot be run in."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode

from fxpipe.errors import FxpipeError
from fxpipe.torch_internals.op_modes import active_modes, modes_are_active


def check_modes(instead: str = "run the model itself in it, as pipe.model(x)") -> None:
    """Raise FxpipeError if a TorchFunctionMode or TorchDispatchMode is active: modes are per thread, so it would reach
    only some of the stages. That of torch.set_default_device is allowed. `instead`: what the user can do."""
    if modes_are_active() and (found := active_modes()):
        kind = "TorchFunctionMode" if isinstance(found[0], TorchFunctionMode) else "TorchDispatchMode"
        raise FxpipeError(
            f"{type(found[0]).__name__} is active here, a {kind}, which would reach only what this thread runs of the "
            f"pipeline; leave it before the pipe runs, or {instead}"
        )
