"""What ranks do in test_interrupt_soak.py: Ctrl-C exactly where a message is half done, or not noted yet."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fxpipe import RankError
from fxpipe.engines.ranks.rank_engine import RankScheduler
from fxpipe.engines.ranks.rank_group import World
from fxpipe.engines.ranks.rank_run import RankRun
from fxpipe.engines.ranks.rank_transport import RankTransport
from fxpipe.engines.transports.open_pipes import OpenPipes
from fxpipe.engines.transports.same_machine import LocalPeer
from fxpipe.engines.transports.shared_memory import SharedBuffer, Slot
from fxpipe.engines.transports.tcp_peer import TcpPeer
from fxpipe.pipe.ranks import rank_builds
from fxpipe.pipe.ranks.rank_builds import RankBuilds
from fxpipe.pipe.ranks.rank_calls import RankCalls
from fxpipe.pipe.ranks.rank_pipe import RankPipe
from tests.whole.ranks.cases import SOON, apart, chain

Place = tuple[Any, str]
IN_STEPS: tuple[Place, ...] = (
    (RankCalls, "make"),
    (RankCalls, "_changed_shapes"),
    (RankCalls, "tell"),
    (RankCalls, "_listen"),
    (RankCalls, "_read"),
    (RankCalls, "_join"),
    (RankBuilds, "agree"),
    (RankBuilds, "live"),
    (RankScheduler, "run"),
    (RankScheduler, "_plan"),
    (RankScheduler, "_commit"),
    (RankRun, "take"),
    (RankRun, "_receive_rest"),
    (RankRun, "_conclude"),
    (RankRun, "outputs"),
    (RankTransport, "expect"),
    (RankTransport, "dispatch"),
    (RankTransport, "open_message"),
    (World, "slot"),
    (World, "put"),
    (World, "begin_to_tell"),
    (World, "told"),
    (World, "hear"),
    (World, "_heard"),
    (SharedBuffer, "begin"),
    (SharedBuffer, "slot"),
    (SharedBuffer, "write"),
    (SharedBuffer, "read"),
    (Slot, "stamp"),
    (LocalPeer, "ring"),
    (LocalPeer, "wait"),
    (TcpPeer, "next"),
    (TcpPeer, "send"),
    (TcpPeer, "_drain"),
    (TcpPeer, "_take"),
    (TcpPeer, "wait"),
)
IN_FIRST_STEPS: tuple[Place, ...] = (
    (RankBuilds, "agree"),
    (RankBuilds, "make"),
    (RankBuilds, "bind"),
    (RankBuilds, "live"),
    (rank_builds, "build_here"),
    (rank_builds, "build_like"),
    (rank_builds, "agree"),
    (World, "broadcast"),
    (World, "all_gather_object"),
    (RankScheduler, "join"),
)


@contextmanager
def pressed_at(place: Place, late: bool, presses: int) -> Iterator[list[int]]:
    """Ctrl-C before the first call of this function, or `late` after it. Yields the number of its calls."""
    owner, name = place
    kept, calls = getattr(owner, name), [0]

    def press() -> None:
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        first = calls[0] == 1
        if first and not late:
            press()
        found = kept(*args, **kwargs)
        if first and late:
            press()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield calls


def interrupted(pipe: RankPipe, group: Any, who: int, place: Place, late: bool, presses: int, data: Any) -> bool:
    """A step that is interrupted on one rank: all end soon, also where it cannot be stopped any more, and the rank
    raises. Returns whether it has come to the place."""
    rank, (x, y) = dist.get_rank(group), data
    where = f"{getattr(place[0], '__name__', place[0])}.{place[1]}, {'late' if late else 'early'}, rank {who}"
    told, calls, began = "", [0], time.monotonic()
    try:
        with pressed_at(place, late, presses if rank == who else 0) as calls:
            pipe.step(x, target=y, loss_fn=F.mse_loss)
    except KeyboardInterrupt:
        told = "KeyboardInterrupt"
    except RankError as error:
        told = str(error)
    assert time.monotonic() - began < SOON, f"{where}: {told}"
    assert (told == "KeyboardInterrupt") == (rank == who and calls[0] > 0), f"{where}: {told or 'nothing'}"
    assert rank == who or not told or "KeyboardInterrupt" in told, f"{where}: {told}"
    return calls[0] > 0


def press_everywhere(group: Any, far: bool, presses: int) -> None:
    """Ctrl-C at each place of a step, on each rank; the next step is exact each time."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = set[Place]()
    try:
        with apart(far):
            pipe, model, data = chain(group, "1f1b", timeout=65 + far)
        x, y = data
        loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
        wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for place in IN_STEPS:
            for who in range(size):
                for late in (False, True):
                    if interrupted(pipe, group, who, place, late, presses, data):
                        reached.add(place)
                    assert pipe.world.lost is None
                    model.zero_grad()
                    found = pipe.step(x, target=y, loss_fn=F.mse_loss)
                    torch.testing.assert_close(found, loss, rtol=1e-9, atol=0)
                    for name, p in model.named_parameters():
                        if name in wanted:
                            torch.testing.assert_close(p.grad, wanted[name], rtol=1e-9, atol=0)
                    model.zero_grad()
        pipe.close()
    finally:
        signal.signal(signal.SIGINT, handler)
    least = {LocalPeer, SharedBuffer, Slot} if not far else {TcpPeer}
    missed = [name for owner, name in IN_STEPS if owner in least and (owner, name) not in reached]
    assert not missed or rank not in (0, size - 1), missed


def press_in_first_steps(group: Any) -> None:
    """The same while ranks capture, plan and load: the next step is the first one that is done."""
    rank = dist.get_rank(group)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for place in IN_FIRST_STEPS:
            for who in range(2):
                for late in (False, True):
                    pipe, model, data = chain(group, "1f1b", timeout=65)
                    x, y = data
                    interrupted(pipe, group, who, place, late, 1, data)
                    model.zero_grad()
                    losses = pipe.collect(pipe.step(x, target=y, loss_fn=F.mse_loss).item())
                    assert losses == [losses[0]] * len(losses)
                    pipe.close()
        # Who closes a pipe and is interrupted has told the others all the same.
        pipe, _, (x, y) = chain(group, "1f1b", timeout=65)
        pipe.step(x, target=y, loss_fn=F.mse_loss)
        if rank == 0:
            with pressed_at((OpenPipes, "leave"), False, 1), pytest.raises(KeyboardInterrupt):
                pipe.close()
        else:
            with pytest.raises(RankError, match="rank 0 has closed this pipe"):
                pipe.step(x, target=y, loss_fn=F.mse_loss)
            pipe.close()
    finally:
        signal.signal(signal.SIGINT, handler)


def wait_alone(group: Any, presses: int) -> None:
    """Rank 1 waits for a call that rank 0 does not make, and is interrupted: it ends soon, rank 0 hears of it in its
    next call, and after they have compiled again the next step is exact."""
    rank = dist.get_rank(group)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pipe, _, (x, y) = chain(group, "1f1b", timeout=64)
        loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
        began = time.monotonic()
        if rank:
            with pressed_at((LocalPeer, "wait"), False, presses), pytest.raises(KeyboardInterrupt):
                pipe.step(x, target=y, loss_fn=F.mse_loss)
            assert time.monotonic() - began < SOON
        dist.barrier(group)
        for _ in range(2):
            with pytest.raises(RankError, match="rank 1 has closed this pipe: KeyboardInterrupt"):
                pipe.step(x, target=y, loss_fn=F.mse_loss)
        pipe.close()
        pipe, _, _ = chain(group, "1f1b", timeout=64)
        torch.testing.assert_close(pipe.step(x, target=y, loss_fn=F.mse_loss), loss, rtol=1e-9, atol=0)
        pipe.close()
    finally:
        signal.signal(signal.SIGINT, handler)


def press_thrice(group: Any) -> None:
    """The third Ctrl-C breaks what it comes in: all ranks hear that this one does not go on."""
    rank = dist.get_rank(group)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pipe, _, (x, y) = chain(group, "1f1b", timeout=67)
        pipe.step(x, target=y, loss_fn=F.mse_loss)
        began = time.monotonic()
        with (
            pressed_at((RankScheduler, "_plan"), False, 3 * rank),
            pytest.raises(KeyboardInterrupt if rank else RankError) as caught,
        ):
            pipe.step(x, target=y, loss_fn=F.mse_loss)
        assert rank or "rank 1 cannot go on: KeyboardInterrupt" in str(caught.value)
        assert time.monotonic() - began < SOON
        with pytest.raises(RankError, match="start all ranks again"):
            pipe.step(x, target=y, loss_fn=F.mse_loss)
        pipe.close()
    finally:
        signal.signal(signal.SIGINT, handler)
