"""What is saved from one number of stages goes on in any other, and in the plain model."""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import fxpipe
from fxpipe import async_save_checkpoint, last_checkpoint, load_checkpoint, materialize, save_checkpoint
from fxpipe.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """Tied weights, running statistics, a frozen parameter, keys that begin like others (`head`, `head.0`)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Sequential(nn.Linear(8, 11))
        self.head[0].weight = self.embed.weight
        self.layers[2].bias.requires_grad = False
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    biases = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() > 1]
    return torch.optim.AdamW(
        [{"params": others}, {"params": biases, "weight_decay": 0.0, "betas": (0.8, 0.9)}], lr=0.01
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05), momentum=0.9)


def batch(step: int) -> Tensor:
    return torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(step))


def train(run: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = batch(step)
        if isinstance(run, fxpipe.Pipe):
            loss = run.step(ids, target=ids, loss_fn=F.cross_entropy)
        else:  # in micro-batches, for the sake of running statistics
            parts = [F.cross_entropy(run(part), part) / 2 for part in ids.chunk(2)]
            loss = sum(parts)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def piped(stages: int, model: nn.Module | None = None) -> fxpipe.Pipe:
    return fxpipe.compile(model or Net(), devices=stages, chunks=2, schedule="1f1b")


def same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize(("make", "stages"), [pytest.param(adam, (2, 7), marks=pytest.mark.slow), (sgd, ())])
def test_saved_from_four_stages(
    make: Callable[[nn.Module], torch.optim.Optimizer], stages: tuple[int, ...], tmp_path: Path
) -> None:
    pipe = piped(4)
    optimizer = make(pipe)
    train(pipe, optimizer, range(3))
    optimizer.param_groups[0]["lr"] *= 0.5  # as a schedule does
    save_checkpoint(tmp_path / "3", pipe, optimizer, step=3, rng=torch.get_rng_state())

    runs: list[nn.Module] = [*map(piped, stages), Net()]
    with torch.device("meta"):
        empty = Net()
    materialize(empty, checkpoint=tmp_path / "3")
    runs.append(empty)
    saved = copy.deepcopy(optimizer.state_dict())
    losses = train(pipe, optimizer, range(3, 23))
    for run in runs:
        other = make(run)
        extra = load_checkpoint(tmp_path / "3", run, other)
        assert extra["step"] == 3
        assert extra["rng"].dtype == torch.uint8
        same(other.state_dict(), saved)
        torch.testing.assert_close(train(run, other, range(3, 23)), losses, rtol=1e-9, atol=0)
        if isinstance(run, fxpipe.Pipe):
            run.close()
    pipe.close()


def test_and_back(tmp_path: Path) -> None:
    plain = Net()
    optimizer = adam(plain)
    train(plain, optimizer, range(2))
    save_checkpoint(tmp_path / "a", plain, optimizer)
    pipe = piped(3)
    other = adam(pipe)
    assert load_checkpoint(tmp_path / "a", pipe, other) == {}
    same(pipe.state_dict(), plain.state_dict())
    same(other.state_dict(), optimizer.state_dict())
    pipe.close()


def test_torch_reads_it_without_us(tmp_path: Path) -> None:
    model, other = Net(), Net()
    save_checkpoint(tmp_path / "a", model)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "a")
    same(other.state_dict(), model.state_dict())


def test_by_key_and_not_by_position(tmp_path: Path) -> None:
    """The optimizer there has the parameters in another order, and not all of them."""
    model, other = Net(), Net()
    first = torch.optim.Adam(model.parameters())
    train(model, first, range(2))
    save_checkpoint(tmp_path / "a", model, first)
    second = torch.optim.Adam([*other.head.parameters(), other.layers[4].bias])
    load_checkpoint(tmp_path / "a", other, second)
    same(second.state[other.layers[4].bias], first.state[model.layers[4].bias])
    same(second.state[other.head[0].bias], first.state[model.head[0].bias])


def test_numbers_that_are_no_tensors(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    first = torch.optim.SGD(model.parameters(), momentum=0.5)
    first.state[model.weight] = {"momentum_buffer": torch.ones(2, 2), "steps": 7, "best": 0.1, "none": None}
    save_checkpoint(tmp_path / "a", model, first)
    second = torch.optim.SGD(model.parameters(), momentum=0.5)
    load_checkpoint(tmp_path / "a", model, second)
    state = second.state[model.weight]
    assert (state["steps"], state["best"]) == (7, 0.1)
    assert state.keys() == {"momentum_buffer", "steps", "best"}


def test_the_last_one_that_is_whole(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for at, name in enumerate("ba"):
        save_checkpoint(tmp_path / name, nn.Linear(2, 2))
        os.utime(tmp_path / name / ".metadata", (at, at))
    (tmp_path / "c").mkdir()  # begun, and killed
    (tmp_path / "c" / "__0_0.distcp").write_bytes(b"...")
    assert last_checkpoint(tmp_path) == tmp_path / "a"


# Beside training ------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are written once the event is set."""
    may, write = threading.Event(), FileSystemWriter.write_data

    def write_data(self: FileSystemWriter, plan: Any, planner: Any) -> Any:
        assert may.wait(60)
        return write(self, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data)
    return may


def test_training_goes_on_meanwhile(tmp_path: Path, slow_disk: threading.Event) -> None:
    """What is saved is what was there when it was asked for; before it is complete, the last one counts."""
    slow_disk.set()
    model = Net()
    optimizer = adam(model)
    train(model, optimizer, range(2))
    save_checkpoint(tmp_path / "a", model, optimizer)
    slow_disk.clear()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    saving = async_save_checkpoint(tmp_path / "b", model, optimizer, step=2, rng=torch.get_rng_state())
    train(model, optimizer, range(2, 4))
    assert last_checkpoint(tmp_path) == tmp_path / "a"
    slow_disk.set()
    saving.wait()
    saving.wait()
    assert last_checkpoint(tmp_path) == tmp_path / "b"
    other = Net()
    second = adam(other)
    assert load_checkpoint(tmp_path / "b", other, second)["step"] == 2
    same((other.state_dict(), second.state_dict()), saved)
    assert any(not torch.equal(value, saved[0][key]) for key, value in model.state_dict().items())


def test_the_next_one_waits(tmp_path: Path, slow_disk: threading.Event) -> None:
    model = nn.Linear(2, 2)
    async_save_checkpoint(tmp_path / "a", model)
    threading.Timer(0.1, slow_disk.set).start()
    async_save_checkpoint(tmp_path / "b", model)
    assert (tmp_path / "a" / ".metadata").exists()
    save_checkpoint(tmp_path / "c", model)
    assert (tmp_path / "b" / ".metadata").exists()


def test_reading_waits(tmp_path: Path, slow_disk: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever model it is read, and whoever waits for it later."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    saving = async_save_checkpoint(tmp_path / "a", model, step=1)
    with pytest.raises(CheckpointError, match="is being written, by an async_save_checkpoint"):
        save_checkpoint(tmp_path / "a", other)
    threading.Timer(0.1, slow_disk.set).start()
    monkeypatch.chdir(tmp_path)
    assert load_checkpoint("a", other) == {"step": 1}
    assert torch.equal(other.weight, model.weight)
    saving.wait()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    saving = async_save_checkpoint(tmp_path / "b", model)
    with pytest.raises(CheckpointError, match="is not complete, it could not be written") as caught:
        materialize(other, checkpoint=tmp_path / "b")
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(OSError, match="no space left"):
        saving.wait()


def test_an_error_of_writing_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    model = nn.Linear(2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", full)
        saving = async_save_checkpoint(tmp_path / "a", model)
        with pytest.raises(OSError, match="no space left"):
            saving.wait()
        async_save_checkpoint(tmp_path / "a", model)
        with pytest.raises(OSError, match="no space left"):
            save_checkpoint(tmp_path / "b", model)
        with pytest.raises(CheckpointError, match="only tensors"):  # at once
            async_save_checkpoint(tmp_path / "a", model, rule=print)
        patch.setattr(FileSystemWriter, "finish", full)
    assert last_checkpoint(tmp_path) is None
    async_save_checkpoint(tmp_path / "a", model).wait()
    assert last_checkpoint(tmp_path) == tmp_path / "a"


ENDS = """
import os, signal, sys, threading, time
from pathlib import Path
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
import fxpipe

folder, how = Path(sys.argv[1]), sys.argv[2]
model = nn.Linear(2, 2)
nn.init.ones_(model.weight)
fxpipe.save_checkpoint(folder / "1", model)
nn.init.zeros_(model.weight)
begun, write = threading.Event(), FileSystemWriter.write_data

def write_data(self, *args):
    found = write(self, *args)
    begun.set()
    time.sleep(0.5)  # all files are there, and nothing says so
    if self.path == folder / "3":
        raise OSError("no space left on device")
    return found

FileSystemWriter.write_data = write_data
fxpipe.async_save_checkpoint(folder / "2", model)
begun.wait()
if how == "ends":
    fxpipe.async_save_checkpoint(folder / "3", nn.Linear(2, 2))
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "last"), [("ends", "2"), ("killed", "1")])
def test_the_end_of_the_process(tmp_path: Path, how: str, last: str) -> None:
    """It waits for the files, and says what has failed; killed before, the last one that is whole is loaded."""
    run = subprocess.run([sys.executable, "-c", ENDS, tmp_path, how], capture_output=True, text=True, timeout=120)
    assert run.returncode == (-signal.SIGKILL if how == "killed" else 0), run.stderr
    told = f"fxpipe: the checkpoint {tmp_path / '3'} is not complete: OSError: no space left on device" in run.stderr
    assert told == (how == "ends")
    model, found = nn.Linear(2, 2), last_checkpoint(tmp_path)
    assert found == tmp_path / last
    load_checkpoint(found, model)
    assert (model.weight == (1 if last == "1" else 0)).all()


# Refusals -------------------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch bomb",)


@pytest.mark.parametrize("read", [load_checkpoint, lambda path, model: materialize(model.to("meta"), checkpoint=path)])
def test_nothing_in_it_is_run(read: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=r"asks for posix.system, which no table of contents needs"):
        read(tmp_path / "a", nn.Linear(1, 1))
    assert not (tmp_path / "bomb").exists()


@pytest.mark.parametrize("where", ["../other/", "/"])
def test_no_file_outside_of_the_folder_is_read(where: str, tmp_path: Path) -> None:
    for name in ("mine", "other"):
        save_checkpoint(tmp_path / name, nn.Linear(1, 1))
    table = tmp_path / "mine" / ".metadata"
    contents = pickle.loads(table.read_bytes())
    for place in contents.storage_data.values():
        place.relative_path = where + place.relative_path
    table.write_bytes(pickle.dumps(contents))
    with pytest.raises(CheckpointError, match=r"names .*__0_0.distcp, which is not in the folder"):
        load_checkpoint(tmp_path / "mine", nn.Linear(1, 1))


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_of_another_python_are_read(module: str, tmp_path: Path) -> None:
    """Python 3.13 names the module of its paths `pathlib._local`, all others `pathlib`."""
    saved, read = nn.Linear(2, 2), nn.Linear(2, 2)
    save_checkpoint(tmp_path / "a", saved)
    table = tmp_path / "a" / ".metadata"
    contents = pickle.dumps(pickle.loads(table.read_bytes()), protocol=2)  # with names as lines
    own, other = (f"c{name}\nPosixPath\n".encode() for name in (PosixPath.__module__, module))
    assert own in contents
    table.write_bytes(contents.replace(own, other))
    load_checkpoint(tmp_path / "a", read)
    assert torch.equal(saved.weight, read.weight)


@pytest.mark.parametrize("attribute", ["new", "__truediv__"])
def test_it_changes_no_class(attribute: str, tmp_path: Path) -> None:
    before = dict(vars(PosixPath))
    (tmp_path / "a").mkdir()
    # the opcodes for setattr(PosixPath, attribute, "x")
    (tmp_path / "a" / ".metadata").write_bytes(f"cpathlib\nPosixPath\n(N(V{attribute}\nVx\ndtb.".encode())
    with pytest.raises(CheckpointError, match="changes the class PosixPath"):
        load_checkpoint(tmp_path / "a", nn.Linear(1, 1))
    assert dict(vars(PosixPath)) == before


@pytest.mark.parametrize(
    ("about", "says"),
    [
        (b"[]", "the file is []: write an object with 'groups', 'extra'"),
        (b"\xff", "invalid start byte"),
        (b"[" * 100_000, "too many lists or objects within each other"),
        (b'{"groups": [3]}', "groups[0] is 3: write an object"),
        (b'{"groups": [{"lr": 1}]}', "params is null: write a list"),
        (b'{"extra": []}', "extra is []: write an object"),
    ],
)
def test_what_is_beside_the_tensors_is_damaged(tmp_path: Path, about: bytes, says: str) -> None:
    model = nn.Linear(1, 1)
    tensors = {f"model.{key}": value.detach() for key, value in model.state_dict().items()}
    tensors["about.0"] = torch.frombuffer(bytearray(about), dtype=torch.uint8)
    dcp.save(tensors, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(CheckpointError, match=f"a is damaged: about.0: .*{re.escape(says)}"):
        load_checkpoint(tmp_path / "a", model)


def test_of_another_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(3, 1), nn.PReLU())
    before = model[1].weight.clone()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "a", model)
    assert str(caught.value).splitlines()[1:] == [
        "  2.weight: missing",
        "  0.bias: the model has none",
        "  0.weight: [3, 2], and the model has [2, 2]",
    ]
    assert torch.equal(model[1].weight, before)


def test_of_another_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path / "none", model)
    one = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1)
    save_checkpoint(tmp_path / "two", model, one)
    with pytest.raises(CheckpointError, match="has nothing of an optimizer for weight, bias"):
        load_checkpoint(tmp_path / "none", model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match="has other hyperparameters for bias than for weight"):
        load_checkpoint(tmp_path / "two", model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match=r"of shape \[3, 3\] that the model does not have"):
        save_checkpoint(tmp_path / "x", model, torch.optim.SGD(nn.Linear(3, 3).parameters()))


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="has a checkpoint already; choose another folder"):
        save_checkpoint(tmp_path / "a", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="weight: on the meta device"):
        save_checkpoint(tmp_path / "b", nn.Linear(2, 2, device="meta"))
    with pytest.raises(CheckpointError, match="only tensors, and what JSON knows, can be saved"):
        save_checkpoint(tmp_path / "b", nn.Linear(2, 2), rule=print)
    with pytest.raises(CheckpointError, match=r"there is|no folder of torch.distributed.checkpoint"):
        load_checkpoint(tmp_path / "b", nn.Linear(2, 2))
