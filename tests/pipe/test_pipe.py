"""What users do with a module, done with a pipe."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe


class Net(nn.Module):
    """A skip over the middle, a tied weight, a batch norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.middle = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        y = self.norm(self.middle(h) * self.scale) + h
        return F.linear(y, self.first.weight)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def pipe(model: nn.Module) -> Iterator[fxpipe.Pipe]:
    pipe = fxpipe.compile(model, devices=3, chunks=4)
    yield pipe
    pipe.close()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("devices", [["cpu:0"] * 3, ["cpu:0", "cpu:1", "cpu:0"], ["cpu:0", "cpu:0", "cpu"]], ids=str)
def test_a_device_may_have_several_stages(model: nn.Module, x: Tensor, devices: list[str], checkpoint: str) -> None:
    plain = copy.deepcopy(model)
    with contextlib.closing(fxpipe.compile(model, devices=devices, chunks=4, checkpoint=checkpoint)) as pipe:
        y, expected = pipe(x), plain(x)
        close(y, expected)
        y.sum().backward()
        expected.sum().backward()
        same_gradients(pipe, plain)
        assert len(pipe.schedule.devices) == len(set(devices))


def test_a_device_that_is_not_there_is_named(model: nn.Module, x: Tensor) -> None:
    with contextlib.closing(fxpipe.compile(model, devices=["cpu", "cuda:99"], chunks=4)) as pipe:
        with pytest.raises(fxpipe.PlanError, match="stage 1 is planned on cuda:99, and this machine has"):
            pipe(x)
    assert next(model.parameters()).device.type == "cpu"


def same_gradients(pipe: nn.Module, plain: nn.Module) -> None:
    for (name, a), (_, b) in zip(pipe.named_parameters(), plain.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            close(a.grad, b.grad)


def test_parameters_and_state_are_the_models_own(pipe: fxpipe.Pipe, model: nn.Module) -> None:
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(pipe.parameters(), model.parameters(), strict=True))
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert pipe.scale == 2.0
    assert pipe.middle is model.middle


@pytest.mark.parametrize("before", [True, False])
def test_optimizer_made_before_or_after(model: nn.Module, x: Tensor, before: bool) -> None:
    plain = copy.deepcopy(model)
    early = torch.optim.Adam(model.parameters())
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    optimizer = early if before else torch.optim.Adam(pipe.parameters())
    reference = torch.optim.Adam(plain.parameters())
    for _ in range(3):
        for net, opt in ((pipe, optimizer), (plain, reference)):
            opt.zero_grad()
            net(x).square().sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
    for a, b in zip(pipe.parameters(), plain.parameters(), strict=True):
        close(a, b)
    pipe.close()


def test_gradients_accumulate_over_calls(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    plain = copy.deepcopy(model)
    for net in (pipe, plain):
        net(x).sum().backward()
        net(2 * x).square().sum().backward()
    same_gradients(pipe, plain)
    pipe.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_between_calls(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    plain = copy.deepcopy(model)
    for freeze in (False, True, False):
        for net in (pipe, plain):
            net.zero_grad()
            net.middle[0].weight.requires_grad_(not freeze)
            net(x).sum().backward()
        same_gradients(pipe, plain)


def test_gradient_of_the_input_and_autograd_grad(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got = torch.autograd.grad(pipe(a).square().sum(), [a, *pipe.parameters()])
    expected = torch.autograd.grad(model(b).square().sum(), [b, *model.parameters()])
    for g, e in zip(got, expected, strict=True):
        close(g, e)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor, context: Any) -> None:
    with context():
        y = pipe(x)
        expected = model(x)
    assert not y.requires_grad
    close(y, expected)
    assert pipe(x).requires_grad


def test_train_and_eval(x: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8)).double()
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    assert pipe.training
    pipe(x)
    pipe.eval()
    assert not model.training
    assert not model[1].training
    close(pipe(x), model(x))
    model.train()
    assert not torch.equal(pipe(x), pipe(x)), "dropout is on again"
    pipe.close()


def test_batches_of_any_size(pipe: fxpipe.Pipe, model: nn.Module) -> None:
    for size in (8, 7, 3, 1, 9, 2):
        x = torch.randn(size, 8, dtype=torch.float64)
        close(pipe(x), model(x))


def test_the_schedule_is_that_of_the_last_batch(pipe: fxpipe.Pipe) -> None:
    """A batch of fewer samples than micro-batches has fewer of them. What is only prepared has not run."""
    chunks = pipe.options.chunks
    for size in (chunks - 1, 2 * chunks, 1):
        pipe(torch.randn(size, 8, dtype=torch.float64))
        ran = {action.micro_batch for row in pipe.schedule.devices for action in row}
        assert ran == set(range(min(size, chunks)))
    assert str(pipe.schedule).startswith("gpipe: 3 stages, 1 micro-batch\n")
    assert pipe.plan.chunks == chunks
    pipe.eval()
    pipe.prepare(torch.randn(1, 8, dtype=torch.float64))
    assert pipe.schedule.chunks == chunks


def test_autocast(model: nn.Module) -> None:
    model = model.float()
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = pipe(x), model(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    y.float().sum().backward()
    assert pipe(x).dtype == torch.float32
    pipe.close()


def test_grad_scaler(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    plain = copy.deepcopy(model)
    for net in (pipe, plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler.scale(net(x).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    for a, b in zip(pipe.parameters(), plain.parameters(), strict=True):
        close(a, b)


def test_hooks(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    seen: list[str] = []
    pipe.register_forward_hook(lambda *_: seen.append("forward"))
    model.first.weight.register_hook(lambda grad: seen.append("weight"))
    pipe(x).sum().backward()
    assert seen == ["forward", "weight"]


def test_load_state_dict_between_calls(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    pipe(x)
    other = Net().double()
    for assign in (False, True):
        pipe.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        close(pipe(x), other(x))


def test_replaced_parameter(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    pipe(x)
    model.middle[0].weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
    y = pipe(x)
    close(y, model(x))
    y.sum().backward()
    assert model.middle[0].weight.grad is not None


def test_changed_dtype(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    pipe(x)
    pipe.float()
    torch.testing.assert_close(pipe(x.float()), model(x.float()))


def test_attribute_of_the_model_changes(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    pipe(x)
    model.scale = 3.0
    close(pipe(x), model(x))


def test_attributes_are_set_on_the_model(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    pipe(x)
    pipe.scale = 5.0
    pipe.norm = nn.Identity()
    assert model.scale == 5.0
    assert isinstance(model.norm, nn.Identity)
    close(pipe(x), model(x))


def test_items_are_the_models() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    pipe = fxpipe.compile(layers, devices=2, chunks=2)
    assert len(pipe) == 3
    assert pipe[0] is layers[0]
    assert pipe[-1] is layers[2]
    assert list(pipe) == list(layers)
    assert layers[1] in pipe
    assert len(pipe[:2]) == 2
    with pytest.raises(IndexError):
        pipe[3]
    named = fxpipe.compile(nn.ModuleDict({"a": layers}), devices=2, chunks=2)
    assert named["a"] is layers
    assert list(named) == ["a"]


def test_a_model_without_items_has_none(pipe: fxpipe.Pipe) -> None:
    assert pipe  # as any module without a length
    for ask in (len, iter, lambda pipe: pipe[0]):
        with pytest.raises(TypeError, match=type(pipe.model).__name__):
            ask(pipe)


def test_the_signature_is_the_models(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    pipe(x)
    pipe.save(tmp_path)
    for shell in (pipe, fxpipe.load(tmp_path, model)):
        assert inspect.signature(shell.forward) == inspect.signature(model.forward)
        assert list(inspect.signature(shell.forward).parameters) == ["x"]
        close(shell.forward(x), model(x))
    assert inspect.getdoc(fxpipe.Pipe.forward).startswith("The model's outputs for the whole batch")


def test_forward_can_be_wrapped(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    inner = pipe.forward
    pipe.forward = lambda x: -inner(x)
    close(pipe(x), -model(x))


def test_two_pipes_of_one_class(model: nn.Module, x: Tensor) -> None:
    other = Net().double()
    a, b = fxpipe.compile(model, devices=2, chunks=2), fxpipe.compile(other, devices=3, chunks=4)
    for _ in range(2):
        close(a(x), model(x))
        close(b(x), other(x))
    a.close()
    close(b(x), other(x))
    b.close()


def test_deepcopy(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    pipe(x)
    twin = copy.deepcopy(pipe)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1)
    close(pipe(x), model(x))
    close(twin(x), twin.model(x))
    twin.close()


def test_pickle(pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    pipe(x)
    twin = pickle.loads(pickle.dumps(pipe))
    close(twin(x), model(x))
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    close(torch.load(file, weights_only=False)(x), model(x))
    twin.close()


def test_an_exception_in_a_stage(x: Tensor) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.table = nn.Embedding(4, 8)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            h = self.b(self.a(x))
            return h + self.table(ids)

    model = Picky().double()
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    good, bad = torch.zeros(8, dtype=torch.long), torch.tensor([0, 0, 0, 0, 0, 9, 0, 0])
    with pytest.raises(IndexError) as raised:
        pipe(x, bad)
    note = "\n".join(raised.value.__notes__)
    assert "stage 1" in note
    assert "micro-batch 2" in note
    assert "test_pipe.py" in note
    assert "self.table(ids)" in note
    close(pipe(x, good), model(x, good))
    pipe.close()


def test_closed_pipe(pipe: fxpipe.Pipe, x: Tensor) -> None:
    pipe(x)
    pipe.close()
    with pytest.raises(fxpipe.FxpipeError, match="closed"):
        pipe(x)


@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1", "cpu:1"], ["cpu:0", "cpu:1", "cpu:0"], ["cpu:0"] * 3])
def test_several_stages_on_one_device(model: nn.Module, x: Tensor, devices: list[str]) -> None:
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, devices=devices, chunks=4)
    for net in (pipe, plain):
        net(x).square().sum().backward()
    same_gradients(pipe, plain)
    assert len(pipe.stages) == pipe.schedule.num_stages == 3
    assert len(pipe.schedule.devices) == len(set(devices))
    assert len(pipe.build.timeline.devices) == len(set(devices))
    pipe.close()


def test_devices_as_a_cluster_and_a_profile_made_before(model: nn.Module, x: Tensor) -> None:
    cluster = fxpipe.Cluster.of(["cpu:0", "cpu:1"])
    first = fxpipe.compile(model, devices=cluster, chunks=2, example_inputs=x)
    assert first.build.cluster == cluster
    again = fxpipe.compile(model, devices=cluster, chunks=2, profile=first.build.profile)
    close(again(x), model(x))
    assert again.plan == first.plan
    first.close()
    again.close()


def test_a_constant_that_changes_at_every_call(x: Tensor) -> None:
    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.mask)

    # The mask is a plain attribute, not a buffer. Each other one was once planned and generated for anew.
    model = Scaled().double()
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    for step in range(4):
        model.mask = torch.full((8,), float(step), dtype=torch.float64)
        close(pipe(x), model(x))
    assert len(pipe._state.cache.builds) == len(pipe._state.cache.lives) == 1
    pipe.close()
