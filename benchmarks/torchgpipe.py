"""torchgpipe's tables (Kim et al., 2020) beside ours: memory by planning, speed by simulation.

    python -m benchmarks.torchgpipe            all rows; some minutes, most of them for capture
    python -m benchmarks.torchgpipe --quick    the rows of up to two devices

The published figures are of torchgpipe 0.0.5 on eight Tesla P40, of which 22 GiB each are free; models, batches and
balances are those of its benchmark programs. What does not match, and why:

- Activations here are what autograd keeps, to the byte. Theirs are all that torch's allocator ever took from the
  device, less the parameters: with what kernels need while they run, and what lies about in pieces. On one device the
  two are near each other (U-Net's baseline: 18.4 and 17.6 GiB); over more, theirs grow to twice ours and beyond.
- Our plans are those whose fullest device is emptiest, theirs were found by hand. So ours fit with room to spare.
- Speeds are simulated from the data sheet. It knows the best that a P40 can do with an op, not how far a kernel is from
  it at a small micro-batch. Speeds relative to each other are what to compare.
- The simulator gives a transfer the whole of a link; the eight cards share a few.
- So the parts of torchgpipe are worth less here, 1.52 times in all (dependencies 1.17, streams 1.25, portals 1.04)
  instead of 1.91 (1.35, 1.34, 1.06): without streams a copy stops two devices for as long as it takes a free link, and
  without dependencies autograd runs here in the best order that it may, but for what it recomputes too early.
- Utilisation here is the share of time in which devices compute or, without streams, copy: for that it falls when
  streams take copies out of it. Theirs is of the GPUs' own counters.
- Memory of the ablation is of all devices. Without dependencies the last one saves for all micro-batches at once, and
  without portals a skip lies on every device on its way; both order as theirs. That streams take memory, 19.1 to
  30.0 GiB, is not simulated: copies that are under way, and memory that an allocator keeps apart for each stream.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
from tabulate import tabulate

from benchmarks.gpipe import Published, ideal, memory_table
from benchmarks.models import resnet101
from benchmarks.planned import AMOEBANET, UNET, Size, Training, graph_of
from benchmarks.simulated import (
    Setting,
    amoebanet_layers,
    box,
    busy,
    memory,
    memory_without_dependencies,
    parts,
    resnet_layers,
    seconds,
    their_plan,
    throughput,
    unet_layers,
    without_dependencies,
    without_streams,
)
from benchmarks.tables import Row, show
from fxpipe.capture import capture
from fxpipe.ir.graph.graph import Graph

GIB = 2**30
MEMORY = 22 * GIB

# Memory of AmoebaNet-D: batch 128; parameters and activations in GiB.
AMOEBANET_MEMORY = (
    Published("baseline", Size(6, 208), Training(1, 128, 1, recompute=False), "81.5M", 0.91, None),
    Published("pipeline-1", Size(6, 416), Training(1, 128, 128), "319.0M", 3.57, 0.91),
    Published("pipeline-2", Size(6, 544), Training(2, 128, 128), "542.7M", 6.07, 3.39),
    Published("pipeline-4", Size(12, 544), Training(4, 128, 128), "1.06B", 11.80, 6.91),
    Published("pipeline-8", Size(24, 512), Training(8, 128, 128), "1.84B", 20.62, 10.83),
)


def rest(whole: float, parameters: int) -> tuple[float, float]:
    """The published total of a U-Net, in GiB, as parameters and activations: two copies of the parameters, and the
    rest."""
    own = 8 * parameters / GIB
    return own, whole - own


# Memory of U-Net: batch 32 of 192 x 192; the table has the totals, of which parameters are counted off here.
UNET_MEMORY = (
    Published("baseline", Size(6, 72), Training(1, 32, 1, recompute=False), "362.2M", *rest(20.3, 362_157_516)),
    Published("pipeline-1", Size(11, 128), Training(1, 32, 32), "2.21B", *rest(20.5, 2_213_834_176)),
    Published("pipeline-2", Size(24, 128), Training(2, 32, 32), "4.99B", *rest(43.4, 4_993_859_008)),
    Published("pipeline-4", Size(24, 160), Training(4, 32, 32), "7.80B", *rest(79.1, 7_802_903_600)),
    Published("pipeline-8", Size(48, 160), Training(8, 32, 32), "15.82B", *rest(154.1, 15_822_206_000)),
)

Speeds = Mapping[str, tuple[Setting, tuple[int, ...], float]]  # how it was run, the balance, samples a second

# AmoebaNet-D (18, 256), 224 x 224; the first is what the others are measured by.
AMOEBANET_SPEED: Speeds = {
    "n=2, m=1": (Setting(2, 96, 1, "always"), (7, 17), 26.733),
    "n=2, m=4": (Setting(2, 256, 4), (9, 15), 41.133),
    "n=2, m=32": (Setting(2, 1280, 32), (9, 15), 47.386),
    "n=4, m=1": (Setting(4, 160, 1, "always"), (3, 4, 5, 12), 26.827),
    "n=4, m=4": (Setting(4, 360, 4), (3, 6, 7, 8), 44.543),
    "n=4, m=32": (Setting(4, 1152, 32), (3, 6, 7, 8), 72.412),
    "n=8, m=1": (Setting(8, 196, 1, "always"), (2, 2, 2, 2, 2, 3, 4, 7), 24.918),
    "n=8, m=4": (Setting(8, 480, 4), (2, 2, 2, 3, 3, 4, 4, 4), 70.065),
    "n=8, m=32": (Setting(8, 1280, 32), (2, 2, 2, 3, 3, 4, 4, 4), 132.413),
}

# U-Net (5, 64), 192 x 192.
UNET_SPEED: Speeds = {
    "baseline": (Setting(1, 40, 1, "never"), (241,), 28.500),
    "pipeline-1": (Setting(1, 80, 2), (241,), 24.456),
    "pipeline-2": (Setting(2, 512, 32), (104, 137), 35.502),
    "pipeline-4": (Setting(4, 512, 16), (30, 66, 84, 61), 67.042),
    "pipeline-8": (Setting(8, 640, 40), (16, 27, 31, 44, 22, 57, 27, 17), 88.497),
}

# ResNet-101, 224 x 224. Of pipeline-2's 1,667 micro-batches 150 are enough to see its speed.
RESNET_SPEED: Speeds = {
    "baseline": (Setting(1, 118, 1, "never"), (370,), 95.862),
    "pipeline-1": (Setting(1, 220, 2), (370,), 81.796),
    "pipeline-2": (Setting(2, 15 * 150, 150), (135, 235), 135.539),
    "pipeline-4": (Setting(4, 5632, 256), (44, 92, 124, 110), 265.958),
    "pipeline-8": (Setting(8, 5400, 150), (26, 22, 33, 44, 44, 66, 66, 69), 411.662),
}

# U-Net (5, 64) on four devices, batch 128: what each part of torchgpipe is worth, in samples a second, with the
# utilisation of the GPUs and GiB in use on all of them (benchmarks/unet-timeline in its repository).
ABLATION = {
    "nothing": (30.662, 0.44, 52.2),
    "dependencies": (41.306, 0.59, 19.1),
    "dependencies, streams": (55.191, 0.71, 30.0),
    "dependencies, streams, portals": (58.477, 0.75, 23.5),
}
ABLATION_SETTING, ABLATION_BALANCE = Setting(4, 128, 8), (34, 76, 70, 61)


def speed_table(graph: Graph, layers: Sequence[int], published: Speeds) -> str:
    """Samples a second, published and simulated; then in parts of the first row's: published, simulated with their
    balance, and with ours (of their first row); and what would be if stages were equal and nothing but the bubble and
    the recomputation were lost."""
    theirs = {name: throughput(graph, setting, layers, balance) for name, (setting, balance, _) in published.items()}
    ours = {name: throughput(graph, setting) for name, (setting, _, _) in published.items()}
    first = next(iter(published))
    rows = [
        (
            name,
            f"{measured:.1f}",
            f"{theirs[name]:.1f}",
            f"{measured / published[first][2]:.2f}",
            f"{theirs[name] / theirs[first]:.2f}",
            f"{ours[name] / theirs[first]:.2f}",
            f"{bound(setting) / bound(published[first][0]):.2f}",
        )
        for name, (setting, _, measured) in published.items()
    ]
    headers = ("", "samples/s", "simulated", "published", "simulated", "our balance", "no imbalance")
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 6))


def bound(setting: Setting) -> float:
    """Speed of equal stages where backward takes twice as long as forward, and recomputation as long as forward."""
    again = {"never": 0, "always": setting.chunks, "except_last": setting.chunks - 1}[setting.checkpoint]
    return ideal(setting.devices, setting.chunks) * 3 / (3 + again / setting.chunks)


ABLATION_HEADS = ("with", "samples/s", "published", "simulated", "utilisation", "simulated", "GiB", "simulated")


def ablation(graph: Graph, layers: Sequence[int]) -> Iterator[Row]:
    """Of each part added: speed in parts of the first row's, utilisation and memory, published and simulated."""
    setting, cluster = ABLATION_SETTING, box(ABLATION_SETTING.devices)
    decided = their_plan(graph, setting, layers, ABLATION_BALANCE)
    full = parts(graph, decided, setting, cluster)
    relayed = parts(graph, decided, setting, cluster, portals=False)
    bare = without_streams(relayed)
    alone = without_dependencies(bare)
    held = (memory_without_dependencies(bare), memory(bare), memory(relayed), memory(full))
    first, slowest = ABLATION["nothing"][0], seconds(alone)
    for (name, told), these, size in zip(ABLATION.items(), (alone, bare, relayed, full), held, strict=True):
        measured, utilisation, gib = told
        yield (
            *(name, measured, measured / first, slowest / seconds(these)),
            *(utilisation, busy(these), gib, size / GIB),
        )


def up_to(devices: int, published: Speeds) -> Speeds:
    return {name: row for name, row in published.items() if row[0].devices <= devices}


def resnet_graph() -> Graph:
    with torch.device("meta"):
        return capture(resnet101(), (torch.empty(2, 3, 224, 224),))


def main() -> None:
    parser = argparse.ArgumentParser(description="torchgpipe's tables beside ours.")
    parser.add_argument("--quick", action="store_true", help="up to two devices only")
    options = parser.parse_args()
    few = 2 if options.quick else 8
    for title, family, published in (
        ("AmoebaNet-D (L, F)", AMOEBANET, AMOEBANET_MEMORY),
        ("U-Net (B, C)", UNET, UNET_MEMORY),
    ):
        print(f"The largest {title} for devices of 22 GiB; GiB\n")
        print(memory_table(family, [row for row in published if row.training.devices <= few], MEMORY, GIB), end="\n\n")
    amoebanet, unet = graph_of(AMOEBANET, Size(6, 256)), graph_of(UNET, Size(5, 64))
    for title, graph, layers, speeds in (
        ("AmoebaNet-D (18, 256)", amoebanet, amoebanet_layers(amoebanet), AMOEBANET_SPEED),
        ("U-Net (5, 64)", unet, unet_layers(5), UNET_SPEED),
        ("ResNet-101", resnet_graph(), resnet_layers(), RESNET_SPEED),
    ):
        print(f"Speed of {title}, times that of the first row\n")
        print(speed_table(graph, layers, up_to(few, speeds)), end="\n\n")
    title = "U-Net (5, 64) on four devices: times the speed of the first row, utilisation, and memory of all devices"
    show(title, ABLATION_HEADS, ablation(unet, unet_layers(5)))


if __name__ == "__main__":
    main()
