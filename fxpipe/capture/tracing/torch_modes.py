"""Modes of torch's around a call, which a pipeline cannot be run in."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fxpipe.errors import FxpipeError


def check_modes(instead: str = "run the model itself in it, as pipe.model(x)") -> None:
    """Raise FxpipeError in a mode of torch's that changes or watches what ops do: it is of this thread alone, so it
    would reach some stages only. The default device is one of these, and may be. `instead`: what the user can do."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        found = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]  # type: ignore[no-untyped-call]
        found += _get_current_dispatch_mode_stack()
        if found:
            kind = "TorchFunctionMode" if isinstance(found[0], TorchFunctionMode) else "TorchDispatchMode"
            raise FxpipeError(
                f"{type(found[0]).__name__} is active here, a {kind}, which would reach only what this thread runs of "
                f"the pipeline; leave it before the pipe runs, or {instead}"
            )
