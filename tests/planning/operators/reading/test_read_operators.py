"""Captured models as operator graphs: those of the published models are the published ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.capture import capture
from fxpipe.errors import PlanError
from fxpipe.ir.operators.operator_map import Reading
from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.planning.operators.models.convolutional_networks import alexnet, inception, resnet
from fxpipe.planning.operators.models.recurrent_networks import nmt, rnnlm, rnntc
from fxpipe.planning.operators.reading.read_operators import read
from tests.helpers.marks import mostly_slow
from tests.helpers.small_strategies import SMALL
from tests.helpers.transparency import build, inputs

PUBLISHED: dict[str, Callable[[], OperatorGraph]] = {
    "alexnet": lambda: alexnet(4, width=2, hidden=16, classes=5, size=63),
    "inception": lambda: inception(4, width=2, classes=5, size=75),
    "resnet": lambda: resnet(4, (1, 2, 1), width=4, classes=5, size=32),
    "rnntc": lambda: rnntc(4, 4, vocab=11, width=8, layers=3, classes=3),
    "rnnlm": lambda: rnnlm(4, 4, vocab=11, width=8),
    "nmt": lambda: nmt(4, 4, 3, vocab=11, width=8),
}


def reading(model: nn.Module, *args: Tensor) -> Reading:
    return read(capture(model, args, reduce="mean"), {"b": len(args[0])})


def facts(operator: Operator, kinds: Any = ()) -> tuple[Any, ...]:
    """All but names; what the paper counts as an operator with the linear layer in it, as that layer."""
    kind = "linear" if operator.kind == "projected_softmax" else operator.kind
    sizes = operator.sizes if kind != "embedding" else (*operator.sizes[-2:],)
    return kind, sizes, operator.roles[1:], operator.weights, operator.window, operator.stride, operator.padding


@pytest.mark.parametrize("name", mostly_slow(["alexnet", "inception", "resnet"], lambda name: name == "alexnet"))
def test_a_convolutional_network_is_the_published_graph(name: str) -> None:
    model = build(SMALL[name])
    got, wanted = reading(model, *inputs(SMALL[name], 4)[0]).operators, PUBLISHED[name]()
    placed = (Counter(facts(o) for o in graph if o.kind != "input") for graph in (got, wanted))
    assert next(placed) == next(placed)
    assert sum(o.work * o.elements for o in got) == pytest.approx(sum(o.work * o.elements for o in wanted))
    assert len(got.edges) == len(wanted.edges)
    assert got.weights == wanted.weights


@pytest.mark.parametrize("name", mostly_slow(["rnntc", "rnnlm", "nmt"], "nmt".__eq__))
def test_a_recurrent_network_has_the_published_operators(name: str) -> None:
    """Attention is several operators here, and what is stacked for the caller is one, too."""
    model = build(SMALL[name])
    got, wanted = reading(model, *inputs(SMALL[name], 4)[0]).operators, PUBLISHED[name]()
    kinds = ("embedding", "lstm", "projected_softmax")
    there = Counter(map(facts, got))
    there.subtract(facts(operator) for operator in wanted if operator.kind in kinds)
    left = {kind for (kind, *_), count in there.items() if count}
    assert left <= {"input", "samplewise", "linear", "matmul", "softmax", "concat", "flatten"}
    assert min(there.values()) == 0
    assert got.weights == wanted.weights == sum(parameter.numel() for parameter in model.parameters())


class Transformer(nn.Module):
    """A block with heads, positions, and a loss over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 11)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(words) + self.positions(torch.arange(words.shape[1]))
        h = self.norm(x)
        h = F.scaled_dot_product_attention(self.heads(self.q(h)), self.heads(self.k(h)), self.heads(self.v(h)))
        x = x + self.out(h.transpose(1, 2).reshape(x.shape))
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).view(-1, 11), labels.view(-1))


def test_a_transformer() -> None:
    words, labels = torch.randint(0, 11, (2, 4, 5))
    found = reading(Transformer(), words, labels)
    rows = [(o.name, o.kind, o.inputs, o.sizes, "".join(o.roles)) for o in found.operators]
    assert rows == [
        ("words", "input", (), (4, 5), "S"),
        ("labels", "input", (), (4, 5), "S"),
        ("embed", "embedding", ("words",), (4, 5, 8), "SAP"),
        ("x", "elementwise", ("embed",), (4, 5, 8), "SAA"),
        ("norm", "layer_norm", ("x",), (4, 5, 8), "SA"),
        ("q", "linear", ("norm",), (4, 5, 8), "SAP"),
        ("k", "linear", ("norm",), (4, 5, 8), "SAP"),
        ("v", "linear", ("norm",), (4, 5, 8), "SAP"),
        ("h_1", "scaled_dot_product", ("q", "k", "v"), (4, 5, 8), "SAA"),
        ("out", "linear", ("h_1",), (4, 5, 8), "SAP"),
        ("x_1", "elementwise", ("x", "out"), (4, 5, 8), "SAA"),
        ("up", "linear", ("x_1",), (4, 5, 32), "SAP"),
        ("down", "linear", ("up",), (4, 5, 8), "SAP"),
        ("x_2", "elementwise", ("x_1", "down"), (4, 5, 8), "SAA"),
        ("head", "linear", ("x_2",), (4, 5, 11), "SAP"),
        ("cross_entropy", "loss", ("head",), (4, 5), "SA"),
    ]
    assert found.operators.operator("x").weights == 40  # the positions
    assert found.operators.weights == sum(parameter.numel() for parameter in Transformer().parameters())


def test_every_op_belongs_to_an_operator() -> None:
    model = build(SMALL["resnet"])
    graph = capture(model, inputs(SMALL["resnet"], 4)[0])
    found = read(graph, {"b": 4})
    assert sorted(name for ops in found.ops.values() for name in ops) == sorted(op.name for op in graph.ops)
    assert found.ops["layers.0.conv3"] == ("x_4",)
    assert found.ops["layers.0"] == ("x_5", "x_6")  # the sum, and the activation of it


def test_a_layer_of_torch_s_own_transformer() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = reading(model, torch.randn(4, 5, 8)).operators
    assert [o.kind for o in found] == [
        "input", "linear", "linear", "linear", "scaled_dot_product", "linear", "elementwise", "layer_norm",
        "linear", "linear", "elementwise", "layer_norm",
    ]  # fmt: skip
    assert {o.sizes for o in found} == {(4, 5, 8), (4, 5, 16)}
    assert found.weights == sum(parameter.numel() for parameter in model.parameters())


class Fused(nn.Module):
    """Queries, keys and values of one linear layer, and a state that begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.cell = nn.Linear(8, 24), nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).reshape(x.shape[0], 5, 3, 2, 4)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape[0], 5, 8)
        h = x.new_zeros(x.shape[0], 8)
        return self.cell(x[:, -1], (h, h))[0]


def test_pieces_are_cut_by_sample() -> None:
    found = reading(Fused(), torch.randn(4, 5, 8)).operators
    rows = [(o.kind, o.inputs, o.sizes, "".join(o.roles)) for o in found]
    assert rows == [
        ("input", (), (4, 5, 8), "S"),
        ("linear", ("x",), (4, 5, 24), "SAP"),
        *[("samplewise", ("qkv",), (4, 2, 5, 4), "S")] * 3,
        ("samplewise", ("q", "k", "v"), (4, 2, 5, 4), "S"),
        ("samplewise", ("scaled_dot_product_attention",), (4, 8), "S"),
        ("lstm", ("getitem_12",), (4, 8), "SP"),
    ]


class Sliding(nn.Module):
    """Numbers for both dimensions in a tuple of one, as torch takes them; gaps in the windows of a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, None, (2,), (1,))
        return F.max_pool2d(x, 3, 1, dilation=2)


def test_windows() -> None:
    conv, pool = [o for o in reading(Sliding(), torch.zeros(4, 2, 16, 16)).operators if o.kind != "input"]
    assert (conv.window, conv.stride, conv.padding) == ((3, 3), (2, 2), (1, 1))
    assert (pool.window, pool.stride, pool.sizes) == ((5, 5), (1, 1), (4, 4, 4, 4))


class Strange(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x).abs()


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.t() @ x).sum()


class Some(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:2].sum()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            Strange(),
            r"fft_fft = fft_fft\(x\).*test_read_operators.py:\d+  return torch.fft.fft.*: 'fft_fft' is no operator",
        ),
        (Turned(), "of t, the first dimension is not that of the samples"),
        (Some(), "it takes some of the samples"),
    ],
)
def test_refuses(model: nn.Module, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        reading(model, torch.randn(8, 6))
