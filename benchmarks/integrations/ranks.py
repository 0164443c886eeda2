"""A language model over the ranks of torchrun, from no memory to the last step, through kills and restarts.

    torchrun --nproc-per-node 4 --max-restarts 3 -m benchmarks.integrations.ranks runs
    torchrun --nproc-per-node 4 --max-restarts 3 -m benchmarks.integrations.ranks runs --model gpt2

It is made on the meta device, of which each rank fills its own stages; a checkpoint is written every few steps, and
after a restart it goes on from the last one that is whole. Without torchrun it runs in one process.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import fxpipe
from benchmarks.integrations.script import need
from fxpipe.demo.transformer import PixelTransformer


class Loss(nn.Module):
    """The model with its loss: how much the next token surprises it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        scores = self.model(input_ids)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


def make(name: str) -> nn.Module:
    if name == "demo":
        return Loss(PixelTransformer(levels=100, length=32, width=32))
    need("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=32, vocab_size=100, n_positions=32, use_cache=False))


def init(model: nn.Module) -> Any:
    """What transformers does at the end of its constructors."""
    rule = getattr(model, "_init_weights", None)
    return None if rule is None else lambda module, path: rule(module)


def batch(name: str, step: int) -> Mapping[str, Tensor]:
    """Counting, from anywhere: the same in every process and after every restart."""
    starts = torch.randint(100, (16, 1), generator=torch.Generator().manual_seed(step))
    ids = (starts + torch.arange(24)) % 100
    return {"input_ids": ids} if name == "demo" else {"input_ids": ids, "labels": ids}


def train(folder: Path, name: str, steps: int, every: int, kill: int | None, own: bool) -> None:
    if own:
        dist.init_process_group("gloo", init_method="fxpipe://")
    with torch.device("meta"):
        model = make(name)
    world = int(os.environ.get("WORLD_SIZE", "2"))
    pipe = fxpipe.compile(model, devices=world, chunks=4, schedule="1f1b", timeout=60)
    pipe.prepare(**batch(name, 0))
    last = fxpipe.last_checkpoint(folder)
    pipe.materialize(seed=0, init=init(model), checkpoint=last)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    first = 0
    if last is not None:
        kept = fxpipe.load_checkpoint(last, pipe, optimizer)
        scheduler.load_state_dict(kept["scheduler"])
        torch.set_rng_state(kept["rng"])
        first = kept["step"]
    with tqdm(range(first, steps), initial=first, total=steps, disable=None if pipe.leads else True) as bar:
        for step in bar:
            if step == kill and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and not pipe.leads:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = pipe.step(**batch(name, step)).item()
            fxpipe.clip_grad_norm_(pipe, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if pipe.leads:
                bar.set_postfix(loss=f"{loss:.4f}")
                with open(folder / "losses.txt", "a") as file:
                    print(step, loss.hex(), file=file)
            if (step + 1) % every == 0:
                fxpipe.save_checkpoint(
                    folder / str(step + 1), pipe, optimizer,
                    step=step + 1, scheduler=scheduler.state_dict(), rng=torch.get_rng_state(),
                )  # fmt: skip
    pipe.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where checkpoints and losses are kept")
    parser.add_argument("--model", choices=("demo", "gpt2"), default="demo")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--kill", type=int, help="step in which all ranks but the first kill themselves, once")
    parser.add_argument("--own", action="store_true", help="initialise torch.distributed before fxpipe does")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    train(options.folder, options.model, options.steps, options.every, options.kill, options.own)


if __name__ == "__main__":
    main()
