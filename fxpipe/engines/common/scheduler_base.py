"""The base of generated schedulers: the stages, a worker thread per device, and how a batch is cut and put together."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    """Where the stages run: the module and the worker label of each stage, and the streams for their copies."""

    stages: tuple[Stage, ...]
    devices: tuple[str, ...]
    streams: Streams


class MiniBatch(NamedTuple):
    """The batch of one run, cut; or the slices that a replica has of it.

    - `micro_batches`: with their inputs; `sizes`: the number of samples in each.
    - `total`: the samples of the whole batch, at least 1.
    - `seed`: the seed of the random ops.
    """

    micro_batches: list[MicroBatch]
    sizes: tuple[int, ...]
    total: int
    seed: int


class Batches(list[MicroBatch]):
    """The micro-batches of one run, and the data that they share.

    - `sizes`, `total`, `seed`: as in `MiniBatch`.
    - `last`: the number of the last micro-batch.
    - `stages`, `devices`, `streams`: where the run takes place.
    - `context`: the caller's modes; `grad`: whether backward may follow.
    - `after[j]`: the token of stage j's latest checkpointed task: a tensor without elements, by which backward runs the
      tasks in reverse order.
    - `lent`: the tensors that stages borrow.
    - `compute[j]`: the stream that stage j computes on.
    """

    def __init__(self, batch: MiniBatch, place: Place) -> None:
        super().__init__(batch.micro_batches)
        self.stages, self.devices, self.streams = place.stages, place.devices, place.streams
        self.sizes, self.total, self.seed = batch.sizes, batch.total, batch.seed
        self.last = len(self) - 1
        self.context = current_context()
        self.grad = self.context.grad and not self.context.inference
        self.after: list[Any] = [None] * len(self.stages)
        self.lent = MicroBatch()
        self.compute: tuple[Stream, ...] = tuple([current_stream(stage.device) for stage in self.stages])
        self._copies: dict[tuple[Tensor, torch.device], Tensor] = {}

    def lend(self, j: int, tensor: Tensor) -> Tensor:
        """A tensor that another stage owns, for stage j: the tensor itself, or its copy on the device of stage j, which
        all stages there share. Copies to an accelerator are asynchronous; a copy to the CPU blocks."""
        device = self.stages[j].device
        if tensor.device == device:
            return tensor
        copy = self._copies.get((tensor, device))
        if copy is None:
            copy = self._copies[tensor, device] = tensor.to(device, non_blocking=device.type != "cpu")
        return copy


class SchedulerBase:
    """The base of generated schedulers.

    - `devices`: the worker label of each stage.
    - `inputs`: the name and batch dimension of each input; None if it is not cut.
    - `sizes`: the name, input and dimension of each number that is known from shapes.
    - `outputs`: the name, batch dimension and reduction of each output.
    - `detached`: the inputs that get no gradient.
    - `totals`: the names of values that are computed from the whole batch before it is cut, such as the number of
      labels that a mean loss divides by; and the names of the inputs and sizes that they are computed from.
    - `epilogue`: the names of values that are computed from the joined micro-batches, and of the outputs that they are
      computed from, which are not returned; `epilogue_stage`: the stage that gives these.
    - `random`: whether any stage draws random numbers.
    - `replicas`: for each stage, the labels of the further workers that run it, each on a slice of every micro-batch.
    """

    devices: tuple[str, ...] = ()
    inputs: tuple[tuple[str, int | None], ...] = ()
    sizes: tuple[tuple[str, str, int], ...] = ()
    outputs: tuple[tuple[str, int | None, str | None], ...] = ()
    detached: tuple[str, ...] = ()
    totals: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    epilogue: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    epilogue_stage: int = -1
    random: bool = False
    replicas: tuple[tuple[str, ...], ...] = ()

    def __init__(
        self,
        stages: Sequence[Stage],
        whole: Stage | None = None,
        last: Stage | None = None,
        threads: bool = True,
    ) -> None:
        """`stages`: a module for each of `devices`, then one for each of `replicas`; `whole`: the stage that computes
        `totals`; `last`: that which computes `epilogue`; `threads`: whether there are workers beside the calling
        thread. Raises ValueError for another number of stages."""
        n = len(self.devices)
        if len(stages) != n + sum(map(len, self.replicas)):
            raise ValueError(f"the scheduler is for {n + sum(map(len, self.replicas))} stages, not {len(stages)}")
        self.stages, self.further = tuple(stages[:n]), tuple(stages[n:])
        self.whole, self.last = whole, last
        self.streams = Streams(tuple(stage.device for stage in self.stages))
        self.place = Place(self.stages, self.devices, self.streams)
        self.apart = len({stage.device for stage in stages}) > 1
        self.mutating = tuple(stage for stage in stages if stage.mutates)
        self.all_stages = (*self.stages, *(stage for stage in (whole, last) if stage is not None))
        self._copying = tuple(stage for stage in self.all_stages if stage.copies or stage.elsewhere)
        self._on_cpu = any(stage.device.type == "cpu" for stage in stages)
        self._workers = {label: Worker(label) for label in sorted(self.workers() if threads else ())}
        self._close = weakref.finalize(self, close, tuple(self._workers.values()))

    def workers(self) -> set[str]:
        """The labels of the worker threads. The last stage's device needs none: the calling thread, which would
        otherwise only wait, is its worker."""
        labels = {*self.devices, *(label for labels in self.replicas for label in labels)}
        return labels - {self.devices[-1]}

    @property
    def source(self) -> str:
        """The text of the generated file."""
        return Path(inspect.getfile(type(self))).read_text(encoding="utf-8")

    def close(self) -> None:
        """End the worker threads. A pipe that is garbage collected closes itself."""
        self._close()

    def wake(self) -> None:
        """Start the worker threads that are gone again: in a forked process all are. Raises RuntimeError if the pipe is
        closed."""
        self.check_open()
        for worker in self._workers.values():
            if not worker.thread.is_alive():
                worker.start()

    def check_open(self) -> None:
        """Raise RuntimeError if the pipe is closed."""
        if not self._close.alive:
            raise RuntimeError("the pipe has no workers: it was closed")

    def check_alive(self) -> None:
        """Raise RuntimeError if a worker thread is gone in the middle of a run."""
        for label, worker in self._workers.items():
            if not worker.thread.is_alive():
                raise RuntimeError(f"the worker thread of {label} is gone; the next run starts another")

    def add_notes(
        self, error: BaseException, m: Batches, j: int, i: int, replica: int = 0, backward: bool = False
    ) -> None:
        """Note on the exception which task it comes from, and how to set `chunks` if the micro-batch was too small."""
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
        """Put the tensors that stages borrow from each other into `m.lent`. Generated schedulers override it."""

    def scatter(self, batch: Sequence[Any], chunks: int, seed: int | None = None) -> MiniBatch:
        """At most `chunks` micro-batches, with their inputs and sizes. `seed`: of the random ops; drawn if it is None
        and there are any. Raises ValueError if the inputs differ in batch size."""
        total = {value.shape[dim] for value, (_, dim) in zip(batch, self.inputs, strict=True) if dim is not None}
        if len(total) > 1:
            raise ValueError(f"the inputs do not have a common batch size, but {sorted(total)}")
        if self._on_cpu:  # stages on the CPU need the inputs there; the other stages copy them from there
            batch = [x.cpu() if isinstance(x, Tensor) and not (x.is_cpu or x.is_meta) else x for x in batch]
        rows = split_sizes(total.pop(), chunks) if total else (1,)
        if seed is None:
            seed = new_seed() if self.random else 0
        m = [MicroBatch() for _ in rows]
        if self.whole is not None:
            for name, value in self.compute_totals(self.whole, batch).items():
                for micro_batch in m:
                    setattr(micro_batch, name, value)
        for value, (name, dim) in zip(batch, self.inputs, strict=True):
            if name in self.detached:
                value = value.detach()
            for micro_batch, piece in zip(m, scatter(value, dim, rows), strict=True):
                setattr(micro_batch, name, piece)
        for name, source, dim in self.sizes:
            for micro_batch in m:
                setattr(micro_batch, name, getattr(micro_batch, source).shape[dim])
        return MiniBatch(m, rows, max(1, sum(rows)), seed)

    def compute_totals(self, whole: Stage, batch: Sequence[Any]) -> dict[str, Any]:
        """The totals of the whole batch, by name, for each micro-batch; empty if their inputs are on other ranks."""
        gives, takes = self.totals
        known = {name: value for (name, _), value in zip(self.inputs, batch, strict=True)}
        known |= {name: known[source].shape[dim] for name, source, dim in self.sizes}
        if any(isinstance(known[name], Tensor) and known[name].is_meta for name in takes):
            return {}
        device = whole.device
        args = [known[name].to(device) if isinstance(known[name], Tensor) else known[name] for name in takes]
        with torch.no_grad():
            found = whole.forward(*args)
        return dict(zip(gives, (found,) if len(gives) == 1 else found, strict=True))

    def returned(self, outputs: Sequence[Any]) -> tuple[Any, ...]:
        """What a run returns, of the joined outputs of its micro-batches."""
        gives, takes = self.epilogue
        if not gives:
            return tuple(outputs)
        known = {name: value for (name, _, _), value in zip(self.outputs, outputs, strict=True)}
        return (*(value for name, value in known.items() if name not in takes), *self.run_epilogue(known))

    def run_epilogue(self, known: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values that the epilogue gives, from joined outputs, by name, and sizes that these show."""
        gives, takes = self.epilogue
        assert self.last is not None  # as the scheduler has an epilogue
        found = self.last.forward(*[known[name] for name in takes])
        return (found,) if len(gives) == 1 else tuple(found)

    def gather(self, m: Batches, taken: bool = True) -> tuple[Any, ...]:
        """The outputs of the mini-batch, with or without those that the epilogue takes."""
        return tuple(
            gather([getattr(micro_batch, name) for micro_batch in m], dim, reduce, m.sizes)
            for name, dim, reduce in self.outputs
            if taken or name not in self.epilogue[1]
        )
