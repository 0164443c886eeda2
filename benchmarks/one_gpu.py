"""What a pipeline costs on one GPU: training steps of four stages beside the plain loop over the same micro-batches.

    python -m benchmarks.one_gpu [--json FILE]

Stages on one GPU cannot overlap, so where the GPU is busy all the time, the best that a pipeline can do is the loop's
time, and with recomputation a second forward. Where the GPU waits for the host, a pipeline can be faster: stages run on
threads of their own, and backward as code or graphs of the device are less work for the host than autograd. Memory is
what a step takes at its highest point, with its gradients. "busy" is the part of a step, from its first kernel to the
end of its last, in which a kernel runs, as torch's profiler has it: what is missing there the GPU waits for the host.
"gradients" is how far these are from the loop's, as a part of them. torchgpipe is beside it where it is installed and
the model is a plain sequence of layers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

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


def busy(step: Callable[[], object]) -> float:
    """The part of a step in which a kernel runs."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
    kernels = [event.time_range for event in found.events() or () if event.device_type == DeviceType.CUDA]
    spans = sorted((span.start, span.end) for span in kernels)
    running, until = 0.0, spans[0][0]
    for start, end in spans:  # of several streams, which overlap
        running += max(0.0, end - max(start, until))
        until = max(until, end)
    return running / (until - spans[0][0])


def difference(model: nn.Module, plain: nn.Module) -> float:
    """How far the gradients of the model are from those of the plain one, as a part of these."""
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    off = sum(float((mine.grad - own.grad).square().sum()) for mine, own in pairs)
    return float((off / sum(float(own.grad.square().sum()) for _, own in pairs)) ** 0.5)


class Measured(NamedTuple):
    """Of a candidate: the seconds of a step in each round, the bytes at its highest point, the part in which the GPU is
    busy, and how far gradients are off."""

    seconds: list[float]
    peak: int
    busy: float
    off: float


def measured(case: Case, rounds: int, steps: int) -> dict[str, Measured]:
    found = candidates(case, GPU)
    runs = {key: one.step for key, one in found.items()}
    for _ in range(3):  # a graph is recorded in its third run
        for step in runs.values():
            step()
    seconds = in_turn(runs, rounds, steps)
    return {
        key: Measured(seconds[key], peak(one.step), busy(one.step), difference(one.model, found[PLAIN].model))
        for key, one in found.items()
    }


def table(found: Mapping[str, Measured]) -> str:
    """Milliseconds a step, how much that is of the loop's, the memory of a step, and how far its gradients are off."""
    rows, loops = [], found[PLAIN].seconds
    for name, one in found.items():
        over = median_difference(one.seconds, loops)
        part = "" if name == PLAIN else f"{100 * over / median(loops):+.1f}%"
        apart = "" if name == PLAIN else f"{one.off:.0e}"
        milliseconds = f"{1e3 * median(one.seconds):.2f}"
        rows.append((name, milliseconds, part, show_bytes(one.peak), f"{100 * one.busy:.0f}%", apart))
    headers = ("", "ms per step", "over the loop", "peak memory", "busy", "gradients")
    return tabulate(rows, headers, colalign=("left", *["right"] * 5), disable_numparse=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Four stages on one GPU beside the plain loop over micro-batches.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="training steps of each candidate in a round")
    parser.add_argument("--json", metavar="FILE", help="write all figures there, too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no GPU here; nothing was measured.")
        return
    what = f"{torch.cuda.get_device_name(GPU)}, torch {torch.__version__}: {STAGES} stages, {CHUNKS} micro-batches"
    print(what)
    figures: dict[str, object] = {"what": what}
    for name, case in cases().items():
        found = measured(case, options.rounds, options.steps)
        figures[name] = {key: one._asdict() for key, one in found.items()}
        print(f"\n{name}\n\n{table(found)}", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
