"""Trains Tokens: DP on 16 of 16 devices, 2 micro-batches of 32, 1f1b, ZeRO-1.

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
from torch.distributed.optim import ZeroRedundancyOptimizer

import fxpipe

HERE = Path(__file__).resolve().parent
BATCH = 64  # samples in a step, on all ranks together, as planned
SEED = 0

# The plan's rank of each process: a row for each host, in the order of its GPUs. launch.sh has the devices.
RANKS = (
    (0, 1, 2, 3, 4, 5, 6, 7),
    (8, 9, 10, 11, 12, 13, 14, 15),
)


# YOURS: the model; another one needs a plan of its own ------------------------------------------------------


def make() -> nn.Module:
    """Without memory for its weights: each rank then makes those of its own stages."""
    sys.path.insert(0, str(HERE / "../nets"))
    from token_nets import tokens as make_model

    with torch.device("meta"):
        made = make_model()
    return made[0] if isinstance(made, tuple) else made


# YOURS: the data --------------------------------------------------------------------------------------------


def batch(step: int) -> Any:
    """MADE UP: the arguments of the model in a step, and the target of the loss.

    All ranks need the same, and after a restart the same again: they depend on the step alone. fxpipe's docs
    say how each rank loads only what its own stages use, in guides/processes.md.
    """
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(11, (BATCH, 6), generator=random)
    mask = torch.ones(BATCH, 6, dtype=torch.bool)
    return (ids, mask), ids


# YOURS: the loss --------------------------------------------------------------------------------------------


def loss_fn(output: Any, target: Tensor) -> Tensor:
    """How much each next token surprises the model."""
    return F.cross_entropy(output["scores"][:, :-1].flatten(0, 1), target[:, 1:].flatten())


# YOURS: the optimizer ---------------------------------------------------------------------------------------


def make_optimizer(pipe: fxpipe.Pipe) -> torch.optim.Optimizer:
    """For the parameters of this rank. Replicas of a stage share out its state (ZeRO-1), as planned."""
    return ZeroRedundancyOptimizer(pipe.parameters(), torch.optim.AdamW, pipe.replica_group, lr=1e-3)


# the loop ---------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it by launch.sh, which starts a process for each device of the plan")
    os.environ["RANK"] = str(RANKS[int(os.environ["HOST_INDEX"])][int(os.environ["LOCAL_RANK"])])
    if not options.cpu and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        raise SystemExit("this host has fewer GPUs than the plan wants of it; --cpu tries the script on CPUs")
    dist.init_process_group("gloo" if options.cpu else "cpu:gloo,cuda:nccl", init_method="fxpipe://")
    device = "cpu" if options.cpu else "cuda"
    inputs, _ = batch(0)
    torch.manual_seed(SEED)
    model = make()
    pipe = fxpipe.compile(
        model, plan=HERE / "plan.json", devices=dist.get_world_size(), example_inputs=inputs
    )
    last = fxpipe.last_checkpoint(options.checkpoints)
    pipe.materialize(SEED, checkpoint=last)
    optimizer = make_optimizer(pipe)
    scaler = fxpipe.GradScaler(pipe, device)
    first = 0
    if last is not None:
        kept = fxpipe.load_checkpoint(last, pipe, optimizer)
        first = kept["step"]
        torch.set_rng_state(kept["rng"])  # of dropout
        scaler.load_state_dict(kept["scaler"])
    if pipe.leads:
        print(f"steps {first} to {options.steps} on {dist.get_world_size()} ranks", flush=True)

    for step in range(first, options.steps):
        inputs, target = batch(step)
        with torch.autocast(device, torch.float16):
            loss = pipe.step(*inputs, target=target, loss_fn=loss_fn, scaler=scaler)
        scaler.unscale_(optimizer)
        fxpipe.clip_grad_norm_(pipe, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if pipe.leads and (step + 1) % options.log_every == 0:
            print(f"step {step + 1:6}  loss {loss.item():.6f}", flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            folder = options.checkpoints / str(step + 1)
            state = {"step": step + 1, "rng": torch.get_rng_state(), "scaler": scaler.state_dict()}
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
    parser.add_argument("--cpu", action="store_true", help="on CPUs, to try the script")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
