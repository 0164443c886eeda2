"""A character GPT, trained as a pipeline: accumulation, clipping, a schedule of the learning rate, evaluation, resume.

    python examples/character_gpt.py --steps 60 --folder runs/gpt

Run it again with more steps, and it goes on from its last checkpoint. Nothing is downloaded: the text is the reference
of the Python language that comes with Python.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe

LENGTH, WIDTH, HEADS, DEPTH = 64, 64, 4, 4
ROWS, PARTS = 16, 2  # samples in a part of a batch, parts of a batch


# model
class Block(nn.Module):
    """Causal self-attention, then two linear layers, each around a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.grow = nn.Linear(WIDTH, 4 * WIDTH)
        self.shrink = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.shrink(F.gelu(self.grow(self.norm2(x))))


class GPT(nn.Module):
    """[b, t] characters in, [b, t, characters] scores of the next one out. First and last layer share one weight."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.embed.weight, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


def loss_fn(scores: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), ids.flatten())


# data
def text() -> tuple[Tensor, str]:
    """The text as numbers, and the characters that they stand for."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    characters = "".join(sorted(set(whole)))
    number = {character: index for index, character in enumerate(characters)}
    return torch.tensor([number[character] for character in whole]), characters


def rows(ids: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the same pieces one character later."""
    starts = torch.randint(len(ids) - LENGTH - 1, (ROWS,), generator=torch.Generator().manual_seed(seed))
    pieces = torch.stack([ids[start : start + LENGTH + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


# train
def train(folder: Path, steps: int, total: int, devices: int) -> None:
    ids, characters = text()
    split = len(ids) * 9 // 10
    learn, held_out = ids[:split], ids[split:]

    torch.manual_seed(0)
    pipe = fxpipe.compile(
        GPT(len(characters)), devices=devices, chunks=4, schedule="1f1b", example_inputs=rows(learn, 0)[0]
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=total)
    first = 0
    if last := fxpipe.last_checkpoint(folder):
        kept = fxpipe.load_checkpoint(last, pipe, optimizer)
        scheduler.load_state_dict(kept["scheduler"])
        first = kept["step"]
        print(f"going on from {last.name}")

    began = time.perf_counter()
    for step in range(first, steps):
        for part in range(PARTS):
            x, y = rows(learn, PARTS * step + part)
            loss = pipe.step(x, target=y, loss_fn=loss_fn, accumulate=PARTS)
        norm = fxpipe.clip_grad_norm_(pipe, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}  gradient norm {norm.item():.2f}")
    print(f"{steps - first} steps in {time.perf_counter() - began:.1f} s")

    pipe.eval()
    x, y = rows(held_out, 0)
    surprise = loss_fn(pipe.forward_only(x), y).item()
    print(f"held out: loss {surprise:.3f}, that is {surprise / math.log(2):.2f} bits for each character")
    pipe.train()
    fxpipe.save_checkpoint(folder / str(steps), pipe, optimizer, step=steps, scheduler=scheduler.state_dict())
    pipe.close()


# end
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/gpt"), help="where checkpoints are kept")
    parser.add_argument("--steps", type=int, default=60, help="train until this step")
    parser.add_argument("--total", type=int, default=200, help="steps of the whole training, for the learning rate")
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)  # each worker has a core of its own
    train(options.folder, options.steps, options.total, options.devices)


if __name__ == "__main__":
    main()
