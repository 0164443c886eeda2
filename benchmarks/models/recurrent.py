"""Recurrent networks, unrolled: a cell for each layer and each step, as strategies place them on devices.

step       0       1       2
layer 1   cell ─▶ cell ─▶ cell          Every cell reads the layer below at its step, and its own layer at the
           ▲       ▲       ▲            step before. All cells of a layer have the same weights.
layer 0   cell ─▶ cell ─▶ cell
           ▲       ▲       ▲
          embed   embed   embed
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Memory = tuple[Tensor, Tensor]


class Cells(nn.Module):
    """Layers of LSTM cells of one width, run for one step at a time."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))

    def forward(self, x: Tensor, memory: Sequence[Memory | None]) -> tuple[Tensor, list[Memory]]:
        """The result of the last layer for one step, and what each layer remembers for the next."""
        remembered = []
        for cell, before in zip(self.layers, memory, strict=True):
            x, held = cell(x, before)
            remembered.append((x, held))
        return x, remembered


class RNNTC(nn.Module):
    """Text classification: layers of LSTM over the words, one label from the last step.

    [batch, steps] words in, [batch, classes] logits out.
    """

    def __init__(self, *, vocab: int = 32000, width: int = 1024, layers: int = 4, classes: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.cells = Cells(layers, width)
        self.out = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        memory: Sequence[Memory | None] = [None] * len(self.cells.layers)
        for word in words.unbind(1):
            x, memory = self.cells(self.embed(word), memory)
        return self.out(x)


class RNNLM(nn.Module):
    """Language model: the next word at every step. [batch, steps] words in, [batch, steps, vocab] logits out."""

    def __init__(self, *, vocab: int = 10000, width: int = 2048, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.cells = Cells(layers, width)
        self.out = nn.Linear(width, vocab)

    def forward(self, words: Tensor) -> Tensor:
        memory: Sequence[Memory | None] = [None] * len(self.cells.layers)
        logits = []
        for word in words.unbind(1):
            x, memory = self.cells(self.embed(word), memory)
            logits.append(self.out(x))
        return torch.stack(logits, dim=1)


class Attention(nn.Module):
    """Attention of a decoder's step to all results of the encoder: products through a matrix, then one layer on what
    was attended to and the step's own result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.match = nn.Linear(width, width, bias=False)
        self.join = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        """[batch, width] and [batch, steps, width] to [batch, width]."""
        weights = torch.softmax(torch.bmm(encoded, self.match(x).unsqueeze(2)), dim=1)
        context = torch.bmm(weights.transpose(1, 2), encoded).squeeze(1)
        return torch.tanh(self.join(torch.cat([context, x], dim=1)))


class NMT(nn.Module):
    """Translation: an encoder, a decoder that starts from what the encoder remembers, and attention.

    [batch, steps] words of each language in, [batch, steps, vocab] logits out.
    """

    def __init__(self, *, vocab: int = 32000, width: int = 1024, layers: int = 2) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.encoder, self.decoder = Cells(layers, width), Cells(layers, width)
        self.attention = Attention(width)
        self.out = nn.Linear(width, vocab)

    def forward(self, words: Tensor, translated: Tensor) -> Tensor:
        memory: Sequence[Memory | None] = [None] * len(self.encoder.layers)
        states = []
        for word in words.unbind(1):
            x, memory = self.encoder(self.source(word), memory)
            states.append(x)
        encoded = torch.stack(states, dim=1)
        logits = []
        for word in translated.unbind(1):
            x, memory = self.decoder(self.target(word), memory)
            logits.append(self.out(self.attention(x, encoded)))
        return torch.stack(logits, dim=1)
