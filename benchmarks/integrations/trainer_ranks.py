"""The Trainer of transformers over the ranks of torchrun: its loop on each rank, with `pipe.step` in place of backward.

    torchrun --nproc-per-node 2 -m benchmarks.integrations.trainer_ranks folder
    python -m benchmarks.integrations.trainer_ranks folder --plain

The first line of the output has the losses and norms, which are the plain model's; `folder` then has what
`from_pretrained` reads.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from benchmarks.integrations.language_model import data, make
from benchmarks.integrations.script import need, show

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def compiled() -> Any:
    """The pipe over all ranks. From then on the Trainer takes each process for the only one: it shares out no data and
    wraps nothing in DistributedDataParallel."""
    world = int(os.environ.get("WORLD_SIZE", "2"))
    pipe = fxpipe.compile(make(), devices=world, chunks=4, schedule="1f1b")
    pipe.prepare(**{name: torch.stack([row[name] for row in data(8)]) for name in ("input_ids", "labels")})
    for name in TORCHRUN:
        os.environ.pop(name, None)
    return pipe


def trainer(model: nn.Module, folder: Path, steps: int, parts: int) -> Any:
    """A Trainer, whose batches are 8 sequences in so many steps; of a pipe, one that calls `step`."""
    from transformers import Trainer, TrainingArguments

    class PipeTrainer(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            model.train()
            # The model divides by the number of labels of all steps of an update, so gradients only add up.
            return model.step(**self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch).detach()

        def _clip_grad_norm(self, model: Any) -> Tensor:
            return fxpipe.clip_grad_norm_(model, self.args.max_grad_norm)

    arguments = TrainingArguments(
        str(folder / "trainer"), per_device_train_batch_size=8 // parts, gradient_accumulation_steps=parts,
        max_steps=steps, learning_rate=1e-3, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, log_level="error",
    )  # fmt: skip
    kind = Trainer if not hasattr(model, "leads") else PipeTrainer
    return kind(model=model, args=arguments, train_dataset=data(64), eval_dataset=data(16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the trained model is saved")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--parts", type=int, default=2, help="steps whose gradients make one update")
    parser.add_argument("--plain", action="store_true", help="train the model itself, in one process")
    options = parser.parse_args()
    need("transformers", "accelerate")
    model = make() if options.plain else compiled()
    made = trainer(model, options.folder, options.steps, options.parts)
    made.train()
    evaluated = made.evaluate()["eval_loss"]
    model.save_pretrained(options.folder)  # all ranks: each writes its own tensors
    if options.plain or model.leads:
        rows = [row for row in made.state.log_history if "loss" in row]
        show("losses", [*(row["loss"] for row in rows), evaluated])
        show("norms", [row["grad_norm"] for row in rows])


if __name__ == "__main__":
    main()
