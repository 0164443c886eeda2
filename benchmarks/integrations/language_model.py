"""A transformers model in a plain loop, and by the library's own Trainer."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

import fxpipe
from benchmarks.integrations.script import need, show


def make() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_head=4, n_embd=32, vocab_size=100, n_positions=32, use_cache=False,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,  # then a pipe's numbers are the plain model's
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def data(rows: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    text = torch.randint(100, (rows, 16))
    return [{"input_ids": row, "labels": row} for row in text]


def losses(steps: int = 5) -> list[float]:
    batch = {name: torch.stack([row[name] for row in data(8)]) for name in ("input_ids", "labels")}
    pipe = fxpipe.compile(make(), devices=2, chunks=4, schedule="1f1b")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        found.append(pipe.step(**batch).item())
        optimizer.step()
    pipe.close()
    return found


def trainer(steps: int = 5, pipeline: bool = True) -> list[float]:
    """By Trainer, of a pipe or of the plain model."""
    from transformers import Trainer, TrainingArguments

    model = fxpipe.compile(make(), devices=2, chunks=4) if pipeline else make()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=8, max_steps=steps, learning_rate=1e-3, logging_steps=1,
            report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        made = Trainer(model, arguments, train_dataset=data(64))
        made.train()
    return [row["loss"] for row in made.state.log_history if "loss" in row]


if __name__ == "__main__":
    need("transformers", "accelerate")
    show("plain loop", losses())
    show("Trainer", trainer())
    show("Trainer, no pipeline", trainer(pipeline=False))
