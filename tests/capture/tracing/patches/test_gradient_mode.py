"""One trace for calls with gradients, under no_grad and in inference mode, and one for each where forward asks."""

from __future__ import annotations

import copy
from contextlib import closing, nullcontext
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from tests.helpers.marks import mostly_slow
from tests.helpers.models import MODELS
from tests.helpers.transparency import build, inputs
from tests.whole.test_both_modes import captures

MODES: dict[str, Any] = {"gradients": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
X = torch.randn(7, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.norm(self.a(x))))


class Detaches(Net):
    """Has its own regions without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            y = y + self.a(y)
        return self.a(y)


class Enables(Net):
    """Always has gradients for a part, which nothing shows outside."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(x)
        with torch.enable_grad():
            return self.a(y)


class AsksForTheMode(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        return y * 2 if torch.is_grad_enabled() else y * 3


class AsksATensor(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        return y * 2 if y.requires_grad else y * 3


class AsksWhatMadeIt(Net):
    """Dynamo refuses to tell this where there are gradients."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        return y * 3 if y.grad_fn is None else y * 2


class AsksWhetherItIsALeaf(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        return y * 3 if y.is_leaf else y * 2


class Updates(Net):
    """Writes a parameter, which is allowed without gradients only."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.a.bias.mul_(0.5)
        return self.b(self.a(x))


def check(model: nn.Module, twin: nn.Module, pipe: Any, mode: str) -> None:
    """A call in this mode is the plain model's."""
    with MODES[mode]():
        got, wanted = pipe(X), torch.cat([twin(part) for part in X.tensor_split(2)])
    assert (got.requires_grad, got.is_inference()) == (wanted.requires_grad, wanted.is_inference())
    torch.testing.assert_close(got, wanted)
    if mode == "gradients":
        for one, result in ((model, got), (twin, wanted)):
            one.zero_grad()
            result.square().sum().backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("order", [*permutations(MODES)], ids="-".join)
@pytest.mark.parametrize("kind", [Net, Detaches, Enables])
def test_one_trace_serves_all_modes(kind: type[nn.Module], order: tuple[str, ...]) -> None:
    model = kind()
    twin = copy.deepcopy(model)
    with captures() as made, closing(fxpipe.compile(model, devices=2, chunks=2, deferred_batch_norm=False)) as pipe:
        for mode in (*order, *order):
            check(model, twin, pipe, mode)
    assert len(made) == 1


@pytest.mark.parametrize("order", [("gradients", "no_grad", "gradients"), ("no_grad", "gradients", "no_grad")])
@pytest.mark.parametrize("kind", [AsksForTheMode, AsksATensor, AsksWhetherItIsALeaf])
def test_what_asks_for_the_mode_has_a_trace_for_each(kind: type[nn.Module], order: tuple[str, ...]) -> None:
    model = kind()
    twin = copy.deepcopy(model)
    with closing(fxpipe.compile(model, devices=2, chunks=2)) as pipe:
        for mode in order:
            check(model, twin, pipe, mode)


@pytest.mark.parametrize("kind", [AsksWhatMadeIt, Updates])
def test_what_is_allowed_without_gradients_only(kind: type[nn.Module]) -> None:
    model = kind().eval()
    twin = copy.deepcopy(model)
    with closing(fxpipe.compile(model, devices=1, chunks=1)) as pipe:
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(pipe(X), twin(X))
    torch.testing.assert_close(model.a.bias, twin.a.bias)


class KeptWhole(Net):
    """Has a part that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Sequential(Turns(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.c(self.a(x)))


class Turns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.filterwarnings("ignore:c.0 is kept whole")
@pytest.mark.parametrize("order", [*permutations(MODES)], ids="-".join)
def test_a_part_that_is_kept_whole(order: tuple[str, ...]) -> None:
    model = KeptWhole()
    twin = copy.deepcopy(model)
    with captures() as made, closing(fxpipe.compile(model, devices=2, chunks=2)) as pipe:
        for mode in (*order, *order):
            check(model, twin, pipe, mode)
    assert len(made) == 1 or order[0] != "gradients"  # else what it returns is learnt again, with gradients


QUICK = ("dropout", "counter", "experts")


@pytest.mark.parametrize(
    ("index", "name"), mostly_slow(enumerate(MODELS), lambda one: one[1] in QUICK, every=3), ids=list(MODELS)
)
def test_results_are_those_of_separate_traces(index: int, name: str) -> None:
    """With gradients and then without them, in either of torch's modes in turn."""
    case = MODELS[name]
    found = []
    for shared in (True, False):
        model = build(case)
        torch.manual_seed(5)
        with closing(fxpipe.compile(model, devices=2, chunks=3, **case.options)) as pipe:
            pipe._state.cache.call_capture.grad_mode.shared &= shared
            outputs = []
            for mode in ("gradients", ("no_grad", "inference")[index % 2]):
                args, kwargs = inputs(case, 7)
                with MODES[mode]():
                    outputs += [x for x in pytree.tree_leaves(pipe(*args, **kwargs)) if isinstance(x, Tensor)]
        found.append(([(x.detach().clone(), x.requires_grad) for x in outputs], dict(model.named_buffers())))
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
