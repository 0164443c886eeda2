"""AmoebaNet-D (L, F): an image classifier found by evolution, whose cells each read the *two* cells before them.

    stem ─▶ R ─▶ R ─▶ N x L/3 ─▶ R ─▶ N x L/3 ─▶ R ─▶ N x L/3 ─▶ classifier

Reduction cells (R) halve the image and double the channels, normal cells (N) keep both. Because each cell also reads
the last but one, every cut of the network is crossed by a skip.

A cell computes seven states. 0 and 1 are its two inputs, brought to `channels`; each further one is the sum of two
operations on earlier states, and some of the states together are the result. The tables NORMAL and REDUCTION say which.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ReLUConvBN(nn.Module):
    """ReLU, a convolution that keeps the size (but for `stride`), batch normalisation."""

    def __init__(self, channels_in: int, channels_out: int, kernel: tuple[int, int] = (1, 1), stride: int = 1) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.conv = nn.Conv2d(channels_in, channels_out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(F.relu(x)))


class FactorizedReduction(nn.Module):
    """Halves the image with two 1x1 convolutions: one reads the even pixels, the other the odd ones."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels_in, channels_out // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels_in, channels_out // 2, 1, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        return self.bn(torch.cat([self.even(x), self.odd(shifted)], dim=1))


def none(channels: int, stride: int) -> nn.Module:
    return nn.Identity()


def avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def max_pool_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return ReLUConvBN(channels, channels, stride=stride)


def conv_3x3(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        ReLUConvBN(channels, narrow),
        ReLUConvBN(narrow, narrow, (3, 3), stride),
        ReLUConvBN(narrow, channels),
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        ReLUConvBN(channels, narrow),
        ReLUConvBN(narrow, narrow, (1, 7), stride),
        ReLUConvBN(narrow, narrow, (7, 1)),
        ReLUConvBN(narrow, channels),
    )


Operation = Callable[[int, int], nn.Module]
Pair = tuple[tuple[int, Operation], tuple[int, Operation]]

NORMAL: tuple[Pair, ...] = (
    ((1, conv_1x1), (1, max_pool_3x3)),
    ((1, none), (0, conv_1x7_7x1)),
    ((0, conv_1x1), (0, conv_1x7_7x1)),
    ((2, max_pool_3x3), (2, none)),
    ((1, avg_pool_3x3), (5, conv_1x1)),
)
NORMAL_RESULT = (0, 3, 4, 6)

REDUCTION: tuple[Pair, ...] = (
    ((0, max_pool_2x2), (0, max_pool_3x3)),
    ((2, none), (1, conv_3x3)),
    ((2, conv_1x7_7x1), (2, max_pool_3x3)),
    ((3, none), (1, max_pool_2x2)),
    ((2, avg_pool_3x3), (3, conv_1x1)),
)
REDUCTION_RESULT = (4, 5, 6)


class Cell(nn.Module):
    """One cell, reading `previous` and `earlier` (the cell before that one).

    `halved` says that the previous cell was a reduction: `earlier` is then twice as large as `previous`.
    """

    def __init__(self, previous: int, earlier: int, channels: int, *, reduction: bool, halved: bool) -> None:
        super().__init__()
        self.previous = ReLUConvBN(previous, channels)
        self.earlier = fit(earlier, channels, halved)
        self.pairs = REDUCTION if reduction else NORMAL
        self.result = REDUCTION_RESULT if reduction else NORMAL_RESULT
        self.left, self.right = nn.ModuleList(), nn.ModuleList()
        for (a, left), (b, right) in self.pairs:
            self.left.append(left(channels, 2 if reduction and a < 2 else 1))
            self.right.append(right(channels, 2 if reduction and b < 2 else 1))
        self.channels_out = len(self.result) * channels

    def forward(self, previous: Tensor, earlier: Tensor) -> Tensor:
        states = [self.previous(previous), self.earlier(earlier)]
        for ((a, _), (b, _)), left, right in zip(self.pairs, self.left, self.right, strict=True):
            states.append(left(states[a]) + right(states[b]))
        return torch.cat([states[i] for i in self.result], dim=1)


def fit(channels_in: int, channels_out: int, halved: bool) -> nn.Module:
    """Brings the last but one cell's result to the size and channels of this cell."""
    if halved:
        return FactorizedReduction(channels_in, channels_out)
    return nn.Identity() if channels_in == channels_out else ReLUConvBN(channels_in, channels_out)


class AmoebaNetD(nn.Module):
    """AmoebaNet-D with `layers` normal cells in all (L, a multiple of three) and `filters` (F, a multiple of four)."""

    def __init__(self, layers: int, filters: int, *, classes: int = 1000) -> None:
        super().__init__()
        if layers % 3 or filters % 4:
            raise ValueError(f"layers must be a multiple of 3 and filters of 4; they are {layers} and {filters}")
        channels = filters // 4
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(channels)

        normal = [False] * (layers // 3)
        self.cells = nn.ModuleList()
        previous = earlier = channels
        halved = False
        for reduction in (True, True, *normal, True, *normal, True, *normal):
            channels *= 2 if reduction else 1
            cell = Cell(previous, earlier, channels, reduction=reduction, halved=halved)
            self.cells.append(cell)
            previous, earlier, halved = cell.channels_out, previous, reduction
        self.classifier = nn.Linear(previous, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = earlier = self.stem_bn(self.stem(F.relu(image)))
        for cell in self.cells:
            x, earlier = cell(x, earlier), x
        return self.classifier(x.mean(dim=(2, 3)))
