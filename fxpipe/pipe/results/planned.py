"""What `fxpipe.plan` returns: the plan with the planner's input, so that it can be simulated, explained, compared and
saved as one JSON file, which `fxpipe.compile(model, plan="plan.json")` runs.

    {"model": "UNet", "chunks": 8, "schedule": "1f1b", "stages": [...],     a plan of ops, as any other
     "planned": {"planner": "optimal", "layers": ..., "chains": ..., "cluster": ...}}    the planner's input
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from tabulate import tabulate

from fxpipe.errors import PlanError
from fxpipe.ir.cluster import cluster as clusters
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.device_groups import grouped, positions
from fxpipe.ir.cluster.roofline import peak
from fxpipe.ir.dataclass_json import from_plain, parse, to_plain, write
from fxpipe.ir.drawable import Drawable
from fxpipe.ir.operators.group_layout import OpSharding, show
from fxpipe.ir.plan import hybrid_plan as hybrids
from fxpipe.ir.plan import layer_chain as chains
from fxpipe.ir.plan import plan as plans
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage, replica_group, shape
from fxpipe.ir.plan.layer_chain import Chain
from fxpipe.ir.plan.model_states import ZERO, ModelStates, model_states
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.plan.stage_ways import Way
from fxpipe.ir.replica_shares import uneven
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.timeline import Timeline
from fxpipe.ir.units import count, show_bytes, show_seconds
from fxpipe.planning.hybrid.plan_request import Answer, Certificate, Request, RequestWay
from fxpipe.schedules.simulate.hybrid_costs import order_of, rows, simulate_hybrid, stage_cost
from fxpipe.viz import chrome_trace as trace
from fxpipe.viz import text_timeline as text
from fxpipe.viz import timeline_picture
from fxpipe.viz.picture_file import Picture

from . import plan_alternatives
from .comparison import Comparison
from .find_plan import find_plan, most_sharding
from .memory_kinds import KINDS, MemoryKinds, memory_kinds
from .plan_alternatives import TriedSize


@dataclass(frozen=True)
class SampleWork:
    """What training on one sample takes.

    - `flops`: floating-point operations of its matrix products, forward and backward, without recomputation, by element
      type; empty if they are not known.
    - `tokens`: how many it has, 0 if it is no text.
    """

    flops: tuple[tuple[str, float], ...] = ()
    tokens: int = 0


@dataclass(frozen=True)
class Planned(Drawable):
    """What `fxpipe.plan` returns: a plan for a step of `batch` samples, and the input of the `planner` that made it.
    Print with `str`.

    - `plan`: what `fxpipe.compile(plan=...)` runs: ops and devices of each stage; without ops if a chain was planned.
    - `layers`: the same plan in the planner's terms: for each stage its range of layers, its devices as positions in
      `cluster`, over how many each op is cut, and its way.
    - `ways`: those that stages have: the model as layers, with their costs on each device of a group.
    - `copies`: bytes in memory for each byte of parameters: the `parameter_copies` that were given, or those for the
      types of the parameters, and then `counted` says what they are.
    - `work`: the FLOPs of one sample, forward and backward, and its tokens.
    - `shardings`: how each op is cut over the devices of a group of its stage, with tensor parallelism.
    - `tried`: what was found with each tensor-parallel size, and how ops were cut for it, if they may be cut.
    - `recompute`, `optimizer_sharding`: those that were asked for; `layers` has those of the plan.
    - `certificate`: no plan takes fewer seconds than its `.bound`; `.gap` is how far that is below the plan's time, as
      a share of it. None if the planner proves nothing.
    """

    plan: Plan
    layers: HybridPlan
    ways: tuple[Way, ...]
    cluster: Cluster
    batch: int
    planner: str
    copies: float
    work: SampleWork = SampleWork()
    certificate: Certificate | None = None
    shardings: tuple[OpSharding, ...] = ()
    tried: tuple[TriedSize, ...] = ()
    recompute: bool | None = None
    optimizer_sharding: str = "none"
    counted: str = ""

    def __str__(self) -> str:
        """The figures of the step, a row for each stage, and what is proven of it."""
        line, layers = self.timeline, self.layers
        counts = f"{count(layers.micro_batches, 'micro-batch', 'micro-batches')} of {self.chain.batch:g}"
        shares = ", ideal shares" if self.chain.ideal_shares else ""
        shares += hybrids.tensor_parallel(layers.stages)
        if layers.shards_optimizer:
            shares += f", {ZERO[layers.optimizer_sharding]}"
        head = [
            f"{self.plan.model}: {shape(layers.stages)} on {len(self.memory)} of "
            f"{count(len(self.cluster.devices), 'device', 'devices')}, {counts}, {self.plan.schedule}{shares}",
            f"{show_seconds(line.makespan)} per step of {count(self.batch, 'sample', 'samples')}, "
            f"{self.batch / line.makespan:,.3g} samples per second, bubble {line.bubble:.1%}{_use(self)}",
        ]
        costs = ("forward", "backward", "busy", *KINDS, "memory", "sends", "recompute")
        align = ("right", "left", "left", *["right"] * 9, "left")
        table = tabulate(_rows(self), ("stage", "layers", "devices", *costs), disable_numparse=True, colalign=align)
        head += [self.counted] if self.counted else []
        proof = [] if self.certificate is None else ["", self.certificate.proof]
        return "\n".join([*head, *_uneven(self), "", *(row.rstrip() for row in table.splitlines()), *proof])

    __repr__ = __str__  # what a notebook's cell or the interpreter shows

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """The chain of each way at the size of a micro-batch."""
        return tuple(way.chain(self.batch, self.layers.micro_batches) for way in self.ways)

    @property
    def chain(self) -> Chain:
        """The first of `chains`."""
        return self.chains[0]

    @cached_property
    def schedule(self) -> Schedule:
        """The order of actions; the replicas of a stage have one row."""
        return self.order(self.plan.schedule)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step; the replicas of a stage have one row."""
        return self.simulate()

    @property
    def seconds(self) -> float:
        """The simulated time of a step, in seconds."""
        return self.timeline.makespan

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of text per second; None if samples are no text."""
        return self.batch * self.work.tokens / self.seconds if self.work.tokens else None

    @property
    def utilization(self) -> float | None:
        """The model FLOPs utilization (MFU; Chowdhery et al., "PaLM", 2022, appendix B): FLOPs of the model's
        matrix products, without recomputation, divided by what the devices of all stages could do at their peak in the
        same time; None if the FLOPs are not known."""
        if not self.work.flops:
            return None
        used = [self.cluster.device(label) for label in self.memory]
        best = sum(flops * self.batch / sum(peak(one, dtype) for one in used) for dtype, flops in self.work.flops)
        return best / self.seconds

    @property
    def memory_kinds(self) -> dict[str, MemoryKinds]:
        """What is in the memory of each device that has a stage at the fullest moment of a step, by label: bytes of
        `parameters`, `gradients`, `optimizer` and `activations`."""
        sharding = self.layers.optimizer_sharding
        states = dict[str, list[ModelStates]]()
        for stage in self.layers.stages:
            own = model_states(self.chains[stage.way], stage.first, stage.end, stage.replicas, self.copies, sharding)
            for label in self._labels(stage):
                states.setdefault(label, []).append(own)
        return {
            label: memory_kinds(ModelStates(*map(sum, zip(*states[label], strict=True))), most)
            for label, most in self.memory.items()
        }

    @property
    def memory(self) -> dict[str, int]:
        """The most bytes in use on each device that has a stage, by label."""
        peaks = dict(zip(rows(self.layers.stages), self.timeline.high_water, strict=True))
        return {label: peaks[stage.devices] for stage in self.layers.stages for label in self._labels(stage)}

    def _labels(self, stage: HybridStage) -> list[str]:
        return [self.cluster.labels[device] for device in stage.devices]

    def order(self, schedule: str) -> Schedule:
        """The schedule of this name, or of this grid, for the plan's stages and micro-batches. Raises PlanError if
        there is none."""
        try:
            return order_of(schedule, self.layers)
        except ValueError as error:
            raise PlanError(str(error)) from None

    def simulate(self, schedule: str | None = None) -> Timeline:
        """The simulated step; if a schedule is given (its name, or a grid), in its order. Raises PlanError if there is
        no such schedule."""
        order = self.schedule if schedule is None else self.order(schedule)
        return simulate_hybrid(self.chains, self.cluster, self.layers, order, self.copies)

    def explain(self) -> str:
        """The stages, and for comparison the time of a step with other planners' plans, with one more device and with
        twice the bandwidth. Searching these takes a few seconds."""
        chosen = Answer(self.layers, self.seconds, self.certificate)
        ways = tuple(
            RequestWay(way.tensor_parallel, way.chains, grouped(self.cluster, way.tensor_parallel)) for way in self.ways
        )
        one = len(ways) == 1
        request = Request(
            ways[0].chains,
            ways[0].cluster if one else self.cluster,
            self.batch,
            recompute=self.recompute,
            all_reduce=self.layers.all_reduce,
            copies=self.copies,
            seconds=3,
            optimizer_sharding=self.optimizer_sharding,
            ways=() if one else ways,
            most_sharding=most_sharding(self.plan.schedule, max(way.tensor_parallel for way in self.ways)),
        )
        times = len(self.layers.stages) // len(rows(self.layers.stages))
        own = partial(find_plan, schedule=self.plan.schedule, stages_per_device=times)
        why = plan_alternatives.explain(self.planner, own, request, chosen, self.timeline, ways[0].degree)
        sizes = plan_alternatives.sizes(self.tried)
        shared = show(self.shardings) if self.shardings else ""
        return "\n\n".join(part for part in (str(self), why, sizes, shared) if part)

    def text(self, width: int = 80) -> str:
        """The timeline as bars for a terminal, `width` characters wide."""
        return text.bars(self.timeline, width)

    def _picture(self) -> Picture:
        """The timeline."""
        title = f"{self.plan.model}, {shape(self.layers.stages)}, {self.plan.schedule}"
        return Picture(title, lambda: timeline_picture.draw(self.timeline, title), partial(str, self))

    def trace(self) -> str:
        """The timeline as the text of a JSON file, for ui.perfetto.dev."""
        return trace.trace(self.timeline)

    def save(self, path: str | Path) -> None:
        """Write the plan and the planner's input to a JSON file, for `fxpipe.compile(model, plan=path)`;
        `fxpipe.pipe.results.planned.load(path)` reads it back."""
        facts = to_plain(self)
        del facts["plan"]
        Path(path).write_text(write({**plans.plain(self.plan), "planned": facts}, 3))


def check(planned: Planned) -> None:
    """Raise ValueError if the parts do not fit each other."""
    for way in planned.ways:
        for chain in way.chains:
            chains.check(chain)
    clusters.check(planned.cluster)
    sizes = [way.tensor_parallel for way in planned.ways]
    for index, stage in enumerate(planned.layers.stages):
        if not 0 <= stage.way < len(sizes) or sizes[stage.way] != stage.tensor_parallel:
            raise ValueError(f"stage {index} has way {stage.way} with tensor parallel {stage.tensor_parallel}; {sizes}")
    hybrids.check(planned.layers, len(planned.chain), len(planned.cluster.devices))
    for stage in planned.layers.stages:
        positions(planned.cluster, stage.tensor_parallel, stage.devices)
    if not planned.batch >= planned.layers.micro_batches:
        raise ValueError(f"{planned.layers.micro_batches} micro-batches of a batch of {planned.batch}")
    firsts = [(own.tensor_parallel, own.devices[:: own.tensor_parallel]) for own in planned.layers.stages]
    devices = [(size, tuple(planned.cluster.labels[at] for at in own)) for size, own in firsts]
    if [(stage.tensor_parallel, stage.devices) for stage in planned.plan.stages] != devices:
        raise ValueError("the stages of ops and the stages of layers are on different devices")


def _uneven(planned: Planned) -> Iterator[str]:
    """Lines on what does not share out evenly: the batch among micro-batches, a micro-batch among replicas."""
    batch, m, samples = planned.batch, planned.layers.micro_batches, planned.chain.samples
    if samples is None:
        return
    if batch % m:
        larger = f"{batch % m} micro-batch{' has' if batch % m == 1 else 'es have'}"
        yield (
            f"{batch} samples do not share out evenly: {larger} {samples}, and {m - batch % m} "
            f"{'has' if m - batch % m == 1 else 'have'} {samples - 1}; the times are for {samples}"
        )
    for s, stage in enumerate(planned.layers.stages):
        if text := uneven(samples, stage.replicas):
            yield f"stage {s} does not share out evenly: {text}"


def _use(planned: Planned) -> str:
    """Tokens per second and MFU, where they are known."""
    tokens, use = planned.tokens_per_second, planned.utilization
    return (f", {tokens:,.3g} tokens per second" if tokens else "") + (f", MFU {use:.1%}" if use else "")


def _rows(planned: Planned) -> list[tuple[str, ...]]:
    line, kinds = planned.timeline, planned.memory_kinds
    found: list[tuple[str, ...]] = []
    groups = rows(planned.layers.stages)
    for s, stage in enumerate(planned.layers.stages):
        micro, after = planned.chains[stage.way], planned.layers.stages[s + 1 : s + 2]
        cost = stage_cost(micro, planned.cluster, stage)
        room = min(planned.cluster.devices[device].memory for device in stage.devices)
        row = groups.index(stage.devices)
        found.append(
            (
                str(s),
                _names(micro, stage),
                replica_group(planned.cluster, stage.devices),
                show_seconds(cost.forward),
                show_seconds(cost.backward),
                f"{line.busy[row] / line.makespan:.0%}" if line.makespan else "",
                *kinds[planned.cluster.labels[stage.devices[0]]].cells(),
                f"{show_bytes(line.high_water[row])} of {show_bytes(room)}",
                show_bytes(planned.chains[after[0].way].cuts[stage.end]) if after else "",
                "always" if stage.recompute else "never",
            )
        )
    return found


def _names(chain: Chain, stage: HybridStage) -> str:
    first, last = chain.layers[stage.first].name, chain.layers[stage.end - 1].name
    return first if stage.end - stage.first == 1 else f"{first} .. {last}"


def compare(names: Sequence[str], several: Sequence[Planned]) -> Comparison:
    """Plans beside each other: prints as a table with a row for each. `slower`: how much more time per sample a step
    takes than with the fastest."""
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
    table = tabulate(rows, (*headers, "slower"), disable_numparse=True, colalign=("left",) * 3 + ("right",) * 7)
    return Comparison(table, tuple((name, one.timeline) for name, one in zip(names, several, strict=True)))


def cluster_in(text: str) -> Cluster | None:
    """The cluster for which the plan in the text of a file was made; None if it does not say. Raises ValueError if the
    text is not JSON, or this is no cluster."""
    data = parse(text)
    facts = data.get("planned") if isinstance(data, dict) else None
    if not isinstance(facts, dict) or "cluster" not in facts:
        return None
    found = from_plain(Cluster, facts["cluster"])
    clusters.check(found)
    return found


def load(path: str | Path) -> Planned:
    """The plan in a file that `Planned.save` wrote. Raises PlanError if there is none."""
    try:
        data = parse(Path(path).read_text(encoding="utf-8"))
        if not isinstance(data, dict) or "planned" not in data:
            raise ValueError("it does not say what its plan was made for; `fxpipe plan` writes both")
        facts = data.pop("planned")
        planned = from_plain(Planned, {**facts, "plan": data} if isinstance(facts, dict) else facts)
        check(planned)
    except (OSError, ValueError) as error:
        raise PlanError(f"no plan to look at in {str(path)!r}: {error}") from None
    return planned
