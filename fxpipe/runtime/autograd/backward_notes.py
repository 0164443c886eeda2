"""Notes on exceptions in backward of a call, from submodules that are kept whole.

Backward of a call is a run of autograd that the user starts, so an exception passes no code of ours on its way out,
unless its task is recomputed. What raises exceptions of its own there are autograd functions written in Python, and a
stage only runs those in submodules that are kept whole. (An error of one of torch's own operations has no note.)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Note = Callable[[Exception], None]

_now = threading.local()  # `note`: what puts the note on exceptions in backward of the task that this thread runs


@contextmanager
def watching(note: Note) -> Iterator[None]:
    """Autograd functions that `watch` finds in this context call `note` with what their backward raises."""
    _now.note = note
    try:
        yield
    finally:
        _now.note = None


def watch(results: Any, given: Any) -> None:
    """Watch the autograd functions between the tensors in two nests, if anybody wants to know."""
    note: Note | None = getattr(_now, "note", None)
    if note is None or not torch.is_grad_enabled():
        return
    seen = {x.grad_fn for x in tree_leaves(given) if isinstance(x, Tensor)}
    todo = [x.grad_fn for x in tree_leaves(results) if isinstance(x, Tensor)]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch._C._FunctionBase):
            _watch(node, note)
        todo += [before for before, _ in node.next_functions]


def _watch(node: Any, note: Note) -> None:
    """Autograd looks up `apply` on the node of a function that is written in Python."""
    own, held = type(node).apply, weakref.ref(node)  # the node must not hold itself

    def apply(*grads: Any) -> Any:
        try:
            return own(held(), *grads)
        except Exception as error:
            note(error)
            raise

    node.apply = apply
