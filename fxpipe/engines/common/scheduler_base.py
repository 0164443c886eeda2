"""What generated schedulers have in common: stages, a worker thread per device, how a batch is cut and put together."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxpipe.runtime import MicroBatch, Stage
from fxpipe.runtime.caller_context import current_context
from fxpipe.runtime.error_notes import add_note
from fxpipe.runtime.microbatch import gather, scatter, split_sizes
from fxpipe.runtime.random import new_seed
from fxpipe.runtime.streams import Stream, Streams, current_stream
from fxpipe.runtime.worker import Worker, close


@dataclass(frozen=True)
class Place:
    """Where the stages run: for each the module and the label of its worker, and the streams of their copies."""

    stages: tuple[Stage, ...]
    devices: tuple[str, ...]
    streams: Streams


class Batches(list[MicroBatch]):
    """The micro-batches of one run, and what holds for all of them.

    `sizes`: samples in each, `total` in all; `last`: the number of the last; `stages`, `devices`, `streams`: where it
    runs; `grad`: whether backward may follow; `seed`: of the random ops; `after[j]`: the token of stage j's latest
    checkpointed task; `lent`: tensors that stages borrow; `compute[j]`: the stream that stage j computes on.
    """

    def __init__(self, sizes: tuple[int, ...], place: Place, draws: bool) -> None:
        super().__init__(MicroBatch() for _ in sizes)
        self.stages, self.devices, self.streams = place.stages, place.devices, place.streams
        self.sizes, self.total = sizes, max(1, sum(sizes))
        self.last = len(sizes) - 1
        self.context = current_context()
        self.grad = self.context.grad and not self.context.inference
        self.seed = new_seed() if draws else 0
        self.after: list[Any] = [None] * len(self.stages)
        self.lent = MicroBatch()
        self.compute: tuple[Stream, ...] = tuple([current_stream(stage.device) for stage in self.stages])
        self._copies: dict[tuple[Tensor, torch.device], Tensor] = {}

    def lend(self, j: int, tensor: Tensor) -> Tensor:
        """A tensor that another stage owns, for stage j: itself, or its copy on the device of stage j, one for all
        stages there. Streams wait for the copy; a CPU must be made to."""
        device = self.stages[j].device
        if tensor.device == device:
            return tensor
        copy = self._copies.get((tensor, device))
        if copy is None:
            copy = self._copies[tensor, device] = tensor.to(device, non_blocking=device.type != "cpu")
        return copy


B = TypeVar("B", bound=Batches)


class SchedulerBase:
    """The base of generated schedulers.

    `devices`: a worker label for each stage; `inputs`: the name and batch dimension (None: whole) of each; `sizes`: the
    name, input and dimension of the numbers known from shapes; `outputs`: the name, batch dimension and reduction of
    each; `detached`: the inputs that no gradient comes back to; `totals`: the names of what is computed from the whole
    batch, and of what it is computed from; `random`: whether any stage draws random numbers; `replicas`: of each stage
    the labels of further workers that run it, each a slice of every micro-batch.
    """

    devices: tuple[str, ...] = ()
    inputs: tuple[tuple[str, int | None], ...] = ()
    sizes: tuple[tuple[str, str, int], ...] = ()
    outputs: tuple[tuple[str, int | None, str | None], ...] = ()
    detached: tuple[str, ...] = ()
    totals: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    random: bool = False
    replicas: tuple[tuple[str, ...], ...] = ()

    def __init__(self, stages: Sequence[Stage], whole: Stage | None = None, threads: bool = True) -> None:
        """`stages`: a module for each of `devices`, then one for each of `replicas`; `whole`: what computes `totals`;
        `threads`: whether there are workers beside the calling thread."""
        n = len(self.devices)
        if len(stages) != n + sum(map(len, self.replicas)):
            raise ValueError(f"the scheduler is for {n + sum(map(len, self.replicas))} stages, not {len(stages)}")
        self.stages, self.further = tuple(stages[:n]), tuple(stages[n:])
        self.whole = whole
        self.streams = Streams(tuple(stage.device for stage in self.stages))
        self.place = Place(self.stages, self.devices, self.streams)
        self.mutating = tuple(stage for stage in stages if stage.mutates)
        all_stages = self.stages if whole is None else (*self.stages, whole)
        self._copying = tuple(stage for stage in all_stages if stage.copies or stage.elsewhere)
        self._on_cpu = any(stage.device.type == "cpu" for stage in stages)
        self._workers = {label: Worker(label) for label in sorted(self.workers() if threads else ())}
        self._close = weakref.finalize(self, close, tuple(self._workers.values()))

    def workers(self) -> set[str]:
        """The labels of the worker threads. The calling thread, which would only wait, is the worker of the last
        stage's device."""
        labels = {*self.devices, *(label for labels in self.replicas for label in labels)}
        return labels - {self.devices[-1]}

    @property
    def source(self) -> str:
        """The text of the file that the scheduler came from."""
        return Path(inspect.getfile(type(self))).read_text(encoding="utf-8")

    def close(self) -> None:
        """End the worker threads. A pipe that is garbage collected closes itself."""
        self._close()

    def wake(self) -> None:
        """Make ready for a run: a worker thread that is gone, as all are in a process that was forked, starts anew.
        Raises RuntimeError if the pipe is closed."""
        if not self._close.alive:
            raise RuntimeError("the pipe has no workers: it was closed")
        for worker in self._workers.values():
            if not worker.thread.is_alive():
                worker.start()

    def check_alive(self) -> None:
        """Raise RuntimeError if a worker thread is gone in the middle of a run."""
        for label, worker in self._workers.items():
            if not worker.thread.is_alive():
                raise RuntimeError(f"the worker thread of {label} is gone; the next run starts another")

    def add_notes(
        self, error: BaseException, m: Batches, j: int, i: int, replica: int = 0, backward: bool = False
    ) -> None:
        """Say on the exception which task it comes from, and what to write where its micro-batch was too small."""
        add_note(error, self.stages[j], j, i, replica, backward)
        if m.sizes[i] == 1 and str(error).startswith("Expected more than 1 value per channel"):
            replica_group = self.replica_count(j)
            chunks, each = (
                m.total // (2 * replica_group),
                f"on each of the {replica_group} replicas of stage {j} " * (replica_group > 1),
            )
            if chunks:
                error.add_note(
                    f"BatchNorm in training needs two samples or more, and a micro-batch has one {each}here: write "
                    f"chunks={chunks} or less for a batch of {m.total}"
                )

    def replica_count(self, j: int) -> int:
        """How many devices share the samples of a micro-batch in stage j."""
        return 1 + len(self.replicas[j]) if self.replicas else 1

    def lend(self, m: Batches) -> None:
        """Put what stages borrow from each other into `m.lent`."""

    def scatter(self, batch: Sequence[Any], chunks: int, kind: Callable[..., B]) -> B:
        """At most `chunks` micro-batches, with their inputs and sizes."""
        total = {value.shape[dim] for value, (_, dim) in zip(batch, self.inputs, strict=True) if dim is not None}
        if len(total) > 1:
            raise ValueError(f"the inputs do not have a common batch size, but {sorted(total)}")
        if self._on_cpu:  # a stage on the CPU finds its inputs there; the others copy them from there
            batch = [value.cpu() if isinstance(value, Tensor) and not value.is_meta else value for value in batch]
        m = kind(split_sizes(total.pop(), chunks) if total else (1,), self.place, self.random)
        for name, value in self.compute_totals(batch).items():
            for micro_batch in m:
                setattr(micro_batch, name, value)
        for value, (name, dim) in zip(batch, self.inputs, strict=True):
            value = value.detach() if name in self.detached else value
            for micro_batch, piece in zip(m, scatter(value, dim, m.sizes), strict=True):
                setattr(micro_batch, name, piece)
        for name, source, dim in self.sizes:
            for micro_batch in m:
                setattr(micro_batch, name, getattr(micro_batch, source).shape[dim])
        return m

    def compute_totals(self, batch: Sequence[Any]) -> dict[str, Any]:
        """What each micro-batch has to know of the whole batch; nothing where other ranks have that."""
        if self.whole is None:
            return {}
        gives, takes = self.totals
        known = {name: value for (name, _), value in zip(self.inputs, batch, strict=True)}
        known |= {name: known[source].shape[dim] for name, source, dim in self.sizes}
        if any(isinstance(known[name], Tensor) and known[name].is_meta for name in takes):
            return {}
        device = self.whole.device
        args = [known[name].to(device) if isinstance(known[name], Tensor) else known[name] for name in takes]
        with torch.no_grad():
            found = self.whole.forward(*args)
        return dict(zip(gives, (found,) if len(gives) == 1 else found, strict=True))

    def gather(self, m: Batches) -> tuple[Any, ...]:
        """The outputs of the mini-batch."""
        return tuple(
            gather([getattr(micro_batch, name) for micro_batch in m], dim, reduce, m.sizes)
            for name, dim, reduce in self.outputs
        )
