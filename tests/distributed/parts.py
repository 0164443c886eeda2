"""What ranks do in test_parts.py: models without memory, checkpoints, and training loops over ranks."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import FxpipeError
from fxpipe.materialize import slots_of
from tests.test_checkpoint import Net, adam, batch, train

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


def saved(group: Any, folder: Path) -> list[float]:
    """Trains for three steps, saves, and goes on for twenty."""
    torch.manual_seed(1)
    pipe = piped(group, Net())
    optimizer = adam(pipe)  # before the first call: it has all parameters, on every rank
    train(pipe, optimizer, range(3))
    with pytest.raises(FxpipeError, match=r"^(rank 0: )?only tensors, and what JSON knows, can be saved"):
        fxpipe.save_checkpoint(folder, pipe, optimizer, step=3, rule=print)  # which the leader alone would keep
    fxpipe.save_checkpoint(folder, pipe, optimizer, step=3)
    losses = train(pipe, optimizer, range(3, 23))
    pipe.close()
    return losses


def gone_on(group: Any, folder: Path, meta: bool) -> list[float]:
    """Goes on for twenty steps where others have stopped."""
    torch.manual_seed(dist.get_rank())  # nobody has the right values before
    pipe = piped(group, on_meta() if meta else Net(), example_inputs=batch(0))
    if meta:
        pipe.materialize(checkpoint=folder)
    optimizer = adam(pipe)
    assert fxpipe.load_checkpoint(folder, pipe, optimizer) == {"step": 3}
    losses = train(pipe, optimizer, range(3, 23))
    pipe.close()
    return losses


def resaved(group: Any, source: Path, folder: Path) -> None:
    """Loads and saves again."""
    pipe = piped(group, Net(), example_inputs=batch(0))
    optimizer = adam(pipe)
    fxpipe.load_checkpoint(source, pipe, optimizer)
    fxpipe.save_checkpoint(folder, pipe, optimizer, step=3)
    pipe.close()


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


def looped(group: Any) -> None:
    torch.manual_seed(1)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    pipe = piped(group, model, example_inputs=batch(0))
    mine = "layers.0.weight" in (pipe.keys_here() or ())
    with pytest.raises(FxpipeError, match=r"so ranks would skip other steps; use fxpipe.GradScaler\(pipe, ...\)"):
        pipe.step(batch(0), target=batch(0), loss_fn=F.cross_entropy, scaler=torch.amp.GradScaler("cpu"))
    found = loop(
        model, pipe, fxpipe.GradScaler(pipe, "cpu", init_scale=1024.0), fxpipe.clip_grad_norm_,
        model.layers[0].weight if mine else None,
    )  # fmt: skip

    def clip(run: nn.Module, most: float) -> Tensor:
        return nn.utils.clip_grad_norm_(run.parameters(), most)

    wanted = loop(plain, plain, torch.amp.GradScaler("cpu", init_scale=1024.0), clip, plain.layers[0].weight)
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
        self.before = self._read("VmRSS")

    def bytes(self) -> int:
        return self._read("VmHWM") - self.before

    def _read(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def stays_within(group: Any, width: int, depth: int) -> int:
    """Steps of a model with so many layers on each rank. Gives the most memory, in bytes, that all of it took."""
    for wide in (8, width):  # first a small one, for what a first step loads
        with torch.device("meta"):
            layers = (nn.Linear(wide, wide, bias=False) for _ in range(depth * dist.get_world_size(group)))
            model = nn.Sequential(*layers)
        x, most = torch.ones(4, wide), Most()
        pipe = piped(group, model, example_inputs=x)
        pipe.materialize(seed=0)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(3):
            pipe.step(x, target=x, loss_fn=F.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        found = most.bytes()
        pipe.close()
    return found
