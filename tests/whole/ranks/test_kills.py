"""Ranks that are killed, stopped or interrupted at any moment of their lives: all others end with an error that
names them, soon. Started again, they go on from the last checkpoint as if nothing had been, to the last bit."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.whole.ranks.lives import SIZE, live

SOON = 40  # seconds, until all know
PATIENCE = 200  # seconds, for whatever nothing stands in the way of
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}


@dataclass(frozen=True)
class Fault:
    """What happens to which rank: after so many steps, and which part of a step later; `far`: ranks share no memory."""

    kind: str
    rank: int
    steps: int
    later: float
    far: bool

    @property
    def timeout(self) -> float:
        """Seconds until a rank counts as lost: nobody sees in any other way that one stands still."""
        return 4.0 if self.kind == "stop" else 60.0


@dataclass(eq=False)
class Ranks:
    """Processes from one start to the end of all; `said`: the errors that they ended with."""

    processes: list[BaseProcess]
    ends: list[Connection]
    steps: list[list[float]] = field(init=False)  # of each rank: when it had met the others, and had done a step
    reached: int = 0
    said: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps = [[] for _ in self.processes]

    def listen(self, until: float) -> None:
        """Hear what any of them says next, if one says something; to all, for who is not heard cannot go on talking."""
        open_ends = {end: rank for rank, end in enumerate(self.ends) if rank not in self.said}
        for ready in wait(list(open_ends), max(0.0, until - time.monotonic())):
            assert isinstance(ready, Connection)
            rank = open_ends[ready]
            try:
                kind, what = ready.recv()
            except (EOFError, ConnectionResetError):
                kind, what = "error", ""
            if kind == "error":
                self.said[rank] = what
            else:
                self.steps[rank].append(time.monotonic())
                self.reached = max(self.reached, what)


@contextmanager
def started(port: int, folder: Path, timeout: float, far: bool = False) -> Iterator[Ranks]:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.whole.ranks.warm", "tests.whole.ranks.lives"])
    ends = [context.Pipe() for _ in range(SIZE)]
    processes = [
        context.Process(target=live, args=(theirs, rank, port, folder, timeout, far), daemon=True)
        for rank, (_, theirs) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    for _, theirs in ends:
        theirs.close()
    try:
        yield Ranks(processes, [ours for ours, _ in ends])
    finally:
        for process in processes:
            process.kill()  # also one that is stopped
            process.join()
        for ours, _ in ends:
            ours.close()


def strike(ranks: Ranks, fault: Fault, usual: float) -> float:
    """Let it happen; gives how many seconds later all others have ended. `usual`: how long a first step takes."""
    wait_for(ranks, fault.rank, fault.steps)
    mine = ranks.steps[fault.rank]
    time.sleep(fault.later * (usual if fault.steps == 0 else mine[-1] - mine[-2]))
    struck, process = time.monotonic(), ranks.processes[fault.rank]
    assert process.pid is not None
    os.kill(process.pid, SIGNALS[fault.kind])
    for rank in [rank for rank in range(SIZE) if rank != fault.rank or fault.kind == "interrupt"]:
        while rank not in ranks.said and time.monotonic() < struck + SOON:
            ranks.listen(struck + SOON)
    seconds = time.monotonic() - struck
    process.join(0 if fault.kind == "stop" else SOON)
    return seconds


def wait_for(ranks: Ranks, rank: int, steps: int) -> None:
    """Until a rank has done so many steps."""
    end = time.monotonic() + PATIENCE
    while len(ranks.steps[rank]) <= steps and not ranks.said and time.monotonic() < end:
        ranks.listen(end)
    assert not ranks.said, ranks.said
    assert len(ranks.steps[rank]) > steps, f"rank {rank} has come to step {len(ranks.steps[rank]) - 1} of {steps}"


def undisturbed(port: int, folder: Path, step: int) -> dict[str, str]:
    """The losses of a run up to this step at least, with what is in the folder before, by step."""
    with started(port, folder, 60.0) as ranks:
        while ranks.reached < step:
            wait_for(ranks, 0, len(ranks.steps[0]))
        for end in ranks.ends:
            end.send("enough")
        for process in ranks.processes:
            process.join(PATIENCE)
            assert process.exitcode == 0
    return dict(losses(folder))


def losses(folder: Path) -> list[tuple[str, str]]:
    """Step and loss, as often as it was computed."""
    lines = (folder / "losses.txt").read_text().splitlines()
    return [(step, loss) for step, loss in map(str.split, lines)]


def random_faults(count: int) -> Iterator[Fault]:
    draw = random.Random(0)
    for kind in draw.sample(["kill", "stop", "interrupt"], k=count, counts=[count * 3 // 5, count // 5, count // 5]):
        moment = draw.randint(kind == "stop", 5), draw.uniform(0, 1.2)
        yield Fault(kind, draw.randrange(SIZE), *moment, far=draw.random() < 0.4)


@pytest.mark.long
def test_twenty_at_random_moments(tmp_path: Path) -> None:
    """One store for all of them, as torchrun's agent keeps it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder, whole = tmp_path / "struck", tmp_path / "whole"
    folder.mkdir()
    whole.mkdir()
    usual, reached, located = 1.0, 0, 0
    for fault in random_faults(20):
        with started(store.port, folder, fault.timeout, fault.far) as ranks:
            seconds = strike(ranks, fault, usual)
            for rank in range(SIZE):
                told = ranks.said.get(rank, "nothing")
                if rank != fault.rank:
                    assert re.search(rf"RankError: rank {fault.rank}\b", told), f"{fault}: rank {rank} said {told}"
                    located += bool(re.search(r"stage \d, micro-batch \d, .* at lives.py:", told))
                elif fault.kind == "interrupt":
                    code = ranks.processes[rank].exitcode  # less than 0 where it was in C++, which aborts
                    assert "KeyboardInterrupt" in told or (code or 0) < 0, f"{fault}: {code}, it said {told}"
            assert seconds < SOON
            reached = max(reached, ranks.reached)
            if len(times := ranks.steps[fault.rank]) > 1:
                usual = times[1] - times[0]
    assert located  # those who were in an action, or waited for what was to come
    found = undisturbed(store.port, folder, reached + 4)
    wanted = undisturbed(store.port, whole, max(map(int, found)) + 1)
    assert len(losses(folder)) > len(found) > 20  # some were computed more than once
    assert all(wanted[step] == loss for step, loss in losses(folder))
    assert found.keys() == {str(step) for step in range(len(found))}
