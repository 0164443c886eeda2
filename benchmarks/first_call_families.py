"""What the first calls of families of transformers cost, by the number of layers, beside one trace by torch.compile.

    pip install transformers
    python -m benchmarks.first_call_families --families llama bert --layers 8 32 80

The models are narrow, since a capture takes as long as that of a wide one. "trace" is the first call of
`torch.compile(model, backend="eager")`, which traces the model in training, with its loss, and runs it; "step" the
first `pipe.step`, with capture, plan, and generated files; "eval" and "no_grad" are the first call after `pipe.eval()`
of the same pipe, and the first under `no_grad` in training; "batch" is the first step of another batch size and length.
In brackets: of the trace. All is timed in one run, by the clock.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
from tabulate import tabulate
from torch import nn

import fxpipe

BATCH, LENGTH, WORDS, CHUNKS = 8, 16, 128, 4
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
LINEAR = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip


def families() -> dict[str, Callable[[int], nn.Module]]:
    """By name, a model with so many layers."""
    import transformers as hf

    encoder = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "use_cache")}
    image = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    t5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "use_cache": False,
          "decoder_start_token_id": 0}  # fmt: skip
    gpt2 = {"vocab_size": WORDS, "n_embd": 32, "n_head": 4, "n_positions": 64, "use_cache": False}
    return {
        "llama": lambda n: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_hidden_layers=n)),
        "gemma3": lambda n: hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**SIZES, num_hidden_layers=n, head_dim=8, sliding_window=8)
        ),
        "qwen3_next": lambda n: hf.Qwen3NextForCausalLM(
            hf.Qwen3NextConfig(**SIZES, **MIXED, **LINEAR, num_hidden_layers=n)
        ),
        "mixtral": lambda n: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_hidden_layers=n, num_local_experts=4)),
        "gpt2": lambda n: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2, n_layer=n)),
        "bert": lambda n: hf.BertForMaskedLM(hf.BertConfig(**encoder, num_hidden_layers=n)),
        "t5": lambda n: hf.T5ForConditionalGeneration(hf.T5Config(**t5, num_layers=n // 2)),
        "vit": lambda n: hf.ViTForImageClassification(hf.ViTConfig(**image, num_hidden_layers=n, num_labels=4)),
    }


def batch_of(family: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    if family == "vit":
        return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(4, (batch,))}
    return {"input_ids": torch.randint(WORDS, (batch, length)), "labels": torch.randint(WORDS, (batch, length))}


def seconds(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def measure(family: str, make: Callable[[int], nn.Module], layers: int) -> list[float]:
    """Seconds of the trace, and of the first calls."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, batch = make(layers).train(), batch_of(family, BATCH, LENGTH)
    compiled = torch.compile(plain, backend="eager")
    found = [seconds(lambda: compiled(**batch))]
    torch._dynamo.reset()
    torch.manual_seed(0)
    pipe = fxpipe.compile(make(layers).train(), devices=2, chunks=CHUNKS, schedule="1f1b")
    try:
        found.append(seconds(lambda: pipe.step(**batch)))
        other = batch_of(family, 2 * BATCH, LENGTH + 5)
        found.append(seconds(lambda: pipe.step(**other)))
        with torch.no_grad():
            found.append(seconds(lambda: pipe(**batch)))
        pipe.eval()
        found.append(seconds(lambda: pipe(**batch)))
    finally:
        pipe.close()
    return found


def table(found: dict[tuple[str, int], Sequence[float]]) -> str:
    rows = [
        (family, layers, f"{trace:.2f}", *(f"{one:.2f} ({one / trace:.2f})" for one in firsts))
        for (family, layers), (trace, *firsts) in found.items()
    ]
    headers = ("", "layers", "trace s", "step s", "batch s", "no_grad s", "eval s")
    return tabulate(rows, headers, stralign="right", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of first calls of transformers, beside torch.compile.")
    parser.add_argument("--families", nargs="+", default=["llama", "gpt2", "bert"], metavar="NAME", help="or all")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32])
    options = parser.parse_args()
    torch.set_num_threads(1)
    makes = families()
    chosen = list(makes) if options.families == ["all"] else options.families
    measure(chosen[0], makes[chosen[0]], 2)  # what the first capture of a process loads is not the model's cost
    print(table({(family, n): measure(family, makes[family], n) for family in chosen for n in options.layers}))


if __name__ == "__main__":
    main()
