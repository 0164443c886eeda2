"""Training for long, and making pipe after pipe: nothing is left behind. No tensors, threads, files, modules."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import fxpipe
from fxpipe.demo.transformer import PixelTransformer
from fxpipe.demo.unet import UNet
from fxpipe.engines.local.thread_autotune import ThreadAutotune
from tests.helpers.marks import mostly_slow

BYTES = 1e6  # that hundreds of steps may leave, for caches that still grow; tensors would be many times as much


@dataclass(frozen=True)
class Held:
    """What the process holds on to."""

    tensors: int  # fake ones apart, which torch caches when it traces
    threads: int
    files: int
    modules: int
    folders: int


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary folders go where no other process makes any."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def held() -> Held:
    gc.collect()
    files = Path("/proc/self/fd")
    return Held(
        tensors=sum(issubclass(type(one), Tensor) and type(one) is not FakeTensor for one in gc.get_objects()),
        threads=threading.active_count(),
        files=len(os.listdir(files)) if files.exists() else 0,
        modules=len(sys.modules),
        folders=len(list(Path(tempfile.gettempdir()).glob("fxpipe-*"))),
    )


def grown(before: Held) -> dict[str, int]:
    """What there is more of than before, and how much more. There may be less: an earlier test's go when they may."""
    now = held()
    more = {field.name: getattr(now, field.name) - getattr(before, field.name) for field in fields(Held)}
    return {name: count for name, count in more.items() if count > 0}


def in_cycles(run: Callable[[], object]) -> list[str]:
    """The types of the tensors and of autograd's nodes that a run leaves in cycles, which only Python's garbage
    collection frees; fake tensors apart, which torch caches when it traces, and classes, which other tests define."""
    gc.collect()
    earlier = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]  # kept: another test's may end now
    gc.disable()
    try:
        run()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = [type(one) for one in gc.garbage if type(one) is not FakeTensor and not isinstance(one, type)]
        return [kind.__name__ for kind in kinds if issubclass(kind, Tensor) or "Function" in kind.__name__]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        del earlier


class MallInfo(ctypes.Structure):
    """What glibc's mallinfo2 tells of all arenas, in bytes or pieces."""

    NAMES: ClassVar = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in (*NAMES, "keepcost")]


def allocated() -> int:
    """Bytes that malloc has given out and not got back; 0 where the C library does not tell. What the process has of
    the system's memory would be no measure: what other tests have freed lies about in it in pieces."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def train(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


DEMOS = {
    "unet": (lambda: UNet(4), torch.zeros(8, 1, 16, 16), torch.ones(8, 1, 16, 16), F.mse_loss),
    "transformer": (
        lambda: PixelTransformer(width=16),
        torch.arange(8 * 20).view(8, 20) % 17,
        torch.arange(8 * 20).view(8, 20) % 16,
        token_loss,
    ),
}


def check(take: Callable[[int], None], warm: int, steps: int) -> None:
    """So many steps leave nothing, after some in which Python and torch fill their lists of freed objects."""
    take(warm)
    before, objects, blocks = held(), len(gc.get_objects()), sys.getallocatedblocks()
    take(steps)
    assert grown(before) == {}
    assert len(gc.get_objects()) - objects < 20
    assert sys.getallocatedblocks() - blocks < 1000 + steps / 10  # numbers and strings are no objects of gc's


@pytest.mark.slow
@pytest.mark.parametrize("name", DEMOS)
def test_steps_leave_nothing(name: str) -> None:
    make, x, y, loss = DEMOS[name]
    pipe = fxpipe.compile(make(), devices=4, chunks=4)
    check(lambda steps: train(pipe, x, y, loss, steps), 10, 40)
    pipe.close()


@pytest.mark.long
@pytest.mark.parametrize("name", DEMOS)
def test_hundreds_of_steps_leave_nothing(name: str) -> None:
    make, x, y, loss = DEMOS[name]
    pipe = fxpipe.compile(make(), devices=4, chunks=4)
    train(pipe, x, y, loss, 100)
    gc.collect()
    memory = allocated()
    check(lambda steps: train(pipe, x, y, loss, steps), 50, 200)
    assert allocated() - memory < BYTES
    pipe.close()


def test_steps_leave_no_cycles() -> None:
    # What is in a cycle lives until Python happens to collect it: activations would pile up.
    make, x, y, loss = DEMOS["unet"]
    pipe = fxpipe.compile(make(), devices=4, chunks=4)
    train(pipe, x, y, loss, 3)
    assert in_cycles(lambda: train(pipe, x, y, loss, 3)) == []
    pipe.close()


# Steps ----------------------------------------------------------------------------------------------------------------


def tiny(schedule: str, checkpoint: str) -> tuple[fxpipe.Pipe, Callable[[int], None]]:
    """A pipe of four small stages, and what takes so many steps with it."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Dropout(0.1), nn.Tanh())))
    pipe = fxpipe.compile(model, devices=4, chunks=4, schedule=schedule, checkpoint=checkpoint)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    batches = [(torch.ones(rows, 4), torch.zeros(rows, 4)) for rows in (8, 8, 7, 3)]

    def take(steps: int) -> None:
        for number in range(steps):
            x, y = batches[number % len(batches)]
            optimizer.zero_grad()
            pipe.step(x, target=y, loss_fn=F.mse_loss, timeline=number % 10 == 0)
            optimizer.step()

    return pipe, take


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "checkpoint"), [("1f1b", "always"), ("zb-h1", "never"), ("zb-h1", "always")])
def test_steps_in_one_go_leave_nothing(schedule: str, checkpoint: str) -> None:
    pipe, take = tiny(schedule, checkpoint)
    check(take, 40, 100)
    pipe.close()


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_thousands_of_steps_leave_nothing(schedule: str) -> None:
    pipe, take = tiny(schedule, "except_last")
    take(900)
    gc.collect()
    memory = allocated()
    check(take, 100, 1000)
    assert allocated() - memory < BYTES
    pipe.close()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_steps_in_one_go_leave_no_cycles(schedule: str) -> None:
    pipe, take = tiny(schedule, "except_last")
    take(3)
    assert in_cycles(lambda: take(4)) == []
    pipe.close()


@pytest.mark.parametrize("alone", [False, True])
def test_steps_inside_of_one_autocast_leave_nothing(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """autocast keeps the weights that it casts until the outermost context ends, and each step has aliases of its
    own."""
    monkeypatch.setattr(ThreadAutotune, "choose", lambda pace: alone)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))  # 1 MB each
    pipe = fxpipe.compile(model, devices=2, chunks=2, schedule="1f1b")
    x = torch.ones(4, 512)
    with torch.autocast("cpu", torch.bfloat16):
        for number in range(60):
            pipe.step(x, loss_fn=torch.sum)
            if number == 10:
                before = allocated()
        assert allocated() - before < BYTES
    pipe.close()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("closed", mostly_slow([True, False], lambda closed: not closed), ids=["closed", "dropped"])
def test_pipes_leave_nothing(closed: bool) -> None:
    def once(x: Tensor) -> None:
        pipe = fxpipe.compile(Net(), devices=2, chunks=2)
        pipe(x).sum().backward()
        pipe.eval()
        pipe(x)
        if closed:
            pipe.close()

    x = torch.ones(4, 4)
    for _ in range(2):
        once(x)
    before = held()
    for _ in range(6):
        once(x)
    assert grown(before) == {}


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_loaded_packages_leave_nothing(tmp_path: Path, closed: bool) -> None:
    def once(x: Tensor) -> None:
        loaded = fxpipe.load(tmp_path / "out", Net())
        loaded(x).sum().backward()
        if closed:
            loaded.close()

    x = torch.ones(4, 4)
    pipe = fxpipe.compile(Net(), devices=2, chunks=2, example_inputs=x)
    pipe.save(tmp_path / "out")
    once(x)
    before = held()
    for _ in range(6):
        once(x)
    assert grown(before) == {}
    pipe.close()
