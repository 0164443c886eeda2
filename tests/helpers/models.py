"""The models that every transparency test runs: small, double precision, each made to break one thing.

A pipeline is wrong in its own ways: a skip that goes to the wrong consumer, a mask that is not sliced, a buffer that is
written twice, an in-place op that also changes the copy of a neighbour. Each class below holds one such trait, and its
docstring says which. `MODELS` is the table; `Case.traits` lets a test pick those with a trait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.models import AmoebaNetD, ResNet, UNet

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def total(output: Any) -> Tensor:
    """A number that every floating-point tensor in the output takes part in, each in its own way: a sum over samples,
    so that the losses of micro-batches add up to that of the batch."""
    terms = []
    for index, leaf in enumerate(pytree.tree_leaves(output), start=1):
        if isinstance(leaf, Tensor) and leaf.is_complex():
            leaf = torch.view_as_real(leaf)
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            # The sine has another gradient at every element; a number (the model's own loss) must stay linear.
            terms.append(index * (leaf.sin() if leaf.dim() else leaf).sum())
    return torch.stack(terms).sum()


@dataclass(frozen=True)
class Case:
    """One model: how to make it, its inputs for a batch size, and what is special about it.

    `random` says that it draws random numbers, `batch_norm` that the samples of a batch see each other (through
    statistics or buffers), so that micro-batches are not the batch. `input_dim` and `output_dim` are the batch
    dimensions, `reduce` how numbers over the batch add up ("sum", or "mean", weighted by size), `options` what
    `fxpipe.compile` must be told, `tol` how far off a value may be, relative.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    traits: frozenset[str]
    loss: Callable[[Any], Tensor] = total
    random: bool = False
    batch_norm: bool = False
    input_dim: int = 0
    output_dim: int = 0
    reduce: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tol: float = 1e-9


# Inputs ---------------------------------------------------------------------------------------------------------------


def vectors(batch: int) -> Inputs:
    return (torch.randn(batch, 8, dtype=torch.float64),), {}


def sequences(batch: int) -> Inputs:
    return (torch.randn(batch, 5, 8, dtype=torch.float64),), {}


def tokens(batch: int) -> Inputs:
    return (torch.randint(0, 11, (batch, 6)),), {}


def images(size: int, channels: int = 3) -> Callable[[int], Inputs]:
    return lambda batch: ((torch.randn(batch, channels, size, size, dtype=torch.float64),), {})


def padded(batch: int) -> Inputs:
    """Sequences and the mask of their real (not padded) places; every sequence has at least one."""
    (x,), _ = sequences(batch)
    lengths = torch.randint(1, 6, (batch,))
    return (x, torch.arange(5) < lengths[:, None]), {}


# Skips ----------------------------------------------------------------------------------------------------------------


class LongSkip(nn.Module):
    """One value with three consumers, in three places far from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        skip = x = torch.tanh(self.layers[0](x))
        for index, layer in enumerate(self.layers[1:]):
            x = torch.tanh(layer(x))
            if index in (2, 4, 6):
                x = x + skip * (index + 1)
        return x


class SkipLadder(nn.Module):
    """Skips of every length, crossing each other: block k reads the results of blocks k - 1, k - 3 and k - 5."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        results = [x]
        for block in self.blocks:
            results.append(torch.tanh(block(sum(results[-1::-2][:3]))))
        return results[-1]


class Branches(nn.Module):
    """Three branches of different depths side by side, joined at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.short = nn.Linear(8, 4)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
        self.deep = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 4))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        return self.head(torch.cat([self.short(x), self.middle(x), self.deep(x)], dim=-1))


class DenseNet(nn.Module):
    """Every layer reads the results of all layers before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(4 + 2 * index, 2, 3, padding=1) for index in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 + 2 * index) for index in range(6))
        self.fc = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        features = [self.stem(image)]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            features.append(layer(F.relu(norm(torch.cat(features, dim=1)))))
        return self.fc(torch.cat(features, dim=1).mean(dim=(2, 3)))


# Parameters -----------------------------------------------------------------------------------------------------------


class TiedWeight(nn.Module):
    """An autoencoder: the last layer uses the first one's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 6)
        self.middle = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.encode(x))
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        return F.linear(x, self.encode.weight.t(), self.bias)


class TiedModule(nn.Module):
    """One module called again and again, with another between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.others = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.again = self.shared

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(x))
        for other in self.others:
            x = torch.tanh(self.shared(torch.relu(other(x))))
        return self.again(x)


class Block(nn.Module):
    """A transformer block by hand: attention and two linear layers, each around a residual."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TiedTransformer(nn.Module):
    """A language model: token numbers in, and the embedding is also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.place = nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids) + self.place(places)
        for block in self.blocks:
            x = block(x, causal=True)
        return self.head(self.norm(x))


class Frozen(nn.Module):
    """Frozen layers at the start and in the middle: whole stages may have nothing to differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        for index in (0, 1, 3):
            self.layers[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Unused(nn.Module):
    """Parameters that no op uses, and a result that nothing reads: their gradients stay None."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.spare = nn.Linear(8, 8)
        self.ignored = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            self.ignored(x)
        return x


class Containers(nn.Module):
    """Parameters in a ParameterList, layers in a ModuleDict and in a Sequential of Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(8) for _ in range(3))
        self.named = nn.ModuleDict({"in": nn.Linear(8, 8), "class": nn.Linear(8, 8)})
        self.nested = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.named.items():
            x = torch.tanh(layer(x)) * (2.0 if name == "in" else 1.0)
        for scale in self.scales:
            x = x * scale
        return self.nested(x)


class WeightNorm(nn.Module):
    """Weights computed from other parameters at every use (torch's parametrizations)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# Normalisation and random numbers -------------------------------------------------------------------------------------


class BatchNorm(nn.Module):
    """Batch statistics: as usual, with another momentum, without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=0.4)
        self.conv3, self.norm3 = nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4, affine=False)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(image)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.norm3(self.conv3(x)).flatten(1)


class OtherNorms(nn.Module):
    """Norms that look at one sample only: group, layer, instance (with statistics kept in buffers)."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(3))
        self.group, self.layer = nn.GroupNorm(2, 4), nn.LayerNorm([4, 10])
        self.instance = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, (self.group, self.layer, self.instance), strict=True):
            x = F.gelu(norm(conv(x)))
        return x


class Dropout(nn.Module):
    """Dropout in every form, several in a stage, one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.drop = nn.Dropout(0.3)
        self.alpha = nn.AlphaDropout(0.2)
        self.inplace = nn.Dropout(0.4, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.layers[0](x)))
        x = self.alpha(torch.selu(self.layers[1](x)))
        x = self.inplace(self.layers[2](x))
        return F.dropout(self.layers[3](x), 0.5, self.training)


class RandomDraws(nn.Module):
    """Random numbers drawn in forward: noise, a coin per sample, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(8, 8), nn.Linear(8, 8)
        self.decode = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.mean(x), F.softplus(self.spread(x))
        x = mean + spread * torch.randn_like(mean)
        x = torch.tanh(self.decode[0](x)) * torch.bernoulli(torch.full_like(x, 0.5))
        keep = torch.rand(x.shape[0], 1, dtype=x.dtype, device=x.device) < 0.7
        return self.decode[1](torch.where(keep, x, -x))


class AttentionDropout(nn.Module):
    """Dropout inside scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 2, dropout=0.3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# In place, views ------------------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """In-place ops wherever a cut may be: a stage then writes into what it was given. An early value is read last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        early = x * 2
        x.add_(self.shift)
        x += early
        x.mul_(0.5).sub_(1.0)
        x = F.relu(x, inplace=True)
        x = self.second(x)
        early += x
        x.tanh_()
        return x * early


class InPlaceFork(nn.Module):
    """A value that one branch writes in place after the other branch has copied it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        kept = x.clone()
        other = self.layers[1](kept)
        x.relu_()
        other.neg_()
        return self.layers[2](x) + other + kept


class SetItem(nn.Module):
    """Fills a tensor piece by piece, with layers between the pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, :4] = torch.tanh(self.left(x))
        x = torch.sin(x)
        y[:, 4:] = torch.tanh(self.right(x))
        y = self.last(y)
        y[..., 0] *= 2.0
        y[y < -1.0] = -1.0
        return y


class Views(nn.Module):
    """Views on both sides of a cut, transposed and not contiguous, and one written through."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x)
        left, right = x.chunk(2, dim=-1)
        turned = left.transpose(1, 2)
        right = torch.tanh(self.narrow(right))
        x = turned.transpose(1, 2) + right
        first = x[:, :2]
        first.mul_(3.0)
        return torch.cat([self.narrow(x), first.expand(3, -1, -1, -1).sum(0)], dim=1)


# What may cross a cut -------------------------------------------------------------------------------------------------


class Indices(nn.Module):
    """Integer and boolean tensors made early and used late."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x)
        order = scores.argsort(dim=-1)
        high = scores > 0
        best, where = scores.topk(3, dim=-1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = torch.where(high, x, x * 0.1).gather(1, order)
        return x.scatter_add(1, where, best)


class Numbers(nn.Module):
    """Plain numbers from shapes, the batch size among them, computed early and used late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        rows = batch * length
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x.reshape(rows, width) / math.sqrt(width)
        return x.view(batch, length * width)


class FlattenTime(nn.Module):
    """Batch and time in one dimension, in and out of it at every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        for layer in self.layers:
            x = x.view(b * t, c)
            x = torch.tanh(layer(x))
            x = x.view(b, t, c) + 1.0
        return x.flatten(0, 1).unflatten(0, (b, t))


class SequenceFirst(nn.Module):
    """The batch is the second dimension inside, and first for the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x.cumsum(dim=0)
        return x.transpose(0, 1).contiguous()


class BatchSecond(nn.Module):
    """The batch is the second dimension for the caller too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x.flip(0)
        return x


class Complex(nn.Module):
    """Complex numbers between two Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.first(x))
        spectrum = spectrum * torch.view_as_complex(self.filter)
        return self.last(torch.fft.irfft(spectrum, n=8))


class MixedPrecision(nn.Module):
    """Values of another precision between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        half = torch.tanh(x.float())
        x = self.layers[1](x) + half.to(x.dtype)
        return self.layers[2](x) * half


# Masks and constants --------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """A mask from the caller that every block uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attend = mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, attend) * mask[..., None]
        return x.sum(dim=1) / mask.sum(dim=1, keepdim=True)


class Causal(nn.Module):
    """A mask made in forward from sizes, that every block uses."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
        for query in self.queries:
            scores = query(x) @ x.transpose(1, 2) / 8**0.5
            x = x + scores.masked_fill(mask, float("-inf")).softmax(dim=-1) @ x
        return x


class Positions(nn.Module):
    """Sines of positions made in forward, the length of the batch known only there, used at every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        place = torch.arange(length, device=x.device, dtype=x.dtype)[:, None]
        rate = torch.arange(0, width, 2, device=x.device) / width
        angle = place / 10.0**rate
        code = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
        sample = torch.zeros(batch, 1, 1, dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x = torch.tanh(layer(x + code + sample))
        return x


class Constants(nn.Module):
    """Tensors that are neither parameters nor buffers: an attribute, a list of them, and one made from numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)
        self.shifts = [torch.full((8,), float(k), dtype=torch.float64) for k in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        for shift in self.shifts:
            x = torch.tanh(x + shift)
        weights = torch.tensor([1.0, -1.0] * 4, dtype=x.dtype, device=x.device)
        return self.last(x * weights) * self.scale


class ClassToken(nn.Module):
    """A learned token before every sequence (expand over the batch) and a patch convolution: a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.place = nn.Parameter(torch.randn(1, 5, 8))
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


# Inputs and outputs ---------------------------------------------------------------------------------------------------


class NestedOutputs(nn.Module):
    """Results of every stage in a nest of tuples, lists and dicts, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        results = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            results.append(x)
        return results[0], [results[1], {"late": (results[2], results[3]), "early": results[0]}]


class DictOutput(nn.Module):
    """A dict of tensors in, a dict out: with a whole number, a text and a None in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        x, weight = batch["features"], batch["weight"]
        hidden = torch.tanh(self.layers[0](x))
        logits = self.layers[2](torch.relu(self.layers[1](hidden))) * weight[:, None]
        return {"logits": logits, "hidden": hidden, "width": x.shape[1], "kind": "test", "cache": None}


def dict_of_vectors(batch: int) -> Inputs:
    (x,), _ = vectors(batch)
    return ({"features": x, "weight": torch.rand(batch, dtype=torch.float64)},), {}


@dataclass
class Prediction:
    logits: Tensor
    states: tuple[Tensor, ...]
    loss: Tensor | None = None


pytree.register_dataclass(Prediction)


class DataclassOutput(nn.Module):
    """A dataclass out, one of its fields None."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Prediction:
        states = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            states.append(x)
        return Prediction(x * 2, tuple(states))


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor


class NamedTupleOutput(nn.Module):
    """A named tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.mean, self.spread = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Pair:
        x = self.body(x)
        return Pair(self.mean(x), F.softplus(self.spread(x)))


class PassThrough(nn.Module):
    """Returns its input as it is, beside a result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return x, y


class Optional(nn.Module):
    """Keyword arguments, one of them None, another a number, another a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        power: int = 1,
        residual: bool = False,
    ) -> Tensor:
        for layer in self.layers:
            y = torch.tanh(layer(x)) ** power
            y = y if mask is None else y * mask
            y = y if bias is None else y + bias
            x = x + y if residual else y
        return x


def optional_inputs(batch: int) -> Inputs:
    (x,), _ = vectors(batch)
    return (x, None), {"bias": torch.randn(batch, 8, dtype=torch.float64), "power": 3, "residual": True}


class TwoInputs(nn.Module):
    """Two inputs through one encoder, and compared; the second one enters late as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.compare = nn.Bilinear(8, 8, 4)
        self.last = nn.Linear(12, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        y = torch.tanh(self.compare(self.encoder(left), self.encoder(right)))
        return self.last(torch.cat([y, right], dim=1))


def two_vectors(batch: int) -> Inputs:
    return (*vectors(batch)[0], *vectors(batch)[0]), {}


class OwnLoss(nn.Module):
    """Returns its loss, a mean over the batch, beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(x, target), x


def vectors_and_classes(batch: int) -> Inputs:
    return (*vectors(batch)[0], torch.randint(0, 8, (batch,))), {}


# Buffers --------------------------------------------------------------------------------------------------------------


class Counter(nn.Module):
    """Counts its calls and its samples in buffers, and reads neither."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("samples", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.samples += x.shape[0]
        return x


class MovingAverage(nn.Module):
    """Puts a new tensor in a buffer's place at every call, computed from the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        x = self.layers[1](x - self.average)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(dim=0)
        return self.layers[4](torch.tanh(self.layers[3](torch.tanh(self.layers[2](torch.tanh(x))))))


class RunningMax(nn.Module):
    """Writes a buffer and reads it after: recomputation must not see it written twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("largest", torch.full((8,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest * 1.01, x.abs().amax(dim=0)))
        x = torch.tanh(self.layers[1](x / self.largest))
        return self.layers[2](x)


class Queue(nn.Module):
    """Writes one row of a buffer, and counts in another which row is next."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("rows", torch.ones(4, 8))
        self.register_buffer("next", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        self.rows.index_copy_(0, self.next % 4, x.detach().mean(dim=0, keepdim=True))
        self.next.add_(1)
        return self.last(x @ self.rows.t() @ self.rows)


# Gradients ------------------------------------------------------------------------------------------------------------


class NoGrad(nn.Module):
    """A teacher that runs without gradients, and a detached value."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.student = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        guess = self.student(x)
        return (guess - target) ** 2 + self.mix(guess.detach())


class ScaleGradient(torch.autograd.Function):
    """The identity, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


class OwnFunction(nn.Module):
    """An autograd.Function of the user's, whose backward is not what autograd would find."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = ScaleGradient.apply(torch.tanh(layer(x)), 0.5)
        return x


# Layers with structure of their own -----------------------------------------------------------------------------------


class LSTM(nn.Module):
    """torch's LSTM, two layers, two directions: one op with many parameters and three results."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (h, _) = self.lstm(x)
        return self.head(torch.relu(y)), h.transpose(0, 1)


class CellLSTM(nn.Module):
    """An LSTM by hand, unrolled: its weights are used at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 6)
        steps = []
        for step in x.unbind(dim=1):
            h, c = self.cell(step, (h, c))
            steps.append(self.head(h))
        return torch.stack(steps, dim=1)


class Attention(nn.Module):
    """nn.MultiheadAttention with padding; its weights are returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(8, 2, batch_first=True)
        self.second = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.first(x, x, x, key_padding_mask=~mask, need_weights=False)
        z, weights = self.second(x + y, x, x, key_padding_mask=~mask)
        return x + y + z, weights


class EncoderDecoder(nn.Module):
    """torch's transformer: every decoder layer reads the encoder's result, a skip over all stages between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Transformer(8, 2, 2, 2, dim_feedforward=16, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = torch.triu(torch.full((5, 5), float("-inf"), dtype=torch.float64), diagonal=1)
        x = self.body(self.embed(source), self.embed(target), tgt_mask=causal, tgt_is_causal=True)
        return x @ self.embed.weight.t()


def two_texts(batch: int) -> Inputs:
    return (torch.randint(0, 11, (batch, 6)), torch.randint(0, 11, (batch, 5))), {}


class TransformerDropout(nn.Module):
    """torch's encoder layers with dropout in all four places."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.2, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Experts(nn.Module):
    """A mixture of experts with einsum: all run, a softmax weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.up = nn.Parameter(torch.randn(3, 8, 16) / 3)
        self.down = nn.Parameter(torch.randn(3, 16, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(dim=-1)
        hidden = F.gelu(torch.einsum("btc,ecd->bted", x, self.up))
        return torch.einsum("bted,edc,bte->btc", hidden, self.down, weights)


class LinearChain(nn.Module):
    """Nothing special: eight layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# The table ------------------------------------------------------------------------------------------------------------


def case(make: Callable[[], nn.Module], inputs: Callable[[int], Inputs], traits: str = "", **more: Any) -> Case:
    return Case(make, inputs, frozenset(traits.split()), **more)


MODELS: dict[str, Case] = {
    "linear chain": case(LinearChain, vectors),
    "long skip": case(LongSkip, vectors, "skips"),
    "skip ladder": case(SkipLadder, vectors, "skips"),
    "branches": case(Branches, vectors, "skips"),
    "densenet": case(DenseNet, images(6), "skips buffers", batch_norm=True),
    "tied weight": case(TiedWeight, vectors, "shared"),
    "tied module": case(TiedModule, vectors, "shared"),
    "tied transformer": case(TiedTransformer, tokens, "shared constants"),
    "frozen": case(Frozen, vectors, "gradients"),
    "unused": case(Unused, vectors, "gradients"),
    "containers": case(Containers, vectors, "names"),
    "weight norm": case(WeightNorm, vectors, "names"),
    "batch norm": case(BatchNorm, images(7), "buffers", batch_norm=True),
    "other norms": case(
        OtherNorms, lambda batch: ((torch.randn(batch, 4, 10, dtype=torch.float64),), {}), "buffers", batch_norm=True
    ),
    "dropout": case(Dropout, vectors, "in-place", random=True),
    "random draws": case(RandomDraws, vectors, random=True),
    "attention dropout": case(AttentionDropout, sequences, random=True),
    "in place": case(InPlace, vectors, "in-place"),
    "in place after a fork": case(InPlaceFork, vectors, "in-place"),
    "set item": case(SetItem, vectors, "in-place views"),
    "views": case(Views, sequences, "in-place views"),
    "indices": case(Indices, vectors, "types"),
    "numbers": case(Numbers, sequences, "types sizes"),
    "flatten time": case(FlattenTime, sequences, "sizes views"),
    "sequence first": case(SequenceFirst, sequences, "views"),
    "batch second": case(
        BatchSecond,
        lambda batch: ((torch.randn(5, batch, 8, dtype=torch.float64),), {}),
        "inputs",
        input_dim=1,
        output_dim=1,
        options={"batch_dim": 1},
    ),
    "complex": case(Complex, vectors, "types"),
    "mixed precision": case(MixedPrecision, vectors, "types"),
    "masked": case(Masked, padded, "masks inputs"),
    "causal": case(Causal, sequences, "masks constants"),
    "positions": case(Positions, sequences, "constants sizes"),
    "constants": case(Constants, vectors, "constants"),
    "class token": case(ClassToken, images(8), "sizes"),
    "nested outputs": case(NestedOutputs, vectors, "outputs"),
    "dict output": case(DictOutput, dict_of_vectors, "inputs outputs"),
    "dataclass output": case(DataclassOutput, vectors, "outputs"),
    "named tuple output": case(NamedTupleOutput, vectors, "outputs"),
    "pass through": case(PassThrough, vectors, "outputs"),
    "optional inputs": case(Optional, optional_inputs, "inputs"),
    "two inputs": case(TwoInputs, two_vectors, "inputs shared"),
    "own loss": case(OwnLoss, vectors_and_classes, "outputs", reduce="mean", options={"reduce": "mean"}),
    "counter": case(Counter, vectors, "buffers"),
    "moving average": case(MovingAverage, vectors, "buffers", batch_norm=True),
    "running max": case(RunningMax, vectors, "buffers", batch_norm=True),
    "queue": case(Queue, vectors, "buffers", batch_norm=True),
    "no grad": case(NoGrad, vectors, "gradients"),
    "own function": case(OwnFunction, vectors, "gradients"),
    "lstm": case(LSTM, sequences, "outputs"),
    "lstm by hand": case(CellLSTM, sequences, "shared"),
    "multi-head attention": case(Attention, padded, "masks outputs"),
    "encoder-decoder": case(EncoderDecoder, two_texts, "skips shared constants"),
    "transformer with dropout": case(TransformerDropout, sequences, random=True),
    "experts": case(Experts, sequences),
    "unet": case(lambda: UNet(2, 4, depth=2), images(8), "skips paper", random=True),
    "amoebanet": case(lambda: AmoebaNetD(3, 16, classes=5), images(64), "skips buffers paper", batch_norm=True),
    "resnet": case(
        lambda: ResNet((1, 2, 1), width=4, classes=5), images(32), "skips in-place buffers paper", batch_norm=True
    ),
}
