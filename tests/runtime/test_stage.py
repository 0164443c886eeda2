"""A stage holds the model's own tensors under the model's own names, whatever those are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpipe.runtime import Stage
from fxpipe.runtime.written_buffers import instead, keep, scratch


class Names(Stage):
    states = ("layers.0.weight", "0.bias", "a.b-c.w", "device.forward", "running")
    constants = ("pos",)
    mutates = ("running", "a.count")


def names() -> tuple[Names, dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {path: nn.Parameter(torch.randn(1)) for path in Names.states[:-1]}
    tensors["running"] = torch.zeros(1)
    return Names(tensors, {"pos": 7}, torch.device("cpu")), tensors


def test_paths_lead_to_the_same_objects() -> None:
    stage, tensors = names()
    assert stage.layers[0].weight is tensors["layers.0.weight"]
    assert stage[0].bias is tensors["0.bias"]
    assert stage.a["b-c"].w is tensors["a.b-c.w"]
    assert stage["device"]["forward"] is tensors["device.forward"]
    assert stage.device == torch.device("cpu")
    assert stage.pos == 7
    assert [name for name, _ in stage.named_parameters()] == list(Names.states[:-1])
    assert dict(stage.named_buffers()).keys() == {"running"}


def test_freezing_takes_effect() -> None:
    stage, tensors = names()
    assert len(stage.trainable()) == 4
    tensors["0.bias"].requires_grad_(False)
    assert len(stage.trainable()) == 3


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'nothing'"):
        names()[0]["nothing"]


class Constants(Stage):
    constants = ("pos", "scale")


def test_a_constant_on_another_device_is_copied_and_followed() -> None:
    pos, scale = torch.zeros(2), torch.ones(2, requires_grad=True)
    stage = Constants({}, {"pos": pos, "scale": scale}, torch.device("meta"))
    assert stage.pos.is_meta
    assert stage.scale.is_meta
    assert stage.trainable() == (stage.scale,)
    assert not pos.is_meta
    before = stage.pos, stage.scale
    stage.refresh()
    assert (stage.pos, stage.scale) == before
    with torch.no_grad():
        scale.add_(1)
    stage.refresh()
    assert stage.pos is before[0]
    assert stage.trainable() == (stage.scale,)
    assert stage.scale is not before[1]


def test_a_constant_on_the_stage_s_device_is_itself() -> None:
    pos, scale = torch.zeros(2), torch.ones(2)
    stage = Constants({}, {"pos": pos, "scale": scale}, torch.device("cpu"))
    assert stage.pos is pos
    assert not stage.copies


class Counts(Stage):
    states = ("deep.count", "deep.mean")
    mutates = ("deep.count", "deep.mean")
    rereads = ("deep.count",)


def test_scratch_buffers_stand_in_and_go() -> None:
    count, mean = torch.tensor(5.0), torch.tensor(6.0)
    stage = Counts({"deep.count": count, "deep.mean": mean}, {}, torch.device("cpu"))
    kept = keep(stage)
    count.add_(10)
    with instead(stage, scratch(stage, kept)):
        assert stage.deep.count.item() == 5
        stage.deep.count.add_(1)
        stage.deep.mean.add_(1)
    assert stage.deep.count is count
    assert stage.deep.mean is mean
    assert (count.item(), mean.item(), kept["deep.count"].item()) == (15, 6, 5)
