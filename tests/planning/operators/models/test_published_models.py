"""The published graphs: as many operators, edges, weights and FLOPs as the papers' own, and the same weights and sizes
as the modules that compute them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.models import NMT, RNNLM, RNNTC, AlexNet, InceptionV3, ResNet
from fxpipe.ir.dataclass_json import read, write
from fxpipe.ir.operators.operators import OperatorGraph, check
from fxpipe.planning.operators.models.convolutional_networks import alexnet, inception, lenet, resnet
from fxpipe.planning.operators.models.published_models import MODELS
from fxpipe.planning.operators.models.recurrent_networks import nmt, rnnlm, rnntc

SHORT = {
    "conv2d": "conv", "pool2d": "pool", "linear": "fc", "flatten": "flat", "elementwise": "add", "concat": "concat",
    "embedding": "embed", "lstm": "lstm", "attention": "attention", "projected_softmax": "softmax",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kinds", "edges", "weights", "gflops"),
    [
        ("alexnet", "5 conv 3 pool 1 flat 3 fc", 11, 61_100_840, 366),
        ("inception", "94 conv 14 pool 11 concat 1 flat 1 fc", 155, 23_817_352, 733),
        ("resnet", "104 conv 2 pool 33 add 1 flat 1 fc", 173, 44_496_488, 999),
        ("rnntc", "40 embed 160 lstm 1 softmax", 317, 66_357_250, 172),
        ("rnnlm", "40 embed 80 lstm 40 softmax", 198, 108_111_632, 448),
        ("nmt", "80 embed 160 lstm 40 attention 40 softmax", 1998, 135_068_928, 356),
    ],
)
def test_published_counts(name: str, kinds: str, edges: int, weights: int, gflops: float) -> None:
    graph = MODELS[name]()
    check(graph)
    operators = [operator for operator in graph if operator.kind != "input"]
    published = iter(kinds.split())
    assert Counter(SHORT[operator.kind] for operator in operators) == {
        kind: int(count) for count, kind in zip(published, published, strict=True)
    }
    assert sum(graph.operators[source].kind != "input" for source, _, _ in graph.edges) == edges
    assert graph.weights == weights
    assert sum(operator.work * operator.elements for operator in operators) / 1e9 == pytest.approx(gflops, rel=2e-3)
    assert read(OperatorGraph, write(graph)) == graph


# A graph, and the module that computes it.
PAIRS: dict[str, tuple[Callable[[], OperatorGraph], Callable[[], nn.Module]]] = {
    "alexnet": (alexnet, AlexNet),
    "inception": (inception, lambda: InceptionV3(norm=False)),
    "resnet": (resnet, lambda: ResNet((3, 4, 23, 3), norm=False)),
    "rnntc": (rnntc, RNNTC),
    "rnnlm": (rnnlm, RNNLM),
    "nmt": (nmt, NMT),
    "small alexnet": (
        lambda: alexnet(4, width=2, hidden=16, classes=5, size=63),
        lambda: AlexNet(width=2, hidden=16, classes=5, size=63),
    ),
    "small inception": (
        lambda: inception(4, width=2, classes=5, size=75),
        lambda: InceptionV3(width=2, classes=5, norm=False),
    ),
    "small resnet": (
        lambda: resnet(4, (1, 2, 1), width=4, classes=5, size=32),
        lambda: ResNet((1, 2, 1), width=4, classes=5, norm=False),
    ),
    "small rnntc": (
        lambda: rnntc(4, 3, vocab=11, width=8, layers=3, classes=3),
        lambda: RNNTC(vocab=11, width=8, layers=3, classes=3),
    ),
    "small rnnlm": (lambda: rnnlm(4, 2, vocab=11, width=8), lambda: RNNLM(vocab=11, width=8)),
    "small nmt": (lambda: nmt(4, 3, 2, vocab=11, width=8), lambda: NMT(vocab=11, width=8)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_weights_are_those_of_the_module(name: str) -> None:
    graph, make = PAIRS[name]
    with torch.device("meta"):
        module = make()
    assert graph().weights == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", ["alexnet", "inception", "resnet"])
@pytest.mark.parametrize("small", [False, True])
def test_convolutions_and_layers_are_of_the_module_s_sizes(name: str, small: bool) -> None:
    graph, make = PAIRS[f"small {name}" if small else name]
    put_out: Counter[tuple[int, ...]] = Counter()
    with torch.device("meta"):
        module = make()
        for layer in module.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.register_forward_hook(lambda _, args, y: put_out.update([tuple(y.shape)]))
        image, *operators = graph()
        module(torch.empty(image.sizes))
    assert Counter(operator.sizes for operator in operators if operator.weights) == put_out


def test_steps_of_a_layer_share_its_weights() -> None:
    graph = rnnlm(4, 3, vocab=11, width=8)
    groups = Counter(operator.weight_group for operator in graph if operator.weights)
    assert groups == {"embed": 3, "lstm0": 3, "lstm1": 3, "softmax": 3}
    assert graph.operator("lstm1.2").inputs == ("lstm0.2", "lstm1.1")


def test_a_decoder_goes_on_where_its_encoder_ended() -> None:
    graph = nmt(4, 3, 2, vocab=11, width=8)
    assert graph.operator("target.lstm1.0").inputs == ("target.lstm0.0", "source.lstm1.2")
    attended = tuple(f"source.lstm1.{step}" for step in range(3))
    assert graph.operator("attention.1").inputs == ("target.lstm1.1", *attended)


def test_lenet() -> None:
    assert lenet().weights == 61_706
    assert lenet().operator("flat").sizes == (64, 400)
