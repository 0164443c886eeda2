"""What users' models do besides arithmetic: each trait passes transparency, or is refused with the user's line.

Each model of `tests/helpers/traits.py` runs as a pipe and takes steps in one configuration; these go round from model
to model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.opaque_call import opaques
from tests.helpers.marks import mostly_slow
from tests.helpers.models import Case, vectors
from tests.helpers.traits import TRAITS, Checkpointed
from tests.helpers.transparency import Result, assert_same, build, inputs, plain, shown, step

DEVICES = CHUNKS = 3
BATCHES = (8, 7)
CHECKPOINTS = ("except_last", "always", "never")
SCHEDULES = ("1f1b", "zb-h1", "gpipe", "interleaved", "zb-v")


def models(turn: int) -> list[Any]:
    """(number, name) of each model; one in each eight, from `2 * turn` on, is not slow."""
    return [
        pytest.param(index, name, id=name, marks=() if index % 8 == 2 * turn else pytest.mark.slow)
        for index, name in enumerate(TRAITS)
    ]


def wanted(case: Case, model: nn.Module, batch: int) -> Result:
    """The model's own step. What it returns as it is, its tensors, does not come once for each micro-batch."""
    torch.manual_seed(batch)
    return plain(case, model, *inputs(case, batch), 1 if "whole" in case.traits else CHUNKS)


@contextmanager
def compiled(case: Case, model: nn.Module, **options: Any) -> Iterator[fxpipe.Pipe]:
    pipe = fxpipe.compile(model, DEVICES, CHUNKS, **{**case.options, **options})
    try:
        yield pipe
    finally:
        pipe.close()


def check_calls(case: Case, model: nn.Module, twin: nn.Module, **options: Any) -> None:
    """Calls of a pipe of the twin, with backward, in training, in eval, and in training again."""
    with compiled(case, twin, **options) as pipe:
        for training, batch in ((True, BATCHES[0]), (False, BATCHES[0]), (True, BATCHES[1])):
            model.train(training)
            pipe.train(training)
            expected = wanted(case, model, batch)
            torch.manual_seed(batch)
            assert_same(step(case, twin, pipe, *inputs(case, batch)), expected, case.tol)
        assert list(pipe.state_dict()) == list(model.state_dict())


def check_steps(case: Case, model: nn.Module, twin: nn.Module, **options: Any) -> None:
    """`pipe.step`, with the loss and the outputs."""
    with compiled(case, twin, **options) as pipe:
        for batch in BATCHES:
            expected = wanted(case, model, batch)
            output = pytree.tree_map_only(Tensor, Tensor.detach, (case.loss(expected.output), expected.output))
            torch.manual_seed(batch)
            args, kwargs = inputs(case, batch)
            twin.zero_grad()
            found = pipe.step(*args, loss_fn=case.loss, outputs=True, **kwargs)
            assert_same(shown(twin, args, kwargs, found), replace(expected, output=output), case.tol)


@pytest.mark.filterwarnings("ignore:use other layers", "ignore:'saved_variables' is deprecated")
@pytest.mark.parametrize(("index", "name"), models(0))
def test_a_pipe_is_the_model(index: int, name: str) -> None:
    case = TRAITS[name]
    check_calls(case, build(case), build(case), checkpoint=CHECKPOINTS[index % len(CHECKPOINTS)])


@pytest.mark.filterwarnings("ignore:use other layers", "ignore:'saved_variables' is deprecated")
@pytest.mark.parametrize(("index", "name"), models(1))
def test_a_step_is_the_models(index: int, name: str) -> None:
    case, around = TRAITS[name], index // len(CHECKPOINTS)
    options = {"schedule": SCHEDULES[index % len(SCHEDULES)], "checkpoint": CHECKPOINTS[around % len(CHECKPOINTS)]}
    check_steps(case, build(case), build(case), **options)


WRITING = [name for name, case in TRAITS.items() if "writes-parameters" in case.traits]


@pytest.mark.parametrize(
    "checkpoint", ["except_last", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("always", "never"))]
)
@pytest.mark.parametrize("name", mostly_slow(WRITING, "writes samples".__eq__))
def test_parameters_that_forward_writes(name: str, checkpoint: str) -> None:
    """Each micro-batch finds what the one before has written; a recomputation what its own forward found. Hooks on
    parameters see the gradient as in the plain model."""
    case = TRAITS[name]
    check_calls(case, build(case), build(case), checkpoint=checkpoint)
    model, twin = build(case), build(case)
    for one in (model, twin):
        for parameter in one.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: 2 * grad)
    check_calls(case, model, twin, checkpoint=checkpoint)
    for schedule in ("1f1b", "zb-h1"):
        check_steps(case, build(case), build(case), schedule=schedule, checkpoint=checkpoint)


@pytest.mark.parametrize("check", mostly_slow([check_calls, check_steps], [check_steps].__contains__))
def test_dropout_inside_of_torchs_checkpoint(check: Callable[..., None]) -> None:
    """The plain model does without the checkpoint, for its recomputation draws other numbers than the seeded ones."""
    case = replace(TRAITS["checkpointed"], make=lambda: Checkpointed(0.3), random=True)
    check(case, build(replace(case, make=lambda: Checkpointed(0.3, recompute=False))), build(case))


@pytest.mark.parametrize("check", mostly_slow([check_calls, check_steps], [check_steps].__contains__))
def test_einops_in_a_model(check: Callable[..., None]) -> None:
    """Its functions, and its layers between others."""
    einops = pytest.importorskip("einops")
    torch_layers = pytest.importorskip("einops.layers.torch")

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Sequential(torch_layers.Rearrange("b (t p) -> b t p", p=2), nn.Linear(2, 6), nn.Tanh())
            self.scale = nn.Parameter(torch.randn(3))
            self.head = nn.Sequential(torch_layers.Reduce("b t c -> b c", "mean"), nn.Linear(6, 8))

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            scale = einops.repeat(self.scale, "h -> b h t d", b=len(h), t=h.shape[1], d=2)
            h = einops.rearrange(h, "b t (h d) -> b h t d", h=3) * scale
            pooled = einops.reduce(h, "b h t d -> b h 1 d", "max")
            return self.head(einops.rearrange(h - pooled, "b h t d -> b t (h d)"))

    case = Case(Patches, vectors, frozenset())
    check(case, build(case), build(case))


# Refused --------------------------------------------------------------------------------------------------------------


class Body(nn.Module):
    """A model whose forward is `body`."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.fc = body, nn.Linear(8, 8)
        self.register_buffer("rows", torch.zeros(4, 8))
        self.register_buffer("next", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, self.fc(x))


def hook(self: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 0.5)
    return x * 2


def parameter_data(self: Any, x: Tensor) -> Tensor:
    self.fc.weight.data = self.fc.weight.data * 0.5
    return self.fc(x)


def derivative(self: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: y.sin().sum())(x)


def derivative_by_autograd(self: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]


def repeats(self: Any, x: Tensor) -> Tensor:
    return x.repeat_interleave(torch.arange(8), dim=1)


def branch(self: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 0 * self.fc.weight.sum() else -x


def index(self: Any, x: Tensor) -> Tensor:
    self.rows[self.next % 4] = x.detach().mean(0)
    return x + self.rows.sum(0)


def index_that_moves(self: Any, x: Tensor) -> Tensor:
    self.rows[self.next] = x.detach().mean(0)
    self.next += 1
    return x + self.rows.sum(0)


def batch_in_buffer(self: Any, x: Tensor) -> Tensor:
    self.rows = x * 2
    return x


REFUSED = {
    hook: r"x.register_hook.*hangs a hook on a value in forward.*autograd.Function",
    parameter_data: r"self.fc.weight.data = .*writes into fc.weight, a parameter",
    batch_in_buffer: r"self.rows = x \* 2\nsets the buffer rows, f32\[4, 8\], to f32\[b, 8\]; .* return the tensor",
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
@pytest.mark.parametrize("how", ["call", "step"])
def test_refused_with_the_line(body: Callable[[Any, Tensor], Any], how: str) -> None:
    case = Case(lambda: Body(body), vectors, frozenset())
    x = torch.randn(8, 8)
    with compiled(case, case.make()) as pipe:
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        with pytest.raises(CaptureError, match=rf"(?s)test_traits.py:\d+\n    .*{REFUSED[body]}"):
            pipe(x) if how == "call" else pipe.step(x, loss_fn=case.loss)
        assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict().items())


def rows_data(self: Any, x: Tensor) -> Tensor:
    self.rows.data = self.rows * 2 + x.detach().mean(0)
    return x + self.rows.sum(0)


TRACED_SINCE = {index, index_that_moves}  # torch 2.14 and later trace them
KEPT_WHOLE = [derivative, derivative_by_autograd, repeats, branch, index, index_that_moves]


@pytest.mark.filterwarnings("ignore::fxpipe.MixedSamplesWarning")
def test_a_buffer_that_gets_other_data_in_forward() -> None:
    """As often as the model itself, on each micro-batch in turn; the state_dict has what it is in the end."""
    case = Case(lambda: Body(rows_data), vectors, frozenset())
    model, own = build(case), build(case)
    x = torch.randn(8, 8).double()
    with compiled(case, model) as pipe:
        for _ in range(2):
            torch.testing.assert_close(pipe(x), torch.cat([own(part) for part in x.tensor_split(CHUNKS)]))
            torch.testing.assert_close(pipe.state_dict()["rows"], own.rows)


@pytest.mark.filterwarnings("ignore::fxpipe.MixedSamplesWarning")
@pytest.mark.parametrize("body", KEPT_WHOLE, ids=lambda body: body.__name__)
def test_what_cannot_be_traced_in_the_models_own_forward_is_kept_whole(body: Callable[[Any, Tensor], Any]) -> None:
    case = Case(lambda: Body(body), vectors, frozenset())
    model, own = build(case), build(case)
    x = torch.randn(8, 8).double()
    with compiled(case, model) as pipe:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = pipe(x)
        said = r"nothing is pipelined: .* because of test_traits.py:\d+"
        whole = any(re.search(said, str(one.message)) for one in told)
        by_itself = body in TRACED_SINCE or opaques(pipe.build.graph)  # the function, and not all of forward
        assert whole or (by_itself and len(pipe.stages) > 1)
        expected = torch.cat([own(part) for part in x.tensor_split(CHUNKS)])
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        for (name, mine), other in zip(model.named_parameters(), own.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, msg=name)
        for mine, other in zip(model.buffers(), own.buffers(), strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("how", ["call", "step"])
def test_layers_without_sizes_are_refused_until_the_model_has_run(how: str) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    x = torch.randn(6, 5)
    pipe = fxpipe.compile(model, 2, 2)
    with pytest.raises(CaptureError, match=r"0\.weight has no shape yet.*model\(x\)"):
        pipe(x) if how == "call" else pipe.step(x, loss_fn=torch.sum)
    expected = model(x)
    torch.testing.assert_close(pipe(x), expected)
    pipe.step(x, loss_fn=torch.sum)
    pipe.close()


def test_backward_hooks_on_modules_are_refused() -> None:
    for register in (nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook):
        model = Body(lambda self, x: self.fc(torch.tanh(x)))
        register(model.fc, lambda *_: None)
        with pytest.raises(CaptureError, match=r"a module in the model has a backward hook.*weight\.register_hook"):
            fxpipe.compile(model, 2, 2)(torch.randn(4, 8))
