"""Llama 2 (Touvron et al., "Llama 2: open foundation and fine-tuned chat models", 2023): a decoder with RMSNorm before
each part, rotary embeddings, gated feed-forward layers, and in the largest model keys and values that several heads
share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BASE = 10000.0  # of the wave lengths of rotary embeddings


@dataclass(frozen=True)
class LlamaSize:
    """The size of a Llama.

    - `inner`: the channels inside a feed-forward layer.
    - `shared`: the heads that keys and values have.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    shared: int
    vocabulary: int = 32000
    sequence: int = 4096


LLAMA_7B = LlamaSize(4096, 11008, 32, 32, 32)
LLAMA_70B = LlamaSize(8192, 28672, 80, 64, 8)


class Attention(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.each = size.hidden // size.heads
        self.groups = size.heads // size.shared
        self.queries = nn.Linear(size.hidden, size.hidden, bias=False)
        self.keys = nn.Linear(size.hidden, size.shared * self.each, bias=False)
        self.values = nn.Linear(size.hidden, size.shared * self.each, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = turned(self.queries(x).view(b, s, -1, self.each).transpose(1, 2), cos, sin)
        k = turned(self.keys(x).view(b, s, -1, self.each).transpose(1, 2), cos, sin)
        v = self.values(x).view(b, s, -1, self.each).transpose(1, 2)
        if self.groups > 1:
            k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.hidden, size.inner, bias=False)
        self.widen = nn.Linear(size.hidden, size.inner, bias=False)
        self.narrow = nn.Linear(size.inner, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.silu(self.gate(x)) * self.widen(x))


class Layer(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(size.hidden, eps=1e-5), Attention(size)
        self.norm_inner, self.feed_forward = nn.RMSNorm(size.hidden, eps=1e-5), FeedForward(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), cos, sin)
        return x + self.feed_forward(self.norm_inner(x))


class Llama(nn.Module):
    """From token ids (samples, sequence) to the loss of each sample: how well each token tells the next one."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        each = size.hidden // size.heads
        lengths = BASE ** -(torch.arange(0, each, 2) / each)
        angles = torch.outer(torch.arange(size.sequence), lengths).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), ids[:, 1:], reduction="none").mean(1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys (samples, heads, sequence, channels), each pair of channels turned by an angle that grows with
    the position (Su et al., "RoFormer", 2021)."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin
