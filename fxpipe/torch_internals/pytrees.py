"""Tensors in nested containers, also in containers of libraries that have told torch of theirs."""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from .capability import Capability

NESTED_VALUES = Capability(
    what="the values in nested containers, with those that libraries have registered",
    names=("torch.utils._pytree.tree_flatten",),
    since="1.8",
    without="fxpipe does not start: torch's own modules for tracing import it, so every version has it",
    needed=True,
)

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
