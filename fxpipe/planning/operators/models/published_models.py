"""The six models on which SOAP strategies were published, by name, with the paper's sizes: batches of 64, of 256 for
AlexNet, and 40 steps for recurrent networks. Each takes another `batch`."""

from __future__ import annotations

from collections.abc import Callable

from fxpipe.ir.operators.operators import OperatorGraph

from .convolutional_networks import alexnet, inception, resnet
from .recurrent_networks import nmt, rnnlm, rnntc

MODELS: dict[str, Callable[..., OperatorGraph]] = {
    "alexnet": alexnet,
    "resnet": resnet,
    "inception": inception,
    "rnntc": rnntc,
    "rnnlm": rnnlm,
    "nmt": nmt,
}
