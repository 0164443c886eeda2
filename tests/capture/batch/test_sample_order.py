"""Rows of samples that reshapes, repeats, joins and cuts bring into another order."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.errors import CaptureError
from tests.helpers.marks import mostly_slow

Body = Callable[[Tensor], Tensor]


class Runs(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def mixed(body: Body, x: Tensor) -> str | int:
    """The dimension of the samples in what the body returns, or why they are mixed."""
    try:
        graph = capture(Runs(body), (x,), reduce="cat")
    except CaptureError as error:
        return str(error)
    [output] = graph.outputs
    assert output.batch_dim is not None
    return graph.mixed[0].what if graph.mixed else output.batch_dim


def by_row(x: Tensor) -> Tensor:
    """Four rows of each sample: all of the first sample, then all of the second."""
    return x.unflatten(1, (4, 2)).flatten(0, 1).repeat(1, 4)


def token(x: Tensor) -> Tensor:
    """Behind a token that is the same for all samples, the sample."""
    return torch.cat((torch.ones(1, 1, 8).expand(x.shape[0], -1, -1), x.unsqueeze(1)), 1)


KEEPS: dict[str, Body] = {
    "repeated and back": lambda x: x.repeat(4, 1).exp().view(4, x.shape[0], 8),
    "the first of each": lambda x: x.repeat(4, 1)[: x.shape[0]],
    "the last of each": lambda x: x.repeat(4, 1)[-x.shape[0] :],
    "the middle": lambda x: x.repeat(4, 1)[x.shape[0] : 3 * x.shape[0]].view(2, -1, 8),
    "split": lambda x: x.repeat(4, 1).split([x.shape[0], 3 * x.shape[0]])[1].view(3, -1, 8),
    "joined, cut again": lambda x: torch.cat((x, by_row(x))).exp()[x.shape[0] :].view(x.shape[0], 4, 8),
    "an empty list of numbers before": lambda x: torch.cat((torch.tensor([]), x.view(-1, 2, 4)), dim=-2),
    "a token, in another order": lambda x: torch.cat(
        (token(x).add(1)[:, :1].repeat(4, 1, 1), by_row(x).unsqueeze(1)), 1
    ).view(x.shape[0], 64),
    "constants, in another order": lambda x: by_row(x) + torch.zeros(x.shape[0], 8).repeat(4, 1),
}
MIXES: dict[str, Body] = {
    "repeated, for rows": lambda x: x.repeat(4, 1).view(x.shape[0], 4, 8),
    "transposed, for rows": lambda x: x.view(-1, 4, 2).transpose(0, 1).flatten().view(-1, 8),
    "concatenated": lambda x: torch.cat((x.repeat(4, 1), by_row(x)), 1).view(x.shape[0], 4, 16),
    "stacked": lambda x: torch.stack((x.repeat(4, 1), by_row(x)), 1).view(x.shape[0], 4, 16),
    "every fourth": lambda x: x.repeat(4, 1)[::4],
    "from the fourth on": lambda x: x.repeat(4, 1)[3 : 3 + x.shape[0]],
    "narrowed": lambda x: x.repeat(4, 1).narrow(0, 3, x.shape[0]),
    "joined, as one": lambda x: torch.cat((x, by_row(x))).view(5, x.shape[0], 8),
    "joined, and cut inside": lambda x: torch.cat((x, by_row(x)))[: 2 * x.shape[0]].view(2, -1, 8),
    "the sample, in another order": lambda x: torch.cat(
        (token(x)[:, 1:].repeat(4, 1, 1), by_row(x).unsqueeze(1)), 1
    ).view(x.shape[0], 64),
    "rows of constants": lambda x: x.repeat(4, 1) * torch.ones(x.shape[0], 1).mul(torch.arange(4)).view(-1, 1),
    "a token that is written": lambda x: torch.cat(
        (token(x)[:, :1].add_(x.unsqueeze(1)).repeat(4, 1, 1), by_row(x).unsqueeze(1)), 1
    ).view(-1, 64),
}


@pytest.mark.parametrize("name", KEEPS)
def test_rows_of_a_sample_stay_its_own(name: str) -> None:
    body, x = KEEPS[name], torch.randn(6, 8)
    dim = mixed(body, x)
    assert isinstance(dim, int), dim
    torch.testing.assert_close(torch.cat([body(x[:2]), body(x[2:])], dim), body(x))


@pytest.mark.parametrize("name", MIXES)
def test_rows_for_those_of_another_sample_are_found(name: str) -> None:
    body, x = MIXES[name], torch.randn(6, 8)
    assert isinstance(mixed(body, x), str)
    parts, whole = [body(x[:2]), body(x[2:])], body(x)
    same = [dim for dim in range(whole.dim()) if sum(part.shape[dim] for part in parts) == whole.shape[dim]]
    assert not any(torch.allclose(torch.cat(parts, dim), whole) for dim in same)


STEPS: dict[str, Body] = {
    "fold": lambda x: x.flatten(0, 1) if x.dim() > 2 else x,
    "swap": lambda x: x.transpose(0, 1) if x.dim() > 2 else x,
    "repeat": lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
    "join": lambda x: torch.cat((x, x.flip(-1))),
    "before": lambda x: x.view(2, x.shape[0] // 2, *x.shape[1:]),
    "behind": lambda x: x.reshape(x.shape[0] // 2, 2, *x.shape[1:]),
    "wide": lambda x: x.reshape(x.shape[0] // 2, 2 * x.shape[1], *x.shape[2:]),
    "narrow": lambda x: x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:]),
    "half": lambda x: x[x.shape[0] // 2 :],
    "chunk": lambda x: x.chunk(2)[1],
}


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["fold", "repeat", "join"]), st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=5))
def test_what_is_not_found_to_mix_does_not(first: str, names: list[str]) -> None:
    def body(x: Tensor) -> Tensor:
        for name in (first, *names):
            x = STEPS[name](x)
        return x

    x = torch.arange(4 * 2 * 16.0).view(4, 2, 16)
    try:
        whole, parts = body(x), [body(x[:2]), body(x[2:])]
        dim = mixed(body, x)
    except (RuntimeError, IndexError):
        return  # some size cannot be halved
    if isinstance(dim, int):
        assert torch.equal(torch.cat(parts, dim), whole), (first, names)


class Windows(nn.Module):
    """A transformer of images whose layers attend within windows, each with a class token, and then all together."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 17, 4))
        self.inside, self.across, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        x = torch.cat((self.token.expand(count, -1, -1), x.flatten(1, 2)), 1) + self.places
        first, x = x[:, :1], x[:, 1:].view(count, 2, 2, 2, 2, 4)
        x = x.transpose(2, 3).reshape(count * 4, 4, 4)
        x = torch.cat((first.repeat(4, 1, 1), x), 1)
        x = x + (self.inside(x) @ x.mT).softmax(-1) @ x
        shape, whole = x.shape, x.view(x.shape[0] // 4, 4 * x.shape[1], 4)
        whole = (self.across(whole) @ whole.mT).softmax(-1) @ whole
        x = x + whole.view(shape)
        x = x[:, 1:].reshape(count, 2, 2, 2, 2, 4).permute(0, 1, 3, 2, 4, 5).reshape(count, 4, 4, 4)
        return self.head(torch.tanh(x)).squeeze(-1)


@pytest.mark.parametrize("chunks", mostly_slow([2, 3], (2).__eq__))
def test_windows(chunks: int) -> None:
    torch.manual_seed(0)
    model, x, y = Windows().double(), torch.randn(6, 4, 4, 4).double(), torch.randn(6, 4, 4).double()
    pipe = fxpipe.compile(copy.deepcopy(model), devices=2, chunks=chunks)
    found = pipe.step(x, target=y, loss_fn=nn.functional.mse_loss)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    torch.testing.assert_close(found, loss.detach(), rtol=1e-9, atol=1e-12)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, dict(model.named_parameters())[name].grad, rtol=1e-9, atol=1e-12)
