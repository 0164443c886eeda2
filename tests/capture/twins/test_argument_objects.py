"""What forward does to the user's own objects among its arguments is done, as by the plain model."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError, PackageError
from tests.helpers.marks import mostly_slow


class Part:
    """Hangs on a `Cache`."""

    def __init__(self) -> None:
        self.count = 0


class Cache:
    """What a user's own cache may have: tensors, counters, lists, and objects that are met twice."""

    def __init__(self) -> None:
        self.h: Tensor | None = None
        self.count = 0
        self.part = self.again = Part()
        self.kept: list[Tensor] = []
        self.last: Any = None


class Net(nn.Module):
    """Changes what it is given in each way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache, outs: list[Tensor], named: dict[str, Any]) -> tuple[Tensor, Cache]:
        h = self.a(x).relu()
        if cache.h is not None:
            h = h + cache.h
        cache.h = h
        cache.count += 1
        cache.part.count += 2
        cache.kept.append(h * 2)
        cache.last = (cache.part, h)
        outs.append(h)
        named["h"] = h
        named["n"] = named.get("n", 0) + 1
        return self.b(h), cache


def equal(got: Any, wanted: Any) -> None:
    """Whether two nests are equal, objects included."""
    assert type(got) is type(wanted)
    if isinstance(got, Tensor):
        torch.testing.assert_close(got, wanted)
    elif isinstance(got, (list, tuple, deque)):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            equal(one, other)
    elif isinstance(got, dict):
        assert got.keys() == wanted.keys()
        for key, value in got.items():
            equal(value, wanted[key])
    elif hasattr(got, "__dict__"):
        equal(vars(got), vars(wanted))
    else:
        assert got == wanted


@pytest.mark.parametrize("chunks", mostly_slow([1, 2], (2).__eq__))
@pytest.mark.parametrize("grad", [False, True])
def test_changes_of_arguments_in_calls(chunks: int, grad: bool) -> None:
    """Objects that are empty at first, and filled later; their gradients reach the model."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    with torch.set_grad_enabled(grad):
        pipe = fxpipe.compile(model, devices=2, chunks=chunks)
        mine: tuple[Any, ...] = (Cache(), [], {})
        theirs: tuple[Any, ...] = (Cache(), [], {})
        for _ in range(4):
            x = torch.randn(4, 4)
            wanted, _ = plain(x, *theirs)
            got, cache = pipe(x, *mine)
            equal(got, wanted)
            equal(mine, theirs)
            assert cache is mine[0]
            assert mine[0].last[0] is mine[0].part is mine[0].again
            assert all(tensor.untyped_storage().nbytes() for tensor in mine[1])
    if grad:
        mine[0].h.sum().backward()
        theirs[0].h.sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            equal(one.grad, other.grad)
    pipe.close()


def test_changes_of_arguments_in_steps() -> None:
    torch.manual_seed(0)
    plain = Net()
    pipe = fxpipe.compile(copy.deepcopy(plain), devices=2, chunks=2)
    x, mine, theirs = torch.randn(4, 4), Cache(), Cache()
    loss = pipe.step(x, mine, [], {}, loss_fn=lambda out: out[0].square().mean())
    wanted = plain(x, theirs, [], {})[0].square().mean()
    wanted.backward()
    equal(loss, wanted.detach())
    with torch.no_grad():
        torch.testing.assert_close(mine.h, theirs.h, check_layout=False)
    assert mine.count == mine.part.count // 2 == len(mine.kept) == 1
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        equal(one.grad, other.grad)
    pipe.close()


def test_a_failed_call_changes_nothing() -> None:
    class Fails(Net):
        def forward(self, x: Tensor, cache: Cache, outs: list[Tensor], named: dict[str, Any]) -> tuple[Tensor, Cache]:
            out, cache = super().forward(x, cache, outs, named)
            return out.view(3, 5), cache

    cache, outs = Cache(), list[Tensor]()
    pipe = fxpipe.compile(Fails(), devices=2, chunks=1)
    with pytest.raises(RuntimeError, match="invalid for input"):
        pipe(torch.randn(4, 4), cache, outs, {})
    equal((cache, outs), (Cache(), []))


class Writes(nn.Module):
    """Writes into its arguments in place: one by its alias, a view of one, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x += 1
        table[:, 0].copy_(self.a(x).sum(1))
        count.add_(x.shape[1])
        return self.b(x) + table, x, count


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("way", ["no_grad", "grad", "step"])
def test_writes_into_arguments(chunks: int, way: str) -> None:
    torch.manual_seed(0)
    plain = Writes()
    pipe = fxpipe.compile(copy.deepcopy(plain), devices=2, chunks=chunks)
    count, own_count = torch.tensor(0), torch.tensor(0)
    for _ in range(3):
        x, table = torch.randn(4, 4), torch.zeros(4, 4)
        own_x, own_table = x.clone(), table.clone()
        with torch.set_grad_enabled(way != "no_grad"):
            wanted = plain(x, table, count)
            if way == "step":
                pipe.step(own_x, own_table, own_count, loss_fn=lambda out: out[0].square().mean())
            else:
                got = pipe(own_x, own_table, own_count)
                equal(got, wanted)
                assert got[1] is own_x
                assert got[2] is own_count
        torch.testing.assert_close((own_x, own_table, own_count), (x, table.detach(), count))
        if way == "grad":
            got[0].square().mean().backward()
        if way != "no_grad":
            wanted[0].square().mean().backward()
            for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
                equal(one.grad, other.grad)
    pipe.close()


def test_what_is_written_and_shared_is_refused() -> None:
    x, pipe = torch.randn(4, 4), fxpipe.compile(Writes(), devices=2, chunks=1)
    with pytest.raises(CaptureError, match=r"x \+= 1\nwrites into the input x, which shares its memory with table"):
        pipe.forward_only(x, x[:], torch.tensor(0))


def test_such_a_call_is_not_saved(tmp_path: Any) -> None:
    pipe = fxpipe.compile(Writes(), devices=2, chunks=1)
    pipe.forward_only(torch.randn(4, 4), torch.zeros(4, 4), torch.tensor(0))
    with pytest.raises(PackageError, match="Writes changes its arguments in such a call"):
        pipe.save(tmp_path / "out")
    pipe.close()


class Output(OrderedDict[str, Tensor]):
    """An argument of a class that is a dict, as the results of transformers are."""


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, output: Output) -> Tensor:
        return self.b(self.a(x) + output["hidden"].mean(1) * output["hidden"].shape[1])


def test_sizes_in_a_subclass_of_dict() -> None:
    model = Reads()
    pipe = fxpipe.compile(model, devices=2, chunks=1)
    for samples, length in ((2, 3), (4, 5), (6, 7)):
        x, output = torch.randn(samples, 4), Output(hidden=torch.randn(samples, length, 4))
        torch.testing.assert_close(pipe.forward_only(x, output), model(x, output))
    pipe.close()
