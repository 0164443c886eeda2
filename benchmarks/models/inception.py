"""Inception-v3 without its auxiliary classifier: modules of parallel branches, which devices may run side by side.

    stem ─▶ A A A ─▶ B ─▶ C C C C ─▶ D ─▶ E E ─▶ classifier
    192     288      768             1280 2048              channels

All numbers of channels are the published ones, for 32 out of the first convolution; another `width` scales them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kernel = int | tuple[int, int]
ROW, COLUMN = (1, 7), (7, 1)


class Conv(nn.Module):
    """A convolution, batch normalisation (or a bias, if not `norm`), ReLU. `padding` None keeps the size."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel: Kernel, stride: int, padding: int | None, norm: bool
    ) -> None:
        super().__init__()
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        same = (high // 2, wide // 2) if padding is None else (padding, padding)
        self.conv = nn.Conv2d(channels_in, channels_out, (high, wide), stride, same, bias=not norm)
        self.bn = nn.BatchNorm2d(channels_out, eps=0.001) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


@dataclass(frozen=True)
class Scale:
    """Makes convolutions from the published numbers of channels."""

    width: int
    norm: bool

    def __call__(self, channels: int) -> int:
        return channels * self.width // 32

    def conv(self, channels_in: int, channels_out: int, kernel: Kernel, stride: int = 1, padding: int = 0) -> Conv:
        size_in = channels_in if channels_in == 3 else self(channels_in)
        return Conv(size_in, self(channels_out), kernel, stride, padding, self.norm)

    def row(self, channels: int, *layers: tuple[int, Kernel], halve: bool = False) -> nn.Sequential:
        """Convolutions in a row, each of (channels out, kernel), that keep the size; the last halves it if `halve`."""
        convs = nn.Sequential()
        for index, (out, kernel) in enumerate(layers, start=1):
            last = halve and index == len(layers)
            stride, padding = (2, 0) if last else (1, None)
            convs.append(Conv(self(channels), self(out), kernel, stride, padding, self.norm))
            channels = out
        return convs


class A(nn.Module):
    def __init__(self, scale: Scale, channels: int, pooled: int) -> None:
        super().__init__()
        self.b1 = scale.row(channels, (64, 1))
        self.b5 = scale.row(channels, (48, 1), (64, 5))
        self.b3 = scale.row(channels, (64, 1), (96, 3), (96, 3))
        self.pool = scale.row(channels, (pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.b1(x), self.b5(x), self.b3(x), self.pool(average(x))], dim=1)


class B(nn.Module):
    """Halves the image."""

    def __init__(self, scale: Scale, channels: int) -> None:
        super().__init__()
        self.b3 = scale.row(channels, (384, 3), halve=True)
        self.b33 = scale.row(channels, (64, 1), (96, 3), (96, 3), halve=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.b3(x), self.b33(x), F.max_pool2d(x, 3, stride=2)], dim=1)


class C(nn.Module):
    """`narrow` channels in the branches of 1x7 and 7x1."""

    def __init__(self, scale: Scale, channels: int, narrow: int) -> None:
        super().__init__()
        n = narrow
        self.b1 = scale.row(channels, (192, 1))
        self.b7 = scale.row(channels, (n, 1), (n, ROW), (192, COLUMN))
        self.b77 = scale.row(channels, (n, 1), (n, COLUMN), (n, ROW), (n, COLUMN), (192, ROW))
        self.pool = scale.row(channels, (192, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.b1(x), self.b7(x), self.b77(x), self.pool(average(x))], dim=1)


class D(nn.Module):
    """Halves the image."""

    def __init__(self, scale: Scale, channels: int) -> None:
        super().__init__()
        self.b3 = scale.row(channels, (192, 1), (320, 3), halve=True)
        self.b73 = scale.row(channels, (192, 1), (192, ROW), (192, COLUMN), (192, 3), halve=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.b3(x), self.b73(x), F.max_pool2d(x, 3, stride=2)], dim=1)


class E(nn.Module):
    def __init__(self, scale: Scale, channels: int) -> None:
        super().__init__()
        self.b1 = scale.row(channels, (320, 1))
        self.b3 = scale.row(channels, (384, 1))
        self.b33 = scale.row(channels, (448, 1), (384, 3))
        self.wide = nn.ModuleList(scale.row(384, (384, (1, 3))) for _ in range(2))
        self.high = nn.ModuleList(scale.row(384, (384, (3, 1))) for _ in range(2))
        self.pool = scale.row(channels, (192, 1))

    def forward(self, x: Tensor) -> Tensor:
        once, twice = self.b3(x), self.b33(x)
        split = [self.wide[0](once), self.high[0](once), self.wide[1](twice), self.high[1](twice)]
        return torch.cat([self.b1(x), *split, self.pool(average(x))], dim=1)


def average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1)


class InceptionV3(nn.Module):
    """Inception-v3 with `width` channels (even) out of the first convolution, for images of at least 75 pixels."""

    def __init__(self, *, width: int = 32, classes: int = 1000, norm: bool = True) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"width must be even; it is {width}")
        s = Scale(width, norm)
        self.stem1 = nn.Sequential(s.conv(3, 32, 3, 2), s.conv(32, 32, 3), s.conv(32, 64, 3, padding=1))
        self.stem2 = nn.Sequential(s.conv(64, 80, 1), s.conv(80, 192, 3))
        self.blocks = nn.Sequential(
            A(s, 192, 32), A(s, 256, 64), A(s, 288, 64),
            B(s, 288),
            C(s, 768, 128), C(s, 768, 160), C(s, 768, 160), C(s, 768, 192),
            D(s, 768),
            E(s, 1280), E(s, 2048),
        )  # fmt: skip
        self.fc = nn.Linear(s(2048), classes)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem1(image), 3, stride=2)
        x = F.max_pool2d(self.stem2(x), 3, stride=2)
        x = self.blocks(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
