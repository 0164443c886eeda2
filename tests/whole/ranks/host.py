"""What each rank does in test_hosts.py: it trains, is killed once on one of the hosts, goes on from the last
checkpoint, and compares with the plain model.

    torchrun --nnodes 2 --nproc-per-node 2 --max-restarts 1 ... -m tests.whole.ranks.host folder
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import torch

import fxpipe
from tests.whole.ranks.driven import CHUNKS, Skips, example, loss_fn

STEPS, SAVED, KILLED = 6, 3, 4


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model, plain = Skips(), Skips()
    plain.load_state_dict(model.state_dict())
    pipe = fxpipe.compile(model, devices=4, chunks=CHUNKS, schedule="1f1b", timeout=60)
    rank, local_rank = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK"))
    host = next(name for _, name in socket.if_nameindex() if name in ("west", "east"))  # as its end of the cable
    assert sorted(pipe.collect((host, local_rank))) == [("east", 0), ("east", 1), ("west", 0), ("west", 1)]
    ids, scale, target = example()
    optimizers = [torch.optim.Adam(run.parameters(), lr=0.05) for run in (pipe, plain)]
    last, first = fxpipe.last_checkpoint(folder), 0
    if last is not None:
        pipe.prepare(ids, scale)
        first = fxpipe.load_checkpoint(last, pipe, optimizers[0])["step"]
    for step in range(STEPS):
        wanted = loss_fn(plain(ids, scale), target)
        wanted.backward()
        if step >= first:
            if step == KILLED and last is None and (host, local_rank) == ("east", 1):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = pipe.step(ids, scale, target=target, loss_fn=loss_fn)
            torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=0)
            gradients = {key: parameter.grad for key, parameter in plain.named_parameters()}
            for key, parameter in pipe.named_parameters():
                torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-9, atol=1e-12)
            optimizers[0].step()
            optimizers[0].zero_grad()
        optimizers[1].step()
        optimizers[1].zero_grad()
        if step + 1 == SAVED and last is None:
            fxpipe.save_checkpoint(folder / "saved", pipe, optimizers[0], step=SAVED)
    os.write(1, f"rank {rank} has compared steps {first} to {STEPS - 1}\n".encode())  # in one piece
    pipe.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
