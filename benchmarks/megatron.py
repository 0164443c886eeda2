"""Published runs of GPT models on up to 3,072 A100, predicted: table 1 of Narayanan et al., "Efficient large-scale
language model training on GPU clusters using Megatron-LM", 2021.

    what one GPU has of a layer ──profile──▶ seconds ──+ all-reduces within a node──▶ stages ──simulate──▶ a step

One figure is calibrated, the share of its peak that an A100's products reach, and on the first row alone. Everything
else is nominal (`fxpipe.ir.cluster.published_clusters`), and the other rows are predicted with their own tensor and
pipeline sizes. Micro-batches are of 1 to 8 samples and a GPU has one to four stages (interleaved), whichever fits and
is the fastest by the paper's formula for the bubble, as the paper chose them by row; this one is simulated. Teraflop/s
are by the paper's formula for the operations of a step, which counts recomputation.

With `--plans`, each row is also planned by `fxpipe.plan(..., tensor_parallel="auto")`, for the same model, GPUs and
batch. "theirs" is the prediction of their step, with interleaved stages, which plans have not; "the same in a plan" is
their configuration without these, as the planner counts it; "ours" is the plan. All have the update of the parameters.
The planner cuts ops in the way that is fastest for a micro-batch. If that is large, sequences are cut and each GPU of a
group has whole weights, so "the same in a plan" then adds up more gradients at the end of a step than theirs.
Theirs always recompute, each layer by itself, as in the paper. Plans do so where memory asks for it, and then whole
stages, which takes more memory; with `--recompute` all stages do.

    python -m benchmarks.megatron
    python -m benchmarks.megatron --plans
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from time import process_time
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import fxpipe
from fxpipe.api.profile import ModelProfile
from fxpipe.api.tensor_parallel import Candidate, candidate
from fxpipe.ir.cluster.cluster import Cluster, Device
from fxpipe.ir.cluster.device_groups import groups
from fxpipe.ir.cluster.network import all_reduce
from fxpipe.ir.cluster.published_clusters import A100, INFINIBAND_LATENCY, a100s
from fxpipe.ir.cluster.what_if import fewer
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage, over_groups
from fxpipe.ir.plan.layer_chain import Chain
from fxpipe.ir.plan.profile import OpCost, total
from fxpipe.ir.plan.stage_ways import Way
from fxpipe.pipe.results.planned import Planned
from fxpipe.planning.hybrid.group_layers import Layers, as_plan, costed
from fxpipe.schedules.make_schedule import make
from fxpipe.schedules.simulate.simulate import Hop, Reduction, StageCost, simulate

from .paper_data import lines
from .tables import show

SEQUENCE, VOCABULARY, HALF = 2048, 51200, 2  # the last: bytes of an element
STATE = 16  # bytes in memory for each parameter: it and its gradient in f16; master copy and two moments in f32
STEP = 28  # bytes that Adam reads and writes for each parameter
CARD = 25e9  # bytes per second of a GPU's network card
SAMPLES = (1, 2, 4, 8)  # of a micro-batch
MOST = 4  # stages of a GPU
HEAD = ("parameters", "GPUs", "t", "p", "d", "micro-batch", "stages per GPU", "paper", "predicted", "off")
PLAN_HEAD = (
    "parameters", "GPUs", "their shape", "theirs", "the same in a plan", "ours", "ours to theirs", "our shape",
    "micro-batches", "stages that recompute", "processor seconds to plan",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A row of the table.

    - `parameters`: in billions.
    - `tensor`, `pipeline`: over how many GPUs a layer is cut, and in how many groups of them the layers are.
    - `teraflops`: what a GPU reached.
    """

    parameters: float
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    teraflops: float

    @property
    def replicas(self) -> int:
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def flops(self) -> float:
        """Floating-point operations of a step, with recomputation (the paper's equation 3)."""
        s, h, n = SEQUENCE, self.hidden, self.layers
        return 96 * self.batch * s * n * h**2 * (1 + s / (6 * h) + VOCABULARY / (16 * n * h))


def runs() -> tuple[Run, ...]:
    """The rows of the table."""
    found = []
    for line in lines("megatron"):
        cells = [cell.strip() for cell in line.strip("| \n").split("|")]
        if len(cells) == 10 and re.fullmatch(r"[\d.]+", cells[0]):
            found.append(Run(float(cells[0]), *map(int, cells[1:8]), teraflops=float(cells[8])))
    return tuple(found)


# What one GPU computes ------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """What one of `tensor` GPUs has of a transformer layer: a share of the heads, and of the inner channels."""

    def __init__(self, hidden: int, heads: int, tensor: int) -> None:
        super().__init__()
        self.heads, self.each = heads // tensor, hidden // heads
        inside = self.heads * self.each
        self.norm, self.norm_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.join, self.project = nn.Linear(hidden, 3 * inside), nn.Linear(inside, hidden)
        self.widen, self.narrow = nn.Linear(hidden, 4 * inside), nn.Linear(4 * inside, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        joined = self.join(self.norm(x)).view(b, s, 3, self.heads, self.each).permute(2, 0, 3, 1, 4)
        q, k, v = joined[0], joined[1], joined[2]
        weights = F.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.1)  # scale and mask are part of the softmax
        x = x + F.dropout(self.project((weights @ v).transpose(1, 2).reshape(b, s, self.heads * self.each)), 0.1)
        return x + F.dropout(self.narrow(F.gelu(self.widen(self.norm_mlp(x)))), 0.1)


class Share(nn.Module):
    """What one GPU has of a GPT of two layers."""

    def __init__(self, hidden: int, heads: int, tensor: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY // tensor, hidden), nn.Embedding(SEQUENCE, hidden)
        self.first, self.second = Layer(hidden, heads, tensor), Layer(hidden, heads, tensor)
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY // tensor, bias=False)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        x = F.dropout(self.words(ids) + self.places(places), 0.1)
        logits = self.head(self.norm(self.second(self.first(x))))
        return F.cross_entropy(logits.transpose(1, 2).float(), ids, reduction="none").mean(1)


@cache
def captured(hidden: int, heads: int, tensor: int) -> ModelProfile:
    with torch.device("meta"):
        model = Share(hidden, heads, tensor).half()
        ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
    return fxpipe.profile(model, ids, ids, device=A100)


@dataclass(frozen=True)
class Costs:
    """What one GPU computes of a micro-batch: of each layer, and of the embedding and the loss."""

    layer: OpCost
    ends: OpCost


def costs(run: Run, samples: int, device: Device) -> Costs:
    known = captured(run.hidden, run.heads, run.tensor)
    made = replace(known, estimated_for=device).at(samples)
    modules = {op.name: op.origin.module for op in known.graph.ops}
    ops: dict[str, list[OpCost]] = {"second": [], "first": [], "": []}
    for one in made.ops:
        ops[next((name for name in ("first", "second") if modules[one.name].startswith(name)), "")].append(one)
    return Costs(total(ops["second"]), total(ops[""]))


# A step ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """The seconds of a step with micro-batches of `samples`, and `each` stages on a GPU."""

    seconds: float
    samples: int
    each: int


def predict(run: Run, device: Device) -> Prediction:
    """The step, run in the way that is the fastest by formula of those that fit in memory."""
    ways = [(samples, each) for samples in SAMPLES for each in range(1, MOST + 1) if possible(run, samples, each)]
    samples, each = min(ways, key=lambda way: formula(run, *way, device))
    return Prediction(step(run, samples, each, device), samples, each)


def formula(run: Run, samples: int, each: int, device: Device) -> float:
    """The seconds of a step without transfers: micro-batches, and the bubble (the paper's section 2.2.2)."""
    micro = run.batch // (run.replicas * samples)
    forward, backward = passes(run, samples, device)
    return (micro + (run.pipeline - 1) / each) * run.layers / run.pipeline * (2 * forward + backward)


def passes(run: Run, samples: int, device: Device) -> tuple[float, float]:
    """Seconds of the forward and of the backward of a layer, with the all-reduces of a group."""
    layer = costs(run, samples, device).layer
    within = all_reduce(a100s(1), range(run.tensor)).seconds(samples * SEQUENCE * run.hidden * HALF)
    return layer.forward + 2 * within, layer.backward + 2 * within


def possible(run: Run, samples: int, each: int) -> bool:
    """Whether micro-batches and layers share out evenly, and everything fits."""
    m, over = divmod(run.batch, run.replicas * samples)
    stages = run.pipeline * each
    if over or run.layers % stages or (each > 1 and (run.pipeline == 1 or m % run.pipeline)):
        return False
    return memory(run, samples, each) <= A100.memory


def memory(run: Run, samples: int, each: int) -> float:
    """Bytes on a GPU of the first stage. Each layer keeps what it takes, and is recomputed by itself."""
    p, found = run.pipeline, costs(run, samples, A100)
    alive = min(run.batch // (run.replicas * samples), p + (p - 1) / each if each > 1 else p)
    taken = samples * SEQUENCE * run.hidden * HALF
    parameters = found.layer.parameters * run.layers / p + found.ends.parameters
    return STATE / HALF * parameters + alive * run.layers / p * taken + found.layer.saved + found.ends.saved


def step(run: Run, samples: int, each: int, device: Device) -> float:
    """The seconds of a step."""
    found, p, t, d = costs(run, samples, device), run.pipeline, run.tensor, run.replicas
    passed = samples * SEQUENCE * run.hidden * HALF
    within = all_reduce(a100s(1), range(t)).seconds(passed)
    stages = p * each
    layers = run.layers // stages
    forward, backward = passes(run, samples, device)
    ends = [0.0] * stages
    ends[0] += found.ends.forward / 3  # the embedding, about
    ends[-1] += found.ends.forward
    work = [
        StageCost(layers * forward + extra, layers * (forward + backward) + 2 * extra, checkpoint="never")
        for extra in ends
    ]
    hop = INFINIBAND_LATENCY + passed / t / CARD  # each GPU of a group sends its share, and they gather it
    hop += within / 2
    m = run.batch // (d * samples)
    names = tuple(f"group {device}" for device in range(p)) * each
    order = make("interleaved" if each > 1 else "1f1b", names, m)
    parameters = (found.layer.parameters * layers * each + found.ends.parameters) / HALF
    nodes = -(-run.gpus // 8)
    rows = all_reduce(a100s(nodes), range(0, d * t, t)).seconds(HALF * parameters)
    line = simulate(
        order,
        work,
        [Hop(s, s + 1, hop, hop) for s in range(stages - 1)],
        names[:p],
        [Reduction(s, rows / each) for s in range(stages)],
    )
    return line.makespan + update(parameters, device)


def update(parameters: float, device: Device) -> float:
    """Seconds in which a GPU updates this many parameters."""
    return STEP * parameters / (device.bandwidth * device.memory_efficiency)


# A plan ---------------------------------------------------------------------------------------------------------------


class Whole(nn.Module):
    """A GPT of this many layers."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, run.hidden), nn.Embedding(SEQUENCE, run.hidden)
        self.layers = nn.ModuleList(Layer(run.hidden, run.heads, 1) for _ in range(run.layers))
        self.norm, self.head = nn.LayerNorm(run.hidden), nn.Linear(run.hidden, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        x = F.dropout(self.words(ids) + self.places(places), 0.1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).transpose(1, 2).float(), ids, reduction="none").mean(1)


def cluster_of(run: Run, device: Device) -> Cluster:
    """The GPUs of the run, all like `device`."""
    nodes = fewer(a100s(-(-run.gpus // 8)), run.gpus)
    known = (replace(device, label=one.label, server=one.server) for one in nodes.devices)
    return replace(nodes, devices=tuple(known))


def profiled(run: Run, device: Device) -> ModelProfile:
    with torch.device("meta"):
        model = Whole(run).half()
        ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
    return fxpipe.profile(model, ids, ids, device=device)


def planned(run: Run, known: ModelProfile, cluster: Cluster, **options: Any) -> Planned:
    """The plan that is found, with the state of Megatron's optimizer."""
    return fxpipe.plan(known, cluster, run.batch, tensor_parallel="auto", parameter_copies=STATE / HALF, **options)


def with_update(found: Planned, device: Device) -> float:
    """Seconds of a step of the plan, and of the update of its parameters."""
    most = max(kinds.parameters for kinds in found.memory_kinds.values()) / HALF
    return found.seconds + update(most, device)


def the_same(run: Run, known: ModelProfile, cluster: Cluster, samples: int) -> Planned:
    """Their configuration as a plan: equal stages of their tensor and data parallel sizes, which recompute, with
    micro-batches of `samples` on each replica. Layers go to stages as in the paper; the embedding goes with the first
    layer, the loss with the last."""
    names = [op.name for op in known.graph.ops]
    modules = {op.name: re.match(r"layers\.(\d+)", op.origin.module) for op in known.graph.ops}
    first = [next(at for at, name in enumerate(names) if _layer(modules[name]) == n) for n in range(run.layers)]
    ends = [*first[1:], len(names)]
    made = Layers(
        Chain(known.model, known.batch, ()),
        tuple(tuple(names[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)),
    )
    rows = known.at(samples * run.replicas)
    if run.tensor > 1:
        one = candidate([rows], made, cluster, run.tensor)
    else:
        one = Candidate(1, cluster, (costed(rows.graph, rows, made),), ())
    each, d = run.layers // run.pipeline, run.replicas
    stages = tuple(
        HybridStage(s * each, (s + 1) * each, tuple(range(s * d, (s + 1) * d)), True) for s in range(run.pipeline)
    )
    micro = run.batch // (d * samples)
    placed = HybridPlan(known.model, stages, micro, samples=d * samples)
    hybrid = over_groups(placed, groups(cluster, run.tensor))
    plan = as_plan(known.graph, made, hybrid, cluster.labels, "1f1b")
    return Planned(plan, hybrid, (Way(run.tensor, one.chains),), cluster, run.batch, "Megatron", STATE / HALF)


def sizes_of(plan: HybridPlan) -> str:
    """The tensor-parallel sizes of the stages: one if all have the same."""
    sizes = [stage.tensor_parallel for stage in plan.stages]
    return ":".join(map(str, sizes if len(set(sizes)) > 1 else sizes[:1]))


def shape_of(plan: HybridPlan) -> str:
    """Tensor x stages x replicas of a plan."""
    replicas = [stage.replicas for stage in plan.stages]
    return f"{sizes_of(plan)} x {len(replicas)} x {max(replicas)}" + (" or less" if len(set(replicas)) > 1 else "")


def _layer(found: re.Match[str] | None) -> int | None:
    return int(found[1]) if found else None


def plan_rows(
    chosen: Sequence[Run], device: Device, seconds: float, recompute: bool | Literal["auto"]
) -> Iterator[tuple[object, ...]]:
    for run in tqdm(chosen, leave=False, disable=None):
        started = process_time()
        cluster = cluster_of(run, device)
        known = profiled(run, cluster.devices[0])
        ours = planned(run, known, cluster, time_limit=seconds, recompute=recompute)
        took = process_time() - started
        best = predict(run, device)
        same = with_update(the_same(run, known, cluster, best.samples), device)
        found = with_update(ours, device)
        own = ours.layers
        yield (
            f"{run.parameters:g} B",
            run.gpus,
            f"{run.tensor} x {run.pipeline} x {run.replicas}",
            best.seconds,
            same,
            found,
            f"{found / best.seconds - 1:+.1%}",
            shape_of(own),
            own.micro_batches,
            sum(stage.recompute for stage in own.stages),
            round(took),
        )


# The table ------------------------------------------------------------------------------------------------------------


def reaching(share: float) -> Device:
    """An A100 whose products in f16 reach this share of their peak."""
    speeds = (replace(one, efficiency=share) if one.dtype == "f16" else one for one in A100.matrices)
    return replace(A100, matrices=tuple(speeds))


def calibrated(first: Run) -> float:
    """The share of its peak that an A100's products reach, so that this run is predicted exactly."""
    low, high = 0.05, 1.0
    for _ in range(20):
        share = (low + high) / 2
        fast = teraflops(first, predict(first, reaching(share)).seconds) > first.teraflops
        low, high = (low, share) if fast else (share, high)
    return (low + high) / 2


def teraflops(run: Run, seconds: float) -> float:
    return run.flops / seconds / run.gpus / 1e12


def rows(chosen: Sequence[Run], device: Device) -> Iterator[tuple[object, ...]]:
    for run in tqdm(chosen, leave=False, disable=None):
        best = predict(run, device)
        found = teraflops(run, best.seconds)
        yield (
            f"{run.parameters:g} B",
            run.gpus,
            run.tensor,
            run.pipeline,
            run.replicas,
            best.samples,
            best.each,
            f"{run.teraflops:.0f}",
            f"{found:.0f}",
            f"{found / run.teraflops - 1:+.0%}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10, help="how many of the table, from the first")
    parser.add_argument("--plans", action="store_true", help="also find plans for the same models and GPUs")
    parser.add_argument("--recompute", action="store_true", help="plans in which all stages recompute, as theirs do")
    parser.add_argument("--seconds", type=float, default=60, help="that the search for a plan may take")
    options = parser.parse_args()
    table = runs()
    share = calibrated(table[0])
    if options.plans:
        title = "seconds of a step, theirs and ours; tensor x stages x replicas:"
        plans = plan_rows(table[: options.rows], reaching(share), options.seconds, options.recompute or "auto")
        show(title, PLAN_HEAD, plans)
        return
    title = f"products in f16 reach {share:.1%} of an A100's peak, by the first row; Tflop/s per GPU:"
    show(title, HEAD, rows(table[: options.rows], reaching(share)))


if __name__ == "__main__":
    main()
