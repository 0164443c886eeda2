"""GPipe's tables (Huang et al., 2019) beside ours: memory by planning, speed by simulation.

    python -m benchmarks.gpipe            all rows; some minutes, most of them for capture
    python -m benchmarks.gpipe --quick    the rows of one and two devices

Table 1, the largest AmoebaNet-D that trains on accelerators of 8 GB: a batch of 128 images of 224 x 224, in 16
micro-batches. What does not match, and why:

- Without pipeline, and with nothing recomputed, eager autograd in single floats keeps almost seven times what GPipe
  shows for (6, 208): its compiler fuses and recomputes what is cheap, and an accelerator may keep half floats.
- Pipeline-1 is (6, 416) with 3.46 GB. Of 16 micro-batches, one of eight images saves 5.2 GB while it is recomputed; for
  the paper's figure, it would have to be half of that.
- Parameter memory: three copies of single floats, which is their figures to 7%, but for the last row, where theirs is
  11% more than three times four bytes for each of 1.8 billion parameters.
- Activations are what autograd keeps, to the byte; theirs contain what kernels need while they run.
- Our plans make the fullest device as empty as can be, at any op; theirs make stages of whole layers alike in time. So
  from two devices on the models fit with room to spare, and wider ones do.

Table 2 and figure 3a are how speed grows with partitions and micro-batches. Beside it stands where the devices' time
goes: computing, recomputing, idle by the schedule (bubble), idle for slower stages (imbalance), and the rest, which
here is transfers. The figures of the paper's own breakdown are not at hand; updates of weights are not simulated.
The bubble is at most (n - 1) / (m + n - 1), as stages recompute while they wait for gradients. With few micro-batches
it costs most, with 32 the recomputation does, a fifth to a quarter of the time. Imbalance is at most 2%, with cuts at
any op; transfers over PCI Express cost more, with large micro-batches above all. GPipe gains less from micro-batches on
few partitions, 1.21 times where 1.94 is the most, and nothing in this model does that.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

from tabulate import tabulate
from tqdm import tqdm

from benchmarks.planned import AMOEBANET, Family, Size, Training, fits, graph_of, largest, needs, parameters
from benchmarks.simulated import Setting, fastest, timeline
from benchmarks.tables import show
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.timeline import Timeline
from fxpipe.schedules.diagnosis.time_split import split

GB = 10**9
MEMORY = 8 * GB
BATCH = 128


@dataclass(frozen=True)
class Published:
    """A row of a memory table as published: bytes of parameters and of activations, in the table's unit; no activations
    if the model did not fit."""

    name: str
    size: Size
    training: Training
    parameters: str
    parameter_memory: float | None
    activation_memory: float | None


# Table 1.
TABLE_1 = (
    Published("Naive-1", Size(6, 208), Training(1, BATCH, 1, recompute=False), "82M", 1.05, 6.26),
    Published("Pipeline-1", Size(6, 416), Training(1, BATCH, 16), "318M", 3.8, 3.46),
    Published("Pipeline-2", Size(6, 544), Training(2, BATCH, 16), "542M", 6.45, 8.11),
    Published("Pipeline-4", Size(12, 544), Training(4, BATCH, 16), "1.05B", 12.53, 15.21),
    Published("Pipeline-8", Size(24, 512), Training(8, BATCH, 16), "1.8B", 24.62, 26.24),
)

# Table 2, AmoebaNet-D (18, 256) on TPUs: speed by (partitions, micro-batches), in parts of that of (2, 1).
TABLE_2 = {
    (2, 1): 1.0, (2, 4): 1.07, (2, 32): 1.21,
    (4, 1): 1.13, (4, 4): 1.26, (4, 32): 1.84,
    (8, 1): 1.38, (8, 4): 1.72, (8, 32): 3.48,
}  # fmt: skip


def memory_table(family: Family, published: Sequence[Published], memory: float, unit: int) -> str:
    """Each published model as published and as we plan it, then the widest of its depth that we fit."""
    headers = (
        "", "model", "parameters", "", "parameter memory", "activations", "fullest device", "fits"
    )  # fmt: skip
    rows = [cells for row in tqdm(published, leave=False) for cells in memory_rows(family, row, memory, unit)]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left",) * 4 + ("right",) * 3 + ("left",))


def memory_rows(family: Family, row: Published, memory: float, unit: int) -> Iterator[tuple[str, ...]]:
    shown = (f"{value:.2f}" if value is not None else "" for value in (row.parameter_memory, row.activation_memory))
    yield (
        row.name,
        str(row.size),
        row.parameters,
        "paper",
        *shown,
        "",
        "no" if row.activation_memory is None else "yes",
    )
    yield ("", str(row.size), *our_cells(family, row.size, row.training, memory, unit))
    widest = largest(family, row.size, row.training, memory)
    if widest is None:
        yield ("", f"({row.size.depth}, -)", "", "ours", "", "", "", "none does")
    elif widest != row.size:
        yield ("", str(widest), *our_cells(family, widest, row.training, memory, unit))


def our_cells(family: Family, size: Size, training: Training, memory: float, unit: int) -> tuple[str, ...]:
    found = needs(family, size, training)
    figures = (
        sum(need.parameters for need in found),
        sum(need.activations for need in found),
        max(need.total for need in found),
    )
    count = parameters(family, size)
    return (
        f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M",
        "ours",
        *(f"{figure / unit:.2f}" for figure in figures),
        "yes" if fits(found, memory) else "no",
    )


SPEED_HEADS = (
    "n",
    "m",
    "GPipe",
    "simulated",
    "no imbalance",
    "computing",
    "recomputation",
    "bubble",
    "imbalance",
    "rest",
)


def speeds(graph: Graph, devices: Sequence[int]) -> Iterator[tuple[object, ...]]:
    """Each row of table 2: the published speed, ours, and that of equal stages, in parts of the first row's; then the
    shares of the devices' time in ours. The rest are transfers. The published speeds are of TPUs with batches and cuts
    that are not published; ours are simulated on P40s, with our cuts and batches of 1,280."""
    first = None
    for (n, m), told in TABLE_2.items():
        if n not in devices:
            continue
        setting = Setting(n, 1280, m, "always" if m == 1 else "except_last")
        step = fastest(graph, setting)
        line = timeline(step)
        speed = setting.rows * m / line.makespan
        first = first or speed
        yield n, m, told, speed / first, ideal(n, m) / ideal(2, 1), *breakdown(line, step.schedule)


def breakdown(line: Timeline, schedule: Schedule) -> tuple[float, ...]:
    """Shares of the devices' time: computing, recomputation, bubble, imbalance, and the rest."""
    found = split(line, schedule)
    shares = [found.mean(part) / found.seconds for part in ("computing", "recomputation", "bubble", "imbalance")]
    return *shares, 1 - sum(shares)


def ideal(n: int, m: int) -> float:
    """How much faster n equal stages are than one, if nothing but the bubble is lost.

    >>> ideal(1, 4), ideal(4, 1), ideal(2, 3)
    (1.0, 1.0, 1.5)
    """
    return n * m / (m + n - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="GPipe's tables beside ours.")
    parser.add_argument("--quick", action="store_true", help="one and two devices only")
    options = parser.parse_args()
    few = 2 if options.quick else 8
    print("Table 1: the largest AmoebaNet-D (L, F) for devices of 8 GB; GB\n")
    print(memory_table(AMOEBANET, [row for row in TABLE_1 if row.training.devices <= few], MEMORY, GB))
    title = "Table 2: AmoebaNet-D (18, 256), times the speed of (2, 1), and where time goes"
    print()
    show(title, SPEED_HEADS, speeds(graph_of(AMOEBANET, Size(6, 256)), [n for n in (2, 4, 8) if n <= few]))


if __name__ == "__main__":
    main()
