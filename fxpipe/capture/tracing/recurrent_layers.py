"""Lets a recurrent layer be traced in the time of one of its steps.

What shapes come out of an LSTM, torch finds out by walking through all its steps, since what is written in C++ would
make a number of a symbolic batch size. For a second of sound that takes minutes. All steps have the same shapes, so one
does. Nor does torch drop anything between the layers while it walks; what is random is told by the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch._decomp.decompositions as steps
from torch import fx

from fxpipe.ir.graph.ops import RECURRENT

from .patched import patched

LAYERS = ("one_layer_rnn", "one_layer_lstm")


@contextmanager
def one_step() -> Iterator[None]:
    """In this context fake recurrent layers compute their first step only, and give it as the result of each."""
    layers = {name: _first_step(getattr(steps, name)) for name in LAYERS if hasattr(steps, name)}
    with patched(steps, **layers):
        yield


def _first_step(layer: Callable[..., Any]) -> Callable[..., Any]:
    def run(sequence: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        out, last = layer(sequence[:1], hidden, *args, **kwargs)
        if isinstance(last, tuple):  # of an LSTM; torch 2.11 squeezes it along the batch instead of the steps
            last = tuple(x.reshape(before.shape) for x, before in zip(last, hidden, strict=True))
        return out.expand(sequence.shape[0], *out.shape[1:]).contiguous(), last

    return run


def drops(node: fx.Node) -> bool:
    """Whether this is a recurrent network with dropout between its layers. Its arguments are (input, state, parameters,
    biases, layers, dropout, train, ...), with the sizes of the steps after the input if that is a packed sequence."""
    if getattr(node.target, "__name__", "") not in RECURRENT or len(node.args) < 9:
        return False
    packed = isinstance(node.args[3], (list, tuple))
    layers, dropout, train = node.args[4 + packed : 7 + packed]
    return bool(train and dropout and layers != 1)
