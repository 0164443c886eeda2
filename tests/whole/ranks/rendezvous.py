"""What ranks do in test_rendezvous.py: steps over a process group with NCCL's rules."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fxpipe
from fxpipe import RankError
from fxpipe.engines.ranks import rank_transport
from fxpipe.engines.ranks.rank_group import World
from fxpipe.engines.ranks.rank_transport import RankTransport
from fxpipe.engines.transports.communicators import Communicators
from fxpipe.pipe.ranks.rank_pipe import RankPipe
from tests.helpers.models import MODELS
from tests.helpers.rendezvous_group import EAGER, LAZY, register
from tests.helpers.transparency import build
from tests.whole.ranks.backends import DEVICES
from tests.whole.ranks.cases import SOON, apart, at, chain, fail_everywhere, lose, raises, step_is_the_models
from tests.whole.test_steps import stepped

CHUNKS = 4


@cache
def like_nccl(group: Any, mode: str) -> Any:
    """A group of the same ranks with NCCL's rules; the group itself over gloo, and where ranks have devices."""
    if not mode or mode in DEVICES:
        return group
    register()
    return dist.new_group(dist.get_process_group_ranks(group), backend=mode, use_local_synchronization=True)


def is_the_model(
    group: Any, mode: str, name: str, schedule: str, checkpoint: str, replicas: Sequence[int] | None = None
) -> None:
    """Steps of a few batch sizes are the model's."""
    case = stepped(MODELS[name])
    model, twin = build(case), build(case)
    fast = like_nccl(group, mode)
    pipe = fxpipe.compile(
        twin, dist.get_world_size(group), CHUNKS, schedule=schedule, checkpoint=checkpoint, replicas=replicas,
        group=fast, timeout=20, **case.options,
    )  # fmt: skip
    assert isinstance(pipe, RankPipe)
    try:
        for batch in (8, 7, 2):
            step_is_the_models(group, pipe, case, (model, twin), batch, CHUNKS)
    finally:
        pipe.close()


# Faults ---------------------------------------------------------------------------------------------------------------


def no_memory(*_: Any) -> NoReturn:
    raise torch.OutOfMemoryError("out of memory")


def broken(*_: Any) -> NoReturn:
    raise RuntimeError("CUDA error: device-side assert triggered")


FAULTS: Mapping[str, tuple[tuple[Any, str, Callable[..., NoReturn]], ...]] = {
    "memory for what is received": ((RankTransport, "_memory", no_memory),),
    "memory for what is sent": ((rank_transport, "apart", no_memory),),
    "the device of a sender": ((rank_transport, "apart", broken),),
}
HOST_FAULTS: Mapping[str, tuple[tuple[Any, str, Callable[..., NoReturn]], ...]] = {
    "memory for what is received": ((World, "receive", no_memory),),
    "memory for what is sent": ((World, "buffer", no_memory),),
}


@contextmanager
def failing(changes: Sequence[tuple[Any, str, Callable[..., NoReturn]]], once: bool) -> Iterator[None]:
    """These functions fail: each once, in its second call, or ever after."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, fail in changes:
            kept, calls = getattr(owner, name), count()

            def call(*args: Any, kept: Any = kept, calls: Any = calls, fail: Any = fail) -> Any:
                number = next(calls)
                return fail() if number == 1 or (number > 1 and not once) else kept(*args)

            patch.setattr(owner, name, call)
        yield


def tell_of_faults(group: Any, mode: str | None) -> None:
    """A fault of rank 1 while it sends or receives: all ranks hear of it at once, and the next step is exact."""
    rank = dist.get_rank(group)
    with apart(not mode):
        pipe, model, (x, y) = chain(like_nccl(group, mode or ""), "1f1b", timeout=21)
    loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for name, changes in (FAULTS if mode else HOST_FAULTS).items():
        model.zero_grad()
        began = time.monotonic()
        with failing(changes if rank == 1 else (), True), pytest.raises((RuntimeError, RankError)) as caught:
            pipe.step(x, target=y, loss_fn=F.mse_loss)
        assert ("CUDA error" if "device" in name else "out of memory") in str(caught.value), name
        assert rank == 1 or "rank 1: " in str(caught.value)
        assert time.monotonic() - began < SOON, name
        assert all(p.grad is None for p in model.parameters())
        torch.testing.assert_close(pipe.step(x, target=y, loss_fn=F.mse_loss), loss, rtol=1e-9, atol=0)
        for path, parameter in model.named_parameters():
            if path in wanted:
                torch.testing.assert_close(parameter.grad, wanted[path], rtol=1e-9, atol=0)
    pipe.close()


def give_up(group: Any, mode: str) -> None:
    """The device of rank 1 fails for good: all ranks hear why at once, and that the pipe is lost."""
    rank = dist.get_rank(group)
    pipe, _, (x, y) = chain(like_nccl(group, mode), "1f1b", timeout=60)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    changes = (
        (rank_transport, "apart", broken),
        (RankTransport, "_memory", broken),
        (Communicators, "exchange", broken),
    )
    began = time.monotonic()
    with failing(changes if rank == 1 else (), False), pytest.raises((RuntimeError, RankError)) as caught:
        pipe.step(x, target=y, loss_fn=F.mse_loss)
    assert "CUDA error: device-side assert" in str(caught.value)
    assert rank == 1 or "rank 1" in str(caught.value)
    assert time.monotonic() - began < SOON
    with raises("rank 1 cannot go on", "start all ranks again"):
        pipe.step(x, target=y, loss_fn=F.mse_loss)


def lose_one(group: Any, mode: str, end: str) -> None:
    lose(like_nccl(group, mode), end, timeout=4)


def fail_in_each_action(group: Any, mode: str) -> None:
    fail_everywhere(like_nccl(group, mode), "1f1b")


def interrupt(group: Any, mode: str) -> None:
    """Ctrl-C on one rank, in an action of forward and in one of backward: all ranks hear of it at once, no gradient is
    added, and the next step is exact."""
    rank = dist.get_rank(group)
    pipe, model, (x, y) = chain(like_nccl(group, mode), "1f1b", timeout=60)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
        wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for action in ("1F2", "0B1"):
            model.zero_grad()
            at(pipe, action, lambda: signal.raise_signal(signal.SIGINT))
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt if rank == int(action[0]) else RankError) as caught:
                pipe.step(x, target=y, loss_fn=F.mse_loss)
            assert rank == int(action[0]) or "KeyboardInterrupt" in str(caught.value)
            assert time.monotonic() - began < SOON
            assert all(p.grad is None for p in model.parameters())
        torch.testing.assert_close(pipe.step(x, target=y, loss_fn=F.mse_loss), loss, rtol=1e-9, atol=0)
        for path, parameter in model.named_parameters():
            if path in wanted:
                torch.testing.assert_close(parameter.grad, wanted[path], rtol=1e-9, atol=0)
    finally:
        signal.signal(signal.SIGINT, handler)
        pipe.close()


# The group itself -----------------------------------------------------------------------------------------------------


def computes_collectives(group: Any, mode: str) -> None:
    """Those that meshes need, of two ranks."""
    register()
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    made, other = (dist.new_group(ranks, backend=mode) for _ in range(2))
    own, both = torch.tensor([rank + 1.0, 10.0]), torch.tensor([[1.0, 10.0], [2.0, 10.0]])
    for op, wanted in (("SUM", both.sum(0)), ("AVG", both.mean(0)), ("MAX", both.amax(0)), ("MIN", both.amin(0))):
        found = own.clone()
        dist.all_reduce(found, getattr(dist.ReduceOp, op), made)
        assert torch.equal(found, wanted), op
        (part,) = torch.zeros(1, 1)
        dist.reduce_scatter(part, list(own.split(1)), getattr(dist.ReduceOp, op), made)
        assert torch.equal(part, wanted[rank : rank + 1]), op
    rows = list(torch.zeros(2, 2))
    dist.all_gather(rows, own, made)
    assert torch.equal(torch.stack(rows), both)
    parts = torch.zeros(2)
    dist.all_to_all_single(parts, own, group=made)
    assert torch.equal(parts, both[:, rank])
    sent = own.clone()
    dist.broadcast(sent, group=made, group_src=1)
    assert torch.equal(sent, both[1])
    dist.scatter(sent, list(both) if rank == 1 else None, group=made, group_src=1)
    assert torch.equal(sent, both[rank])
    with pytest.raises(RuntimeError, match="is not a type that NCCL has"):
        dist.all_reduce(own.to(torch.int16), group=made)
    # Two communicators in different orders: on a device that runs one call at a time, neither ends.
    for one in (made, other):
        dist.barrier(one)
    works = [dist.all_reduce(own.clone(), group=one, async_op=True) for one in (made, other)[:: 1 - 2 * rank]]
    with pytest.raises(RuntimeError, match="timed out") if mode == EAGER else nullcontext():
        works[1].wait(timedelta(seconds=1))
    dist.barrier(group)
    if mode == LAZY:  # another call in the place of one
        with pytest.raises(RuntimeError, match=r"allreduce SUM: rank 0|allgather: rank 1"):
            dist.all_gather(rows, own, made) if rank else dist.all_reduce(own, group=made)


def keeps_the_rules(group: Any, mode: str) -> None:
    """Two ranks that both receive before they send wait for ever; as a batch, the same calls end. Types that NCCL has
    not are refused; `abort` ends what waits."""
    made, peer = like_nccl(group, mode), 1 - dist.get_rank(group)
    here, there = torch.full((3,), float(peer)), torch.zeros(3)
    with pytest.raises(RuntimeError, match="is not a type that NCCL has"):
        made.send([here.to(torch.int16)], peer)
    made._start_coalescing()
    made.recv([there], peer)
    made.send([here], peer)
    made._end_coalescing().wait()
    assert there.tolist() == [1 - peer] * 3
    works = [made.recv([there], peer), made.send([here], peer)]
    with pytest.raises(RuntimeError, match=r"timed out|receives \[12\], while that"):
        works[0].wait(timedelta(seconds=1))
    dist.barrier(group)
    made.abort()
    with pytest.raises(RuntimeError):
        works[1].wait(timedelta(seconds=5))
