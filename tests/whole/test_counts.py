"""What a pipe does while it runs, counted: copies, frees, the order of backward, recomputations, writes to buffers.

net     cpu:0  first ── skip ─────────────────────┬──────────────┐
                 └──▶ cpu:1  second ──▶ cpu:2  third ──▶ cpu:2  fourth ──▶ y
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fxpipe
from fxpipe.codegen.package.load_package import load_package, unload
from fxpipe.codegen.package.package_files import write
from fxpipe.engines.local.forward_engine import Batches, Pipeline
from fxpipe.runtime import copy as copy_on_streams
from fxpipe.runtime.autograd.activation_checkpoint import Task
from tests.helpers.marks import mostly_slow

MODES: list[str | set[int]] = ["never", "except_last", "always", {0, 2}]
CHUNKS = 4
Devices = Sequence[str]
Make = Callable[..., fxpipe.Pipe]


class Net(nn.Module):
    """`skip` is used one, two and three stages later; each stage counts its micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Part()
        self.second = Part()
        self.third = Part()
        self.fourth = Part()

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        h = self.second(skip)
        h = self.third(h) + skip
        return self.fourth(h) * skip


class Words(Net):
    """The same from token ids, which have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(7, 6)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("sum", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.sum += x.detach().sum(0)
        return torch.tanh(self.fc(x) + 0.01 * self.count)


DATA = {
    "floats": (Net, torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)),
    "ids": (Words, torch.arange(8) % 7),
}
SPLIT = ["second", "third", "fourth"]
APART = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
TWO_ON_ONE = ["cpu:0", "cpu:1", "cpu:2", "cpu:2"]
IN_TURNS = ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]
SPREAD = {"apart": APART, "two on one": TWO_ON_ONE, "in turns": IN_TURNS, "all on one": ["cpu:0"] * 4}
GRID = list(product(MODES, DATA, SPREAD))


@pytest.fixture
def make() -> Iterator[Make]:
    """A pipe of a net in four stages."""
    made: list[fxpipe.Pipe] = []

    def pipe(kind: type[nn.Module] = Net, devices: Devices = APART, **options: Any) -> fxpipe.Pipe:
        torch.manual_seed(0)
        made.append(fxpipe.compile(kind().double(), devices, CHUNKS, **{"cut": SPLIT} | options))
        return made[-1]

    yield pipe
    for one in made:
        one.close()


# What happens, written down -------------------------------------------------------------------------------------------


class Log(list[tuple[str, int, int]]):
    """What a pipe does, in order: (what, stage, micro-batch), where what is

    F      a forward run
    again  a recomputation on the edge that waits for no gradient
    late   a recomputation by the backward that should have found it done
    grad   a gradient arrives at the task's outputs
    B      a node of the autograd graph that the task's forward run, or recomputation, has made
    """

    def only(self, stage: int, *what: str) -> list[tuple[str, int]]:
        return [(kind, i) for kind, j, i in self if j == stage and kind in what]


def watch(pipe: fxpipe.Pipe, monkeypatch: pytest.MonkeyPatch) -> Log:
    """Write down what a pipe that has run once does from now on."""
    log, now = Log(), {}
    for j in range(len(pipe.stages)):
        watch_stage(pipe, j, log, now, monkeypatch)
    original = Task.recompute

    def recompute(task: Task, saved: tuple[Tensor, ...]) -> Any:
        j, i = task.where
        now[j] = i
        log.append(("again" if sys._getframe(1).f_code.co_qualname == "Recompute.backward" else "late", j, i))
        return original(task, saved)

    monkeypatch.setattr(Task, "recompute", recompute)
    return log


def watch_stage(pipe: fxpipe.Pipe, j: int, log: Log, now: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`now[j]` is the micro-batch that stage j works on."""
    compute, forward = getattr(pipe.scheduler, f"compute_{j}"), pipe.stages[j].forward

    def watched_compute(m: Batches, i: int) -> None:
        now[j] = i
        log.append(("F", j, i))
        compute(m, i)
        for name in pipe.build.program.stages[j].gives:
            getattr(m[i], name).grad_fn.register_prehook(lambda *_: log.append(("grad", j, i)))

    def watched_forward(*args: Any) -> Any:
        outputs, i = forward(*args), now[j]
        stops = {x.grad_fn for x in args if isinstance(x, Tensor)}
        for node in nodes(outputs if isinstance(outputs, tuple) else (outputs,), stops):
            node.register_prehook(lambda *_: log.append(("B", j, i)))
        return outputs

    monkeypatch.setattr(pipe.scheduler, f"compute_{j}", watched_compute)
    monkeypatch.setattr(pipe.stages[j], "forward", watched_forward)


def nodes(outputs: Sequence[Tensor], stops: set[Any]) -> set[Any]:
    """The autograd nodes between the outputs and where a task's inputs come from, without those of parameters."""
    found: set[Any] = set()
    todo = [x.grad_fn for x in outputs if isinstance(x, Tensor)]
    while todo:
        node = todo.pop()
        if node is not None and node not in found and node not in stops and "AccumulateGrad" not in node.name():
            found.add(node)
            todo += [following for following, _ in node.next_functions]
    return found


def recomputed(mode: str | set[int], stage: int) -> list[int]:
    """The micro-batches that a stage recomputes, in the order of backward."""
    if isinstance(mode, set):
        mode = "except_last" if stage in mode else "never"
    count = {"never": 0, "except_last": CHUNKS - 1, "always": CHUNKS}[mode]
    return list(reversed(range(count)))


@pytest.mark.parametrize(("mode", "data", "spread"), mostly_slow(GRID, GRID[::7].__contains__), ids=str)
def test_the_way_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: str | set[int], data: str, spread: str
) -> None:
    kind, x = DATA[data]
    pipe = make(kind, SPREAD[spread], checkpoint=mode)
    pipe(x)
    log = watch(pipe, monkeypatch)
    pipe(x).square().sum().backward()
    for stage in range(4):
        back = [i for _, i in log.only(stage, "B")]
        assert back == sorted(back, reverse=True), f"stage {stage}: later micro-batches go first"
        assert set(back) == set(range(CHUNKS))
        assert log.only(stage, "F") == [("F", i) for i in range(CHUNKS)]
        # Each recomputation is done once, and not by the backward that finds its gradient there.
        assert log.only(stage, "again", "late") == [("again", i) for i in recomputed(mode, stage)]
        for i in recomputed(mode, stage):
            events = log.only(stage, "again", "grad", "B")
            assert events.index(("again", i)) < events.index(("grad", i)) < events.index(("B", i))
            if i < CHUNKS - 1:
                assert events.index(("again", i)) > events.index(("B", i + 1))


# Portals --------------------------------------------------------------------------------------------------------------


class Far(Net):
    """`far` is used three stages later, and by nobody else."""

    def forward(self, x: Tensor) -> Tensor:
        far = self.first(x)
        h = self.second(far * 2)
        h = self.third(h)
        return self.fourth(h) * far


def test_a_long_value_passes_through_no_stage_between(make: Make) -> None:
    pipe = make(Far)
    pipe.prepare(DATA["floats"][1])
    relayed, program = pipe.trail["cut"], pipe.build.program
    assert all("far" in stage.takes and "far" in stage.gives for stage in relayed.stages[1:3])
    assert [(move.source, move.target) for move in program.moves if move.value == "far"] == [(0, 3)]
    for j in (1, 2):
        assert "far" not in program.stages[j].takes + program.stages[j].gives
        code = pipe.files[f"stage{j}.py"].split('"""')[2]
        of_stage = pipe.scheduler.source.split(f"# stage {j}, ")[1].split("# stage ")[0]
        for text in (code, of_stage):
            assert not re.search(r"\bfar\b", re.sub("#.*", "", text))


class Named(tuple[int, int]):
    """Stands for a stream: stage and micro-batch."""

    def wait_stream(self, other: object) -> None: ...


@pytest.mark.parametrize("mode", mostly_slow(["never", "except_last", "always"], "except_last".__eq__))
def test_a_value_is_copied_once_to_each_device(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The scheduler for three GPUs, two stages on the last, run with stages that are all on the CPU.
    x = DATA["floats"][1]
    devices = ["cuda:0", "cuda:1", "cuda:2", "cuda:2"]
    hollow = fxpipe.compile(
        Net().double().to("meta"), devices, CHUNKS, checkpoint=mode, cut=SPLIT, example_inputs=x.to("meta")
    )
    write(hollow.files, tmp_path)
    package = load_package(tmp_path)
    model = Net().double()
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    scheduler: Pipeline = package.Scheduler([kind(tensors, {}, torch.device("cpu")) for kind in package.STAGES])
    moved: list[tuple[str, int, int, int, int]] = []

    def counted(source: Any, target: tuple[int, int], device: torch.device, *values: Tensor) -> Any:
        if source is None:  # the caller's batch
            return copy_on_streams(None, None, device, *values)
        (j, i), (k, _) = source, target
        moved.append(("there", j, k, i, len(values)))
        found = copy_on_streams(None, None, device, *values)
        node = (found[0] if isinstance(found, tuple) else found).grad_fn
        node.register_prehook(lambda grads: moved.append(("back", k, j, i, sum(g is not None for g in grads))))
        return found

    module = sys.modules[type(scheduler).__module__]
    monkeypatch.setattr(scheduler, "streams", {(j, i): Named((j, i)) for j in range(4) for i in range(CHUNKS)})
    monkeypatch.setattr(module, "copy", counted)
    monkeypatch.setattr(module, "wait", lambda to, after, *values: values[0] if len(values) == 1 else values)
    (y,) = scheduler.run((x,), CHUNKS)
    y.square().sum().backward()
    # skip: to stage 1 and to stage 2, which hands it to its neighbour on the same device; the output of second
    assert sorted(move[1:] for move in moved if move[0] == "there") == sorted(
        (j, k, i, 1) for j, k in ((0, 1), (0, 2), (1, 2)) for i in range(CHUNKS)
    )
    assert sorted(move[1:] for move in moved if move[0] == "back") == sorted(
        (k, j, i, 1) for j, k in ((0, 1), (0, 2), (1, 2)) for i in range(CHUNKS)
    )
    scheduler.close()
    unload(package)


@pytest.mark.parametrize("devices", mostly_slow([APART, TWO_ON_ONE], TWO_ON_ONE.__eq__), ids=["apart", "two on one"])
def test_a_value_is_let_go_after_its_last_use(make: Make, monkeypatch: pytest.MonkeyPatch, devices: Devices) -> None:
    pipe, x = make(devices=devices), DATA["floats"][1]
    with torch.no_grad():
        pipe(x)
        kept = keep_track(pipe, monkeypatch)
        alive: list[list[int]] = []
        last = pipe.scheduler.compute_3

        def compute_3(m: Batches, i: int) -> None:
            alive.append([k for k in range(i + 1) if not kept[k].expired()])
            last(m, i)

        monkeypatch.setattr(pipe.scheduler, "compute_3", compute_3)
        pipe(x)
    assert alive == [[0], [1], [2], [3]], "the last stage finds the skip of its micro-batch and none from before"
    assert all(memory.expired() for memory in kept.values())


@pytest.mark.parametrize("mode", mostly_slow(["never", "except_last", "always"], "except_last".__eq__))
def test_a_skip_is_let_go_in_backward(make: Make, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    pipe, x = make(checkpoint=mode), DATA["floats"][1]
    pipe(x)
    kept = keep_track(pipe, monkeypatch)
    first, gone = pipe.scheduler.compute_0, {}

    def compute_0(m: Batches, i: int) -> None:
        first(m, i)
        m[i].skip.grad_fn.register_prehook(lambda *_: gone.update({i: kept[i].expired()}))

    monkeypatch.setattr(pipe.scheduler, "compute_0", compute_0)
    y = pipe(x)
    assert not any(memory.expired() for memory in kept.values())
    y.square().sum().backward()
    assert all(memory.expired() for memory in kept.values()), "backward is done, though its result is still there"
    # When the gradients of all its users have arrived, none of them holds it; stage 0 itself may, for its tanh.
    assert gone == {i: i in recomputed(mode, 0) for i in range(CHUNKS)}


def keep_track(pipe: fxpipe.Pipe, monkeypatch: pytest.MonkeyPatch) -> dict[int, StorageWeakRef]:
    """The memory of the first stage's output, by micro-batch, from the next run on; recomputations do not count."""
    kept: dict[int, StorageWeakRef] = {}
    forward = pipe.stages[0].forward

    def first(*args: Any) -> Any:
        skip = forward(*args)
        if len(kept) < CHUNKS:
            kept[len(kept)] = StorageWeakRef(skip.untyped_storage())
        return skip

    monkeypatch.setattr(pipe.stages[0], "forward", first)
    return kept


# Buffers --------------------------------------------------------------------------------------------------------------


CASES = product(MODES, ["apart", "two on one"])
QUICK = [("never", "apart"), ("except_last", "two on one"), ("always", "apart"), ({0, 2}, "two on one")]


@pytest.mark.parametrize(("mode", "spread"), mostly_slow(CASES, QUICK.__contains__), ids=str)
def test_buffers_are_written_once_per_micro_batch(make: Make, mode: str | set[int], spread: str) -> None:
    pipe, x = make(devices=SPREAD[spread], checkpoint=mode), DATA["floats"][1]
    plain = copy.deepcopy(pipe.model)
    own = dict(pipe.named_buffers())
    for step in range(1, 4):
        y = pipe(x)
        counts = {name: buffer.item() for name, buffer in pipe.named_buffers() if name.endswith("count")}
        assert counts == dict.fromkeys(counts, step * CHUNKS), "forward has written them"
        y.sum().backward()
        with torch.no_grad():
            for piece in x.split(len(x) // CHUNKS):
                plain(piece)
        for (name, buffer), (_, wanted) in zip(pipe.named_buffers(), plain.named_buffers(), strict=True):
            torch.testing.assert_close(buffer, wanted, rtol=1e-12, atol=1e-12, msg=name)
            assert buffer is own[name]
