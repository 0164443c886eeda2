"""A captured graph, evaluated on real tensors, is the model: outputs, gradients and buffers, whole and cut."""

import copy
import dataclasses
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.utils._pytree import tree_leaves

from fxpipe.capture import CallCapture, NoOps
from fxpipe.ir.graph.evaluate_graph import evaluate
from tests.helpers.marks import mostly_slow


def tensors_of(model, graph):
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {state.name: named[state.path] for state in graph.states if state.kind != "constant"}


def run_whole(model, graph, inputs):
    values = evaluate(graph, dict(zip([i.name for i in graph.inputs], inputs, strict=True)), tensors_of(model, graph))
    return tuple(values[output.value] for output in graph.outputs)


def run_cut(model, chunks, graph, inputs):
    """The graph on each micro-batch, put together as the outputs say."""
    cut = [
        [value] * chunks if item.batch_dim is None else value.tensor_split(chunks, item.batch_dim)
        for item, value in zip(graph.inputs, inputs, strict=True)
    ]
    parts = [run_whole(model, graph, micro_batch) for micro_batch in zip(*cut, strict=True)]
    joined = []
    for output, values in zip(graph.outputs, zip(*parts, strict=True), strict=True):
        if output.batch_dim is not None:
            joined.append(torch.cat(values, output.batch_dim))
        else:
            joined.append({"same": values[0], "sum": sum(values), "mean": sum(values) / chunks}[output.reduce])
    return tuple(joined)


def leaves(value):
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    found = [leaves(v) if dataclasses.is_dataclass(v) else [v] for v in tree_leaves(value)]
    return [leaf for group in found for leaf in group]


def assert_same(expected, got):
    assert type(expected) is type(got)
    expected, got = leaves(expected), leaves(got)
    assert len(expected) == len(got)
    for e, g in zip(expected, got, strict=True):
        if isinstance(e, torch.Tensor):
            assert g.untyped_storage().nbytes() >= g.numel() > 0 or g.numel() == 0
            close(g, e)
        else:
            assert e == g


def close(got, expected):
    tight = {"rtol": 1e-9, "atol": 1e-12} if expected.dtype == torch.float64 else {}
    torch.testing.assert_close(got, expected, **tight)


def gradients(model, output, inputs):
    """Of a number that depends on all outputs."""
    total = sum(
        (leaf.double() * torch.linspace(1, 2, leaf.numel()).view_as(leaf)).sum()
        for leaf in leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    )
    wanted = [p for p in [*model.parameters(), *inputs] if p.requires_grad]
    if not isinstance(total, torch.Tensor) or not wanted:
        return []
    return torch.autograd.grad(total, wanted, allow_unused=True)


def check(model, *args, chunks=1, **kwargs):
    """Two calls each, so that a graph is used again too."""
    torch.manual_seed(0)
    plain, model = model, copy.deepcopy(model)
    call_capture = CallCapture(
        model, sizes=lambda batch: [len(part) for part in torch.arange(batch).tensor_split(chunks)]
    )
    inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    for _ in range(2):
        before = torch.get_rng_state()
        expected = plain(*args, **kwargs)
        torch.set_rng_state(before)
        run = partial(run_cut, model, chunks) if chunks > 1 else partial(run_whole, model)
        got = call_capture(args, kwargs, run)
        assert_same(expected, got)
        for e, g in zip(gradients(plain, expected, inputs), gradients(model, got, inputs), strict=True):
            assert (e is None) == (g is None)
            if e is not None:
                close(g, e)
        if chunks == 1:
            for (name, e), (same, g) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
                assert name == same
                close(g, e)
    return call_capture


def linear(*sizes):
    return nn.Linear(*sizes, dtype=torch.float64)


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear(8, 8), linear(8, 8), linear(8, 8)

    def forward(self, x):
        first = torch.relu(self.a(x))
        second = torch.relu(self.b(first)) + x
        return torch.cat([self.c(second) * first, second], 1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 11, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        b, t = ids.shape
        h = self.embed(ids) + torch.arange(t, device=ids.device)[None, :, None]
        h = torch.tanh(h.reshape(b * t, 8))
        return self.head(h).view(b, t, -1)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, dtype=torch.float64)
        self.norm = nn.BatchNorm2d(4, dtype=torch.float64)

    def forward(self, image):
        return F.max_pool2d(F.relu(self.norm(self.conv(image)), inplace=True), 2)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear(8, 8)

    def forward(self, x):
        h = self.fc(x)
        h += 1
        h.mul_(2).add_(x)
        early = h[:, :2]
        h[:, 4:] = 0.5
        early.neg_()
        F.relu(h, inplace=True)
        return h * early.sum(1, keepdim=True)


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: list
    note: str = "n"


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear(8, 8)

    def forward(self, x, extra, *, scale=1.0, mask=None):
        h = self.fc(x) * scale
        if mask is not None:
            h = h.masked_fill(mask, 0.0)
        h = h + extra["a"][0]
        return Pair(h, [x, {"t": h.t(), "same": h, "n": x.shape[0], "none": None}]), OrderedDict(w=self.fc.weight)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear(8, 8)
        self.calls = 0
        self.seen = []
        self.register_buffer("ema", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        self.last = self.fc(x)
        self.steps += 1
        self.ema = self.ema * 0.9 + x.detach().mean(0)
        return self.last * 2


class Regions(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            target = self.a(x)
            with torch.enable_grad():
                target = target + self.b(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.b(x)
            with torch.autocast("cpu", enabled=False):
                y = self.a(y.float())
        return y, target


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, dtype=torch.float64)

    def forward(self, x):
        y, _ = self.lstm(x)
        return y[:, -1]


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = linear(8, 8), linear(8, 2)

    def forward(self, x):
        h = torch.vmap(lambda row: row / row.norm() + torch.vmap(torch.sin)(self.a.weight).sum(0))(self.a(x))
        return self.b(h), torch.vmap(lambda row: (row.cumsum(0), row.max()))(h)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        # A batch norm would count its recomputation in the plain model, as a batch of its own.
        self.a, self.norm = linear(8, 8), nn.LayerNorm(8, dtype=torch.float64)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(lambda h: self.norm(self.a(h)), x, use_reentrant=False) + x


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * grad


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = linear(8, 8)
        self.scale = torch.full((8,), 2.0, dtype=torch.float64)

    def forward(self, x):
        return Square.apply(self.a(x)) * self.scale


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear(8, 24)

    def forward(self, x):
        b = x.shape[0]
        q, k, v = self.fc(x).view(b, 3, 2, 4).unbind(1)
        scores = (q.unsqueeze(2) * k.unsqueeze(1)).sum(-1).softmax(-1)
        low, where = scores.max(-1)
        return (scores @ v).flatten(1), low, where, torch.zeros(b, 2), x.new_ones(b)


class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop = linear(8, 8), nn.Dropout(0.5)

    def forward(self, x, y=None):
        return self.drop(self.fc(x)), x if y is None else y


def x(*shape, grad=True):
    torch.manual_seed(1)
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def single(*shape):
    return x(*shape, grad=False).float()


def transformer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)


IDS = torch.arange(30).view(6, 5) % 11
EXTRA = {"a": (x(6, 8), None)}
CASES = {
    "skips": (Skips, (x(6, 8),), {}),
    "tied": (Tied, (IDS,), {}),
    "batch norm": (Norm, (x(6, 3, 8, 8),), {}),
    "in place": (InPlace, (x(6, 8),), {}),
    "structured": (Structured, (x(6, 8), EXTRA), {"scale": 0.5}),
    "mask": (Structured, (x(6, 8),), {"extra": EXTRA, "mask": x(6, 8) > 0}),
    "counting": (Counting, (x(6, 8),), {}),
    "regions": (Regions, (single(6, 8),), {}),
    "lstm": (Recurrent, (x(6, 5, 8),), {}),
    "vmap": (Mapped, (x(6, 8),), {}),
    "transformer": (transformer, (x(6, 5, 8),), {}),
    "transformer, eval": (lambda: transformer().eval(), (x(6, 5, 8),), {}),
    "checkpoint": (Checkpointed, (x(6, 8),), {}),
    "autograd function": (Custom, (x(6, 8),), {}),
    "views": (Views, (x(6, 8),), {}),
    "dropout": (Ends, (x(6, 8),), {}),
    "dropout, eval": (lambda: Ends().eval(), (x(6, 8),), {"y": x(6, 2)}),
    "sequential": (lambda: nn.Sequential(linear(8, 8), nn.ReLU(), linear(8, 2)), (x(6, 8),), {}),
    "batch of one": (Skips, (x(1, 8),), {}),
    "frozen": (lambda: Skips().requires_grad_(False), (x(6, 8),), {}),
}
WHOLE_ONLY = ("batch norm", "regions", "dropout", "counting", "batch of one")  # not the same when cut


@pytest.mark.parametrize("name", mostly_slow(CASES, [*CASES][::2].__contains__))
def test_whole(name):
    make, args, kwargs = CASES[name]
    torch.manual_seed(0)
    check(make(), *args, **kwargs)


CUT = [name for name in CASES if name not in WHOLE_ONLY]


@pytest.mark.parametrize("name", mostly_slow(CUT, CUT[1::2].__contains__))
def test_cut_into_unequal_micro_batches(name):
    make, args, kwargs = CASES[name]
    torch.manual_seed(0)
    check(make(), *args, chunks=4, **kwargs)


def test_a_model_without_ops_is_an_error_of_its_own():
    with pytest.raises(NoOps, match="Identity has no ops"):
        CallCapture(nn.Identity())((x(6, 8),), {}, run_whole)


def test_no_grad():
    with torch.no_grad():
        check(Skips(), x(6, 8))
