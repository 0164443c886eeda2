"""What happens before what on the streams of a program for GPUs, told by streams that only take notes.

A stream is what it has seen: the events on it, and those on streams it has waited for. Stages compute on the CPU; where
a real stream would let a kernel read memory that is not written yet, an event is missing here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.codegen.scheduler.value_locations import Places, torch_device
from fxpipe.engines.common.scheduler_base import Batches, MiniBatch, Place
from fxpipe.engines.local.forward_engine import Pipeline
from fxpipe.ir.program.program import Program
from tests.codegen.scheduler.test_forward_scheduler import Skip, build, gradients, skip_program, with_checkpoint

Event = tuple[str, int, int]  # F or B, stage, micro-batch


class Stream:
    """`stage` and `micro_batch` for a copy stream, with the stream that the stage computes on."""

    def __init__(self, stage: int = -1, micro_batch: int = -1, compute: Stream | None = None) -> None:
        self.stage, self.micro_batch, self.compute = stage, micro_batch, compute
        self.seen: set[Event] = set()

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.seen


class Streams(dict[tuple[int, int], Stream | None]):
    def __init__(self, compute: Sequence[Stream | None]) -> None:
        super().__init__()
        self.compute = compute

    def __missing__(self, key: tuple[int, int]) -> Stream | None:
        compute = self.compute[key[0]]
        self[key] = None if compute is None else Stream(*key, compute)
        return self[key]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The copies, as (from stage, to stage, micro-batch), -1 for the CPU; each is checked as it is made."""
    made: list[tuple[int, int, int]] = []

    def move(
        source: Stream | None, target: Stream | None, device: Any, user: Any, tensors: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        back = torch._C._current_graph_task_id() != -1
        if source is not None:
            i = source.micro_batch
            kind, later = ("B", i - 1) if back else ("F", i + 1)
            assert (kind, source.stage, i) in source.seen, "the copy starts before the value is there"
            assert (kind, source.stage, later) not in source.seen, "the copy waits for work that it does not need"
        if target is not None:
            target.seen |= set() if source is None else source.seen
            target.seen.add(("copied back" if back else "copied", target.stage, target.micro_batch))
        made.append((*(-1 if s is None else s.stage for s in (source, target)), (source or target).micro_batch))
        return tuple(x.clone() for x in tensors)

    def wait_stream(waiting: Stream | None, done: Stream) -> None:
        """`leave` asks torch for the compute stream of a device, which is the CPU here."""
        waiting = waiting or done.compute
        assert waiting is not None
        waiting.wait_stream(done)

    @contextmanager
    def use_stream(stream: Stream | None) -> Iterator[None]:
        yield

    copies, worker = (importlib.import_module(f"fxpipe.runtime.{name}") for name in ("autograd.device_copy", "worker"))
    monkeypatch.setattr(copies, "move", move)
    monkeypatch.setattr(copies, "wait_stream", wait_stream)
    monkeypatch.setattr(worker, "use_stream", use_stream)
    return made


def watched(program: Program, model: Skip, chunks: int, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """The pipeline, with its stages on the CPU and streams that take notes."""
    monkeypatch.setattr("tests.codegen.scheduler.test_forward_scheduler.torch_device", lambda label: "cpu")
    pipe, places = build(program, model, chunks), Places(program)
    of_device = {device: Stream() for device in map(torch_device, program.devices) if device != "cpu"}
    compute = [of_device.get(torch_device(device)) for device in program.devices]
    pipe.streams = Streams(compute)

    class OnThese(Batches):
        def __init__(self, batch: MiniBatch, place: Place) -> None:
            super().__init__(batch, place)
            self.compute = tuple(compute)

    monkeypatch.setattr("fxpipe.engines.local.forward_engine.Batches", OnThese)
    for j in range(len(compute)):
        watch(pipe, places, j, compute[j])
    return pipe


def watch(pipe: Pipeline, places: Places, j: int, compute: Stream | None) -> None:
    """Note and check the tasks of stage j."""
    stage = places.program.stages[j]
    run, forward = getattr(pipe, f"compute_{j}"), pipe.stages[j].forward
    if compute is None:
        return

    def compute_j(m: Any, i: int) -> None:
        def noted(*args: Any) -> Any:
            result = forward(*args)
            compute.seen.add(("F", j, i))
            return result

        takes = [getattr(m[i], places.at(name, j)[5:]) for name in stage.takes]
        sources = {places.sources[name, j] for name in stage.takes if places.arrives(name, j)}
        if any(j >= 0 and torch_device(places.program.devices[j]) != "cpu" for j in sources):
            assert ("copied", j, i) in compute.seen, "the task starts before its inputs are there"
        for x in takes:
            if x.requires_grad:
                x.register_hook(lambda _: compute.seen.add(("B", j, i)))
        pipe.stages[j].forward = noted
        run(m, i)
        for name in stage.gives:
            if places.leaves(name, j):
                getattr(m[i], places.at(name, j)[5:]).register_hook(lambda _: arrived(i))

    def arrived(i: int) -> None:
        """All gradients of a value are added up by now: the copied one, too."""
        assert ("copied back", j, i) in compute.seen, "the gradient is used before it is there"

    setattr(pipe, f"compute_{j}", compute_j)


LAYOUTS = [
    ("cuda:0", "cuda:1", "cuda:2", "cuda:3"),
    ("cuda:0", "cuda:1", "cuda:0", "cuda:1"),
    ("cuda:0", "cuda:1", "cuda:0", "cpu:0"),
    ("cpu:0", "cuda:0", "cuda:1", "cuda:0"),
    ("cuda:0", "cuda:0", "cuda:0", "cuda:0"),
]


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("devices", LAYOUTS, ids=" ".join)
def test_nothing_is_read_before_it_is_written(
    make_graph: Callable[..., Any],
    make_program: Callable[..., Program],
    log: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    devices: Sequence[str],
) -> None:
    model, program = skip_program(make_graph, make_program, devices)
    program = with_checkpoint(program, mode)
    pipe = watched(program, model, 3, monkeypatch)
    image = torch.randn(7, 4).double()
    expected = [torch.cat(pieces) for pieces in zip(*map(model, image.tensor_split(3)), strict=True)]
    outputs = pipe.run((image,), 3)
    forward = len(log)
    torch.testing.assert_close(list(outputs), expected)
    torch.testing.assert_close(gradients(outputs, model), gradients(expected, model))
    assert sorted(log[forward:]) == sorted((target, source, i) for source, target, i in log[:forward])
    assert bool(log) == (len(set(map(torch_device, devices))) > 1)
    pipe.close()
