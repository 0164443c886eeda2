"""A transformer that guesses each pixel of an image from those before it. Its first and last layer share one embedding,
so the pipeline's first and last stage share one parameter."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """Causal self-attention, then two linear layers, each around a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.shrink(F.gelu(self.grow(self.norm2(x))))

    def attention(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, width))


class PixelTransformer(nn.Module):
    """[b, t] grey levels in, [b, t, levels] scores of the next pixel's level out."""

    def __init__(self, levels: int = 17, length: int = 64, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(levels, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList([Layer(width, heads=4) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, pixels: Tensor) -> Tensor:
        positions = torch.arange(pixels.shape[1], device=pixels.device)
        x = self.embed(pixels) + self.position(positions)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)
