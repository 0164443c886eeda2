"""ResNet of bottleneck blocks; with (3, 4, 23, 3) of them, ResNet-101."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 around a narrow middle, added to the input; the 3x3 carries the stride."""

    def __init__(self, channels_in: int, width: int, stride: int, norm: bool = True) -> None:
        super().__init__()
        channels_out = EXPANSION * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=not norm)
        self.bn1 = normalisation(width, norm)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=not norm)
        self.bn2 = normalisation(width, norm)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=not norm)
        self.bn3 = normalisation(channels_out, norm)
        self.downsample = None
        if stride != 1 or channels_in != channels_out:
            conv = nn.Conv2d(channels_in, channels_out, 1, stride, bias=not norm)
            self.downsample = nn.Sequential(conv, normalisation(channels_out, norm))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        x = self.bn3(self.conv3(x))
        x += identity
        return F.relu(x, inplace=True)


def normalisation(channels: int, norm: bool) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm else nn.Identity()


class ResNet(nn.Module):
    """Groups of `blocks` bottlenecks; each group but the first halves the image and doubles the width. Convolutions
    have a bias in place of batch normalisation if not `norm`."""

    def __init__(self, blocks: Sequence[int], *, width: int = 64, classes: int = 1000, norm: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=not norm)
        self.bn1 = normalisation(width, norm)
        self.layers = nn.ModuleList()
        channels = width
        for level, count in enumerate(blocks):
            for index in range(count):
                stride = 2 if level > 0 and index == 0 else 1
                self.layers.append(Bottleneck(channels, width * 2**level, stride, norm))
                channels = EXPANSION * width * 2**level
        self.fc = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(image)), inplace=True)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        for layer in self.layers:
            x = layer(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet101(classes: int = 1000) -> ResNet:
    return ResNet((3, 4, 23, 3), classes=classes)
