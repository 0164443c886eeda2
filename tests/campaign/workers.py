"""Processes that try models, one after the other; one that hangs says where and is replaced, as is one that dies.

A worker sends each outcome as it comes, so that of a model that hangs all is known until then.
"""

from __future__ import annotations

import faulthandler
import gc
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from . import one

PATIENCE = 240  # seconds that one model may take: it takes three
LIFE = 60  # models, after which a worker is replaced: torch keeps what it has traced
RANKS = 0.06  # how many of the models step over ranks


@dataclass
class Worker:
    """A process, the model that it tries, and since when."""

    process: Any
    end: Connection
    dump: Path
    index: int = -1
    since: float = 0.0
    done: int = 0
    ready: bool = False


@dataclass
class Workers:
    """`jobs` workers that try the models with these indices: `reports()` are (index, what, more)."""

    seed: int
    jobs: int
    out: Path
    todo: Iterator[int]
    workers: list[Worker] = field(default_factory=list)

    def reports(self) -> Iterator[tuple[int, str, Any]]:
        """What workers say: "outcome", and "done" with what was tried, or None; "hang" and "died" with the stacks of
        one that was in the middle of a model."""
        try:
            for _ in range(self.jobs):
                self.hire()
            while self.workers:
                wait([worker.end for worker in self.workers], timeout=1.0)
                for worker in list(self.workers):
                    yield from self.listen(worker)
        finally:
            for worker in self.workers:
                worker.process.kill()

    def hire(self) -> None:
        """One more worker, if there is something to do."""
        index = next(self.todo, None)
        if index is None:
            return
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        dump = Path(tempfile.mkdtemp(prefix="campaign-")) / "stacks.txt"
        process = context.Process(target=work, args=(theirs, self.seed, str(dump)))
        process.start()
        theirs.close()
        self.workers.append(Worker(process, ours, dump, index, time.monotonic()))
        ours.send(index)

    def listen(self, worker: Worker) -> Iterator[tuple[int, str, Any]]:
        """What a worker has to say, or that it says nothing any more."""
        try:
            while worker.end.poll():
                what, more = worker.end.recv()
                yield worker.index, what, more
                if what == "done":
                    self.next(worker)
                    return
        except (EOFError, OSError):
            self.dismiss(worker)
            yield worker.index, "died", f"exit code {worker.process.exitcode}\n{stacks(worker)}"
            self.hire()
            return
        if time.monotonic() - worker.since > PATIENCE + 20:
            self.dismiss(worker)
            yield worker.index, "hang", stacks(worker)
            self.hire()

    def next(self, worker: Worker) -> None:
        worker.done += 1
        index = next(self.todo, None) if worker.done < LIFE else None
        if index is None:
            worker.end.send(None)
            self.dismiss(worker)
            self.hire()
        else:
            worker.index, worker.since = index, time.monotonic()
            worker.end.send(index)

    def dismiss(self, worker: Worker) -> None:
        worker.process.join(timeout=5)
        worker.process.kill()
        worker.process.join()
        worker.end.close()
        self.workers.remove(worker)


def stacks(worker: Worker) -> str:
    return worker.dump.read_text() if worker.dump.exists() else ""


def work(end: Connection, seed: int, dump: str) -> None:
    """Try the models whose indices come."""
    import torch

    from .ranks import Ranks

    torch.set_num_threads(1)
    ranks = Ranks()
    with open(dump, "w") as file, tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        faulthandler.enable(file)
        while (index := end.recv()) is not None:
            faulthandler.dump_traceback_later(PATIENCE, file=file)
            try:
                subject = one.drawn(seed, index, Path(folder), ranks=RANKS)
                found = one.tried(subject, Path(folder), f"model{index}", ranks, lambda o: end.send(("outcome", o)))
                end.send(("done", found))
            except Exception:
                end.send(("outcome", traceback.format_exc()))
                end.send(("done", None))
            faulthandler.cancel_dump_traceback_later()
            gc.collect()
    ranks.close()
