"""The U-Net of the memory and speed tables: five levels, B convolutions per cell, C channels at the top.

    level 0   C  ───────────────── skip ─────────────────▶  C/2 ──▶ segment
       1        2C  ────────────── skip ─────────────▶  C
       2           4C  ─────────── skip ─────────▶ 2C
       3              8C  ──────── skip ─────▶ 4C
       4                16C  ───── skip ─▶ 8C
    bottleneck             32C, back to 16C

The skip of level 0 waits for everything else to run: in a pipeline, it goes from the first stage to the last. All
parameters are weights of convolutions.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvBlock(nn.Module):
    """A 3x3 convolution, dropout of whole channels, normalisation per image, leaky ReLU."""

    def __init__(self, channels_in: int, channels_out: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.drop = nn.Dropout2d(dropout)
        self.norm = nn.InstanceNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.drop(self.conv(x))))


class Cell(nn.Module):
    """`blocks` conv blocks in a row: the first widens to `middle`, the last ends at `channels_out`."""

    def __init__(self, blocks: int, channels_in: int, middle: int, channels_out: int, dropout: float) -> None:
        super().__init__()
        widths = [channels_in, *[middle] * (blocks - 1), channels_out]
        self.blocks = nn.ModuleList(ConvBlock(a, b, dropout) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class UNet(nn.Module):
    """U-Net (B, C): `blocks` convolutions per cell, `channels` at the top level, doubling at each of `depth` levels."""

    def __init__(
        self,
        blocks: int,
        channels: int,
        *,
        depth: int = 5,
        channels_in: int = 3,
        channels_out: int = 1,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        width = [channels * 2**level for level in range(depth)]
        deepest = width[-1]
        self.encoder = nn.ModuleList(
            Cell(blocks, before, here, here, dropout)
            for before, here in zip([channels_in, *width], width, strict=False)
        )
        self.bottleneck = Cell(blocks, deepest, 2 * deepest, deepest, dropout)
        self.decoder = nn.ModuleList(Cell(blocks, 2 * here, here // 2, here // 2, dropout) for here in reversed(width))
        self.segment = nn.Conv2d(channels // 2, channels_out, 1, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        x, skips = image, []
        for cell in self.encoder:
            x = cell(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottleneck(x)
        for cell in self.decoder:
            skip = skips.pop()
            x = F.interpolate(x, scale_factor=2)
            x = cell(torch.cat([pad_to(x, skip), skip], dim=1))
        return self.segment(x)


def pad_to(x: Tensor, other: Tensor) -> Tensor:
    """`x` with zeros at the right and bottom until it is as high and wide as `other`: pooling rounds odd sizes down."""
    down, right = other.shape[2] - x.shape[2], other.shape[3] - x.shape[3]
    return F.pad(x, (0, right, 0, down)) if down or right else x
