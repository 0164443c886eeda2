"""What ranks say before a call, with two of them in one process: the leader's call first, then that of the other."""

from __future__ import annotations

import pickle
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxpipe.errors import RankError
from fxpipe.pipe.ranks.rank_arguments import CallArguments
from fxpipe.pipe.ranks.rank_calls import Header, RankCalls
from fxpipe.runtime.interrupts import InterruptShield


class World:
    """What the leader tells is there when the other one hears."""

    def __init__(self, rank: int, said: deque[bytes]) -> None:
        self.rank, self.leads, self.said, self.others = rank, rank == 0, said, (1 - rank,)
        self.told = 0  # announcements of new shapes
        self.interrupts = InterruptShield()

    def tell(self, *_: int, data: bytes) -> None:
        self.told += pickle.loads(data).given is not None
        self.said.append(data)

    def hear(self, peer: int) -> bytes:
        return self.said.popleft()


class Two:
    """Two ranks; `tried` has the shapes with which the second one goes ahead, `refused` why it fails, `told` how many
    announcements the leader had made when each of its calls began."""

    def __init__(self) -> None:
        self.said: deque[bytes] = deque()
        self.ranks = [RankCalls(World(rank, self.said)) for rank in range(2)]
        self.tried: list[list[int]] = []
        self.refused: list[str] = []
        self.told: list[int] = []

    def lead(self, given: CallArguments, kind: int = 0) -> Any:
        return self.ranks[0].make(lambda given: self.take(0, given, kind), given, self.join_failed_call)

    def follow(self, given: CallArguments, kind: int = 0) -> Any:
        def call(given: CallArguments) -> Any:
            self.tried.append(list(given[0][0].shape))
            return self.take(1, given, kind)

        return self.ranks[1].make(call, given, self.join_failed_call)

    def take(self, rank: int, given: CallArguments, kind: int) -> Any:
        if rank == 0:
            self.told.append(self.ranks[0].world.told)
        if given[1]:
            raise ValueError("not this one")
        scheduler = SimpleNamespace(random=False, run=lambda batch, chunks, scale, seed, given: (batch, chunks, seed))
        return self.ranks[rank].take(scheduler, given[0], 4, kind)[0]

    def join_failed_call(self, header: Header, looks: CallArguments, error: BaseException) -> None:
        self.refused.append(f"{header.kind} {list(looks[0][0].shape)} {error}")


def batch(rows: int, **kwargs: Any) -> CallArguments:
    return (torch.zeros(rows, 2),), kwargs, None


NOTHING: CallArguments = (), {}, None


def test_looks_are_told_where_they_are_new() -> None:
    two = Two()
    for rows in (8, 8, 6, 8):
        (x,), chunks, seed = two.lead(batch(rows))
        assert (list(x.shape), chunks, seed) == ([rows, 2], 4, 0)
        (x,), *_ = two.follow(NOTHING)
        assert (x.device.type, list(x.shape)) == ("meta", [rows, 2])
    assert two.told == [1, 1, 2, 3]  # before the leader captures, and the other one, too
    assert two.tried == [[8, 2], [8, 2], [8, 2], [6, 2], [6, 2], [8, 2]]  # as in the call before, then as they are
    assert not two.refused


def test_the_leader_fails() -> None:
    two = Two()
    two.lead(batch(8))
    two.follow(NOTHING)
    with pytest.raises(ValueError, match="not this one"):
        two.lead(batch(8, more=1))
    with pytest.raises(RankError, match=r"^rank 0: ValueError: not this one$"):
        two.follow(NOTHING)
    assert not two.refused
    told = two.ranks[0].world.told
    two.lead(batch(8))
    assert two.ranks[0].world.told == told + 1  # nobody knows what the others have heard
    two.follow(NOTHING)


def test_another_rank_fails() -> None:
    two = Two()
    for rows in (8, 6):  # in the second call with looks that are old, and then again
        two.lead(batch(rows), kind=3)
        with pytest.raises(ValueError, match="not this one"):
            two.follow(((), {"more": 1}, None), kind=3)
    assert two.refused == ["3 [8, 2] not this one", "3 [6, 2] not this one"]
    two.lead(batch(8))
    with pytest.raises(RankError, match=r"rank 1 was given argument 0 of type torch.float32 and shape \[7, 2\]"):
        two.follow(batch(7))
    assert len(two.refused) == 3


def test_another_rank_is_interrupted_before_it_has_heard_of_new_shapes() -> None:
    two = Two()
    two.lead(batch(8))
    two.follow(NOTHING)
    two.lead(batch(6), kind=3)

    def interrupted(given: CallArguments) -> None:
        raise KeyboardInterrupt("now")

    with pytest.raises(KeyboardInterrupt):
        two.ranks[1].make(interrupted, NOTHING, two.join_failed_call)
    assert two.refused == ["3 [6, 2] now"]
    assert not two.said


def test_calls_of_different_kinds() -> None:
    two = Two()
    two.lead(batch(8), kind=1)
    with pytest.raises(RankError, match="this call is of another kind on rank 1 than on rank 0"):
        two.follow(NOTHING, kind=2)
    assert len(two.refused) == 1
    assert two.refused[0].startswith("1 [8, 2] this call is of another kind")
