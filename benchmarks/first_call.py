"""What the first call of a deep model costs, by the number of layers: Dynamo's part, and ours after it.

    python -m benchmarks.first_call
    python -m benchmarks.first_call --backward code

The model is a GPT-2 of small width, whose capture takes as long as that of a wide one. "dynamo" is the time in torch's
tracing and in making its guards; "aot" the time that stages take to be traced through autograd, with backward as code;
"run" is a later step of the same kind; "ours" is what the first step takes besides: capture after the trace, plan and
files. "traced/least" is dynamo and aot compared with those of the fewest layers. The last columns are further first
calls of the same pipe: of another length, another batch, a call, and a call after `eval()`; and, in a fresh pipe, the
first call after two steps and `eval()`. In brackets: how much longer each takes than the next one of its kind, as a
part of the first step. Seconds are by the clock, so run it alone, and compare those of one run. With `--profile`, the
functions in which our part spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch._dynamo import convert_frame

import fxpipe
from fxpipe.passes.backward.tracing import trace_stage

WIDTH, HEADS, WORDS, LENGTH, BATCH, CHUNKS = 32, 4, 97, 16, 8, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.dropout(self.c_proj(y.transpose(1, 2).reshape(b, t, WIDTH)), 0.1, self.training)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c_fc(x), approximate="tanh")
        return F.dropout(self.c_proj(x), 0.1, self.training)


class Block(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """The architecture of GPT-2, with tied embeddings; its width does not matter here."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(4 * LENGTH, WIDTH)
        self.h = nn.ModuleList(map(Block, range(layers)))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])), 0.1, self.training)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@contextmanager
def seconds_in(*parts: tuple[Any, str]) -> Iterator[list[float]]:
    """Seconds that these functions take, of owners by name, none of which calls another."""
    spent = [0.0]

    def timed(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[0] += perf_counter() - start

        return call

    with ExitStack() as replaced:
        for owner, name in parts:
            replaced.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield spent


DYNAMO = (convert_frame, "compile_frame"), (convert_frame.DynamoOutput, "build_guards")  # without what they call back
AOT = (trace_stage, "trace"), (trace_stage, "layouts")


@dataclass(frozen=True)
class First:
    """Seconds of the first step, in all, in Dynamo and in traces of stages, and of the second; the ops; and seconds of
    each further first call and of the next one of its kind."""

    ops: int
    seconds: float
    dynamo: float
    aot: float
    run: float
    others: tuple[tuple[float, float], ...]

    @property
    def ours(self) -> float:
        return self.seconds - self.traced - self.run

    @property
    def traced(self) -> float:
        return self.dynamo + self.aot


def fresh(layers: int, backward: str) -> fxpipe.Pipe:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return fxpipe.compile(GPT2(layers), devices=2, chunks=CHUNKS, schedule="1f1b", backward=backward)


def first(layers: int, backward: str = "autograd", profile: cProfile.Profile | None = None) -> First:
    """The first step of a model of so many layers, and then further first ones."""
    pipe = fresh(layers, backward)

    def step(batch: int = BATCH, length: int = LENGTH) -> float:
        ids = torch.randint(0, WORDS, (batch, length))
        start = perf_counter()
        pipe.step(ids, target=ids.roll(1), loss_fn=loss)
        return perf_counter() - start

    def call() -> float:
        ids = torch.randint(0, WORDS, (BATCH, LENGTH))
        start = perf_counter()
        pipe(ids)
        return perf_counter() - start

    with seconds_in(*DYNAMO) as dynamo, seconds_in(*AOT) as aot:
        if profile is not None:
            profile.enable()
        seconds = step()
        if profile is not None:
            profile.disable()
        spent = dynamo[0], aot[0]
    ops, run = len(pipe.build.graph.ops), step()
    kinds = (partial(step, length=LENGTH + 5), partial(step, batch=2 * BATCH), call)
    others = [(kind(), kind()) for kind in kinds]
    pipe.eval()
    others.append((call(), call()))
    pipe.close()
    pipe = fresh(layers, backward)
    for _ in range(2):
        step()
    pipe.eval()
    others.append((call(), call()))
    pipe.close()
    return First(ops, seconds, *spent, run, tuple(others))


def table(found: dict[int, First]) -> str:
    headers = ("layers", "ops", "step s", "dynamo s", "aot s", "traced/least", "run s", "ours s", "ours/dynamo",
               "ms per op", "ours ms per op", "length s", "batch s", "call s", "eval s",
               "steps, eval s")  # fmt: skip
    least = found[min(found)].traced
    rows = [
        (
            layers, one.ops, f"{one.seconds:.2f}", f"{one.dynamo:.2f}", f"{one.aot:.2f}", f"{one.traced / least:.2f}",
            f"{one.run:.2f}", f"{one.ours:.2f}",
            f"{one.ours / one.dynamo:.2f}", f"{1e3 * one.seconds / one.ops:.2f}", f"{1e3 * one.ours / one.ops:.2f}",
            *(f"{seconds:.2f} ({(seconds - later) / one.seconds:.0%})" for seconds, later in one.others),
        )
        for layers, one in found.items()
    ]  # fmt: skip
    return tabulate(rows, headers, stralign="right", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of first calls, by the number of layers.")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 12, 48])
    parser.add_argument("--backward", choices=("autograd", "code"), default="autograd")
    parser.add_argument("--profile", action="store_true", help="show where the time of the last model's step goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first(1, options.backward)  # what the first capture of a process loads is not the model's cost
    profile = cProfile.Profile() if options.profile else None
    last = options.layers[-1]
    print(table({n: first(n, options.backward, profile if n == last else None) for n in options.layers}))
    if profile is not None:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(r"fxpipe|passes|codegen", 60)


if __name__ == "__main__":
    main()
