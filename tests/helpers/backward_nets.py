"""Small models whose generated backward is read in goldens; their lines are named there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UNet(nn.Module):
    """A skip past a stage, batch norm, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        skip = F.relu(self.norm(self.down(image)))
        x = F.max_pool2d(skip, 2)
        x = F.relu(self.middle(x))
        x = F.interpolate(x, scale_factor=2)
        return self.up(torch.cat([x, skip], dim=1))


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        x = x + self.drop(self.out(y))
        h = F.gelu(self.up(self.norm2(x)))
        return x + self.drop(self.down(h))


class Lstm(nn.Module):
    """A recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return self.head(y[:, -1])


class Gated(nn.Module):
    """Two layers for two stages on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.sigmoid(self.gate(x))
        h = F.gelu(self.up(x))
        return self.down(F.dropout(h, 0.1, self.training))
