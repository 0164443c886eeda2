"""A pipeline over processes, which is killed and goes on.

    torchrun --nproc-per-node 4 --max-restarts 2 examples/four_ranks.py --folder runs/ranks --kill 12

Without torchrun it runs in one process.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import Tensor

import fxpipe
from fxpipe.demo.run import token_loss
from fxpipe.demo.transformer import PixelTransformer


# data
def batch(step: int) -> tuple[Tensor, Tensor]:
    """Counting, from anywhere: the same in every process, and after every restart."""
    starts = torch.randint(17, (16, 1), generator=torch.Generator().manual_seed(step))
    ids = (starts + torch.arange(25)) % 17
    return ids[:, :-1], ids[:, 1:]


# train
def train(folder: Path, steps: int, every: int, kill: int | None) -> None:
    with torch.device("meta"):  # no memory yet
        model = PixelTransformer()
    world = int(os.environ.get("WORLD_SIZE", "4"))
    pipe = fxpipe.compile(model, devices=world, chunks=4, schedule="1f1b", timeout=60, example_inputs=batch(0)[0])
    last = fxpipe.last_checkpoint(folder)
    pipe.materialize(seed=0, checkpoint=last)  # of each rank, its own stage
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    first = 0
    if last is not None:
        first = fxpipe.load_checkpoint(last, pipe, optimizer)["step"]
    if pipe.leads:
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"start {int(restart) + 1}: steps {first} to {steps} on {world} ranks", flush=True)

    for step in range(first, steps):
        if step == kill and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)  # as a machine that fails
        x, y = batch(step)
        loss = pipe.step(x, target=y, loss_fn=token_loss)
        fxpipe.clip_grad_norm_(pipe, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.leads and step % 5 == 4:
            print(f"step {step + 1:2}  loss {loss.item():.3f}", flush=True)
        if (step + 1) % every == 0:
            fxpipe.save_checkpoint(folder / str(step + 1), pipe, optimizer, step=step + 1)

    # evaluate
    pipe.eval()
    x, y = batch(-1)
    right = (pipe.forward_only(x).argmax(-1) == y).float().mean()  # all ranks make the call
    if pipe.leads:
        print(f"right guesses: {right.item():.0%}")
    pipe.close()


# end
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/ranks"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--kill", type=int, help="the step in which rank 2 is killed, once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options.folder, options.steps, options.every, options.kill)


if __name__ == "__main__":
    main()
