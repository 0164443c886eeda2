"""What a pipeline costs on one GPU: four stages of it beside the plain loop over the same micro-batches.

    python -m benchmarks.one_gpu

Stages on one GPU cannot overlap, so the best that a pipeline can do is the loop's time. What it takes beyond that is
the host's work, where the GPU waits for it, and with recomputation a second forward. Memory is what a step takes at its
highest point, beyond parameters and gradients. The loop has one backward for all micro-batches, as the pipeline has.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from benchmarks.models import UNet
from benchmarks.timing import in_turn, median_difference
from fxpipe.ir.units import show_bytes

GPU = "cuda:0"
STAGES = 4
CHUNKS = 8
PLAIN = "plain loop"
MODES = ("never", "except_last", "always")
Step = Callable[[], object]


class MLP(nn.Sequential):
    """Large matrices and nothing else: the GPU is busy for long with each op."""

    def __init__(self, width: int = 2048, depth: int = 16) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))


def cases() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]]:
    """Each model with a batch."""
    return {
        "mlp": (MLP, lambda: torch.randn(CHUNKS * 512, 2048)),
        "unet": (lambda: UNet(3, 32), lambda: torch.randn(CHUNKS * 4, 3, 128, 128)),
    }


def step_of(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Step:
    """A training step without optimizer; the GPU is done with it when it returns."""

    def step() -> None:
        model.zero_grad()
        run(x).sum().backward()
        if x.is_cuda:
            torch.cuda.synchronize(x.device)

    return step


def candidates(make: Callable[[], nn.Module], batch: Callable[[], Tensor], device: str) -> dict[str, Step]:
    """The plain loop, then a pipeline for each mode of recomputation."""
    x = batch().to(device)
    model = make().to(device)

    def loop(x: Tensor) -> Tensor:
        return torch.cat([model(part) for part in x.tensor_split(CHUNKS)])

    found = {PLAIN: step_of(model, loop, x)}
    for mode in MODES:
        pipe = fxpipe.compile(make().to(device), devices=[device] * STAGES, chunks=CHUNKS, checkpoint=mode)
        found[f"fxpipe, {mode}"] = step_of(pipe, pipe, x)
    return found


def peak(step: Step) -> int:
    """Bytes of the GPU at the highest point of a step, above what all candidates hold between steps."""
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_allocated(GPU)
    step()
    return torch.cuda.max_memory_allocated(GPU) - before


def table(seconds: dict[str, list[float]], peaks: dict[str, int]) -> str:
    """Milliseconds a step, how much that is of the loop's, and the memory of a step."""
    rows = []
    for name, times in seconds.items():
        over = median_difference(times, seconds[PLAIN])
        part = "" if name == PLAIN else f"{100 * over / median(seconds[PLAIN]):+.1f}%"
        rows.append((name, f"{1e3 * median(times):.2f}", part, show_bytes(peaks[name])))
    headers = ("", "ms per step", "over the loop", "peak memory")
    return tabulate(rows, headers, colalign=("left", "right", "right", "right"), disable_numparse=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Four stages on one GPU beside the plain loop over micro-batches.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="training steps of each candidate in a round")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no GPU here; nothing was measured.")
        return
    print(f"{torch.cuda.get_device_name(GPU)}, torch {torch.__version__}: {STAGES} stages, {CHUNKS} micro-batches")
    for name, (make, batch) in cases().items():
        steps = candidates(make, batch, GPU)
        seconds = in_turn(steps, options.rounds, options.steps)
        print(f"\n{name}\n\n{table(seconds, {key: peak(step) for key, step in steps.items()})}")


if __name__ == "__main__":
    main()
