"""Processes that are ranks, kept for many tests: to start one takes seconds.

    pool.run(function, *args, ranks=(0, 1))      function(group, *args), a function of a module, on each of these ranks

They are forked from a server that has imported everything, and meet through a file.
"""

from __future__ import annotations

import faulthandler
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.whole.ranks import backends

SIZE = 4
GROUPS = ((0, 1), (2, 3), (0, 1, 2), (0, 1, 2, 3))
PATIENCE = 200  # seconds that one function may take
LIMIT = timedelta(seconds=60)
STARTS = 3
READY = "ready"
LOST = "connectFullMesh failed"  # of gloo: on a busy machine it may lose a connection while it makes them
WARM = ["tests.whole.ranks.warm"]


class RankFailed(AssertionError):
    """The traceback of a rank."""


class ConnectionLost(RankFailed):
    """torch could not make a group, through no fault of who asked for it. The other ranks may wait for it still."""


class Pool:
    """`size` ranks that wait for something to do, forked from a server, or ("fork") from this process. `mode`: what
    they compute on and talk over (`backends.py`)."""

    def __init__(self, size: int = SIZE, how: str = "forkserver", mode: str | None = None) -> None:
        self.context: Any = get_context(how)
        if how == "forkserver":
            self.context.set_forkserver_preload(WARM)
        self.size, self.mode = size, mode or ""
        self._meet()

    def _meet(self) -> None:
        for _ in range(STARTS):
            self.processes, self.ends, self.folder = self._started()
            if self._ready():
                return
            self.close()
        raise RankFailed(f"{self.size} ranks have not met, {STARTS} times")

    def _started(self) -> tuple[list[Any], list[Connection], tempfile.TemporaryDirectory[str]]:
        folder = tempfile.TemporaryDirectory(prefix="ranks-")
        meeting = str(Path(folder.name) / "meet")
        ends = [self.context.Pipe() for _ in range(self.size)]
        given = [(theirs, rank, self.size, meeting, self.mode) for rank, (_, theirs) in enumerate(ends)]
        processes = [self.context.Process(target=serve, args=one, daemon=True) for one in given]
        for process in processes:
            process.start()
        for _, theirs in ends:
            theirs.close()
        return processes, [ours for ours, _ in ends], folder

    def _ready(self) -> bool:
        """Whether all ranks have met."""
        try:
            return all(end.poll(2 * LIMIT.total_seconds()) and end.recv() == READY for end in self.ends)
        except (EOFError, ConnectionError):
            return False

    def start(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int], patience: float = PATIENCE) -> None:
        """`patience`: seconds after which each rank prints where it is."""
        for rank in ranks:
            self.ends[rank].send((function, tuple(ranks), args, patience))

    def results(self, ranks: Sequence[int], patience: float = PATIENCE) -> list[Any]:
        """What the function has returned on each rank. Raises RankFailed with the tracebacks of those it failed on."""
        end, answered = time.monotonic() + patience, {}
        while len(answered) < len(ranks):
            missing = {id(self.ends[rank]): rank for rank in ranks if rank not in answered}
            ready = wait([self.ends[rank] for rank in missing.values()], max(0.0, end - time.monotonic()))
            if not ready:
                break
            answered.update({missing[id(one)]: one.recv() for one in ready})
            if any(LOST in text for text, _ in answered.values()):
                raise ConnectionLost("\n".join(text for text, _ in answered.values() if text))
        failed = [f"rank {rank}:\n{answered[rank][0]}" for rank in ranks if rank in answered and answered[rank][0]]
        failed += [f"rank {rank} does not answer" for rank in ranks if rank not in answered]
        if failed:
            raise RankFailed("\n".join(failed))
        return [answered[rank][1] for rank in ranks]

    def run(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] = tuple(range(SIZE))) -> list[Any]:
        """Once more on new ranks where a connection was lost."""
        for _ in range(STARTS - 1):
            self.start(function, *args, ranks=ranks)
            try:
                return self.results(ranks)
            except ConnectionLost:
                self.close()
                self._meet()
        self.start(function, *args, ranks=ranks)
        return self.results(ranks)

    def close(self) -> None:
        for end in self.ends:
            end.close()
        wait([process.sentinel for process in self.processes], timeout=1)
        for process in self.processes:
            process.kill()  # also one that is stopped
            process.join()
        self.folder.cleanup()


def serve(end: Connection, rank: int, size: int, meeting: str, mode: str) -> None:
    """Do what comes, until nobody is there to ask."""
    torch.set_num_threads(1)
    backends.start(mode, rank, size, store=dist.FileStore(meeting, size), timeout=LIMIT)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in GROUPS if max(ranks) < size}
    end.send(READY)
    while True:
        try:
            function, ranks, args, patience = end.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(patience)
        torch.manual_seed(0)  # on all ranks the same, whatever they have done before
        try:
            answer = "", function(groups[ranks], *args)
        except BaseException:
            answer = traceback.format_exc(), None
        faulthandler.cancel_dump_traceback_later()
        end.send(answer)
