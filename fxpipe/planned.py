"""What `fxpipe.plan` returns: the plan, with all that it was made for, so that it can be simulated, explained, compared
and kept as one JSON file, which `fxpipe.compile(model, plan="plan.json")` runs.

    {"model": "UNet", "chunks": 8, "schedule": "1f1b", "stages": [...],     a plan of ops, as any other
     "planned": {"planner": "optimal", "layers": ..., "chains": ..., "cluster": ...}}    what it was made for
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .errors import PlanError
from .ir import chain as chains
from .ir import cluster as clusters
from .ir import hybrid as hybrids
from .ir import plan as plans
from .ir.chain import Chain, nearest
from .ir.cluster import Cluster
from .ir.hybrid import HybridPlan, HybridStage, ranges, shape
from .ir.plan import Plan
from .ir.schedule import Schedule
from .ir.timeline import Timeline
from .ir.units import show_bytes, show_seconds
from .planning.optimal import Certificate
from .planning.planners import Request
from .schedules.make import make
from .simulator.hybrid import simulate_hybrid
from .viz import html, svg, text, trace


@dataclass(frozen=True)
class Planned:
    """`plan` says which ops and devices form which stage, and `layers` the same of the layers of `chains` and the
    positions in `cluster`, for a step of `batch` samples. `plan` has no ops where a chain was planned; `chains` are the
    same layers at one or several micro-batches. `copies` is how many bytes are in memory for each byte of parameters;
    `certificate` is there where the planner gives one. Print with `str`."""

    plan: Plan
    layers: HybridPlan
    chains: tuple[Chain, ...]
    cluster: Cluster
    batch: int
    planner: str
    copies: float
    certificate: Certificate | None = None

    def __str__(self) -> str:
        return show(self)

    @cached_property
    def chain(self) -> Chain:
        """The chain at the size of a micro-batch."""
        return nearest(self.chains, self.batch / self.layers.micro_batches)

    @cached_property
    def schedule(self) -> Schedule:
        """What each stage does when."""
        return self.order(self.plan.schedule)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step. A row is a stage, with all of its devices."""
        return self.simulate()

    @property
    def seconds(self) -> float:
        """What a step takes, as simulated."""
        return self.timeline.makespan

    @property
    def memory(self) -> dict[str, int]:
        """The most bytes in use on each device that has a stage."""
        peaks = zip(self.layers.stages, self.timeline.high_water, strict=True)
        return {self.cluster.labels[device]: peak for stage, peak in peaks for device in stage.devices}

    @property
    def request(self) -> Request:
        """What was asked of the planner."""
        return Request(
            self.chains, self.cluster, self.batch, all_reduce=self.layers.all_reduce, copies=self.copies, seconds=3
        )

    def order(self, schedule: str) -> Schedule:
        """The schedule of this name, or grid, for the plan's stages."""
        stages = tuple(f"stage {s}" for s in range(len(self.layers.stages)))
        try:
            return make(schedule, stages, self.layers.micro_batches)
        except ValueError as error:
            raise PlanError(str(error)) from None

    def simulate(self, schedule: str | None = None) -> Timeline:
        """The step in the order of another schedule."""
        order = self.schedule if schedule is None else self.order(schedule)
        return simulate_hybrid(self.chain, self.cluster, self.layers, order, self.copies)

    def explain(self) -> str:
        """The stages, what other plans would take, and what more hardware would be worth; plans a few seconds."""
        from .why import explain  # it plans again, and so stands above this file

        return explain(self)

    def text(self, width: int = 80) -> str:
        """The timeline as bars for a terminal."""
        return text.bars(self.timeline, width)

    def svg(self) -> str:
        """The timeline as the text of an SVG file."""
        return svg.draw(self.timeline, title(self))

    def html(self) -> str:
        """The timeline, the stages and the plan as the text of an HTML file, which needs nothing besides."""
        return html.draw(self.timeline, title(self), show(self))

    def trace(self) -> str:
        """The timeline for ui.perfetto.dev."""
        return trace.trace(self.timeline)

    def save(self, path: str | Path) -> None:
        """Write all of it to a JSON file, for `fxpipe.compile(model, plan=path)` and `fxpipe.planned.load`."""
        Path(path).write_text(dump(self))


def title(planned: Planned) -> str:
    return f"{planned.plan.model}, {shape(planned.layers.stages)}, {planned.plan.schedule}"


def check(planned: Planned) -> None:
    """Raise ValueError if the parts do not fit each other."""
    for chain in planned.chains:
        chains.check(chain)
    clusters.check(planned.cluster)
    hybrids.check(planned.layers, len(planned.chain), len(planned.cluster.devices))
    if not planned.batch >= planned.layers.micro_batches:
        raise ValueError(f"{planned.layers.micro_batches} micro-batches of a batch of {planned.batch}")
    devices = [tuple(planned.cluster.labels[at] for at in stage.devices) for stage in planned.layers.stages]
    if [stage.devices for stage in planned.plan.stages] != devices:
        raise ValueError("the stages of ops and the stages of layers are on different devices")


def show(planned: Planned) -> str:
    """A head with the figures of the step, and a row for each stage."""
    line = planned.timeline
    counts = f"{planned.layers.micro_batches} micro-batches of {planned.chain.batch:g}"
    head = [
        f"{planned.plan.model}: {shape(planned.layers.stages)} on {len(planned.memory)} of "
        f"{len(planned.cluster.devices)} devices, {counts}, {planned.plan.schedule}",
        f"{show_seconds(line.makespan)} per step of {planned.batch} samples, "
        f"{planned.batch / line.makespan:,.3g} samples per second, bubble {line.bubble:.1%}",
    ]
    headers = (
        "stage",
        "layers",
        "devices",
        "forward",
        "backward",
        "busy",
        "parameters",
        "memory",
        "sends",
        "recompute",
    )
    align = ("right", "left", "left", *["right"] * 6, "left")
    table = tabulate(_rows(planned), headers, disable_numparse=True, colalign=align)
    return "\n".join([*head, "", *(row.rstrip() for row in table.splitlines())])


def _rows(planned: Planned) -> list[tuple[str, ...]]:
    micro, line = planned.chain, planned.timeline
    rows: list[tuple[str, ...]] = []
    for s, stage in enumerate(planned.layers.stages):
        r = len(stage.devices)
        room = min(planned.cluster.devices[device].memory for device in stage.devices)
        rows.append(
            (
                str(s),
                _names(micro, stage),
                _devices(planned.cluster, stage),
                show_seconds((micro.forwards[stage.end] - micro.forwards[stage.first]) / r),
                show_seconds((micro.backwards[stage.end] - micro.backwards[stage.first]) / r),
                f"{line.busy[s] / line.makespan:.0%}" if line.makespan else "",
                show_bytes(micro.parameters[stage.end] - micro.parameters[stage.first]),
                f"{show_bytes(line.high_water[s])} of {show_bytes(room)}",
                show_bytes(micro.cuts[stage.end]) if stage.end < len(micro) else "",
                "always" if stage.recompute else "never",
            )
        )
    return rows


def _names(chain: Chain, stage: HybridStage) -> str:
    first, last = chain.layers[stage.first].name, chain.layers[stage.end - 1].name
    return first if stage.end - stage.first == 1 else f"{first} .. {last}"


def _devices(cluster: Cluster, stage: HybridStage) -> str:
    """As in "V100:0-7"."""
    labels = [cluster.labels[device] for device in stage.devices]
    kinds = {label.rpartition(":")[0] for label in labels}
    numbers = [label.rpartition(":")[2] for label in labels]
    if len(kinds) == 1 and all(number.isdecimal() for number in numbers):
        return f"{kinds.pop()}:{ranges(map(int, numbers))}"
    return ", ".join(labels)


def compare(names: Sequence[str], several: Sequence[Planned]) -> str:
    """A table with a row for each plan; `slower` is how much longer a step of as many samples takes than with the
    fastest."""
    least = min(one.seconds / one.batch for one in several)
    rows = [
        (
            name,
            f"{one.plan.model} {shape(one.layers.stages)}",
            one.plan.schedule,
            str(one.layers.micro_batches),
            str(len(one.memory)),
            show_seconds(one.seconds),
            f"{one.batch / one.seconds:,.3g}",
            f"{one.timeline.bubble:.1%}",
            show_bytes(max(one.memory.values())),
            f"{one.seconds / one.batch / least - 1:.1%}",
        )
        for name, one in zip(names, several, strict=True)
    ]
    headers = ("plan", "stages", "schedule", "micro-batches", "devices", "step", "samples/s", "bubble", "most memory")
    return tabulate(rows, (*headers, "slower"), disable_numparse=True, colalign=("left",) * 3 + ("right",) * 7)


def dump(planned: Planned) -> str:
    """The JSON text; `load` reads it back, and `fxpipe.compile` the plan in it."""
    certificate = None if planned.certificate is None else asdict(planned.certificate)
    facts = {
        "planner": planned.planner,
        "batch": planned.batch,
        "copies": planned.copies,
        "certificate": certificate,
        "layers": asdict(planned.layers),
        "cluster": asdict(planned.cluster),
    }
    text = plans.dump(planned.plan).rstrip().removesuffix("}").rstrip()
    costs = ",\n".join(chains.dump(chain).strip() for chain in planned.chains)
    return f'{text},\n "planned": {json.dumps(facts).removesuffix("}")},\n "chains": [{costs}]}}\n}}\n'


def load(path: str | Path) -> Planned:
    """The plan in a file that `Planned.save` wrote. Raises PlanError where there is none."""
    try:
        text = Path(path).read_text()
        data: dict[str, Any] = json.loads(text)
        if "stages" in data and "planned" not in data:
            raise ValueError("it has a plan, but not what it was made for; `fxpipe plan` writes both")
        planned = _load(text, data["planned"])
        check(planned)
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"no plan to look at in {str(path)!r}: {error}") from None
    return planned


def _load(text: str, facts: dict[str, Any]) -> Planned:
    certificate = facts["certificate"]
    return Planned(
        plans.load(text),
        hybrids.load(json.dumps(facts["layers"])),
        tuple(chains.load(json.dumps(chain)) for chain in facts["chains"]),
        clusters.load(json.dumps(facts["cluster"])),
        facts["batch"],
        facts["planner"],
        facts["copies"],
        None if certificate is None else Certificate(**certificate),
    )
