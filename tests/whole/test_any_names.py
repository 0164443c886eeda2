"""A model may call its parts whatever torch lets it: what stages, nn.Module or generated code call something is no
exception."""

from __future__ import annotations

import builtins
import copy
import keyword
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from fxpipe.codegen.text.source_names import RESERVED, STAGE_NAMES, state_path
from fxpipe.runtime import Stage
from fxpipe.runtime.stage import own_names
from tests.helpers.marks import mostly_slow

ODD = ["a-b", "a b", "é", "ﬁ", "01", "1", "a'b", 'say "hi"', "# noqa", "x\\n", "__mangled", "_", "l", "{x}", "字"]
USED = ["m", "i", "j", "x", "draw", "relu", "linear", "add", "mul", "piece_3", "forward", "loss_fn", "target", "model"]
ALL = sorted({*own_names(), *dir(object), *keyword.kwlist, *dir(builtins), *RESERVED, *ODD, *USED})
OWN = sorted({*sorted(own_names())[::2], "slots", "parts", "regions", "replace", "device", "copies"})
WHOLE = pytest.mark.filterwarnings("ignore:.*is kept whole:UserWarning")
MOST = sorted({*ALL} - {*dir(builtins)} | {"print", "len", "ValueError"})


def test_the_names_of_stages_are_all_reserved() -> None:
    """Also those that a stage only has when it is made."""
    assert own_names() >= {"slots", "parts", "replace", "give_back", "_put_state", "_differentiable", "copies", "run"}
    assert own_names() >= STAGE_NAMES  # Dynamo adds one to classes that it has seen


@given(st.lists(st.sampled_from(ALL), min_size=1, max_size=3, unique=True), st.text(min_size=1))
@settings(max_examples=60, deadline=None)
def test_any_path_leads_to_its_tensor(names: list[str], other: str) -> None:
    """What generated code writes for a path finds the model's tensor, and the stage still works."""
    other = other.replace(".", "_")
    paths = dict.fromkeys([".".join([*names, "weight"]), f"{other}.{names[0]}", f"{other}.{other}", f"{names[-1]}_.x"])
    kind = type("Kind", (Stage,), {"states": tuple(paths), "mutates": (next(iter(paths)),)})
    tensors = {path: nn.Parameter(torch.zeros(1)) for path in paths}
    stage = kind(tensors, {}, torch.device("cpu"))
    for path, tensor in tensors.items():
        assert eval(state_path(path), {"self": stage}) is tensor
    assert stage.device == torch.device("cpu")
    assert {id(x) for x in stage.trainable()} == {id(x) for x in tensors.values()}
    assert stage.state_dict().keys() == tensors.keys()
    stage.replace(next(iter(paths)), torch.ones(1))
    stage.refresh()
    stage.give_back()
    assert len(stage.slots) == len(paths)


class Named(nn.Module):
    """Uses a part of each name: as a submodule, a parameter, and a buffer that it counts in."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.held = nn.Module(), nn.Module(), nn.Module()  # in a tuple: no submodules by themselves
        self.layers, self.scales, self.counts = self.held
        self.names = [name for name in names if not hasattr(self.layers, name)]
        for name in self.names:
            self.layers.add_module(name, nn.Linear(3, 3, bias=False))
            self.scales.register_parameter(name, nn.Parameter(torch.rand(3)))
            self.counts.register_buffer(name, torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for name in self.names:
            x = torch.tanh(getattr(self.layers, name)(x)) * getattr(self.scales, name)
            getattr(self.counts, name).add_(1)
            x = x + getattr(self.counts, name)
        return self.last(x)


class Top(Named):
    """The same parts, in the model itself: half of the names are submodules, half parameters and buffers."""

    def __init__(self, names: list[str]) -> None:
        super().__init__([])
        self.names = [name for name in names if not hasattr(self, name)]
        for index, name in enumerate(self.names):
            if index % 3 == 0:
                self.add_module(name, nn.Linear(3, 3, bias=False))
            elif index % 3 == 1:
                self.register_parameter(name, nn.Parameter(torch.rand(3)))
            else:
                self.register_buffer(name, torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, name in enumerate(self.names):
            part = getattr(self, name)
            x = torch.tanh(part(x) if index % 3 == 0 else x + part)
        return self.last(x)


def groups(names: list[str], size: int) -> list[list[str]]:
    names = [name for name in names if "." not in name]
    return [names[at : at + size] for at in range(0, len(names), size)]


def check(model: nn.Module, **options: Any) -> fxpipe.Pipe:
    """Calls and steps of a pipe against the model: results, gradients, buffers."""
    twin, x = copy.deepcopy(model), torch.randn(4, 3)
    pipe = fxpipe.compile(model, devices=2, chunks=1, **options)
    loss = pipe.step(x, target=torch.zeros(4, 3), loss_fn=nn.functional.mse_loss)
    wanted = nn.functional.mse_loss(twin(x), torch.zeros(4, 3))
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    for (name, here), there in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad, msg=name)
    torch.testing.assert_close(pipe(x), twin(x))
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    return pipe


GROUPED = [(kind, names) for kind in (Named, Top) for names in groups(MOST, 60)]


@pytest.mark.parametrize(
    ("kind", "names"),
    mostly_slow(GROUPED, lambda one: (one[1] in groups(MOST, 60)[::2]) == (one[0] is Named)),
    ids=lambda one: one[0] if isinstance(one, list) else one.__name__,
)
def test_a_model_may_use_any_name(kind: type[Named], names: list[str]) -> None:
    check(kind(names)).close()


def test_compiled_and_saved_stages_know_them_too(tmp_path: Path) -> None:
    """`self["device"]` is the model's, `self.device` the stage's."""
    model = Top(OWN)
    pipe = check(model, compile_stages="eager")
    pipe.save(tmp_path)
    loaded, x = fxpipe.load(tmp_path, model), torch.randn(4, 3)
    torch.testing.assert_close(loaded(x), model(x))
    keys = [key for stage in loaded.stages for key in stage.state_dict()]
    assert sorted(keys) == sorted(key for key in model.state_dict() if not key.startswith("counts"))


class Device(nn.Module):
    """Has a parameter `device`, and makes a tensor on the device where it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.device = nn.Parameter(torch.rand(3))
        self.first = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.device + torch.arange(3, device=x.device)


def test_a_device_of_the_models_beside_that_of_the_stage() -> None:
    pipe = check(Device(), compile_stages="eager")
    source = "".join(stage.source for stage in pipe.stages)
    assert 'self["device"]' in source
    assert "device=self.device" in source


class Kept(nn.Module):
    """Cannot be traced; what it calls its tensors is what a stage calls what it keeps whole."""

    def __init__(self) -> None:
        super().__init__()
        self.run, self.stage = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
        self.forward_, self.tensor = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.tensor(x * self.run) + self.forward_(x) * self.stage


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slots, self.last = Kept(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.slots(x)) * self.slots.run + self.slots.tensor(x)


@WHOLE
def test_a_submodule_kept_whole_may_use_them() -> None:
    pipe = check(Holds())
    assert any("opaque" in stage.source for stage in pipe.stages)


@WHOLE
def test_a_constant_is_not_called_like_what_is_kept_whole() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mask_0, self.mask = nn.Linear(3, 3), Doubles(), [torch.rand(3)]  # mask_0: also mask[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.mask_0(self.first(x)) * self.mask[0]

    check(Model())


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2
