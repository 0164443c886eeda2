"""Models with one unusual trait each, beside those in `tests/helpers/models.py`: what users do that capture may miss.

Their pipes run in a few configurations only (`tests/whole/test_traits.py`). Again, each docstring says what the trait
is.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.helpers.models import Block, Case, case, sequences, tokens, vectors

DOUBLE = torch.float64


class Layers(nn.Module):
    """Three linear layers, for the models below."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))


# Made in forward, and kept --------------------------------------------------------------------------------------------


class LazyTable(Layers):
    """A table of positions that the first call makes, and later ones find."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            place = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None]
            self.table = torch.cos(place * torch.arange(8, dtype=x.dtype, device=x.device))
        for layer in self.layers:
            x = torch.tanh(layer(x) + self.table[: x.shape[1]])
        return x


class LazyBuffer(Layers):
    """The same table in a buffer, which gets its shape with the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] != x.shape[1]:
            place = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None]
            self.table = torch.cos(place * torch.arange(8, dtype=x.dtype, device=x.device))
        for layer in self.layers:
            x = torch.tanh(layer(x) + self.table)
        return x


class NoBuffer(Layers):
    """The same table in a buffer that is None at first, set anew for longer sequences by `register_buffer`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            place = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None]
            table = torch.cos(place * torch.arange(8, dtype=x.dtype, device=x.device))
            self.register_buffer("table", table, persistent=False)
        for layer in self.layers:
            x = torch.tanh(layer(x) + self.table[: x.shape[1]])
        return x


class LazyDict(Layers):
    """Tables by length in a dict, filled as lengths come."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.arange(length, dtype=x.dtype).sin()[:, None]
        for layer in self.layers:
            x = torch.tanh(layer(x) + self.tables[length])
        return x


@functools.cache
def angles(length: int, width: int) -> Tensor:
    return torch.outer(torch.arange(length, dtype=DOUBLE), torch.arange(width, dtype=DOUBLE)).cos()


class CachedFunction(Layers):
    """A constant from a function that remembers its results."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * angles(x.shape[1], 8))
        return x


# Buffers --------------------------------------------------------------------------------------------------------------


class RingBuffer(Layers):
    """Writes the next row of a buffer by index, counts in another, and reads all rows after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.linspace(0, 1, 32).view(4, 8))
        self.register_buffer("next", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        self.rows[self.next[None] % 4] = x.detach().mean(0)
        self.next += 1
        x = torch.tanh(self.layers[1](x + self.rows.mean(0)))
        return self.layers[2](x)


class NumberInBuffer(Layers):
    """Reads from a buffer, as a Python number, which row comes next, and writes the number that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.linspace(0, 1, 32).view(4, 8))
        self.register_buffer("next", torch.tensor([0]))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        next = int(self.next)
        self.rows[next] = x.detach().mean(0)
        self.next[0] = (next + 1) % 4
        x = torch.tanh(self.layers[1](x + self.rows.mean(0)))
        return self.layers[2](x)


class BufferData(Layers):
    """Gives a buffer other memory, by its `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        self.scale.data = self.scale.data * 0.9 + x.data.abs().mean(0)
        x = torch.tanh(self.layers[1](x)) * self.scale
        return self.layers[2](x)


class RollingBuffer(Layers):
    """Moves the rows of a buffer up and puts a new one at the end, by slices, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.linspace(0, 1, 32).view(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        if self.training:
            self.rows[:-1] = self.rows[1:].clone()
            self.rows[-1] = x.detach().mean(0)
        x = torch.tanh(self.layers[1](x))
        return self.layers[2](x + self.rows.mean(0))


class Hopfield(Layers):
    """A buffer moved towards the values that pass by (lerp_), and one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.training:
            self.centre.lerp_(x.detach().mean(0).to(self.centre.dtype), 0.25)
        return x - self.centre


# Hooks ----------------------------------------------------------------------------------------------------------------


class Hooked(Layers):
    """Hooks on its modules that change what goes in and comes out, one with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.layers[1].register_forward_hook(lambda module, args, output: output.sin())
        self.layers[2].register_forward_hook(
            lambda module, args, kwargs, output: output + args[0] + module.bias, with_kwargs=True
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def clip(grad: Tensor) -> Tensor:
    return grad.clamp(-0.1, 0.1)


def double_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


class ParameterHooks(Layers):
    """Hooks on parameters that clip their gradient, which is no sum of what they make of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.hang()

    def hang(self) -> None:
        self.layers[0].weight.register_hook(clip)
        self.layers[1].weight.register_hook(clip)
        self.layers[1].bias.register_post_accumulate_grad_hook(double_gradient)
        self.layers[2].weight.register_post_accumulate_grad_hook(double_gradient)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + torch.tanh(self.layers[0](x))


# Regions --------------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """torch's checkpoint around blocks, the new kind and the reentrant one, with random numbers inside and between."""

    def __init__(self, dropout: float, recompute: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 2, dropout) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))
        self.drop = nn.Dropout(dropout)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.kept(self.blocks[0], x, use_reentrant=False))
        x = self.kept(lambda y, factor: self.drop(self.blocks[1](y)) * factor, x, self.scale, use_reentrant=True)
        return self.kept(torch.sin, x, use_reentrant=False, preserve_rng_state=False)

    def kept(self, function: Callable[..., Tensor], *args: Tensor, **options: Any) -> Tensor:
        return checkpoint(function, *args, **options) if self.recompute else function(*args)


class Autocast(Layers):
    """Half precision for some of the layers, single within that, and weights cast twice."""

    def forward(self, x: Tensor) -> Tensor:
        weights = [layer.weight.float() for layer in self.layers]
        y = x.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.tanh(F.linear(y, weights[0]))
            y = F.linear(y, weights[1])
            with torch.autocast("cpu", enabled=False):
                y = F.linear(y.float(), weights[2])
            y = F.linear(y, weights[0]) + F.linear(y, weights[1])
        return x + y.to(x.dtype)


class GradRegions(Layers):
    """Regions without and, within these, with gradients; a decorated method; a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 8)

    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        return torch.tanh(self.teacher(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            still = torch.tanh(self.layers[0](x))
            with torch.enable_grad():
                moving = torch.tanh(self.layers[1](still))
            still = still * 2
        with torch.set_grad_enabled(not self.training):
            x = x + torch.tanh(self.layers[2](x))
        x = self.layers[2](x + moving)
        return x * still + self.target(x)


# Parameters written in forward ----------------------------------------------------------------------------------------


class Normalised(nn.Module):
    """A linear layer that normalises its weight in place in training, and again where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.weight.copy_(weight / (1e-3 + torch.linalg.vector_norm(weight, dim=1, keepdim=True)))
        weight = weight / (1e-3 + torch.linalg.vector_norm(weight, dim=1, keepdim=True))
        return x @ weight.t() / math.sqrt(8)


class NormalisesWeights(nn.Module):
    """Layers that normalise their weights in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.plain = Normalised(), Normalised(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.plain(x))
        return torch.tanh(self.second(x))


class WritesSamples(nn.Module):
    """Moves a learnt centre towards each batch after it was used, and scales a weight through views and `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.more = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.centre = nn.Parameter(torch.linspace(-1, 1, 8))
        self.scale = nn.Parameter(torch.ones(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.scale.view(-1)
        self.scale.data[0].mul_(0.75)
        x = torch.tanh(self.first(x)) + rows[:8]
        y = torch.tanh(x - self.centre)
        with torch.no_grad():
            self.centre.mul_(0.5).add_(x.mean(0), alpha=0.5)
            self.scale[1] += 0.25
        return self.more(torch.tanh(self.last(y) * rows[8:] * self.scale[0]))


class Codebook(nn.Module):
    """Replaces each row by the nearest of a codebook, a frozen embedding whose weight follows averages of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(6, 8)
        self.codes.weight.requires_grad_(False)
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.weight.detach().clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(x.detach(), self.codes.weight).argmin(-1)
        found = self.codes(nearest)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 6).to(x.dtype)
                self.counts.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.data.mul_(0.9).add_(hot.t() @ x, alpha=0.1)
                self.codes.weight.data.copy_(self.sums / (self.counts[:, None] + 1e-3))
        return x + (found - x).detach(), (found.detach() - x).square().mean(-1)


class Quantises(nn.Module):
    """Vector quantisation between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.codebook, self.last = nn.Linear(8, 8), Codebook(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, distance = self.codebook(torch.tanh(self.first(x)))
        return self.last(torch.tanh(x)), distance


# Gradients of their own -----------------------------------------------------------------------------------------------


class Saved(torch.autograd.Function):
    """Saves tensors and a number, and returns two tensors, one of them without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, power: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.power = power
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return (x * weight) ** power, sign

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        inner = grad * ctx.power * (x * weight) ** (ctx.power - 1)
        by_x = inner * weight * 3 if ctx.needs_input_grad[0] else None  # not what autograd would find
        return by_x, (inner * x).sum(0), None


class Two(torch.autograd.Function):
    """Two outputs with gradients, one of which may have none; written with setup_context, differentiable once."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, sine: Tensor, cosine: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * (sine * x.cos() - cosine * x.sin())


class Straight(torch.autograd.Function):
    """Rounds; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Old(torch.autograd.Function):
    """Reads what it saved by the name that this had before torch 0.4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_variables
        return 5 * grad * weight, (grad * x).sum(0)  # the 5 is not what autograd would find


class OwnFunctions(Layers):
    """Functions of its own: saved tensors, by their old name too, several outputs, no gradient for some, straight
    through."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, sign = Saved.apply(torch.tanh(self.layers[0](x)), self.weight, 2)
        sine, _ = Two.apply(self.layers[1](x))
        sine, cosine = Two.apply(Old.apply(self.layers[2](sine), self.weight) * sign)
        return Straight.apply(3 * cosine) + sine, sign


class Argmax(nn.Module):
    """An embedding looked up by what scores highest: no gradient passes there."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.words, self.last = nn.Linear(8, 5), nn.Embedding(5, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best = self.score(x).argmax(-1)
        return self.last(self.words(best)), best


class GradientSwitch(Layers):
    """Straight-through rounding and a detached copy, written by hand."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.layers[0](x))
        x = x + (x.round() - x).detach()
        x = torch.tanh(self.layers[1](x))
        frozen = x.detach().clone()
        return self.layers[2](frozen) * x.data.sign() + x


class FrozenInside(Layers):
    """A frozen weight used with a trained bias; a frozen embedding; a gradient through frozen layers to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight.requires_grad_(False)
        self.layers[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Warns(Layers):
    """Warns in forward, as what is out of date does."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            warnings.warn("use other layers", FutureWarning, stacklevel=2)
        return x


class ToldToCompile(Layers):
    """Leaves out what it needs where it is told that it is being compiled."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape[:1], dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * mask[:, None]  # type: ignore[index]
        return x


COLLECTED: ContextVar[list[Tensor] | None] = ContextVar("collected", default=None)
FACTOR = ContextVar("factor", default=0.5)


def collect(module: nn.Module, args: Any, out: Tensor) -> None:
    found = COLLECTED.get()
    if found is not None:
        found.append(out)


class Collects(Layers):
    """Hands a list down to the hooks of its layers in a context variable, and returns what they have put into it.
    Raises where it is told that it is being compiled."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(collect)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            raise RuntimeError("run me as I am")
        found: list[Tensor] = []
        token = COLLECTED.set(found)
        try:
            for layer in self.layers:
                x = torch.tanh(layer(x) * FACTOR.get())
        finally:
            COLLECTED.reset(token)
        return x, *found


# Parameters made of others --------------------------------------------------------------------------------------------


class OldNorms(nn.Module):
    """torch's first weight_norm and spectral_norm, which set the weight in a hook before every call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.weight_norm(nn.Linear(8, 8))
        self.second = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.third = nn.utils.weight_norm(nn.Linear(8, 8), dim=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Parametrized(nn.Module):
    """Parametrizations of torch: spectral norm with its buffers, an orthogonal weight, one of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.second = parametrizations.orthogonal(nn.Linear(8, 8))
        self.third = nn.Linear(8, 8)
        parametrize.register_parametrization(self.third, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class ParametrizedOnce(nn.Module):
    """One layer called three times, whose weight is computed once (parametrize.cached)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            for _ in range(3):
                x = torch.tanh(self.layer(x))
        return x


class SharedDeep(nn.Module):
    """A module under two names, a parameter under three, and a bias that is another layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)})
        self.decoder = nn.ModuleList([self.encoder["second"], nn.Linear(8, 8), self.encoder["first"]])
        self.weight = self.decoder[1].weight
        self.head = nn.Linear(8, 8)
        self.head.bias = self.encoder["first"].bias

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.encoder.values(), *self.decoder):
            x = torch.tanh(layer(x))
        return self.head(x) @ self.weight.t()


class SparseGradient(nn.Module):
    """Sparse gradients, from an embedding and a bag of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, sparse=True)
        self.bags = nn.EmbeddingBag(11, 8, sparse=True, mode="sum")
        self.last = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.tanh(self.words(ids).mean(1)) + torch.tanh(self.bags(ids)))


# Numbers --------------------------------------------------------------------------------------------------------------


class ComplexWeights(nn.Module):
    """Complex parameters and a complex output, beside the angle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128) / 3)
        self.second = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128) / 3)
        self.rotate = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(x, x.roll(1, -1)) @ self.first
        z = z * torch.polar(torch.ones_like(self.rotate), self.rotate)
        z = torch.fft.ifft(torch.fft.fft(z, norm="ortho") @ self.second.mH, norm="ortho")
        pairs = torch.view_as_complex(torch.view_as_real(z) * 2)
        return pairs.conj().resolve_conj(), torch.view_as_real(pairs).square().sum(-1)


class Rotary(nn.Module):
    """Positions as rotations of complex pairs, the table made under no_grad and autocast switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("rate", 1.0 / 10 ** (torch.arange(0, 8, 2) / 8), persistent=False)

    @torch.no_grad()
    def turns(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            place = torch.arange(x.shape[1], device=x.device)
            angle = torch.outer(place, self.rate)
            return torch.polar(torch.ones_like(angle), angle)

    def forward(self, x: Tensor) -> Tensor:
        turns = self.turns(x)
        for layer in (self.first, self.last):
            pairs = torch.view_as_complex(torch.tanh(layer(x)).unflatten(-1, (4, 2)))
            x = torch.view_as_real(pairs * turns).flatten(-2)
        return x


class Einsums(nn.Module):
    """Attention written with einsum and unflatten, as einops code is."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, 8, 2, 4) / 3)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("btc,schd->sbhtd", x, self.qkv)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(4)
        y = torch.einsum("bhij,bhjd->bihd", scores.softmax(-1), v)
        y = y.flatten(2).unflatten(1, (-1, 1)).movedim(1, 2).squeeze(1)
        return x + self.out(y)


class HalfInside(Layers):
    """Weights in bfloat16 and float16, cast at every use; results in these precisions, too."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randn(8, 8))
        self.brain = nn.Parameter(torch.randn(8, 8))

    def _apply(self, fn: Any, recurse: bool = True) -> HalfInside:
        super()._apply(fn, recurse)
        self.small.data, self.brain.data = self.small.data.half(), self.brain.data.bfloat16()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.layers[0](x))
        half = torch.tanh(x.half() @ self.small)
        brain = torch.tanh(half.to(torch.bfloat16) @ self.brain)
        return self.layers[1](brain.to(x.dtype)), half


# Inputs and outputs ---------------------------------------------------------------------------------------------------


class Aliases(Layers):
    """Outputs that share memory: a value, its views, the same tensor twice, the input and a view of it."""

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return y, y, y[:, :4], y.unsqueeze(1), x, x[:, 4:], y.view(-1, 2, 4).transpose(1, 2), y.detach()


class OwnTensors(Layers):
    """Returns what it holds beside a result: a parameter, a frozen one, a buffer, a view of it, and it again after an
    op that does nothing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, 8))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        own = {"weight": self.layers[0].weight, "frozen": self.frozen, "scale": self.scale}
        return {
            "y": x,
            **own,
            "part": self.scale[:4],
            "same": self.scale.to(x.dtype),
            "large": self.frozen.contiguous(),
        }


class Kinds(Layers):
    """Whole numbers, truths and bytes out, beside a value."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        top, where = x.topk(2, dim=-1)
        return {"x": x, "high": x > 0, "where": where, "top": top, "bytes": (x * 10).to(torch.int8), "any": x.any(1)}


class Mailbox:
    """A container of the user's that pytree knows."""

    def __init__(self, value: Any, note: str) -> None:
        self.value, self.note = value, note

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mailbox) and self.note == other.note


pytree.register_pytree_node(
    Mailbox,
    lambda box: ([box.value], box.note),
    lambda values, note: Mailbox(*values, note),
    flatten_with_keys_fn=lambda box: ([(pytree.GetAttrKey("value"), box.value)], box.note),
)


class Nested(NamedTuple):
    boxes: list[Mailbox]
    last: dict[str, Tensor]


class OwnContainers(Layers):
    """A class of the user's inside of a list inside of a named tuple, in and out."""

    def forward(self, box: Mailbox) -> Nested:
        x, boxes = box.value["x"], []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            boxes.append(Mailbox(x, f"layer {len(boxes)}"))
        return Nested(boxes, {"last": x * box.value["scale"]})


def boxed(batch: int) -> Any:
    (x,), _ = vectors(batch)
    return (Mailbox({"x": x, "scale": 2.0}, "in"),), {}


class WrittenViews(Layers):
    """In-place ops on intermediate values and on views of views, before and after they are read."""

    def forward(self, x: Tensor) -> Tensor:
        x = 3 * self.layers[0](x)
        left, right = x[:, :4], x.view(-1, 2, 4)[:, 1]
        x.mul_(0.5)
        y = torch.tanh(left) + right
        right.add_(1).mul_(0.5)
        x[:, ::2].copy_(y)
        x.t()[1].zero_()
        x = 2 * self.layers[1](torch.tanh(x))
        x[x > 0.5] = 0.5
        x.view(-1).sub_(0.2)
        return self.layers[2](x).add_(left.repeat(1, 2))


class Mapped(nn.Module):
    """torch.vmap over the samples, with a weight for all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.vmap(lambda row: torch.tanh(self.first.weight @ row) * row.norm())(x)
        return self.last(x)


class Noise(Layers):
    """Noise in every way to draw it: like another tensor, of a size, in place, from a distribution, by choice."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x)) + 0.1 * torch.randn_like(x)
        x = x * torch.empty_like(x).bernoulli_(0.7)
        x = torch.tanh(self.layers[1](x)) + torch.rand(x.shape, dtype=x.dtype, device=x.device)
        x = x + torch.randint(0, 3, (x.shape[0], 1), device=x.device) + torch.normal(0.0, 0.1, x.shape)
        pick = torch.multinomial(x.detach().softmax(-1), 2)
        x = x + torch.zeros_like(x).uniform_(-0.1, 0.1) + F.gumbel_softmax(x, dim=-1)
        return self.layers[2](F.dropout1d(x.unsqueeze(1), 0.2, self.training).squeeze(1)).gather(1, pick)


class TrainEval(Layers):
    """Another path in training than in eval, by module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.extra = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(torch.tanh(self.layers[0](x)))
        if self.extra.training:
            return self.layers[1](x), self.extra(x)
        return self.layers[2](x)


TRAITS: dict[str, Case] = {
    "lazy table": case(LazyTable, sequences),
    "lazy buffer": case(LazyBuffer, sequences),
    "no buffer": case(NoBuffer, sequences),
    "lazy dict": case(LazyDict, sequences),
    "cached function": case(CachedFunction, sequences),
    "ring buffer": case(RingBuffer, vectors, batch_norm=True),
    "number in buffer": case(NumberInBuffer, vectors, batch_norm=True),
    "buffer data": case(BufferData, vectors, batch_norm=True),
    "rolling buffer": case(RollingBuffer, vectors, batch_norm=True),
    "buffer moved": case(Hopfield, vectors, batch_norm=True),
    "hooked": case(Hooked, vectors),
    "parameter hooks": case(ParameterHooks, vectors),
    "checkpointed": case(lambda: Checkpointed(0.0), sequences),
    "autocast": case(Autocast, vectors, tol=2e-2),
    "grad regions": case(GradRegions, vectors),
    "normalises weights": case(NormalisesWeights, vectors, "writes-parameters"),
    "writes samples": case(WritesSamples, vectors, "writes-parameters", batch_norm=True),
    "quantises": case(Quantises, vectors, "writes-parameters", batch_norm=True),
    "own functions": case(OwnFunctions, vectors),
    "argmax": case(Argmax, vectors),
    "gradient switch": case(GradientSwitch, vectors),
    "frozen inside": case(FrozenInside, vectors),
    "warns": case(Warns, vectors),
    "told to compile": case(ToldToCompile, vectors),
    "collects": case(Collects, vectors),
    "old norms": case(OldNorms, vectors, batch_norm=True),
    "parametrized": case(Parametrized, vectors, batch_norm=True),
    "parametrized once": case(ParametrizedOnce, vectors),
    "shared deep": case(SharedDeep, vectors),
    "sparse gradient": case(SparseGradient, tokens),
    "complex weights": case(ComplexWeights, vectors),
    "rotary": case(Rotary, sequences),
    "einsums": case(Einsums, sequences),
    "half inside": case(HalfInside, vectors, tol=2e-2),
    "aliases": case(Aliases, vectors),
    "own tensors": case(OwnTensors, vectors, "whole"),
    "kinds": case(Kinds, vectors),
    "own containers": case(OwnContainers, boxed),
    "written views": case(WrittenViews, vectors),
    "mapped": case(Mapped, vectors),
    "noise": case(Noise, vectors, random=True),
    "train and eval": case(TrainEval, vectors, batch_norm=True),
}
