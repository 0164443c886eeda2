"""Memory in the DAPPLE paper beside ours, on V100 of 16 GB: its tables VI and VIII, by planning and simulation.

    python -m benchmarks.dapple_memory

Table VI is BERT-48 in two stages on cluster B with M micro-batches of two samples: throughput, and memory as the mean
of both devices. Parameters count 16 bytes (Adam); what a sample saves is the peak of the authors' example program,
3.473 GB, shared by the transformer layers. Nothing is fitted. What differs, and why:

- Throughput is that of their profile and the nominal network, and higher than theirs. Theirs lies on a line: with
  DAPPLE, each micro-batch of a stage takes 223 ms, where their profile has 172, and each step 114 ms besides. With
  these, more micro-batches gain more than by the bubble alone, which is ours.
- GPipe of three micro-batches fits here by half a gigabyte, with nothing else on the device: theirs does not.
- With recomputation, a stage keeps only what it takes here. Theirs keeps 1.1 GB of each micro-batch (GPipe, 9.9 to
  13.2 GB from M = 2 to 5), a third of all: so GPipe's memory grows, and recomputation costs 17 to 20% where it costs
  27% here. Two thirds of a forward again would cost 20% here, too.

Table VIII is the deepest BERT on n devices, with recomputation. The deepest here is of straight pipelines: of all cuts
whose stages fit, those with the fastest slowest stage. A stage is recomputed as a whole, so that it needs room for
all that its layers save of one micro-batch; how large theirs are is not said, so ours are of one sample and of two.
On one device nothing is gained by recomputing a whole model; its 48 layers are the most of two samples in 16 GiB.
The paper's 5.5 billion parameters are 1.6% more than its 428 layers have. Utilisation is of 16 micro-batches for each
device; their number is not said, and no profile tells what keeps one device from more than 93%: to compare, theirs is
also shown in parts of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from fxpipe.ir.cluster.published_clusters import preset
from fxpipe.ir.plan.hybrid_plan import HybridStage, warmup_of
from fxpipe.ir.plan.layer_chain import Chain, scaled
from fxpipe.ir.timeline import Timeline
from fxpipe.planning.hybrid.event_time import Problem
from fxpipe.planning.hybrid.simple_plans import PICOSECONDS, one_each
from fxpipe.planning.stages.balance import StageCosts, balance
from fxpipe.schedules.make_schedule import make
from fxpipe.schedules.simulate.simulate import Hop, StageCost, simulate

from .dapple import TABLE_V
from .dapple_profiles import read
from .paper_data import MISSING, expected, folder, profile_path
from .tables import Row, show

GB = 10**9
ROOM = 16 * 2**30  # bytes of a V100
COPIES = 4  # 16 bytes for each parameter of 4
SAMPLES = 2  # of a micro-batch: the profile's
BERT = next(case for case in TABLE_V if case.model == "BERT-48")
SCHEDULES = {"GPipe": "gpipe", "DAPPLE": "1f1b"}
EACH = 16  # micro-batches for each device in table VIII


def bert(layers: int = 48, samples: int = SAMPLES) -> Chain:
    """BERT of so many transformer layers, from the authors' profile of 48, that saves what their program does."""
    chain = scaled(read(profile_path(BERT.profile)), samples)
    first = next(at for at, layer in enumerate(chain.layers) if layer.name == "layer_0")
    one = replace(chain.layers[first], saved=samples * BERT.activations / 48)
    alike = (replace(one, name=f"layer_{n}") for n in range(layers - 1))
    last = replace(chain.layers[first + 47], saved=one.saved)
    ends = (replace(layer, saved=0.0) for layer in chain.layers[first + 48 :])
    before = (replace(layer, saved=0.0) for layer in chain.layers[:first])
    return replace(chain, model=f"BERT-{layers}", layers=(*before, *alike, last, *ends))


def step(problem: Problem, stages: tuple[HybridStage, ...], schedule: str) -> Timeline:
    """A step of a straight pipeline under a schedule, with its memory."""
    costs = []
    for s, stage in enumerate(stages):
        plain = problem.stage(stage.first, stage.end, stage.devices)
        taken = problem.chain.cuts[stage.first] if s else 0.0
        mode = "always" if stage.recompute else "never"
        costs.append(
            StageCost(
                plain.forward,
                plain.backward,
                saved=round(plain.kept),
                taken=round(taken),
                fixed=round(plain.fixed),
                checkpoint=mode,
            )
        )
    rates = [problem.rate(a.devices, b.devices).seconds(problem.chain.cuts[a.end]) for a, b in pairwise(stages)]
    hops = [Hop(s, s + 1, seconds, seconds) for s, seconds in enumerate(rates)]
    names = [problem.cluster.labels[stage.devices[0]] for stage in stages]
    return simulate(make(schedule, names, problem.micro_batches), costs, hops, names)


# Table VI -------------------------------------------------------------------------------------------------------------

HEADS_VI = ("schedule", "M", "paper's samples/s", "ours", "paper, of M = 2", "ours")
HEADS_VI += ("paper's GB", "ours", "fullest device")


def table_vi() -> Iterator[Row]:
    """A row for each of the paper's, in its order."""
    slowest: dict[str, tuple[float, float]] = {}
    for told in expected()["table_VI_bert48_2stage_B"]:
        name, m = told["sched"], told["M"]
        base, _, recompute = name.partition("+")
        problem = Problem(bert(), preset("B:2"), m, copies=COPIES, capped=False)
        stages = tuple(replace(stage, recompute=bool(recompute)) for stage in one_each(problem))
        line = step(problem, stages, SCHEDULES[base])
        ours, theirs = m * SAMPLES / line.makespan, told.get("thr")
        first = slowest.setdefault(name, (ours, theirs))
        held = [size / GB for size in line.high_water]
        yield (
            name,
            m,
            theirs,
            ours,
            theirs and theirs / first[1],
            ours / first[0],
            "out of memory" if told.get("oom") else f"{told['mem']:.2f}",
            sum(held) / len(held),
            max(held),
        )


# Table VIII -----------------------------------------------------------------------------------------------------------

HEADS_VIII = ("", "devices", "samples", "layers", "parameters", "GB of parameters", "utilisation", "of one device")


def deepest(devices: int, samples: int) -> Problem:
    """The deepest BERT of which a straight pipeline with recomputation fits."""
    low, high = devices, 2 * devices
    while straight(depth(high, devices, samples)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if straight(depth(middle, devices, samples)) else (low, middle)
    return depth(low, devices, samples)


def depth(layers: int, devices: int, samples: int) -> Problem:
    return Problem(bert(layers, samples), preset(f"A:{devices}"), EACH * devices, copies=COPIES, capped=False)


def straight(problem: Problem) -> tuple[HybridStage, ...]:
    """The straight pipeline with the fastest slowest stage of those that fit with recomputation; empty if none does."""
    chain, n = problem.chain, len(problem.cluster.devices)
    if len(chain) < n:
        return ()
    nothing = [0] * (len(chain) + 1)
    work = [round((f + b) * PICOSECONDS) for f, b in zip(chain.forwards, chain.backwards, strict=True)]
    held = [round(COPIES * p + saved) for p, saved in zip(chain.parameters, chain.saved, strict=True)]
    alive = [warmup_of("early", s, n, problem.micro_batches) for s in range(n)]
    stages = [StageCosts(work, nothing, nothing, held, [k * round(cut) for cut in chain.cuts], ROOM) for k in alive]
    cuts = balance(stages, [range(1, len(chain))] * (n - 1))
    spans = enumerate(pairwise(cuts)) if cuts else ()
    return tuple(HybridStage(a, b, (s,), recompute=n > 1) for s, (a, b) in spans)


def table_viii(most: int = 8) -> Iterator[Row]:
    """For each of the paper's rows up to so many devices, it and ours."""
    whole = None
    for name, told in expected()["table_VIII_max_bert"].items():
        devices = int(name.rpartition("-")[2])
        if devices > most:
            return
        whole = whole or told["util"]
        yield name, devices, None, told["L"], told["params"], told["mem_GB"], told["util"], told["util"] / whole
        for samples in (1, 2):
            problem = deepest(devices, samples)
            line = step(problem, straight(problem), "1f1b")
            chain = problem.chain
            parameters = chain.parameters[-1]
            transformers = sum(layer.name.startswith("layer_") for layer in chain.layers)
            busy = sum(line.busy) / devices / line.makespan
            yield (
                "ours", devices, samples, transformers, f"{parameters / 4e9:.2f}B", COPIES * parameters / GB, busy, busy
            )  # fmt: skip


def main() -> None:
    if folder() is None:
        print(MISSING)
        return
    show("Table VI: BERT-48 in two stages on cluster B", HEADS_VI, table_vi())
    show("Table VIII: the deepest BERT with recomputation on V100 of 16 GB", HEADS_VIII, table_viii())


if __name__ == "__main__":
    main()
