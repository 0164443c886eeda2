"""Tensors in nested containers, also in containers of libraries that have told torch of theirs."""

from __future__ import annotations

from torch.utils import _pytree

from .capability import Capability

NESTED_VALUES = Capability(
    what="the values in nested containers, with those that libraries have registered",
    names=("torch.utils._pytree.tree_flatten",),
    since="1.8",
    without="fxpipe does not start: torch's own modules for tracing import it, so every version has it",
    needed=True,
)

tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map
__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
