"""Derivatives in forward, as in potentials, physics-informed networks and scores: all is as in the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import fxpipe
from fxpipe.capture.opaque.derivatives import depended_on
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.opaque_call import opaques
from tests.helpers.marks import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore:.*is kept whole")
WIDTH = 6


class Potential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 5), nn.Softplus(), nn.Linear(5, 1))

    def total(self, x: Tensor) -> Tensor:
        return self.energy(x).square().sum()


class ByAutograd(Potential):
    def forward(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(self.total(x), x, create_graph=True)[0]


class OfInput(Potential):
    """As potentials are written: positions need a gradient from here on, and further ones are taken of the first."""

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        (force,) = torch.autograd.grad(self.total(x), x, create_graph=True)
        return force + torch.autograd.grad(force.sum(), x, create_graph=self.training)[0]


class Grad(Potential):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(self.total)(x)


class Jvp(Potential):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.func.jvp(self.energy, (x,), (x.sin(),))[1]


class Jacrev(Potential):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(self.energy))(x)[:, 0]


class Dual(Potential):
    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return x * forward_ad.unpack_dual(self.energy(forward_ad.make_dual(x, x.sin()))).tangent


class Inside(nn.Module):
    """In a submodule, with something before and after."""

    def __init__(self, *kinds: type[Potential]) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 3)
        self.middle = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.middle:
            x = x + part(x)
        return self.last(x)


class AtTop(Potential):
    """In the model's own forward, around submodules."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.kind.forward(self, self.first(x)))


class Forces(nn.Module):
    """As in SchNetPack: the derivative of what other modules have computed, by what it was computed from."""

    def forward(self, energy: Tensor, x: Tensor) -> Tensor:
        found = torch.autograd.grad([energy], [x], [torch.ones_like(energy)], create_graph=True, allow_unused=True)[0]
        return torch.zeros_like(x) if found is None else -found


class SchNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.filters, self.out = (
            nn.Embedding(3, 4),
            nn.Sequential(nn.Linear(1, 4), nn.Softplus()),
            nn.Linear(4, 1),
        )
        self.forces = Forces()

    def forward(self, kinds: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        distance = (x[:, :, None] - x[:, None]).square().sum(-1, keepdim=True).add(1e-2).sqrt()
        h = torch.tanh((self.filters(distance) * self.kinds(kinds)[:, None]).sum(2))
        energy = self.out(h).sum((1, 2))
        return energy, self.forces(energy, x)


class Residual(nn.Module):
    """The residual of the heat equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.speed = (
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        u = self.net(x)
        (du,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 1].sum(), x, create_graph=True)
        return u, du[:, 0] - self.speed * ddu[:, 1]


class Score(nn.Module):
    """Sliced score matching."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        score, along = torch.func.jvp(self.net, (x,), (v,))
        return (v * along).sum(1) + 0.5 * (v * score).sum(1).square()


class Head(nn.Module):
    """A model as a submodule, with something after it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.scale = body, nn.Parameter(torch.ones(()))

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.body(*given)
        return one, two * self.scale


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


X, ATOMS, KINDS = drawn(6, WIDTH), drawn(6, 3, 3), torch.arange(18).reshape(6, 3) % 3


def loss_of(found: Any) -> Tensor:
    return (
        sum((part.square().mean() for part in found), torch.zeros(()))
        if isinstance(found, tuple)
        else found.square().mean()
    )


def check(model: nn.Module, given: tuple[Tensor, ...], kept: list[str], **options: Any) -> fxpipe.Pipe:
    """A call and a step are the plain model's, as are all gradients."""
    model = model.double()
    plain = copy.deepcopy(model)
    wanted = loss_of(plain(*map(Tensor.clone, given)))
    wanted.backward()
    pipe = fxpipe.compile(model, 2, **options)
    for how in ("step", "call"):  # the call runs what was traced for the step
        model.zero_grad()
        if how == "call":
            found = loss_of(pipe(*map(Tensor.clone, given)))
            found.backward()
        else:
            found = pipe.step(*map(Tensor.clone, given), loss_fn=loss_of)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        for (name, mine), own in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, own.grad, rtol=1e-9, atol=1e-9, msg=name)
    assert [opaque.path for opaque in opaques(pipe.build.graph)] == kept
    return pipe


@pytest.mark.parametrize(
    ("kind", "mode"),
    mostly_slow(
        [(ByAutograd, "never"), *((kind, "always") for kind in (ByAutograd, OfInput, Jvp, Dual))],
        [(ByAutograd, "never"), (OfInput, "always")].__contains__,
    ),
)
def test_in_a_submodule(kind: type[Potential], mode: str) -> None:
    check(Inside(kind), (X,), ["middle.0"], chunks=2, checkpoint=mode).close()


@pytest.mark.parametrize("kinds", [(Grad, Grad), pytest.param((Jacrev,), marks=pytest.mark.slow)])
def test_in_layers_that_are_alike_and_of_a_vmap(kinds: tuple[type[Potential], ...]) -> None:
    kept = [f"middle.{place}" for place in range(len(kinds))]
    check(Inside(*kinds), (X,), kept, chunks=3, checkpoint="except_last").close()


@pytest.mark.parametrize("kind", [ByAutograd, Grad])
def test_in_the_models_own_forward(kind: type[Potential]) -> None:
    pipe = check(AtTop(kind), (X,), [""], chunks=3, checkpoint="always", backward="code")
    assert len(pipe.stages) == 1
    pipe.close()


def test_the_model_is_told_to_be_one_op() -> None:
    with pytest.warns(UserWarning, match="nothing is pipelined: .*it takes derivatives inside of forward"):
        fxpipe.compile(AtTop(Grad).double(), 2, 1)(X)


@pytest.mark.parametrize(
    ("model", "given", "kept"),
    [
        (SchNet, (KINDS, ATOMS), ""),
        (lambda: Head(SchNet()), (KINDS, ATOMS), "body"),
        (lambda: Head(Residual()), (X,), "body"),
        (Score, (X, X.flip(0)), ""),
    ],
)
def test_what_people_write(model: Callable[[], nn.Module], given: tuple[Tensor, ...], kept: str) -> None:
    check(model(), given, [kept], chunks=2, checkpoint="always").close()


def test_the_stage_runs_its_first_forward_with_gradients() -> None:
    pipe = check(Inside(ByAutograd), (X,), ["middle.0"], chunks=2, checkpoint="always", cut=["middle.0"])
    assert [stage.derives for stage in pipe.stages] == [False, True]
    pipe.close()


def test_a_loss_that_is_derived_by_the_models_input_is_refused_with_its_line() -> None:
    def slope(found: tuple[Tensor, Tensor]) -> Tensor:
        return torch.autograd.grad(found[0].sum(), found[1], create_graph=True)[0].square().mean()

    class WithInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.net(x), x

    pipe = fxpipe.compile(WithInput().double(), 2, 2)
    with pytest.raises(CaptureError, match=r"test_derivatives.py:\d+(?s:.*)loss_fn differentiates with respect"):
        pipe.step(X.clone().requires_grad_(), loss_fn=slope)
    pipe.close()


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("hooked", mostly_slow([False, True], (True).__eq__))
def test_a_derivative_of_the_pipe(mode: str, hooked: bool) -> None:
    """The third one, of a call of what takes one inside; also with hooks on parameters."""
    model = Inside(ByAutograd).double()
    pipe, found = fxpipe.compile(copy.deepcopy(model), 2, 2, checkpoint=mode), []
    for net in (model, pipe):
        if hooked:
            for parameter in net.parameters():
                parameter.register_hook(torch.sin)
        x = X.clone().requires_grad_()
        out = net(x).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (again,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        total = again.square().sum() + slope.sum()
        found.append(torch.autograd.grad(total, list(net.parameters()), allow_unused=True))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    pipe.close()


def test_results_depend_on_what_autograd_goes_back_to() -> None:
    """Not by way of another given tensor, and not where a gradient is stopped."""
    weight, x, other = (torch.ones(2, requires_grad=True) for _ in range(3))
    given = x * 2
    first, second = (given * 3).unbind()
    assert depended_on([first * weight, "no tensor"], (weight, x, given, other)) == (True, False, True, False)
    assert depended_on([second.detach() + other], (weight, x, given, other)) == (False, False, False, True)
    assert depended_on([given], (given,)) == (True,)
    assert depended_on([torch.ones(2)], (torch.ones(2), weight)) == (False, False)
