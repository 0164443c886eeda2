"""Trains Sequential: straight on 4 of 4 devices, 4 micro-batches of 4, 1f1b-late.

    bash launch.sh --steps 100

Written by `fxpipe plan --launch`, to be edited: change what is under YOURS. DATA AND LOSS ARE MADE UP,
so that the script runs as it is. Started again, it goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe

HERE = Path(__file__).resolve().parent
BATCH = 16  # samples in a step, on all ranks together, as planned
SEED = 0


# YOURS: the model; another one needs a plan of its own ------------------------------------------------------


def make() -> nn.Module:
    """The same on every rank, which keeps its stages. If it is too large for that: `fxpipe plan --meta`."""
    sys.path.insert(0, str(HERE / "../../nets"))
    from token_nets import make_model

    made = make_model()
    return made[0] if isinstance(made, tuple) else made


# YOURS: the data --------------------------------------------------------------------------------------------


def batch(step: int) -> Any:
    """MADE UP: the arguments of the model in a step, and the target of the loss.

    All ranks need the same, and after a restart the same again: they depend on the step alone. fxpipe's docs
    say how each rank loads only what its own stages use, in guides/processes.md.
    """
    random = torch.Generator().manual_seed(step)
    input_ = torch.randn(BATCH, 8, generator=random)
    target = torch.randn(BATCH, 8, generator=random)
    return (input_,), target


# YOURS: the loss --------------------------------------------------------------------------------------------


def loss_fn(output: Any, target: Tensor) -> Tensor:
    """MADE UP: how far the output is from random numbers."""
    return F.mse_loss(output, target)


# YOURS: the optimizer ---------------------------------------------------------------------------------------


def make_optimizer(pipe: fxpipe.Pipe) -> torch.optim.Optimizer:
    """For the parameters of this rank."""
    return torch.optim.AdamW(pipe.parameters(), lr=1e-3)


# the loop ---------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it by launch.sh, which starts a process for each device of the plan")
    dist.init_process_group("gloo", init_method="fxpipe://")
    inputs, _ = batch(0)
    torch.manual_seed(SEED)
    model = make()
    pipe = fxpipe.compile(
        model, plan=HERE / "plan.json", devices=dist.get_world_size(), example_inputs=inputs
    )
    last = fxpipe.last_checkpoint(options.checkpoints)
    optimizer = make_optimizer(pipe)
    first = 0
    if last is not None:
        kept = fxpipe.load_checkpoint(last, pipe, optimizer)
        first = kept["step"]
        torch.set_rng_state(kept["rng"])  # of dropout
    if pipe.leads:
        print(f"steps {first} to {options.steps} on {dist.get_world_size()} ranks", flush=True)

    for step in range(first, options.steps):
        inputs, target = batch(step)
        loss = pipe.step(*inputs, target=target, loss_fn=loss_fn)
        fxpipe.clip_grad_norm_(pipe, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.leads and (step + 1) % options.log_every == 0:
            print(f"step {step + 1:6}  loss {loss.item():.6f}", flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            folder = options.checkpoints / str(step + 1)
            state = {"step": step + 1, "rng": torch.get_rng_state()}
            fxpipe.save_checkpoint(folder, pipe, optimizer, **state)

    pipe.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=1, help="steps")
    parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument(
        "--checkpoints", type=Path, default=HERE / "checkpoints", help="a folder that all hosts see"
    )
    train(parser.parse_args())


if __name__ == "__main__":
    main()
