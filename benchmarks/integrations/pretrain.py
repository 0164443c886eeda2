"""A language model of transformers, trained over the ranks of torchrun by a loop with all that loops have.

    torchrun --nproc-per-node 2 -m benchmarks.integrations.pretrain runs
    python -m benchmarks.integrations.pretrain runs-plain --plain

Gradients of several batches add up and are clipped, a scaler and a schedule of the learning rate have their say, there
is one bar, and now and then an evaluation and a checkpoint, from the last of which it goes on when it is started again.
The second command is the same loop around the plain model, with the same losses.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import fxpipe
from benchmarks.integrations.script import need

BATCHES = 2  # for each step of the optimizer
TOKENS, LENGTH, ROWS = 100, 16, 8


def make() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)  # the same on every rank
    config = GPT2Config(
        n_layer=4, n_head=4, n_embd=32, vocab_size=TOKENS, n_positions=LENGTH, use_cache=False,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,  # else a pipe draws other numbers than the plain model
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def batch(number: int) -> Tensor:
    """Counting, from anywhere, with mistakes."""
    random = torch.Generator().manual_seed(number)
    ids = (torch.randint(TOKENS, (ROWS, 1), generator=random) + torch.arange(LENGTH)) % TOKENS
    return ids.where(torch.rand(ids.shape, generator=random) < 0.9, 0)


def loss_fn(output: Any, ids: Tensor) -> Tensor:
    """How much the next token surprises the model, for the mean over the batches of a step."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / BATCHES


def pipeline(model: nn.Module) -> tuple[Any, Any, Any]:
    pipe = fxpipe.compile(
        model, devices=int(os.environ.get("WORLD_SIZE", "2")), chunks=4, schedule="1f1b", example_inputs=batch(0)
    )
    return pipe, fxpipe.clip_grad_norm_, fxpipe.GradScaler(pipe, "cpu")


def plain(model: nn.Module) -> tuple[Any, Any, Any]:
    def clip(model: nn.Module, most: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), most)

    return model, clip, torch.amp.GradScaler("cpu")


def backward(run: nn.Module, ids: Tensor, scaler: Any) -> float:
    """The loss of a batch, whose gradients are added."""
    if isinstance(run, fxpipe.Pipe):
        return float(run.step(ids, target=ids, loss_fn=loss_fn, scaler=scaler))
    loss = loss_fn(run(ids), ids)
    scaler.scale(loss).backward()
    return loss.item()


def evaluate(run: nn.Module) -> float:
    ids = batch(-1)
    run.eval()
    if isinstance(run, fxpipe.Pipe):
        output = run.forward_only(ids)
    else:
        with torch.no_grad():
            output = run(ids)
    run.train()
    return BATCHES * float(loss_fn(output, ids))


def train(folder: Path, run: nn.Module, clip: Any, scaler: Any, steps: int, every: int, until: int) -> None:
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    first, leads = 0, getattr(run, "leads", True)
    if last := fxpipe.last_checkpoint(folder):
        kept = fxpipe.load_checkpoint(last, run, optimizer)
        scheduler.load_state_dict(kept["scheduler"])
        scaler.load_state_dict(kept["scaler"])
        first = kept["step"]
    with tqdm(range(first, until), initial=first, total=steps, disable=None if leads else True) as bar:
        for step in bar:
            loss = sum(backward(run, batch(BATCHES * step + number), scaler) for number in range(BATCHES))
            scaler.unscale_(optimizer)
            norm = float(clip(run, 1.0))
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            found = [loss, norm]
            if (step + 1) % every == 0:
                found.append(evaluate(run))
                fxpipe.save_checkpoint(
                    folder / str(step + 1), run, optimizer,
                    step=step + 1, scheduler=scheduler.state_dict(), scaler=scaler.state_dict(),
                )  # fmt: skip
            if leads:
                bar.set_postfix(loss=f"{loss:.4f}")
                with open(folder / "losses.txt", "a") as file:
                    print(step, *found, file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where checkpoints and losses are kept")
    parser.add_argument("--plain", action="store_true", help="without a pipeline")
    parser.add_argument("--double", action="store_true", help="in 64 bits")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations and checkpoints")
    parser.add_argument("--until", type=int, help="the step to stop at, to go on another time")
    options = parser.parse_args()
    need("transformers")
    options.folder.mkdir(parents=True, exist_ok=True)
    model = make().double() if options.double else make()
    run, clip, scaler = plain(model) if options.plain else pipeline(model)
    train(options.folder, run, clip, scaler, options.steps, options.every, options.until or options.steps)


if __name__ == "__main__":
    main()
