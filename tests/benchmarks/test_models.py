"""The papers' models have exactly the parameters that the papers count, and train at small sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.models import (
    LLAMA_7B,
    LLAMA_70B,
    NMT,
    RNNLM,
    RNNTC,
    AlexNet,
    AmoebaNetD,
    InceptionV3,
    Llama,
    ResNet,
    UNet,
    resnet101,
)
from benchmarks.models.llama import LlamaSize


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("blocks", "channels", "count"),
    [
        (5, 64, 232_687_328),
        (6, 72, 362_157_516),
        (11, 128, 2_213_834_176),
        (24, 128, 4_993_859_008),
        (24, 160, 7_802_903_600),
        (48, 160, 15_822_206_000),
    ],
)
def test_unet_has_the_published_parameters(blocks: int, channels: int, count: int) -> None:
    with torch.device("meta"):
        model = UNet(blocks, channels)
    assert parameters(model) == count
    assert not list(model.buffers())


@pytest.mark.parametrize(
    ("layers", "filters", "count"),
    [
        (18, 208, 81_505_540),
        (18, 256, 122_470_120),
        (18, 416, 319_024_120),
        (18, 544, 542_734_840),
        (36, 512, 935_798_248),
        (36, 544, 1_055_832_376),
        (72, 512, 1_844_858_344),
    ],
)
def test_amoebanet_has_the_published_parameters(layers: int, filters: int, count: int) -> None:
    with torch.device("meta"):
        model = AmoebaNetD(layers, filters)
    assert parameters(model) == count


def test_amoebanet_has_the_published_parameters_cell_by_cell() -> None:
    with torch.device("meta"):
        model = AmoebaNetD(18, 544)
    first = [parameters(cell) for cell in model.cells[:5]]
    assert parameters(model.stem) + parameters(model.stem_bn) == 3_944
    assert first == [331_704, 1_541_968, 3_042_592, 3_782_432, 4_078_368]
    assert parameters(model.cells[-1]) == 65_142_912
    assert parameters(model.classifier) == 8_705_000


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (AlexNet, 61_100_840),
        (InceptionV3, 23_834_568),
        (resnet101, 44_549_160),
        (lambda: ResNet((3, 4, 23, 3), norm=False), 44_496_488),
        (RNNTC, 66_357_250),
        (RNNLM, 108_111_632),
        (NMT, 135_068_928),
    ],
)
def test_others_have_the_published_parameters(make: Callable[[], nn.Module], count: int) -> None:
    with torch.device("meta"):
        model = make()
    assert parameters(model) == count


@pytest.mark.parametrize(
    ("model", "size", "shape"),
    [
        (UNet(2, 4, depth=3), 16, (2, 1, 16, 16)),
        (UNet(1, 4, depth=2), 11, (2, 1, 11, 11)),
        (AmoebaNetD(3, 16, classes=7), 32, (2, 7)),
        (ResNet((1, 2, 1, 1), width=8, classes=7), 32, (2, 7)),
        (AlexNet(width=2, hidden=16, classes=7, size=63), 63, (2, 7)),
        (InceptionV3(width=2, classes=7), 75, (2, 7)),
    ],
    ids=["unet", "unet, odd sizes", "amoebanet", "resnet", "alexnet", "inception"],
)
def test_a_small_one_trains(model: nn.Module, size: int, shape: tuple[int, ...]) -> None:
    y = model(torch.randn(2, 3, size, size))
    assert y.shape == shape
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_meta_device_runs_the_full_size() -> None:
    with torch.device("meta"):
        assert UNet(11, 128)(torch.empty(2, 3, 192, 192)).shape == (2, 1, 192, 192)
        assert AmoebaNetD(18, 208)(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
        assert resnet101()(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
        assert AlexNet()(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
        assert InceptionV3()(torch.empty(2, 3, 299, 299)).shape == (2, 1000)


def test_amoebanet_refuses_uneven_sizes() -> None:
    with pytest.raises(ValueError, match="multiple of 3"):
        AmoebaNetD(4, 16)


@pytest.mark.parametrize(
    ("model", "lengths", "shape"),
    [
        (RNNTC(vocab=11, width=8, layers=2, classes=3), [4], (2, 3)),
        (RNNLM(vocab=11, width=8), [4], (2, 4, 11)),
        (NMT(vocab=11, width=8), [4, 3], (2, 3, 11)),
    ],
    ids=["rnntc", "rnnlm", "nmt"],
)
def test_a_small_recurrent_one_trains(model: nn.Module, lengths: list[int], shape: tuple[int, ...]) -> None:
    y = model(*(torch.randint(0, 11, (2, length)) for length in lengths))
    assert y.shape == shape
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_alexnet_refuses_images_that_are_too_small() -> None:
    AlexNet(width=2, hidden=16, size=63)
    with pytest.raises(ValueError, match="62 pixels are too small"):
        AlexNet(width=2, hidden=16, size=62)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count"), [(LLAMA_7B, 6_738_415_616), (LLAMA_70B, 68_976_648_192)])
def test_llama_has_the_published_parameters(size: LlamaSize, count: int) -> None:
    with torch.device("meta"):
        model = Llama(size)
    assert parameters(model) == count


def test_a_token_of_llama_knows_those_before_it_alone() -> None:
    """A change of the last token changes the loss of predicting it, and of no token before."""
    torch.manual_seed(0)
    model = Llama(LlamaSize(16, 24, 2, 4, 2, vocabulary=11, sequence=6))
    ids = torch.randint(11, (2, 6))
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % 11
    (gradient,) = torch.autograd.grad(model(ids).sum(), model.layers[1].attention.keys.weight)
    assert gradient.abs().sum() > 0
    hidden = [model.layers[0](model.tokens(one), model.cos, model.sin) for one in (ids, other)]
    assert torch.equal(hidden[0][:, :-1], hidden[1][:, :-1])
    assert not torch.equal(hidden[0][:, -1], hidden[1][:, -1])
