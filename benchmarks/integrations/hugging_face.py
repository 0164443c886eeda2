"""Models of transformers and PEFT as they are used: from shards, with caches, experts and checkpoints, in the Trainer.

    python -m benchmarks.integrations.hugging_face

Each function returns the same number of a pipe and of the plain model, or fails.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from benchmarks.integrations.script import need

Pair = tuple[float, float]
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, **options))


def tokens() -> Tensor:
    return torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))


def shards(tied: bool = False) -> Pair:
    """A model that is made without memory, prepared with its cache, and filled from a folder of shards."""
    ids, plain = tokens(), llama(tie_word_embeddings=tied)
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder, max_shard_size="20KB")
        assert (Path(folder) / "model.safetensors.index.json").exists()
        with torch.device("meta"):
            model = llama(tie_word_embeddings=tied)
        pipe = fxpipe.compile(model, devices=2, chunks=2, schedule="1f1b")
        pipe.prepare(input_ids=ids, labels=ids)
        pipe.materialize(checkpoint=folder, init=lambda module, path: model._init_weights(module))
        got = pipe.step(input_ids=ids, labels=ids).item()
        pipe.close()
    return got, plain(ids, labels=ids).loss.item()


def base_of_a_model_with_a_head() -> Pair:
    from transformers import LlamaModel

    ids, plain = tokens(), llama()
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        with torch.device("meta"):
            model = LlamaModel(plain.config)
        fxpipe.materialize(model, checkpoint=folder, init=lambda module, path: model._init_weights(module))
    return model(ids).last_hidden_state.sum().item(), plain.model(ids).last_hidden_state.sum().item()


def experts() -> Pair:
    """A router's loss is that of each micro-batch, and cross entropy that of the batch, though labels are ignored."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    options = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    plain = MixtralForCausalLM(MixtralConfig(**SMALL, **options, router_aux_loss_coef=0.02))
    ids = tokens()
    labels = ids.masked_fill((torch.arange(8) < 4)[:, None] & (torch.arange(16) > 2), -100)

    def run(i: Tensor, y: Tensor) -> Any:
        return plain(input_ids=i, labels=y, use_cache=False)

    whole = run(ids, labels)
    parts = [run(*cut).aux_loss for cut in zip(ids.chunk(2), labels.chunk(2), strict=True)]
    want = whole.loss + 0.02 * (sum(parts) / 2 - whole.aux_loss)
    pipe = fxpipe.compile(copy.deepcopy(plain), devices=2, chunks=2, schedule="1f1b", reduce={"aux_loss": "mean"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxpipe.MixedSamplesWarning)  # no token is dropped
        got = pipe.step(input_ids=ids, labels=labels, use_cache=False).item()
    pipe.close()
    return got, want.item()


def adapters(dora: bool = False) -> Pair:
    """PEFT's recipe: checkpoints first, then adapters. The number is the sum of the gradients' norms."""
    base = llama().double()
    base.gradient_checkpointing_enable()
    return stepped(adapted(base, dora).double())


def weight_decomposed() -> Pair:
    """The same with DoRA, which scales the columns of each weight."""
    return adapters(dora=True)


def four_bit() -> Pair:
    """Adapters of linear layers whose weights are in 4 bits, by bitsandbytes."""
    from bitsandbytes.nn import Linear4bit

    base = llama()
    for module in list(base.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.Linear) and name != "lm_head":
                made = Linear4bit(part.in_features, part.out_features, bias=False, compute_dtype=torch.float32)
                made.weight.data = part.weight.data
                setattr(module, name, made.to("cpu"))  # which cuts it down to 4 bits
    return stepped(adapted(base))


def adapted(base: nn.Module, dora: bool = False) -> Any:
    """A model with adapters, of which all have a gradient: half of them begin at zero otherwise."""
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=4, use_dora=dora, **options)).train()


def stepped(plain: Any) -> Pair:
    """The sums of the gradients' norms after a step of a pipe and of the model."""
    model, ids = copy.deepcopy(plain), tokens()
    plain(input_ids=ids, labels=ids).loss.backward()
    pipe = fxpipe.compile(model, devices=2, chunks=2, schedule="1f1b", checkpoint="always")
    pipe.step(input_ids=ids, labels=ids)
    pipe.close()
    return norms(model), norms(plain)


def accelerated() -> Pair:
    """The loop of Accelerate, which wraps model, optimizer and loader. The number is the sum of the losses."""
    from accelerate import Accelerator

    found = []
    for cut in (True, False):
        model = llama().double()
        run = fxpipe.compile(model, devices=2, chunks=2) if cut else model
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        loader = torch.utils.data.DataLoader(tokens(), batch_size=4)  # type: ignore[arg-type]
        accelerator = Accelerator(cpu=True)
        run, optimizer, loader = accelerator.prepare(run, optimizer, loader)
        losses = []
        for ids in loader:
            with accelerator.accumulate(run):
                loss = run(input_ids=ids, labels=ids, use_cache=False).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(run.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        found.append(sum(losses))
    return found[0], found[1]


def norms(model: nn.Module) -> float:
    return sum(one.grad.norm().item() for one in model.parameters() if one.grad is not None)


def evaluated() -> Pair:
    """The evaluation loss of the Trainer, whose checkpoints transformers reads again."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for model in (fxpipe.compile(llama(), devices=2, chunks=2), llama()):
            arguments = TrainingArguments(
                folder, per_device_train_batch_size=8, max_steps=2, save_steps=2, report_to=[], use_cpu=True,
                disable_tqdm=True,
            )  # fmt: skip
            trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
            trainer.train()
            found.append(trainer.evaluate()["eval_loss"])
            again = AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-2")
            assert again.config.num_hidden_layers == SMALL["num_hidden_layers"]
    return found[0], found[1]


ALL = (shards, base_of_a_model_with_a_head, experts, adapters, weight_decomposed, four_bit, accelerated, evaluated)

if __name__ == "__main__":
    need("transformers", "peft", "accelerate", "safetensors", "bitsandbytes")
    for one in ALL:
        pipe, plain = one()
        print(f"{one.__name__}: pipe {pipe:.5f}, plain {plain:.5f}")
