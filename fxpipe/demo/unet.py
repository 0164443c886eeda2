"""A U-Net that removes noise from images. Its skips jump over the stages of a pipeline: they become portals."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions at one resolution."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        return F.relu(self.conv2(x))


class UNet(nn.Module):
    """[b, 1, h, w] noisy in, [b, 1, h, w] clean out; h and w divisible by 8."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        c = channels
        self.down1 = Block(1, c)
        self.down2 = Block(c, 2 * c)
        self.down3 = Block(2 * c, 4 * c)
        self.middle = Block(4 * c, 4 * c)
        self.up3 = Block(8 * c, 2 * c)
        self.up2 = Block(4 * c, c)
        self.up1 = Block(2 * c, c)
        self.head = nn.Conv2d(c, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        skip1 = self.down1(image)
        skip2 = self.down2(F.max_pool2d(skip1, 2))
        skip3 = self.down3(F.max_pool2d(skip2, 2))
        x = self.middle(F.max_pool2d(skip3, 2))
        x = self.up3(torch.cat([F.interpolate(x, scale_factor=2), skip3], dim=1))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), skip2], dim=1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), skip1], dim=1))
        noise = self.head(x)
        return image - noise
