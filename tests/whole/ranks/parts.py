"""What ranks do in test_parts.py: models without memory, checkpoints, and training loops over ranks."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import DataLoader

import fxpipe
from fxpipe.errors import CheckpointError, FxpipeError, RankError
from fxpipe.pipe.materialize import slots_of
from tests.docs.page_blocks import blocks, run, same
from tests.training.test_checkpoint import Net, adam, batch, train

CHUNKS = 2


def piped(group: Any, model: nn.Module, **options: Any) -> fxpipe.Pipe:
    return fxpipe.compile(model, chunks=CHUNKS, schedule="1f1b", group=group, timeout=60, **options)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def bytes_of(model: nn.Module) -> int:
    """What the model's tensors take that have values."""
    tensors = {id(slot.now): slot.now for slot in slots_of(model) if slot.now is not None and not slot.now.is_meta}
    return sum(tensor.nbytes for tensor in tensors.values())


def materialised(group: Any) -> int:
    """Steps of a model of which each rank has its own stage; gives how many bytes that is here."""
    model, plain = on_meta(), on_meta()
    pipe = piped(group, model, example_inputs=batch(0))
    pipe.materialize(seed=2)
    fxpipe.materialize(plain, seed=2)
    here = {slot.full for slot in slots_of(model) if slot.now is not None and not slot.now.is_meta}
    assert here == set(pipe.keys_here() or ())
    losses = train(pipe, adam(pipe), range(3))
    torch.testing.assert_close(losses, train(plain, adam(plain), range(3)), rtol=1e-9, atol=0)
    wanted = plain.state_dict()
    for key, value in pipe.state_dict().items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-9, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")
    pipe.eval()  # captured anew, with a part of the model on the meta device
    torch.testing.assert_close(pipe.forward_only(batch(9)), plain.eval()(batch(9)))
    pipe.close()
    return bytes_of(model)


Run = tuple[dict[str, Tensor], list[float]]  # what is on a rank where others go on, and the next twenty losses


def saved(group: Any, folder: Path) -> Run:
    """Trains for three steps, saves, and goes on for twenty."""
    torch.manual_seed(1)
    pipe = piped(group, Net())
    optimizer = adam(pipe)  # before the first call: it has all parameters, on every rank
    train(pipe, optimizer, range(3))
    with pytest.raises(FxpipeError, match=r"^(rank 0: )?only tensors, and what JSON knows, can be saved"):
        fxpipe.save_checkpoint(folder, pipe, optimizer, step=3, rule=print)  # which the leader alone would keep
    fxpipe.save_checkpoint(folder, pipe, optimizer, step=3)
    state = held(pipe, optimizer)
    losses = train(pipe, optimizer, range(3, 23))
    pipe.close()
    plain = nn.Linear(2, 2)  # the same on all ranks, which all save it
    fxpipe.async_save_checkpoint(folder / "plain", plain).wait()
    other = nn.Linear(2, 2)
    fxpipe.load_checkpoint(folder / "plain", other)
    assert all(map(torch.equal, plain.parameters(), other.parameters()))
    return state, losses


def gone_on(group: Any, folder: Path, meta: bool) -> Run:
    """Goes on for twenty steps where others have stopped."""
    torch.manual_seed(dist.get_rank())  # nobody has the right values before
    pipe = piped(group, on_meta() if meta else Net(), example_inputs=batch(0))
    if meta:
        pipe.materialize(checkpoint=folder)
    optimizer = adam(pipe)
    assert fxpipe.load_checkpoint(folder, pipe, optimizer) == {"step": 3}
    state = held(pipe, optimizer)
    losses = train(pipe, optimizer, range(3, 23))
    pipe.close()
    return state, losses


def held(run: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers, and what the optimizer keeps of each parameter, by key."""
    found = {key: value.detach().clone() for key, value in run.state_dict().items()}
    for key, parameter in run.named_parameters():
        found |= {f"{name} of {key}": value.clone() for name, value in optimizer.state.get(parameter, {}).items()}
    return {key: value.cpu() for key, value in found.items()}


def put_together(runs: Sequence[Run]) -> Run:
    """What all ranks have, each thing on one of them, and the losses, the same on all."""
    states = [state for state, _ in runs]
    whole = {key: value for state in states for key, value in state.items()}
    assert sum(map(len, states)) == len(whole)
    assert all(losses == runs[0][1] for _, losses in runs)
    return whole, runs[0][1]


def resaved(group: Any, source: Path, folder: Path) -> None:
    """Loads and saves again."""
    pipe = piped(group, Net(), example_inputs=batch(0))
    optimizer = adam(pipe)
    fxpipe.load_checkpoint(source, pipe, optimizer)
    fxpipe.save_checkpoint(folder, pipe, optimizer, step=3)
    pipe.close()


def saved_beside(group: Any, folder: Path) -> Run:
    """Saves while training goes on, the last rank late; then again, and that rank cannot write its files."""
    torch.manual_seed(1)
    pipe = piped(group, Net())
    optimizer, last = adam(pipe), dist.get_rank(group) == dist.get_world_size(group) - 1
    train(pipe, optimizer, range(3))
    state, write = held(pipe, optimizer), FileSystemWriter.write_data

    def late(self: FileSystemWriter, *args: Any) -> Any:
        time.sleep(0.5 * last)
        return write(self, *args)

    def full(self: FileSystemWriter, *args: Any) -> Any:
        if last:
            raise OSError("no space left on device")
        return write(self, *args)

    with patch.object(FileSystemWriter, "write_data", late):
        fxpipe.async_save_checkpoint(folder / "whole", pipe, optimizer, step=3)
        losses = train(pipe, optimizer, range(3, 23))
        # It is complete at some time, though nobody calls `wait`; each rank alone may read it.
        assert fxpipe.load_checkpoint(folder / "whole", Net()) == {"step": 3}
    with patch.object(FileSystemWriter, "write_data", full):
        torn = fxpipe.async_save_checkpoint(folder / "torn", pipe, optimizer)
        train(pipe, optimizer, range(23, 24))
        with pytest.raises(CheckpointError, match="torn is not complete, it could not be written"):
            fxpipe.load_checkpoint(folder / "torn", Net())
        error, text = (OSError, "no space") if last else (RankError, f"^rank {dist.get_world_size(group) - 1}: OSError")
        with pytest.raises(error, match=text):
            torn.wait()
    fxpipe.save_checkpoint(folder / "later", pipe, optimizer)  # says nothing of it again
    assert {path.parent.name for path in folder.glob("*/.metadata")} == {"whole", "later"}
    pipe.close()
    return state, losses


def loads_its_own(group: Any, page: Path, folder: Path) -> None:
    """The part of a page in which each rank loads what its stages use, beside the plain model with all of it."""
    text = page.read_text()
    start = text.index("## Data: each rank loads")
    section = "```python\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n\nimport fxpipe\n```\n"
    section += text[start : text.index("\n## ", start)]
    name = f"losses {os.getpid()}.md"
    with chdir(folder):
        for block, printed in run(name, section, blocks(section)):
            assert same(block, printed)
    names = vars(sys.modules[f"page_losses_{os.getpid()}"])
    samples, losses = names["Part"](), []
    samples.first = samples.last = True
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))
    optimizer = torch.optim.Adam(model.parameters())
    for part in DataLoader(samples, batch_sampler=names["order"](0, 10)):
        loss = F.cross_entropy(model(part["image"]), part["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert names["whole"] == pytest.approx(losses, rel=1e-5)


def loop(model: nn.Module, run: nn.Module, scaler: Any, clip: Any, odd: nn.Parameter | None) -> list[float]:
    """A loop with all that users do: accumulation, scaling, clipping, a schedule of the learning rate. The gradient of
    `odd` is infinite in the third step."""
    optimizer = adam(run)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=5)
    found = []
    for step in range(5):
        for part in range(2):
            ids = batch(10 * step + part)
            if isinstance(run, fxpipe.Pipe):
                loss = run.step(ids, target=ids, loss_fn=F.cross_entropy, scaler=scaler)
            else:
                pieces = [F.cross_entropy(run(piece), piece) / 2 for piece in ids.chunk(2)]
                loss = torch.stack(pieces).sum()
                scaler.scale(loss).backward()
            found.append(loss.item())
        if step == 2 and odd is not None:
            odd.grad.view(-1)[0] = torch.inf
        scaler.unscale_(optimizer)
        found.append(clip(run, 0.1).item())
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found


def clip_plain(run: nn.Module, most: float) -> Tensor:
    return nn.utils.clip_grad_norm_(run.parameters(), most)


def loops_alike(model: nn.Module, pipe: fxpipe.Pipe, plain: nn.Module) -> None:
    """`loop` of the pipe of a model on the meta device, where each rank keeps its own part only, beside the plain
    one."""
    pipe.materialize(seed=2)
    fxpipe.materialize(plain, seed=2)
    odd = model.layers[0].weight if "layers.0.weight" in (pipe.keys_here() or ()) else None
    scalers = fxpipe.GradScaler(pipe, "cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = loop(model, pipe, scalers[0], fxpipe.clip_grad_norm_, odd)
    wanted = loop(plain, plain, scalers[1], clip_plain, plain.layers[0].weight)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0, equal_nan=True)


def looped(group: Any) -> None:
    torch.manual_seed(1)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    pipe = piped(group, model, example_inputs=batch(0))
    mine = "layers.0.weight" in (pipe.keys_here() or ())
    with pytest.raises(
        FxpipeError, match=r"so some ranks would skip an update that others make; use fxpipe.GradScaler\(pipe, ...\)"
    ):
        pipe.step(batch(0), target=batch(0), loss_fn=F.cross_entropy, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(FxpipeError, match=r"clip by different norms; use fxpipe.clip_grad_norm_\(pipe, max_norm\)"):
        clip_plain(pipe, 1.0)
    with pytest.raises(FxpipeError, match="clip by different norms"):
        nn.utils.clip_grad_norm_((p for _, p in pipe.named_parameters() if p.requires_grad), 1.0)
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)  # is no pipe's
    found = loop(
        model, pipe, fxpipe.GradScaler(pipe, "cpu", init_scale=1024.0), fxpipe.clip_grad_norm_,
        model.layers[0].weight if mine else None,
    )  # fmt: skip

    wanted = loop(plain, plain, torch.amp.GradScaler("cpu", init_scale=1024.0), clip_plain, plain.layers[0].weight)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0, equal_nan=True)
    assert found[-1] == 512  # halved once, on every rank
    reference = plain.state_dict()
    for key, value in pipe.state_dict().items():
        torch.testing.assert_close(value, reference[key], rtol=1e-9, atol=1e-12)
    pipe.close()


class Most:
    """The most memory that this process has had since, over what it had then."""

    def __init__(self) -> None:
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed is given back at once
        Path("/proc/self/clear_refs").write_text("5")  # Linux forgets the peak
        self.before = self.read("VmRSS")

    def bytes(self) -> int:
        return self.read("VmHWM") - self.before

    def read(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """In this context the process gets so many bytes and no more."""
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (Most().read("VmData") + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def stays_within(group: Any, width: int, depth: int) -> float:
    """Steps of a model with so many layers on each rank, whose parameters alone no rank may hold. Gives the most memory
    that all of it took, for each byte of the parameters and gradients that are here."""
    layers = depth * dist.get_world_size(group)
    whole = layers * 4 * width * width
    with at_most(3 * whole // 4):
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(whole, dtype=torch.uint8)
        for _ in range(2):  # the first time also loads what all later steps share
            most = Most()
            needed = 2 * steps_of(group, width, layers)
            found = most.bytes() / needed
    return found


def steps_of(group: Any, width: int, layers: int) -> int:
    """Some steps of so many layers; gives the bytes of the parameters here."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    x = torch.ones(4, width)
    pipe = piped(group, model, example_inputs=x)
    pipe.materialize(init=lambda module, path: nn.init.eye_(module.weight) if path else None)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.001)
    losses = []
    for _ in range(3):
        losses.append(pipe.step(x, target=2 * x, loss_fn=F.mse_loss).item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[1] < losses[0]
    own = bytes_of(model)
    pipe.close()
    return own
