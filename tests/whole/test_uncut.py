"""With chunks=1 nothing is cut: inputs need no common batch size, and forward may count samples and take them apart."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError, InputError
from fxpipe.pipe.build.build_cache import MOST_RUNNING
from tests.helpers.marks import mostly_slow


class Net(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, *given: Any) -> Tensor:
        return self.body(self, *given)


def listed(net: Net, x: Tensor) -> Tensor:
    return net.head(torch.stack([net.second(sample).relu() for sample in list(net.first(x))]))


def padded(net: Net, x: Tensor) -> Tensor:
    parts = [sample[: 2 + at % 3] for at, sample in enumerate(net.first(x).unbind(0))]
    return net.head(net.second(F.pad(nn.utils.rnn.pad_sequence(parts, batch_first=True), (0, 4))))


def ranked(net: Net, x: Tensor) -> Tensor:
    order = net.first(x).sum(1).argsort()
    return net.head(net.second(net.first(x))[order][: x.shape[0] // 2 + 1])


def by_counts(net: Net, tiles: Tensor, counts: list[int]) -> Tensor:
    return net.head(torch.stack([net.second(part).mean(0) for part in net.first(tiles).split(counts)]))


def with_places(net: Net, x: Tensor, places: Tensor) -> Tensor:
    return net.head(net.second(net.first(x)) + net.second.weight[places].sum(0))


def of_lists(net: Net, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
    found = [net.head(net.second(net.first(image))) for image in images]
    losses = [F.mse_loss(one.mean(0), target["mean"]) for one, target in zip(found, targets, strict=True)]
    return torch.stack(losses).mean()


def of_graphs(net: Net, nodes: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
    """A graph isomorphism network: nodes add up their neighbours, and graphs their nodes."""

    def with_neighbours(x: Tensor) -> Tensor:
        return x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])

    x = net.second(with_neighbours(net.first(with_neighbours(nodes)).relu())).relu()
    return net.head(x.new_zeros(int(graph.max()) + 1, 8).index_add(0, graph, x))


def graphs(size: int) -> tuple[Any, ...]:
    graph = torch.arange(size).repeat_interleave(torch.arange(size) % 3 + 2)
    starts = torch.arange(len(graph) - 1)
    return torch.randn(len(graph), 6), torch.stack((starts, starts + 1))[:, graph[1:] == graph[:-1]], graph


def tiles(size: int) -> tuple[Any, ...]:
    return torch.randn(2 * size, 6), [1 + at % 3 for at in range(size - 1)] + [
        2 * size - sum(1 + at % 3 for at in range(size - 1))
    ]


def lists(size: int) -> tuple[Any, ...]:
    return [torch.randn(1 + at, 6) for at in range(size)], [{"mean": torch.randn(3)} for _ in range(size)]


BODIES: dict[Callable[..., Tensor], Callable[[int], tuple[Any, ...]]] = {
    listed: lambda size: (torch.randn(size, 6),),
    padded: lambda size: (torch.randn(size, 6),),
    ranked: lambda size: (torch.randn(size, 6),),
    by_counts: tiles,
    with_places: lambda size: (torch.randn(size, 6), torch.arange(3)),
    of_lists: lists,
    of_graphs: graphs,
}


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum()


CASES = list(product(BODIES, ["autograd", "code"]))
QUICK = [(ranked, "autograd"), (with_places, "code"), (of_lists, "autograd"), (by_counts, "code")]


@pytest.mark.parametrize(
    ("body", "backward"),
    mostly_slow(CASES, QUICK.__contains__),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_calls_and_steps_are_those_of_the_model(body: Callable[..., Tensor], backward: str) -> None:
    torch.manual_seed(0)
    plain = Net(body).double()
    pipe = fxpipe.compile(copy.deepcopy(plain), devices=2, chunks=1, schedule="1f1b", backward=backward)
    given = [double(BODIES[body](size)) for size in (4, 4, 5, 3)]
    for args in given:
        torch.testing.assert_close(pipe(*args), plain(*args))
        plain.zero_grad()
        pipe.zero_grad()
        expected = loss_of(plain(*args))
        expected.backward()
        torch.testing.assert_close(pipe.step(*args, loss_fn=loss_of), expected.detach())
        for one, two in zip(pipe.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)
    assert len([stage for stage in pipe.build.program.stages if stage.ops]) == 2
    pipe.close()


def double(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(double, value))
    if isinstance(value, dict):
        return {key: double(item) for key, item in value.items()}
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("body", [body for body in BODIES if body is not listed], ids=lambda body: body.__name__)
def test_what_is_cut_must_be_possible_to_cut(body: Callable[..., Tensor]) -> None:
    pipe = fxpipe.compile(Net(body), devices=2, chunks=2)
    with pytest.raises((CaptureError, InputError)):
        pipe(*BODIES[body](4))


def test_a_batch_that_can_have_any_size_keeps_it() -> None:
    net = Net(lambda net, x: net.head(net.second(net.first(x))))
    pipe = fxpipe.compile(net, devices=2, chunks=1)
    pipe(torch.randn(4, 6))
    graph = pipe.build.graph
    assert graph.inputs[0].batch_dim == 0
    pipe(torch.randn(7, 6))
    assert pipe.build.graph is graph


def test_what_cannot_be_captured_at_all_says_why_for_a_batch() -> None:
    def hooked(net: Net, x: Tensor) -> Tensor:
        x = net.first(x)
        x.register_hook(lambda grad: grad * 2)
        return net.second(x)

    pipe = fxpipe.compile(Net(hooked), devices=2, chunks=1)
    for _ in range(2):
        with pytest.raises(CaptureError, match="hangs a hook on a value in forward"):
            pipe(torch.randn(4, 6))


def test_more_kinds_of_calls_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpipe.capture.capture_call.MOST_TRACES", 3)
    plain = Net(listed)
    pipe = fxpipe.compile(copy.deepcopy(plain), devices=2, chunks=1)
    for size in (2, 3, 4, 5, 6, 2, 6):
        x = torch.randn(size, 6)
        torch.testing.assert_close(pipe(x), plain(x))
    pipe.close()


def test_kinds_of_calls_that_nobody_makes_any_more_end_their_threads() -> None:
    torch.manual_seed(0)
    net = Net(listed)
    plain, pipe = copy.deepcopy(net), fxpipe.compile(net, 2, 1)
    calls = [torch.randn(size, 6) for size in (*range(1, MOST_RUNNING + 4), 1)]
    before = threading.active_count()
    late = pipe(calls[0])  # its backward comes when its kind has been closed
    for x in calls:
        torch.testing.assert_close(pipe(x), plain(x))
    assert threading.active_count() - before <= 2 * MOST_RUNNING
    late.sum().backward()
    plain(calls[0]).sum().backward()
    for parameter, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad)
    pipe.close()
