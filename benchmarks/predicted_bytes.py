"""Bytes that each worker keeps at the highest point of a step: predicted before the step, beside those of the step.

Where backward is code, the prediction is the simulator's, from the names and types of what each stage keeps. Where it
is autograd's, only torch knows what its functions save; there `pipe.compare()` runs the step on fake tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from benchmarks.models import NMT, RNNLM, RNNTC, AlexNet, InceptionV3, ResNet, UNet
from benchmarks.workload import Workload
from fxpipe.demo.transformer import PixelTransformer
from fxpipe.ir.timeline import Timeline
from fxpipe.pipe.build.build import predict

CHUNKS, BATCH, WORDS = 4, 8, 11
SCHEDULES = (("1f1b", "never"), ("gpipe", "always"), ("zb-h1", "never"), ("zb-v", "always"), ("interleaved", "never"))
Made = tuple[nn.Module, tuple[Any, ...]]


def words(*steps: int) -> tuple[Any, ...]:
    return tuple(torch.randint(0, WORDS, (BATCH, length)) for length in steps)


def images(size: int, channels: int = 3) -> tuple[Any, ...]:
    return (torch.randn(BATCH, channels, size, size, dtype=torch.float64),)


def perceptron() -> nn.Module:
    return Workload(stages=2, chunks=CHUNKS, rows=2, width=16, depth=3).model()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: Mapping[str, Callable[[], Made]] = {
    "perceptron": lambda: (perceptron(), (torch.randn(BATCH, 16, dtype=torch.float64),)),
    "U-Net": lambda: (UNet(2, 4, depth=2), images(8)),
    "ResNet": lambda: (ResNet((1, 2, 1), width=4, classes=5), images(32)),
    "AlexNet": lambda: (AlexNet(width=2, hidden=16, classes=5, size=63), images(63)),
    "Inception": lambda: (InceptionV3(width=2, classes=5, norm=False), images(75)),
    "text classifier, LSTM": lambda: (RNNTC(vocab=WORDS, width=8, layers=2, classes=3), words(4)),
    "language model, LSTM": lambda: (RNNLM(vocab=WORDS, width=8), words(4)),
    "translation, LSTM": lambda: (NMT(vocab=WORDS, width=8), words(4, 3)),
    "transformer of pixels": lambda: (PixelTransformer(depth=2), (torch.randint(17, (BATCH, 15)),)),
    "transformer, dropout": lambda: (encoder(), (torch.randn(BATCH, 5, 16, dtype=torch.float64),)),
}


def total(output: Any) -> Tensor:
    """A loss: the sum of the squares of all results."""
    found = [x for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, Tensor)]
    return torch.stack([x.square().sum() for x in found]).sum()


def peaks(timeline: Timeline) -> tuple[int, ...]:
    """The most bytes of each worker."""
    return tuple(max(count for _, count in steps) for steps in timeline.memory)


def beside(name: str, schedule: str, checkpoint: str) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """The bytes of each worker, predicted and of a step; and how many stages have code."""
    torch.manual_seed(0)
    model, args = MODELS[name]()
    options: dict[str, Any] = {"deferred_batch_norm": False, "schedule": schedule, "checkpoint": checkpoint}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = fxpipe.compile(model.double(), 2, CHUNKS, backward="code", **options)
        try:
            pipe.step(*args, loss_fn=total, timeline=True)
            measured, stages = pipe.timeline, pipe.build.program.stages
            assert measured is not None
            coded = f"{sum(stage.backward is not None for stage in stages)} of {len(stages)}"
            return peaks(predict(pipe.build, CHUNKS)), peaks(measured), coded
        finally:
            pipe.close()


def rows() -> Iterator[tuple[str, ...]]:
    for place, name in enumerate(MODELS):
        schedule, checkpoint = SCHEDULES[place % len(SCHEDULES)]
        predicted, measured, coded = beside(name, schedule, checkpoint)
        for worker, (one, other) in enumerate(zip(predicted, measured, strict=True)):
            first = (name, f"{schedule}, {checkpoint}", coded) if not worker else ("", "", "")
            yield (*first, f"cpu:{worker}", f"{one:,}", f"{other:,}", f"{one - other:+,}" if one != other else "equal")


def table() -> str:
    """Predicted and measured bytes of ten models."""
    headers = ("model", "schedule, recompute", "stages as code", "worker", "predicted", "measured", "")
    align = ("left", "left", "left", "left", "right", "right", "left")
    return tabulate(list(rows()), headers, disable_numparse=True, colalign=align)
