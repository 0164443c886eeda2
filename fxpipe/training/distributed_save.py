"""Write a checkpoint from all processes that train a model: at once, or in a thread while training goes on.

The files are those of torch.distributed.checkpoint. Its own `save` waits in collectives of the process group: if a rank
is gone, only some of the others get an error, and it does not name the rank. Here the ranks of a pipe communicate as in
all calls of a pipe, so that all others get an error that names the rank.

Its `async_save` has a thread that waits in collectives, for which ranks need a process group of their own. Here the
threads have nothing to wait for but the files: each rank leaves word in the store of the process group that its own
files are written, and the leader's thread, which looks for these words, completes the checkpoint. What goes wrong is
told in `Saving.wait`, which all ranks call, and which does not need the threads to hear of each other.

    rank 0   save ──┬─ steps go on ─────────────────────┬─ wait
                    └─ its files ── all others' words? ─┴─ .metadata: complete
    rank 1   save ──┬─ steps go on ──────────────────────── wait
                    └─ its files ── its word
"""

from __future__ import annotations

import atexit
import pickle
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fxpipe.errors import CheckpointError
from fxpipe.pipe.drop_in_module import DropInModule
from fxpipe.pipe.ranks.loaded_rank_pipe import LoadedRanks
from fxpipe.pipe.ranks.rank_consistency import on_each
from fxpipe.pipe.ranks.rank_pipe import RankPipe
from fxpipe.pipe.saved.checkpoint_folder import being_written
from fxpipe.runtime.interrupts import Interrupts, ignore
from fxpipe.torch_internals.process_groups import default_store

OverRanks = RankPipe | LoadedRanks
TABLE = ".metadata"  # torch.distributed.checkpoint writes this file last
PAUSE = 0.05  # seconds between two looks for the words of other ranks
PATIENCE = 300.0  # seconds that a leader that ends looks for the words of ranks that are no ranks of a pipe


@dataclass(frozen=True)
class Savers:
    """The processes that save a model together, as one of them sees them.

    - `place`: the number of this process; the one with number 0 leads.
    - `collect`: takes a value of each process, and returns all of them on all, in order.
    - `store`: where they leave word for each other; None if this is the only one.
    - `lost`: whether one of them is known to be lost.
    - `timeout`: seconds after which one that does not answer counts as lost.
    """

    place: int
    collect: Callable[[Any], list[Any]]
    store: Any = None
    lost: Callable[[], bool] = lambda: False
    timeout: float = PATIENCE

    @property
    def leads(self) -> bool:
        return self.place == 0


def savers_of(model: nn.Module) -> Savers:
    """The processes that save this model: the ranks of a pipe, or for a plain model all processes."""
    if isinstance(model, OverRanks):
        world = model.world
        return Savers(
            model.place,
            partial(model.collect_all, call="save_checkpoint"),
            default_store(),  # who holds it may use it after the process group is destroyed
            lost=lambda: world.lost is not None,
            timeout=world.timeout,
        )
    if isinstance(model, DropInModule) or not dist.is_initialized():
        return Savers(0, lambda value: [value])
    return Savers(dist.get_rank(), gathered, default_store())


def gathered(value: Any) -> list[Any]:
    """The values of all processes of torch.distributed, in order, on all of them."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@dataclass(frozen=True, eq=False)
class Draft:
    """What this process is about to write.

    - `planner`: has the tensors; `plan`: which of them are written here, and where.
    - `writer`: writes files.
    - `table`: the table of contents of the checkpoint, without the places in files.
    - `count`: how many processes write.
    - `name`: the same on all of them, and of no other checkpoint.
    """

    planner: DefaultSavePlanner
    plan: Any
    writer: FileSystemWriter
    table: Any
    count: int
    name: str

    def write(self) -> Any:
        """Write this process's files. Returns what `finish` needs of each process."""
        return self.writer.write_data(self.planner.finish_plan(self.plan), self.planner).wait()

    @property
    def finish(self) -> Callable[[list[Any]], None]:
        """A function that completes the checkpoint once all files are written: for the leader. It holds no tensors."""
        return partial(self.writer.finish, self.table)


def draft(path: Path, find: Callable[[], dict[str, Tensor]], savers: Savers, copies: bool) -> Draft:
    """Agree with all processes on who writes what. `find` returns the tensors of this one, by key; they are copied to
    host memory if `copies` is true. A failure in one process raises its error there, and RankError in all others."""
    planner, writer = DefaultSavePlanner(), FileSystemWriter(path)

    def own() -> Any:
        tensors = find()
        planner.set_up_planner(writer.stage(tensors) if copies else tensors, writer.storage_meta(), savers.leads)
        writer.set_up_storage_writer(savers.leads)
        return writer.prepare_local_plan(planner.create_local_plan()), uuid4().hex

    heard = on_each(savers.collect, own)
    plans, table = planner.create_global_plan([plan for plan, _ in heard])
    mine = writer.prepare_global_plan(plans)[savers.place]
    return Draft(planner, mine, writer, table, len(heard), heard[0][1])


def write(drafted: Draft, savers: Savers) -> None:
    """Write; return when the checkpoint is complete. Raises as `draft` does."""
    written = on_each(savers.collect, drafted.write)
    on_each(savers.collect, lambda: drafted.finish(written) if savers.leads else None)


class Saving:
    """A checkpoint that is being written in the folder `path`, in the background: `wait` is optional."""

    def __init__(self, path: Path, drafted: Draft, savers: Savers) -> None:
        self.path, self._savers = path, savers
        self._complete_it, self._count, self._name = drafted.finish, drafted.count, drafted.name
        self._written: Any = None  # what `Draft.write` returns
        self._error: BaseException | None = None
        self._here, self._asked = threading.Event(), threading.Event()  # files of this process are written; `wait` runs
        self._lock, self._complete = threading.Lock(), False
        self._settled = False
        being_written.add(self)
        # Not a daemon: the end of the process waits for it.
        threading.Thread(target=self._run, args=(drafted,), name=f"fxpipe writes {path}").start()

    def wait(self) -> None:
        """Return when the checkpoint is complete. All ranks call this. If writing has failed on one, its error is
        raised there, and RankError on all others; the folder then is no checkpoint. After Ctrl-C, KeyboardInterrupt is
        raised when all is written; after a second Ctrl-C, at once."""
        if self._settled:
            return
        collect = self._savers.collect
        with Interrupts(ignore):
            self._asked.set()
            self._here.wait()
            try:
                written = on_each(collect, self._own)
                on_each(collect, lambda: self._finish(written) if self._savers.leads else None)
            finally:
                self._settled = True
                being_written.discard(self)

    def complete(self) -> None:
        """As `wait`, but any rank may call it alone. Raises CheckpointError if writing has failed, or if other ranks
        are not done within the timeout."""
        self._here.wait()
        end = time.monotonic() + self._savers.timeout
        while not (self.path / TABLE).exists():
            failed, late = self._failed(), time.monotonic() > end
            if failed or late:
                why = "it could not be written" if failed else "other ranks are still writing it"
                raise CheckpointError(
                    f"{self.path} is not complete, {why}: call wait() of its save on all ranks"
                ) from (self._error)
            time.sleep(PAUSE)

    def _failed(self) -> bool:
        """Whether nobody will complete the checkpoint, as far as this rank knows."""
        with suppress(RuntimeError):  # the store is gone, with its process
            store = self._savers.store
            return self._error is not None or self._savers.lost() or (store is not None and store.check([self._key(0)]))
        return True

    def _key(self, place: int) -> str:
        """Where a rank leaves word of its files; the leader, that the checkpoint stays incomplete."""
        return f"fxpipe/save/{self._name}/{place}"

    def _own(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._written

    def _finish(self, written: list[Any]) -> None:
        """Complete the checkpoint, if that was not done before."""
        with self._lock:
            if not self._complete:
                self._complete_it(written)
                self._complete = True

    # In the thread ----------------------------------------------------------------------------------------------------

    def _run(self, drafted: Draft) -> None:
        try:
            self._written = drafted.write()
        except Exception as error:
            self._error = error
        finally:
            self._here.set()
        try:
            written = [self._written] if self._savers.store is None else self._words()
            if written is not None and self._error is None:
                self._finish(written)
        except Exception as error:
            self._error = error
        if self._savers.store is not None and self._savers.leads and not self._complete and not self._asked.is_set():
            with suppress(RuntimeError):
                self._savers.store.set(self._key(0), b"")

    def _words(self) -> list[Any] | None:
        """Leave word of this process's files. On the leader, the words of all; None if one has failed, or if `wait`,
        which asks each process, is called meanwhile."""
        store, keys = self._savers.store, [self._key(place) for place in range(self._count)]
        with suppress(RuntimeError):  # the store is gone, with its process: `wait` finds out why
            if not self._savers.leads:
                store.set(keys[self._savers.place], b"" if self._error else pickle.dumps(self._written))
            elif all(map(self._comes, keys[1:])):
                words = [store.get(key) for key in keys[1:]]
                return [self._written, *map(pickle.loads, words)] if all(words) else None
        return None

    def _comes(self, key: str) -> bool:
        """Wait for a word; False if nobody needs it any more, or it does not come."""
        end = None
        while not self._savers.store.check([key]):
            if end is None and not threading.main_thread().is_alive():
                end = time.monotonic() + self._savers.timeout
            late = end is not None and time.monotonic() > end
            if late or self._error or self._asked.is_set() or self._savers.lost():
                return False
            time.sleep(PAUSE)
        return True

    def report(self) -> None:
        """Called at the end of the process: print that the checkpoint is not complete, if no error has said so."""
        if self._error is not None:
            why = f"{type(self._error).__name__}: {self._error}"
        elif self._savers.leads and not self._complete:
            why = "not all ranks have written their files"
        else:
            return
        print(f"fxpipe: the checkpoint {self.path} is not complete: {why}", file=sys.stderr)


@atexit.register
def _report() -> None:
    for saving in list(being_written):
        if isinstance(saving, Saving):
            saving.report()
