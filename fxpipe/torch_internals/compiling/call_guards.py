"""Checks that a call is of the kind that was compiled, in the time of one small op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fxpipe.torch_internals.capability import Capability

from .compiled_code import stance

GUARDS = Capability(
    what="checks of tensors and of torch's global state",
    names=(
        "torch._C._dynamo.guards.GlobalStateGuard",
        "torch._C._dynamo.guards.TensorGuards",
        "torch._dynamo.eval_frame._stance.stance",
    ),
    since="2.7",
    without="compiled stages are called through torch.compile's own checks, which takes longer",
)


def tensors_are_like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A check whether tensors have the types, sizes, strides and devices of these, need gradients as these do, and are
    different ones."""
    sizes: Any = [list(one.shape) for one in tensors]
    strides: Any = [list(one.stride()) for one in tensors]
    from torch._C._dynamo import guards

    made: Any = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = made.check
    return check


def state_is_like_now() -> Callable[[], bool]:
    """A check whether torch's global state, such as autocast, is that of now."""
    from torch._C._dynamo import guards

    check: Callable[[], bool] = guards.GlobalStateGuard().check
    return check


def compiles_as_usual() -> bool:
    """Whether torch.compile is neither switched off nor told to do something else."""
    return stance() == "default"
