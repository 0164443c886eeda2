"""Less usual things that users do with a module, done with a pipe: hooks inside, wrappers, threads, odd backwards."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import fxpipe
from fxpipe.capture import capture
from fxpipe.errors import CaptureError, PackageError
from fxpipe.ir.plan.plan import Plan, StagePlan
from tests.helpers.marks import mostly_slow

MODES = ["never", "except_last", "always"]
X = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.norm(self.middle(h)) + h


class Several(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.first(x))
        return {"early": h * 2, "late": self.norm(self.middle(h)), "side": self.middle[0](h).sin()}


Make = Callable[..., tuple[fxpipe.Pipe, nn.Module]]


@pytest.fixture
def make() -> Iterator[Make]:
    """A pipe, and a plain copy of its model."""
    made: list[fxpipe.Pipe] = []

    def pipe(kind: type[nn.Module] = Net, **options: Any) -> tuple[fxpipe.Pipe, nn.Module]:
        torch.manual_seed(0)
        model = kind().double()
        made.append(fxpipe.compile(model, **{"devices": 3, "chunks": 4} | options))
        return made[-1], copy.deepcopy(model)

    yield pipe
    for one in made:
        one.close()


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def same_gradients(pipe: nn.Module, plain: nn.Module) -> None:
    for (name, a), (_, b) in zip(pipe.named_parameters(), plain.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            close(a.grad, b.grad)


# A loss that the model computes itself --------------------------------------------------------------------------------


class Labelled(nn.Module):
    """Shapes computed with, as language models do; the loss leaves labels out, more in some samples than in others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.embed(ids)
        size = (*h.size()[:-1], self.weight.shape[1])
        logits = torch.mm(h.view(-1, h.size(-1)), self.weight).view(size)
        loss = F.cross_entropy(logits.view(-1, size[-1]), labels.view(-1))
        return {"loss": loss + 0.1 * logits.square().mean(), "masked": (logits * ids[..., None]).sum() / ids.sum()}


@pytest.mark.parametrize("samples", [8, 7, 3])
def test_a_loss_of_the_model_is_that_of_the_whole_batch(make: Make, samples: int) -> None:
    pipe, plain = make(Labelled, devices=2)
    ids, labels = torch.arange(5 * samples).view(samples, 5) % 6, torch.arange(5 * samples).view(samples, 5) % 5
    labels[0], labels[2, 1:] = -100, -100
    got, expected = pipe(ids, labels), plain(ids, labels)
    for name in expected:
        close(got[name], expected[name])
    (got["loss"] + got["masked"]).backward()
    (expected["loss"] + expected["masked"]).backward()
    same_gradients(pipe.model, plain)
    assert "totals = (" in pipe.scheduler.source


# A vmap on the other side of a cut ------------------------------------------------------------------------------------


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.vmap(lambda row: row * row.exp())(self.first(x))
        return self.second(torch.vmap(lambda a, b: a * b, in_dims=1, out_dims=1)(rows, x))


def test_gradients_come_back_through_a_vmap(make: Make) -> None:
    first, *rest = (op.name for op in capture(Mapped().double(), (X,)).ops)
    stages = StagePlan((first,), "cpu:0", "never"), StagePlan(tuple(rest), "cpu:1", "never")
    pipe, plain = make(Mapped, devices=None, chunks=None, plan=Plan("Mapped", stages, 4))
    pipe(X).square().sum().backward()
    plain(X).square().sum().backward()
    same_gradients(pipe.model, plain)


def test_a_vmap_whose_result_is_needed_late(make: Make) -> None:
    class Late(Mapped):
        def forward(self, x: Tensor) -> Tensor:
            early = torch.vmap(lambda row: row * row.exp())(self.first(x))
            return self.second(torch.tanh(x * 2).sin().exp().sin()) + early

    pipe, plain = make(Late, devices=2)
    pipe(X).square().sum().backward()
    plain(X).square().sum().backward()
    same_gradients(pipe.model, plain)
    entered = next(text for name, text in pipe.files.items() if "_vmap_increment_nesting" in text)
    assert "_vmap_decrement_nesting" in entered


def test_a_vmap_beside_a_total_of_the_batch(make: Make) -> None:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(y, target, weight=torch.arange(1.0, 9.0, dtype=y.dtype), label_smoothing=0.1)

    pipe, plain = make(Mapped)
    target = torch.arange(len(X)) % 8
    expected = loss(plain(X), target)
    expected.backward()
    close(pipe.step(X, target=target, loss_fn=loss), expected)
    same_gradients(pipe.model, plain)
    assert "_vmap_increment_nesting" not in pipe.files["totals.py"]


# Hooks inside the model -----------------------------------------------------------------------------------------------


def test_forward_hooks_before_and_after(make: Make) -> None:
    pipe, _ = make()
    model = pipe.model
    model.first.register_forward_hook(lambda module, args, output: output * 2)
    close(pipe(X), model(X))
    for register, hook in (
        (model.norm.register_forward_hook, lambda module, args, output: output.sin()),
        (model.middle[0].register_forward_pre_hook, lambda module, args: (args[0] * 3,)),
        (model.register_forward_hook, lambda module, args, output: -output),
    ):
        before = pipe(X)
        handle = register(hook)
        close(pipe(X), model(X))
        assert not torch.equal(pipe(X), before)
        handle.remove()
        close(pipe(X), before)


def test_a_hook_that_keeps_an_activation(make: Make) -> None:
    # The dict once got a tensor without memory: the one that capture traces with.
    pipe, plain = make()
    kept: list[dict[str, Tensor]] = [{}, {}]
    for net, found in zip((pipe.model, plain), kept, strict=True):
        net.middle.register_forward_hook(lambda module, args, output, found=found: found.update(h=output))
    for factor in (1, 2):
        pipe(X * factor)
        plain(X * factor)
        close(kept[0]["h"], kept[1]["h"])
    kept[0]["h"].sum().backward()
    kept[1]["h"].sum().backward()
    same_gradients(pipe, plain)


def test_hooks_that_cannot_be(make: Make) -> None:
    pipe, _ = make()
    pipe(X)
    handle = pipe.model.first.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"a module in the model has a backward hook.*weight\.register_hook"):
        pipe(X)
    handle.remove()
    pipe(X)
    seen: list[Any] = []

    def look(module: Any, args: Any, output: Any) -> None:
        seen[len(seen) :] = [output]

    handle = pipe.model.first.register_forward_hook(look)
    with pytest.raises(CaptureError, match="does it append to a list"):
        pipe(X)
    handle.remove()
    pipe(X)


def test_hooks_on_the_pipe(make: Make) -> None:
    pipe, plain = make()
    seen: list[str] = []
    pipe.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    pipe.register_full_backward_hook(lambda *_: seen.append("backward"))
    y = pipe(X.clone().requires_grad_())
    close(y, plain(X * 2))
    y.sum().backward()
    assert seen == ["backward"]


# As a module ----------------------------------------------------------------------------------------------------------


def test_names_and_modules(make: Make) -> None:
    pipe, plain = make()
    assert [name for name, _ in pipe.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in pipe.named_children()] == [name for name, _ in plain.named_children()]
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert next(iter(pipe.modules())) is pipe
    assert pipe.get_submodule("middle.0") is pipe.model.middle[0]


def test_apply_and_freeze(make: Make) -> None:
    pipe, _ = make()
    pipe(X)
    pipe.apply(lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.Linear) else None)
    assert (pipe.model.first.weight == 1).all()
    close(pipe(X), pipe.model(X))
    assert not pipe.requires_grad_(False)(X).requires_grad
    pipe.requires_grad_(True)(X).sum().backward()
    assert pipe.model.first.weight.grad is not None


def test_moving_average(make: Make) -> None:
    pipe, plain = make()
    pipe(X)
    before = threading.active_count()
    average, own = copy.deepcopy(pipe), torch.optim.swa_utils.AveragedModel(pipe)
    for _ in range(5):
        copy.deepcopy(pipe)
        with torch.no_grad():
            for a, b in zip(average.parameters(), pipe.parameters(), strict=True):
                a.lerp_(b, 0.1)
        own.update_parameters(pipe)
    assert threading.active_count() <= before, "a copy has no threads until it is called"
    close(average(X), plain(X))
    close(own(X), plain(X))
    average.close()
    own.module.close()


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half(make: Make, kind: torch.dtype) -> None:
    pipe, plain = make()
    pipe(X)
    y, wanted = pipe.to(kind)(X.to(kind)), plain.to(kind)(X.to(kind))
    assert y.dtype == kind
    torch.testing.assert_close(y, wanted)
    y.sum().backward()
    assert pipe.model.first.weight.grad.dtype == kind


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = inner
        self.head = nn.Linear(8, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def test_inside_another_module(make: Make) -> None:
    pipe, plain = make()
    outer, reference = Wrapper(pipe), Wrapper(plain)
    for net in (outer, reference):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            net(X).square().sum().backward()
            optimizer.step()
    same_gradients(outer, reference)
    state = outer.state_dict()
    assert list(state) == list(reference.state_dict())
    assert [name for name, _ in outer.named_parameters()] == [name for name, _ in reference.named_parameters()]
    outer.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert not pipe(X).any()
    del state["inner.first.weight"]
    assert outer.load_state_dict(state, strict=False).missing_keys == ["inner.first.weight"]
    outer.eval()
    assert not pipe.training
    assert not pipe.model.middle.training
    assert outer.train().float()(X.float()).dtype == torch.float32


def test_in_a_sequential_with_a_loss(make: Make) -> None:
    pipe, plain = make()
    for inner in (pipe, plain):
        torch.manual_seed(2)
        net = nn.Sequential(inner, nn.Linear(8, 3).double())
        F.cross_entropy(net(X), torch.arange(8) % 3).backward()
    same_gradients(pipe, plain)


def test_functional_call(make: Make) -> None:
    pipe, plain = make()
    doubled = {name: value * 2 for name, value in plain.named_parameters()}
    close(torch.func.functional_call(pipe, doubled, (X,)), torch.func.functional_call(plain, doubled, (X,)))
    close(pipe(X), plain(X))


@pytest.mark.filterwarnings("ignore:(?s).*the model asks for checkpoints of activations")
def test_checkpoint_inside_the_model(make: Make) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            return self.norm(checkpoint(self.middle, h, use_reentrant=False)) + h

    pipe, plain = make(Checkpointed)
    for net in (pipe, plain):
        net(X).square().sum().backward()
    same_gradients(pipe, plain)


# Other threads and processes ------------------------------------------------------------------------------------------


def test_a_data_loader_with_workers(make: Make) -> None:
    pipe, plain = make()
    pipe(X)  # the pipe has threads when the loader forks
    for (x,) in DataLoader(TensorDataset(X), batch_size=4, num_workers=2):
        close(pipe(x), plain(x))


@pytest.mark.parametrize("shared", [False, True], ids=["a pipe each", "one pipe"])
def test_two_threads(make: Make, shared: bool) -> None:
    pipes = [make()] * 2 if shared else [make(), make()]
    errors: list[BaseException] = []

    def work(pipe: fxpipe.Pipe, plain: nn.Module, seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(5):
                x = torch.randn(8, 8, dtype=torch.float64, generator=generator)
                found = torch.autograd.grad(pipe(x).square().sum(), list(pipe.parameters()))
                close(found, torch.autograd.grad(plain(x).square().sum(), list(plain.parameters())))
                with torch.no_grad():
                    close(pipe(x[:5]), plain(x[:5]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(*pair, seed)) for seed, pair in enumerate(pipes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors[0]


# Backward -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_backward_twice(make: Make, mode: str) -> None:
    pipe, plain = make(checkpoint=mode)
    for net in (pipe, plain):
        loss = net(X).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    same_gradients(pipe, plain)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_double_backward(make: Make, mode: str, linear: bool) -> None:
    # With a linear loss, and with autograd.grad, a recomputing stage once left terms out without a word.
    pipe, plain = make(checkpoint=mode)
    penalties = []
    for net in (pipe, plain):
        x = X.clone().requires_grad_()
        loss = net(x).sum() if linear else net(x).square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        penalties.append(torch.autograd.grad(slope.square().sum(), list(net.parameters()), allow_unused=True))
    close(penalties[0], penalties[1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "used", mostly_slow([["early"], ["late"], ["side"], ["early", "side"]], [["late"], ["side"]].__contains__)
)
def test_only_some_outputs_in_the_loss(make: Make, mode: str, used: list[str]) -> None:
    pipe, plain = make(Several, checkpoint=mode)
    for net in (pipe, plain):
        found = net(X)
        sum(found[name].square().sum() for name in used).backward()
    same_gradients(pipe, plain)


@pytest.mark.parametrize("mode", MODES)
def test_only_some_micro_batches_in_the_loss(make: Make, mode: str) -> None:
    pipe, plain = make(checkpoint=mode)
    for rows in (slice(0, 2), slice(3, 5), slice(6, 8), slice(0, 0)):
        for net in (pipe, plain):
            net.zero_grad()
            net(X)[rows].square().sum().backward()
        for a, b in zip(pipe.parameters(), plain.parameters(), strict=True):
            # A micro-batch that no loss uses has no gradient where the plain model has zeros.
            close(torch.zeros_like(a) if a.grad is None else a.grad, b.grad)


@pytest.mark.parametrize("mode", MODES)
def test_two_calls_then_two_backwards(make: Make, mode: str) -> None:
    pipe, plain = make(checkpoint=mode)
    for net in (pipe, plain):
        first, second = net(X).square().sum(), net(2 * X).sum()
        first.backward()
        second.backward()
    same_gradients(pipe, plain)


def test_hooks_on_saved_tensors(make: Make) -> None:
    pipe, plain = make()
    with torch.autograd.graph.save_on_cpu():
        pipe(X).sum().backward()
    plain(X).sum().backward()
    same_gradients(pipe, plain)


# On the meta device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [torch.empty(8, 8, device="meta"), torch.ones(8, 8)], ids=["meta", "real"])
def test_a_model_on_the_meta_device(example: Tensor) -> None:
    with torch.device("meta"):
        model = Net()
    pipe = fxpipe.compile(model, devices=3, chunks=4, example_inputs=example)
    assert "Net: 3 stages" in pipe.explain()
    assert "class Stage1" in pipe.files["stage1.py"]
    for attempt in (lambda: pipe(X.float()), lambda: pipe.stages):
        with pytest.raises(PackageError, match=r"it is on the meta device; call pipe.materialize\(\)"):
            attempt()
    plain = Net()
    pipe.to_empty(device="cpu").load_state_dict(plain.state_dict())
    torch.testing.assert_close(pipe(X.float()), plain(X.float()))
    pipe.close()


def test_prepared_for_a_loss_that_knows_the_whole_batch() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 5)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.linear(x), labels)

    labels = torch.tensor([0, 1, -100, 2, -100, -100, 3, 4])
    model = Masked()
    pipe = fxpipe.compile(model, devices=2, chunks=4, example_inputs=(X.float(), labels))
    torch.testing.assert_close(pipe(X.float(), labels), model(X.float(), labels))
    pipe.close()
