"""A model on the meta device gets values that depend on the seed, and not on who makes which part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe.errors import CheckpointError, MaterializeError
from fxpipe.ir.graph.graph import called
from fxpipe.pipe.materialize import slots_of
from tests.helpers.marks import mostly_slow

TOKENS = torch.arange(24).reshape(4, 6) % 11


class Scale(nn.Module):
    """Has parameters, and nothing that sets them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    """Tied weights; a parent that initialises its child's bias, as attention does; buffers that are saved, and one that
    is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = Scale()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.arange(6.0)[:, None], persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.head(self.norm(self.scale(x)))


def init(module: nn.Module, path: str) -> None:
    if isinstance(module, Scale):
        module.weight.data = torch.rand(8)  # as some libraries do it
    if path == "":
        module.places.copy_(torch.arange(6.0)[:, None])


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def loss_of(out: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), ids.flatten())


def made(seed: int = 3) -> nn.Module:
    model = on_meta(Net)
    fxpipe.materialize(model, seed, init=init)
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    return {slot.full: slot.now for slot in slots_of(model) if slot.now is not None}


def same(left: nn.Module, right: nn.Module) -> bool:
    a, b = values(left), values(right)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class Peak(TorchDispatchMode):
    """The most bytes that tensors on the CPU have had at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.device.type == "cpu":
            storage = result.untyped_storage()
            self.alive[storage._cdata] = storage.nbytes()
        self.most = max(self.most, sum(self.alive.values()))
        return result


# Values ---------------------------------------------------------------------------------------------------------------


def test_stages_and_the_plain_model_begin_alike() -> None:
    plain = made()
    state = torch.get_rng_state()
    pipe = fxpipe.compile(on_meta(Net), devices=3, chunks=2, schedule="1f1b", example_inputs=TOKENS)
    pipe.materialize(seed=3, init=init)
    assert same(pipe.model, plain)
    assert torch.equal(torch.get_rng_state(), state)
    assert pipe.model.head.weight is pipe.model.embed.weight
    assert not same(plain, made(seed=4))
    loss = pipe.step(TOKENS, target=TOKENS, loss_fn=loss_of)
    assert loss.isfinite()
    pipe.eval()
    plain.load_state_dict(pipe.state_dict())
    torch.testing.assert_close(pipe(TOKENS), plain.eval()(TOKENS))
    pipe.close()


@pytest.mark.parametrize("backward", mostly_slow(["autograd", "code"], "autograd".__eq__))
def test_a_step_under_autocast_is_captured_in_its_types(backward: str) -> None:
    """Autocast does nothing for tensors on the meta device."""
    plain = made()
    pipe = fxpipe.compile(on_meta(Net), devices=2, chunks=1, schedule="1f1b", example_inputs=TOKENS, backward=backward)
    pipe.materialize(seed=3, init=init)
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipe.step(TOKENS, target=TOKENS, loss_fn=loss_of)
        expected = loss_of(plain(TOKENS), TOKENS)
    expected.backward()
    assert {str(op.type)[:4] for op in pipe.build.graph.ops if called(op) == "linear"} == {"bf16"}
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, one), two in zip(pipe.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=2e-2, atol=2e-3, msg=name)


def test_each_part_is_what_it_is_in_the_whole() -> None:
    plain, model = made(), on_meta(Net)
    keys = list(values(model))
    for part in range(5):
        fxpipe.materialize(model, 3, init=init, only=keys[part::5])
    assert same(model, plain)


def test_modules_that_are_there_keep_what_they_have() -> None:
    model = on_meta(lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True))  # whose _reset_parameters sets all of it
    fxpipe.materialize(model, only={key for key in values(model) if key.startswith("encoder")})
    with torch.no_grad():
        model.encoder.layers[0].linear1.weight.fill_(7)
    fxpipe.materialize(model)
    assert model.encoder.layers[0].linear1.weight.eq(7).all()
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_values_are_of_the_distribution_that_the_module_has() -> None:
    layers = nn.ModuleList([nn.Linear(64, 64, device="meta"), nn.Linear(64, 64, device="meta")])
    fxpipe.materialize(layers)
    first, second = (layer.weight for layer in layers)
    assert 0.07 < first.std() < 0.0744  # uniform within 1/8
    assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.05


def test_what_a_user_has_put_on_parameters_stays() -> None:
    model = nn.Linear(2, 2, device="meta")
    model.weight.decay, model.bias.requires_grad = False, False
    fxpipe.materialize(model)
    assert (model.weight.decay, model.bias.requires_grad) == (False, False)
    assert not model.bias.is_meta


def test_a_buffer_off_the_meta_device_keeps_its_values() -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("places", torch.arange(8.0, device="cpu"), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + self.places)

    model = on_meta(Places)
    pipe = fxpipe.compile(model, devices=2, chunks=2, example_inputs=torch.ones(4, 8))
    pipe.materialize()
    torch.testing.assert_close(pipe(torch.ones(4, 8)), model(torch.ones(4, 8)))
    pipe.close()


class MadeOfNumbers(nn.Module):
    """Makes tensors of Python's numbers on the device of its input: a cache begins as an empty one, and grows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        cache = torch.tensor([], dtype=x.dtype, device=x.device)
        cache = torch.cat([cache, x], dim=-1)
        x = x * torch.tensor([2.0] * 8, device=x.device) + x.new_tensor(0.5)
        return self.second(x) + torch.as_tensor([[1.0]], device=x.device), cache


def test_tensors_made_of_numbers_on_the_meta_device() -> None:
    model, x = on_meta(MadeOfNumbers), torch.randn(4, 8)
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    pipe.prepare(x)
    pipe.materialize(seed=1)
    torch.testing.assert_close(pipe(x), model(x))
    pipe.close()


def test_memory_is_that_of_the_part() -> None:
    model = nn.ModuleList(nn.Linear(64, 64, device="meta") for _ in range(8))
    with Peak() as peak:
        fxpipe.materialize(model, only={key for key in values(model) if key[0] in "23"})
    assert peak.most < 1.1 * 2 * 4 * (64 * 64 + 64)
    assert {key for key, tensor in values(model).items() if not tensor.is_meta} == {
        f"{i}.{name}" for i in (2, 3) for name in ("weight", "bias")
    }


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["file", "folder", "nested folder"])
def test_from_a_checkpoint(form: str, tmp_path: Path) -> None:
    plain, path = made(), tmp_path / "saved"
    if form == "file":
        torch.save(plain.state_dict(), path)
    else:
        held = plain.state_dict()
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            dcp.save(held if form == "folder" else {"model": held, "step": 3}, checkpoint_id=path)
    model = on_meta(Net)
    fxpipe.materialize(model, checkpoint=path, init=init)  # for `places`, which state_dict() does not have
    assert same(model, plain)
    part = on_meta(Net)
    fxpipe.materialize(part, checkpoint=path, only={"head.weight"})
    assert torch.equal(part.embed.weight, plain.embed.weight)
    assert part.head.bias.is_meta


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3, 2)}, tmp_path / "saved")
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(CheckpointError, match=r"weight: \[3, 2\], and the model has \[2, 2\]"):
        fxpipe.materialize(model, checkpoint=tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"bias \(parameter of Linear\): missing"):
        fxpipe.materialize(model, checkpoint=tmp_path / "saved")
    assert model.weight.is_meta


# Refusals -------------------------------------------------------------------------------------------------------------


def test_tensors_that_nobody_sets() -> None:
    model = on_meta(Net)
    with pytest.raises(MaterializeError) as caught:
        fxpipe.materialize(model)
    message = str(caught.value)
    assert "scale.weight (parameter of Scale): Scale has no reset_parameters\n" in message
    assert "places (buffer of Net): it was computed in __init__, and the meta device computes nothing\n" in message
    assert "if isinstance(module, Net): module.places.copy_(...)" in message
    assert all(tensor.is_meta for tensor in values(model).values())
    with pytest.raises(MaterializeError, match=r"scale.weight .*; init did not set it"):
        fxpipe.materialize(model, init=lambda module, path: None)


class Library(Net):
    """Its library sets all that is not loaded, buffers that __init__ computes too."""

    def _init_weights(self, module: nn.Module) -> None:
        init(module, "" if module is self else "child")


def test_the_error_names_the_librarys_own_way() -> None:
    model = on_meta(Library)
    with pytest.raises(MaterializeError, match=r"\nPass init=lambda module, path: model\._init_weights\(module\)"):
        fxpipe.materialize(model)
    fxpipe.materialize(model, init=lambda module, path: model._init_weights(module))
    assert not any(tensor.is_meta for tensor in values(model).values())


def test_an_error_in_a_modules_initialisation_says_which() -> None:
    class Odd(nn.Linear):
        def reset_parameters(self) -> None:
            raise ZeroDivisionError("odd")

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
        model.append(torch.nn.utils.skip_init(nn.Linear, 2, 2, device="meta"))
    model[2].__class__ = Odd
    with pytest.raises(ZeroDivisionError) as caught:
        fxpipe.materialize(model)
    assert caught.value.__notes__ == ["in reset_parameters of 2 (Odd), on the way to its first values"]
    assert model[0].weight.is_meta


class Twice(nn.Module):
    """Draws for two tensors in one go, for the first not at all on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(4, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.first)
        nn.init.normal_(self.second)


def test_a_part_of_a_module_is_what_it_is_in_the_whole() -> None:
    plain, model = on_meta(Twice), on_meta(Twice)
    fxpipe.materialize(plain)
    fxpipe.materialize(model, only={"second"})
    assert torch.equal(model.second, plain.second)
    assert model.first.is_meta
    with torch.no_grad():
        model.second.zero_()
    fxpipe.materialize(model)
    assert torch.equal(model.first, plain.first)
    assert model.second.eq(0).all()


class Pair(nn.Sequential):
    """Initialises its children, in place; or `apart`, from a tensor that is copied."""

    def __init__(self, apart: bool) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.apart = apart

    def reset_parameters(self) -> None:
        for child in self:
            fill = nn.init.orthogonal_ if self.apart else nn.init.trunc_normal_
            fill(child.weight)


def test_what_a_parent_sets_does_not_depend_on_the_part() -> None:
    plain, model = on_meta(lambda: Pair(False)), on_meta(lambda: Pair(False))
    fxpipe.materialize(plain)
    fxpipe.materialize(model, only={"1.weight", "1.bias"})
    assert torch.equal(model[1].weight, plain[1].weight)
    whole, part = on_meta(lambda: Pair(True)), on_meta(lambda: Pair(True))
    fxpipe.materialize(whole)
    with pytest.raises(MaterializeError, match="drawn apart and then copied, so they would depend on the part"):
        fxpipe.materialize(part, only={"1.weight", "1.bias"})
