"""What a step does while it runs, counted: the order of actions, recomputations, writes to buffers, what is kept."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.engines.common.step import Step
from fxpipe.ir.schedule.schedule import Action
from tests.helpers.marks import mostly_slow
from tests.whole.test_counts import SPLIT, Net

CHUNKS = 5
CHECKPOINTS: list[Any] = ["never", "except_last", "always", {0, 2}]
SCHEDULES = {
    "gpipe": 4, "1f1b": 4, "1f1b-late": 4, "zb-h1": 4, "zb-h2": 4,
    "interleaved": 2, "interleaved-late": 2, "looped-bfs": 2, "zb-v": 2, "dualpipe-v": 2,
}  # fmt: skip
GRID = list(product(SCHEDULES, CHECKPOINTS))  # each third has all schedules and all modes
METHODS = {
    "forward": "F",
    "forward_to_recompute": "F",
    "recompute": "R",
    "backward": "B",
    "input_gradient": "I",
    "weight_gradient": "W",
}
Make = Callable[..., fxpipe.Pipe]


@pytest.fixture
def make() -> Iterator[Make]:
    """A pipe of a net in four stages."""
    made: list[fxpipe.Pipe] = []

    def pipe(schedule: str, kind: type[nn.Module] = Net, chunks: int = CHUNKS, **options: Any) -> fxpipe.Pipe:
        torch.manual_seed(0)
        model = kind().double()
        made.append(fxpipe.compile(model, SCHEDULES[schedule], chunks, schedule=schedule, cut=SPLIT, **options))
        return made[-1]

    yield pipe
    for one in made:
        one.close()


def step(pipe: fxpipe.Pipe, rows: int = 2 * CHUNKS) -> None:
    x = torch.linspace(-1, 1, 6 * rows, dtype=torch.float64).view(rows, 6)
    pipe.step(x, loss_fn=torch.sum)


def watch(monkeypatch: pytest.MonkeyPatch, note: Callable[[Step, Action], None]) -> None:
    """`note` gets each action as it begins, on its thread."""
    for name, kind in METHODS.items():
        monkeypatch.setattr(Step, name, noted(getattr(Step, name), kind, note))


def noted(method: Callable[..., Any], kind: str, note: Callable[[Step, Action], None]) -> Callable[..., Any]:
    def run(m: Step, j: int, i: int, *args: Any) -> Any:
        note(m, Action(kind, j, i))
        return method(m, j, i, *args)

    return run


@pytest.mark.parametrize(("schedule", "checkpoint"), mostly_slow(GRID, GRID[::13].__contains__), ids=str)
def test_buffers_are_written_once_per_micro_batch(make: Make, schedule: str, checkpoint: Any) -> None:
    pipe = make(schedule, checkpoint=checkpoint)
    plain = copy.deepcopy(pipe.model)
    own = dict(pipe.named_buffers())
    x = torch.linspace(-1, 1, 66, dtype=torch.float64).view(11, 6)
    for turn in range(1, 3):
        pipe.step(x, loss_fn=torch.sum)
        counts = {name: buffer.item() for name, buffer in pipe.named_buffers() if name.endswith("count")}
        assert counts == dict.fromkeys(counts, turn * CHUNKS)
        with torch.no_grad():
            for piece in x.tensor_split(CHUNKS):
                plain(piece)
        for (name, buffer), (_, wanted) in zip(pipe.named_buffers(), plain.named_buffers(), strict=True):
            torch.testing.assert_close(buffer, wanted, rtol=1e-12, atol=1e-12, msg=name)
            assert buffer is own[name]


@pytest.mark.parametrize(
    "schedule", mostly_slow(SCHEDULES, ("1f1b", "zb-h1", "interleaved", "dualpipe-v").__contains__)
)
def test_each_worker_runs_its_row(make: Make, monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """In the order of the schedule, on a thread of its own, and nothing else; micro-batches that are not there left
    out."""
    pipe = make(schedule, checkpoint="never")
    step(pipe)
    log: dict[str, list[Action]] = defaultdict(list)
    watch(monkeypatch, lambda m, action: log[threading.current_thread().name].append(action))
    labels = dict.fromkeys(pipe.build.program.devices)
    # The calling thread is the worker of the last stage's device.
    mine = pipe.build.program.devices[-1]
    names = [threading.current_thread().name if label == mine else f"fxpipe {label}" for label in labels]
    for rows in (2 * CHUNKS, 3):
        log.clear()
        step(pipe, rows)
        wanted = [[action for action in row if action.micro_batch < rows] for row in pipe.schedule.devices]
        assert dict(log) == dict(zip(names, wanted, strict=True))


@pytest.mark.parametrize("schedule", mostly_slow(["gpipe", "1f1b", "zb-h1"], "1f1b".__eq__))
def test_recomputation_starts_before_the_gradient_is_there(
    make: Make, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """Each gradient is held back until the stage that it goes to has begun to compute again: if that waited for the
    gradient, both would wait."""
    pipe = make(schedule, checkpoint="always")
    step(pipe)
    begun: dict[tuple[int, int], threading.Event] = defaultdict(threading.Event)
    late: list[tuple[int, int]] = []
    watch(monkeypatch, lambda m, action: begun[action[1:]].set() if action.kind == "R" else None)
    send = Step.send_gradient

    def held_back(m: Step, j: int, i: int, name: str, value: Any, to: int) -> None:
        if not begun[to, i].wait(60):
            late.append((to, i))
        send(m, j, i, name, value, to=to)

    monkeypatch.setattr(Step, "send_gradient", held_back)
    step(pipe)
    assert late == []
    assert {(j, i) for (j, i), event in begun.items() if event.is_set()} >= {(j, i) for j in range(3) for i in range(5)}


# What is kept ---------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Four equal stages that keep much."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third, self.fourth):
            x = F.gelu(layer(x)).sin().tanh()
        return x


def live(pipe: fxpipe.Pipe, rows: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most micro-batches that each stage keeps at once."""
    most = [0] * 4

    def note(m: Step, action: Action) -> None:
        if action.kind != "R":
            kept = [i for (j, i) in [*m.kept, *m.pending_by_autograd] if j == action.stage and i != action.micro_batch]
            most[action.stage] = max(most[action.stage], len(kept) + 1)

    with monkeypatch.context() as patch:
        watch(patch, note)
        step(pipe, rows)
    return most


@pytest.mark.parametrize(
    ("chunks", "checkpoint"),
    mostly_slow(product([2, 4, 8, 16], ["never", "always"]), [(2, "always"), (8, "never")].__contains__),
)
def test_live_micro_batches(make: Make, monkeypatch: pytest.MonkeyPatch, chunks: int, checkpoint: str) -> None:
    """1F1B keeps min(stages from here to the end, chunks) at a stage, however many there are; GPipe keeps all."""
    for schedule, wanted in (("1f1b", [4, 3, 2, 1]), ("gpipe", [chunks] * 4), ("zb-h1", [4] * 4)):
        pipe = make(schedule, Wide, chunks, checkpoint=checkpoint)
        step(pipe, 2 * chunks)
        found = live(pipe, 2 * chunks, monkeypatch)
        limits = [min(most, chunks) for most in wanted]
        assert found == limits if schedule != "zb-h1" else all(a <= b for a, b in zip(found, limits, strict=True))


def kept_bytes(make: Make, schedule: str, chunks: int, checkpoint: str) -> tuple[int, ...]:
    """The most bytes that autograd keeps on each device, for micro-batches of two. Of the caller's batch, only the
    micro-batches count that the first stage keeps."""
    pipe = make(schedule, Wide, chunks, checkpoint=checkpoint)
    step(pipe, 2 * chunks)
    x = torch.linspace(-1, 1, 12 * chunks, dtype=torch.float64).view(2 * chunks, 6)
    pipe.step(x, loss_fn=torch.sum, timeline=True)
    return tuple(pipe.timeline.high_water)


def test_kept_bytes(make: Make) -> None:
    early = [kept_bytes(make, "1f1b", chunks, "never") for chunks in (4, 8, 16)]
    assert early[0] == early[1] == early[2], "as many as there are stages behind, for any number of micro-batches"
    assert early[0] == tuple(sorted(early[0], reverse=True))
    late = [kept_bytes(make, "gpipe", chunks, "never") for chunks in (4, 8, 16)]
    for device in range(4):
        assert late[0][device] < late[1][device] < late[2][device]
    again = kept_bytes(make, "1f1b", 8, "always")
    assert all(a < b for a, b in zip(again[:-1], early[1][:-1], strict=True))
    assert again[-1] == early[1][-1], "its backwards follow at once: nothing is computed again"
