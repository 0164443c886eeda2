"""Plans for training Llama 2 on nodes of 8 H100: how it is shared, how fast a step is, how long planning takes.

A batch is of 4 million tokens, as in the paper: 1,024 samples of 4,096. Parameters are in bf16, with a master copy and
moments in f32. "others" are the seconds of the best plans of other tensor-parallel sizes.

    python -m benchmarks.llama_plans
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from time import process_time

import torch

import fxpipe
from fxpipe.pipe.results.planned import Planned

from .megatron import shape_of, sizes_of
from .models.llama import LLAMA_7B, LLAMA_70B, Llama, LlamaSize
from .tables import show

BATCH = 1024
STATE = 8  # bytes in memory for each byte of parameters
CASES = (("7B", LLAMA_7B, "h100:16"), ("70B", LLAMA_70B, "h100:64"))
HEAD = (
    "model", "GPUs", "tensor x stages x replicas", "micro-batches", "that recompute", "seconds", "MFU", "memory",
    "at most above optimum", "others", "processor seconds to plan",
)  # fmt: skip


def planned(size: LlamaSize, cluster: str, seconds: float) -> Planned:
    with torch.device("meta"):
        model = Llama(size).bfloat16()
        ids = torch.zeros(2, size.sequence, dtype=torch.long)
    return fxpipe.plan(
        model,
        cluster,
        BATCH,
        example_inputs=(ids,),
        tensor_parallel="auto",
        parameter_copies=STATE,
        time_limit=seconds,
    )


def rows(cases: Sequence[tuple[str, LlamaSize, str]], seconds: float) -> Iterator[tuple[object, ...]]:
    for name, size, cluster in cases:
        started = process_time()
        found = planned(size, cluster, seconds)
        took = process_time() - started
        own = sizes_of(found.layers)
        others = [f"{one.size}: {one.seconds:.1f}" for one in found.tried if one.seconds and str(one.size) != own]
        yield (
            name,
            len(found.cluster.devices),
            shape_of(found.layers),
            found.layers.micro_batches,
            sum(stage.recompute for stage in found.layers.stages),
            found.seconds,
            f"{found.utilization or 0:.1%}",
            f"{max(found.memory.values()) / 1e9:.0f} GB",
            f"{found.certificate.gap:.1%}" if found.certificate else "",
            ", ".join(others),
            round(took),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="that the search for a plan may take")
    options = parser.parse_args()
    show(f"Llama 2, steps of {BATCH} samples:", HEAD, rows(CASES, options.seconds))


if __name__ == "__main__":
    main()
