"""How long a model takes from capture to a running pipeline, beside the capture alone.

    python -m benchmarks.compile_time

Models of about 100, 1,000 and 10,000 ops. "Capture" is the first call of `torch.compile` with a backend that runs the
captured graph as it is, the batch marked as dynamic; "fxpipe" is `fxpipe.compile` and the first call of the pipe.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from math import log
from statistics import median
from time import perf_counter

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
from tabulate import tabulate
from torch import Tensor, fx, nn
from tqdm import tqdm

import fxpipe

WIDTH = 8
STAGES = 4
CHUNKS = 4


class Residuals(nn.Module):
    """About `ops` ops: layers around residuals, and from every tenth a skip to the end."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(ops // 3))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for index, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            if index % 10 == 0:
                skips.append(x)
        return torch.stack(skips).mean(dim=0)


def as_it_is(graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., object]:
    return graph.forward


def capture_only(model: nn.Module, x: Tensor) -> None:
    torch._dynamo.maybe_mark_dynamic(x, 0)
    torch.compile(model, backend=as_it_is, fullgraph=True)(x)


def capture_to_running(model: nn.Module, x: Tensor) -> None:
    devices = [f"cpu:{stage}" for stage in range(STAGES)]
    pipe = fxpipe.compile(model, devices=devices, chunks=CHUNKS)
    pipe(x)
    pipe.close()


def seconds(route: Callable[[nn.Module, Tensor], None], ops: int) -> float:
    """Of one route, from nothing, on a new model."""
    torch._dynamo.reset()
    model, x = Residuals(ops), torch.randn(2 * CHUNKS, WIDTH)
    start = perf_counter()
    route(model, x)
    return perf_counter() - start


Times = dict[tuple[str, int], float]


def measure(sizes: Sequence[int], repeats: int) -> Times:
    """Median seconds per route and size; the routes take turns."""
    routes = {"capture": capture_only}
    if callable(getattr(fxpipe, "compile", None)):
        routes["fxpipe"] = capture_to_running
    for route in routes.values():
        seconds(route, 30)  # what the first capture of a process loads is not the model's cost
    found: dict[tuple[str, int], list[float]] = {(name, ops): [] for ops in sizes for name in routes}
    for ops, _ in tqdm([(ops, turn) for ops in sizes for turn in range(repeats)], leave=False):
        for name, route in routes.items():
            found[name, ops].append(seconds(route, ops))
    return {key: median(times) for key, times in found.items()}


def table(times: Times) -> str:
    """Seconds and milliseconds per op for each size; how each grew, beside what n log n would."""
    sizes = sorted({ops for _, ops in times})
    rows = []
    for before, ops in zip([None, *sizes], sizes, strict=False):
        capture, pipe = times["capture", ops], times.get(("fxpipe", ops), float("nan"))
        row = [f"{ops:,}", f"{capture:.2f}", f"{pipe:.2f}", f"{pipe / capture:.2f}", f"{pipe / ops * 1e3:.2f}"]
        if before:
            row += [f"{pipe / times.get(('fxpipe', before), float('nan')):.1f}x"]
            row += [f"{ops * log(ops) / (before * log(before)):.1f}x"]
        rows.append(row)
    headers = ("ops", "capture s", "fxpipe s", "ratio", "ms per op", "growth", "n log n")
    return tabulate(rows, headers, stralign="right", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds from capture to a running pipeline.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1_000, 10_000], help="ops per model")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(table(measure(options.sizes, options.repeats)))


if __name__ == "__main__":
    main()
