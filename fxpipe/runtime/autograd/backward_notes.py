"""Adds notes to exceptions in backward of a call, from submodules that are kept whole.

The user starts backward of a call, so its exceptions do not pass through code of fxpipe, unless their task is
recomputed. Autograd functions written in Python may raise exceptions there, and in a stage only submodules that are
kept whole run such functions. (Errors of torch's own operations get no note.)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fxpipe.torch_internals.pytrees import tree_leaves

Note = Callable[[Exception], None]


class _Watching(threading.local):
    """`note` adds the note of the task that a thread runs; None outside of `watching`."""

    def __init__(self) -> None:
        self.note: Note | None = None


_watching = _Watching()


@contextmanager
def watching(note: Note) -> Iterator[None]:
    """Autograd functions that `watch` finds in this context call `note` with exceptions of their backward."""
    _watching.note = note
    try:
        yield
    finally:
        _watching.note = None


def watch(results: Any, given: Any) -> None:
    """Watch the autograd functions between the tensors nested in `given` and those in `results`, inside `watching`."""
    note = _watching.note
    if note is None or not torch.is_grad_enabled():
        return
    seen = {x.grad_fn for x in tree_leaves(given) if isinstance(x, Tensor)}
    todo = [x.grad_fn for x in tree_leaves(results) if isinstance(x, Tensor)]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            _watch(node, note)
        todo += [before for before, _ in node.next_functions]


def _watch(node: Any, note: Note) -> None:
    """Replace `apply` of the node, which autograd looks up on nodes of functions written in Python."""
    own, held = type(node).apply, weakref.ref(node)  # the node must not hold itself

    def apply(*grads: Any) -> Any:
        try:
            return own(held(), *grads)
        except Exception as error:
            note(error)
            raise

    node.apply = apply
