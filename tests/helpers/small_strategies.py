"""The six models of the paper in a small size, as cases for comparisons with the plain model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.models import NMT, RNNLM, RNNTC, AlexNet, InceptionV3, ResNet
from tests.helpers.models import Case, Inputs, images

WORDS = 11


def words(*steps: int) -> Callable[[int], Inputs]:
    """A tensor of words for each of these lengths."""
    return lambda batch: (tuple(torch.randint(0, WORDS, (batch, length)) for length in steps), {})


SMALL = {
    "alexnet": Case(lambda: AlexNet(width=2, hidden=16, classes=5, size=63), images(63), frozenset()),
    "inception": Case(lambda: InceptionV3(width=2, classes=5, norm=False), images(75), frozenset()),
    "resnet": Case(lambda: ResNet((1, 2, 1), width=4, classes=5, norm=False), images(32), frozenset()),
    "rnntc": Case(lambda: RNNTC(vocab=WORDS, width=8, layers=3, classes=3), words(4), frozenset()),
    "rnnlm": Case(lambda: RNNLM(vocab=WORDS, width=8), words(4), frozenset()),
    "nmt": Case(lambda: NMT(vocab=WORDS, width=8), words(4, 3), frozenset()),
}
