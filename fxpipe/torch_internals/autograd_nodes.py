"""Which node of autograd runs, and in which order nodes were made."""

from __future__ import annotations

from typing import Any

import torch

from .capability import Capability

CURRENT_NODE = Capability(
    what="the node of autograd that runs now",
    names=("torch._C._current_autograd_node",),
    since="1.13",
    without="saved tensors live until their whole backward has run; backwards as code may not show the model's lines",
)
NODE_NUMBERS = Capability(
    what="the numbers that autograd gives its nodes",
    names=("torch.autograd._get_sequence_nr", "torch.autograd.graph.Node._sequence_nr"),
    since="2.0",
    without="backwards as code may not show the model's lines",
)


def current_node() -> Any:
    """The node that this thread runs; None if it runs none, or if that is not known."""
    return torch._C._current_autograd_node() if CURRENT_NODE.there else None


def next_number() -> int:
    """The number that the next node gets; 0 if that is not known."""
    return int(torch.autograd._get_sequence_nr()) if NODE_NUMBERS.there else 0  # type: ignore[attr-defined]


def number_of(node: Any) -> int:
    """The number of a node; -1 for None, or if that is not known."""
    return int(node._sequence_nr()) if node is not None and NODE_NUMBERS.there else -1
