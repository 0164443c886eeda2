"""What a rank does in test_kills.py, from its start to its end, which comes at any moment.

It trains as a rank of torchrun does: it finds the others through the environment, and goes on from the last checkpoint.
What it says of itself goes through a connection: how far it has come, and which error it ended with.
"""

from __future__ import annotations

import os
import signal
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.engines.transports.same_machine import SWITCH
from fxpipe.pipe.ranks.rank_pipe import RankPipe
from tests.training.test_checkpoint import adam, batch

SIZE, EVERY = 3, 2  # ranks; steps from one checkpoint to the next


class Small(nn.Module):
    """With all that a checkpoint must not forget: tied weights, running statistics, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.norm, self.head = (
            nn.Embedding(11, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 11),
        )  # fmt: skip
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids), 0.2, self.training)
        return self.head(self.norm(torch.tanh(self.middle(x))))


def live(end: Connection, rank: int, port: int, folder: Path, timeout: float, far: bool) -> None:
    """A process's life: it sends ("step", number) after each, also after "step" 0, in which all meet, and at last
    ("error", what it is). Once it is under way, ranks count as lost after `timeout` seconds. Those that are `far` share
    no memory."""
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": SIZE}
    os.environ.update({name: str(value) for name, value in address.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ[SWITCH] = str(int(not far))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        train(end, rank, folder, timeout)
    except BaseException:
        end.send(("error", traceback.format_exc()))
    os._exit(0)


def train(end: Connection, rank: int, folder: Path, timeout: float) -> None:
    """Until somebody says that it is enough."""
    torch.manual_seed(1)
    pipe = fxpipe.compile(Small(), SIZE, 2, schedule="1f1b", timeout=60)
    assert isinstance(pipe, RankPipe)
    end.send(("step", 0))
    pipe.prepare(batch(0))
    optimizer, first = adam(pipe), 0
    if (last := fxpipe.last_checkpoint(folder)) is not None:
        kept = fxpipe.load_checkpoint(last, pipe, optimizer)
        torch.set_rng_state(kept["rng"])
        first = kept["step"]
    step = first
    while not any(pipe.collect(end.poll())):
        ids = batch(step)
        loss = pipe.step(ids, target=ids, loss_fn=F.cross_entropy).item()
        fxpipe.clip_grad_norm_(pipe, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.leads:
            with open(folder / "losses.txt", "a") as file:
                print(step, loss.hex(), file=file)
        step += 1
        pipe.world.timeout, pipe.world.limit = timeout, timedelta(seconds=timeout)
        if step % EVERY == 0:
            fxpipe.save_checkpoint(folder / str(step), pipe, optimizer, step=step, rng=torch.get_rng_state())
        end.send(("step", step))
