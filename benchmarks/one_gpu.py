"""What a pipeline costs on one GPU: training steps of four stages beside the plain loop over the same micro-batches.

    python -m benchmarks.one_gpu

Stages on one GPU cannot overlap, so where the GPU is busy all the time, the best that a pipeline can do is the loop's
time, and with recomputation a second forward. Where the GPU waits for the host, a pipeline can be faster: stages run on
threads of their own, and backward as code or graphs of the device are less work for the host than autograd. Memory is
what a step takes at its highest point, with its gradients. "gradients" is how far these are from the loop's, as a part
of them. torchgpipe is beside it where it is installed and the model is a plain sequence of layers.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from benchmarks.models import Llama, UNet
from benchmarks.models.llama import LlamaSize
from benchmarks.timing import in_turn, median_difference
from fxpipe.ir.units import show_bytes

GPU = "cuda:0"
STAGES = 4
CHUNKS = 8
PLAIN = "plain loop"
OPTIONS = {
    "never": {"checkpoint": "never"},
    "except_last": {"checkpoint": "except_last"},
    "always": {"checkpoint": "always"},
    "never, code": {"checkpoint": "never", "backward": "code"},
    "selective, code": {"checkpoint": "selective", "backward": "code"},
    "never, graphs": {"checkpoint": "never", "compile_stages": "device_graphs"},
}
SMALL = LlamaSize(hidden=768, inner=2048, layers=12, heads=12, shared=12, sequence=512)
Context = Callable[[], AbstractContextManager[object]]


class MLP(nn.Sequential):
    """Large matrices and nothing else: the GPU is busy for long with each op."""

    def __init__(self, width: int = 2048, depth: int = 16) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))


class Case(NamedTuple):
    """A model, its batch, the loss of its output and the batch, and the context of a step."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    context: Context = nullcontext


class Candidate(NamedTuple):
    """A training step without optimizer, and the model that it gives gradients."""

    step: Callable[[], object]
    model: nn.Module


def mean_square(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def mean(losses: Tensor, batch: Tensor) -> Tensor:
    return losses.mean()


def cases() -> dict[str, Case]:
    return {
        "MLP, float32, 4096 samples": Case(MLP, lambda: torch.randn(CHUNKS * 512, 2048), mean_square),
        "U-Net, float32, 32 images of 128 x 128": Case(
            lambda: UNet(3, 32), lambda: torch.randn(CHUNKS * 4, 3, 128, 128), mean_square
        ),
        "Llama of 134 million parameters, bfloat16 autocast, 16 texts of 512 words": Case(
            lambda: Llama(SMALL),
            lambda: torch.randint(0, SMALL.vocabulary, (CHUNKS * 2, 512)),
            mean,  # the model computes its losses itself
            partial(torch.autocast, "cuda", torch.bfloat16),
        ),
    }


def candidates(case: Case, device: str) -> dict[str, Candidate]:
    """The plain loop, torchgpipe where it can be, and then a pipeline with each of the options."""
    torch.manual_seed(0)
    x, plain = case.batch().to(device), case.make().to(device)
    for module in plain.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0  # draws would differ
    found = {PLAIN: Candidate(partial(loop, case, plain, x), plain)}
    if isinstance(plain, nn.Sequential) and importlib.util.find_spec("torchgpipe"):
        from torchgpipe import GPipe

        for mode in ("never", "always"):
            model = deepcopy(plain)
            each = [len(model) // STAGES] * STAGES
            peer = GPipe(model, each, devices=[device] * STAGES, chunks=CHUNKS, checkpoint=mode)
            found[f"torchgpipe, {mode}"] = Candidate(partial(call, case, peer, model, x), model)
    for name, options in OPTIONS.items():
        if "compile_stages" in options and not device.startswith("cuda"):
            continue
        model = deepcopy(plain)
        pipe = fxpipe.compile(model, [device] * STAGES, CHUNKS, schedule="1f1b", **options)
        found[f"fxpipe, {name}"] = Candidate(partial(pipelined, case, pipe, model, x), model)
    return found


def loop(case: Case, model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    for part in x.tensor_split(CHUNKS):
        with case.context():
            loss = case.loss(model(part), part) / CHUNKS
        loss.backward()
    wait(x)


def call(case: Case, run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    with case.context():
        loss = case.loss(run(x), x)
    loss.backward()
    wait(x)


def pipelined(case: Case, pipe: fxpipe.Pipe, model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    with case.context():
        pipe.step(x, target=x, loss_fn=case.loss)
    wait(x)


def wait(x: Tensor) -> None:
    """Until the device is done."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def peak(step: Callable[[], object]) -> int:
    """Bytes of the GPU at the highest point of a step, above what all candidates hold between steps."""
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_allocated(GPU)
    step()
    return torch.cuda.max_memory_allocated(GPU) - before


def difference(model: nn.Module, plain: nn.Module) -> float:
    """How far the gradients of the model are from those of the plain one, as a part of these."""
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    off = sum(float((mine.grad - own.grad).square().sum()) for mine, own in pairs)
    return float((off / sum(float(own.grad.square().sum()) for _, own in pairs)) ** 0.5)


def table(seconds: dict[str, list[float]], peaks: dict[str, int], off: dict[str, float]) -> str:
    """Milliseconds a step, how much that is of the loop's, the memory of a step, and how far its gradients are off."""
    rows = []
    for name, times in seconds.items():
        over = median_difference(times, seconds[PLAIN])
        part = "" if name == PLAIN else f"{100 * over / median(seconds[PLAIN]):+.1f}%"
        apart = "" if name == PLAIN else f"{off[name]:.0e}"
        rows.append((name, f"{1e3 * median(times):.2f}", part, show_bytes(peaks[name]), apart))
    headers = ("", "ms per step", "over the loop", "peak memory", "gradients")
    return tabulate(rows, headers, colalign=("left", "right", "right", "right", "right"), disable_numparse=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Four stages on one GPU beside the plain loop over micro-batches.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="training steps of each candidate in a round")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no GPU here; nothing was measured.")
        return
    print(f"{torch.cuda.get_device_name(GPU)}, torch {torch.__version__}: {STAGES} stages, {CHUNKS} micro-batches")
    for name, case in cases().items():
        found = candidates(case, GPU)
        steps = {key: one.step for key, one in found.items()}
        for _ in range(3):  # a graph is recorded in its third run
            for step in steps.values():
                step()
        seconds = in_turn(steps, options.rounds, options.steps)
        off = {key: difference(one.model, found[PLAIN].model) for key, one in found.items()}
        print(f"\n{name}\n\n{table(seconds, {key: peak(step) for key, step in steps.items()}, off)}", flush=True)


if __name__ == "__main__":
    main()
