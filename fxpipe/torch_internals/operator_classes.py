"""What kind of thing an op of torch calls."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from .capability import Capability

OPERATOR_CLASSES = Capability(
    what="the classes of operators and their schemas",
    names=(
        "torch._ops.OpOverload",
        "torch._ops.OpOverloadPacket",
        "torch._ops.HigherOrderOperator",
    ),
    since="1.13",
    without="fxpipe does not start: `torch.ops` is made of them",
    check=lambda: schema(torch.ops.aten.relu.default).name == "aten::relu",
    needed=True,
)
PADDING = Capability(
    what="the function that F.pad calls",
    names=("torch._C._nn.pad",),
    since="1.13",
    without="it is written by the name that it has",
)

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket", "overload_name", "padding", "schema"]


def schema(operator: Any) -> Any:
    """The schema of an operator: its arguments, and which of them it writes."""
    return operator._schema


def overload_name(operator: Any) -> str:
    """Which of its packet an operator is."""
    return str(operator._overloadname)


def padding() -> Any:
    """What F.pad calls, and what is captured of it; None if that is not known."""
    if not PADDING.there:
        return None
    from torch._C import _nn

    return _nn.pad
