"""What `pipe.diagnose()` returns: where the time of a step goes, which loss is the largest, and what to change.

1f1b, 2 micro-batches: 19 s; the plan predicts 19 s
             computing    recomputation    schedule's bubble    imbalance    transfers    host    stragglers    step
cpu:0             12 s              0 s                  7 s          0 s          0 s     0 s           0 s    19 s
cpu:1              6 s              0 s               11.2 s       1.75 s          0 s     0 s           0 s    19 s
...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from tabulate import tabulate

from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.timeline import Timeline
from fxpipe.ir.units import count, show_seconds
from fxpipe.schedules.diagnosis.time_split import PARTS, TimeSplit, slow

from .replanned import Replanned

LITTLE = 0.05  # a loss that is not worth a change


@dataclass(frozen=True)
class Diagnosis:
    """Where the time of a measured step goes, beside what the plan predicts. `str` of it is a table, then what costs
    most and what to change.

    - `plan`: what ran; `schedule`: the name of its schedule.
    - `chunks`: the number of micro-batches.
    - `measured`, `predicted`: the time of the step by device and part, each a `TimeSplit`.
    - `timeline`: the measured one.
    - `again`: what `replan` calls.
    """

    plan: Plan
    schedule: str
    chunks: int
    measured: TimeSplit
    predicted: TimeSplit
    timeline: Timeline
    again: Callable[[], Replanned] = field(repr=False, compare=False)

    @property
    def largest(self) -> str:
        """The part that costs most, besides computing: "recomputation", "bubble", "imbalance", "transfers", "host" or
        "stragglers"."""
        return self.measured.largest

    @property
    def advice(self) -> str:
        """What costs most, and what to change."""
        part, split = self.largest, self.measured
        name = shown(part)
        share = split.mean(part) / split.seconds if split.seconds else 0.0
        computing = f"{split.mean('computing') / split.seconds:.0%}" if split.seconds else "all"
        if share < LITTLE:
            return f"The devices compute {computing} of the time. No loss is large: the largest is {name}, {share:.0%}."
        return f"The largest loss is {name}: {share:.0%} of the devices' time. {ADVICE[part](self)}"

    @property
    def head(self) -> str:
        """How long the step took, from call to return and without what surrounds its actions, and as predicted."""
        seconds, line = show_seconds(self.measured.seconds), self.timeline
        if line.call is not None:
            seconds += (
                f" from call to return, {show_seconds(line.makespan)} from first to last action, in which devices "
            )
            seconds += f"are idle for {line.bubble:.1%}"
        micro_batches = count(self.chunks, "micro-batch", "micro-batches")
        return f"{self.schedule}, {micro_batches}: {seconds}; the plan predicts {show_seconds(self.predicted.seconds)}"

    def replan(self) -> Replanned:
        """Plan again with the times of this step. Returns the fastest plan that fits in memory, for
        `fxpipe.compile(model, plan=...)`, with its predicted step time and that of the plan that ran.

        Only the borders between stages change, also those that were chosen by `cut=`. Devices,
        micro-batches, schedule, recomputation, offload and replicas stay. A step tells how long a stage takes, not an
        op: the time of a stage is divided among its ops as the profile predicted. If the profile is far off for one op
        of a stage, replan again after a step with the new plan and the new profile:

            found = pipe.diagnose().replan()
            pipe = fxpipe.compile(model, plan=found, profile=found.profile)

        Each of several ranks finds the same plan. Raises PlanError for a pipe with a strategy, which places each op.
        """
        return self.again()

    def __str__(self) -> str:
        split, other = self.measured, self.predicted
        rows = [[device, *self._row(split, device)] for device in split.parts]
        means = [(name, one, one.seconds) for name, one in (("mean", split), ("predicted", other))]
        rows += [
            [name, *(show_seconds(one.mean(part)) for part in PARTS), show_seconds(seconds)]
            for name, one, seconds in means
        ]
        align = ("left", *("right" for _ in PARTS), "right")
        table = tabulate(
            rows, ["", *map(shown, PARTS), "step"], tablefmt="plain", disable_numparse=True, colalign=align
        )
        return f"{self.head}\n{table}\n{self.advice}"

    __repr__ = __str__  # what a notebook's cell or the interpreter shows

    def _row(self, split: TimeSplit, device: str) -> list[str]:
        return [*(show_seconds(split.parts[device][part]) for part in PARTS), show_seconds(split.seconds)]

    def worst(self, part: str) -> str:
        """The device or link that causes the most seconds of a part, such as "transfers"."""
        blamed = self.measured.blamed[part]
        return max(blamed, key=lambda by: blamed[by])

    def stages_on(self, device: str) -> str:
        """The stages of a device as text, such as "stages 0, 2"."""
        found = [str(index) for index, stage in enumerate(self.plan.stages) if device in stage.devices]
        return f"stage{'s' * (len(found) > 1)} {', '.join(found)}"


def shown(part: str) -> str:
    """The name of a part in text: of all that is idle, the bubble of a timeline, only some is for the schedule."""
    return "schedule's bubble" if part == "bubble" else part


def _bubble(found: Diagnosis) -> str:
    if found.chunks == 1:
        return "With one micro-batch only one device works at a time: cut the batch into more, with chunks=."
    return (
        f"Devices wait for the first and the last micro-batches: cut the batch into more than {found.chunks}, with "
        "chunks=, or take a schedule with a smaller bubble, such as 'interleaved' or 'zb-h1'."
    )


def _imbalance(found: Diagnosis) -> str:
    split = found.measured
    work = {device: parts["computing"] + parts["recomputation"] for device, parts in split.parts.items()}
    most = max(work, key=lambda device: work[device])
    return (
        f"{most}, with {found.stages_on(most)}, computes {show_seconds(work[most])}, the mean of all devices is "
        f"{show_seconds(sum(work.values()) / len(work))}: let fxpipe cut again by the times of this step "
        "(pipe.diagnose().replan()), or by those of each op (cut='time', profile='measure'), or give that stage "
        "more devices with replicas=."
    )


def _transfers(found: Diagnosis) -> str:
    link = found.worst("transfers")
    seconds: dict[str, float] = {}
    for span in found.timeline.on(link):
        seconds[span.label] = seconds.get(span.label, 0.0) + span.seconds
    longest = max(seconds, key=lambda label: seconds[label])
    waited = show_seconds(found.measured.blamed["transfers"][link])
    what = f", most of it for {longest}" if longest else ""
    return (
        f"Devices wait {waited} in all for {link}{what}: cut where less moves (pipe.explain() tells the bytes "
        "that each stage takes and gives), or use a faster link there."
    )


def _host(found: Diagnosis) -> str:
    actions = [span.seconds for device in found.timeline.devices for span in found.timeline.on(device)]
    return (
        f"Devices are idle though all they need is there, most for the host of {found.worst('host')}; half of the "
        f"actions take less than {show_seconds(median(actions))}. Make them longer, with a larger "
        "batch or fewer chunks=, and look for other work on the cores of that machine."
    )


def _recomputation(found: Diagnosis) -> str:
    device = found.worst("recomputation")
    return (
        f"Stages run forward again in backward, {device} for "
        f"{show_seconds(found.measured.blamed['recomputation'][device])}: if there is memory, write "
        "checkpoint='never', or name the stages that need it, as in checkpoint={0}."
    )


def _stragglers(found: Diagnosis) -> str:
    device, times = found.worst("stragglers"), slow(found.measured.slowness)
    if device in times:
        return (
            f"{device} takes {times[device]:.1f} times as long for what the plan gives it as the others do: look for "
            "other work on that device, or a slower one. If it is as fast as the others, the plan's costs are wrong: "
            "pipe.diagnose().replan() takes those of this step, and profile='measure' times each op."
        )
    longest = max(found.timeline.on(device), key=lambda span: span.seconds)
    return (
        f"Some actions of {device} take far longer than others of their stage, such as the {longest}: look for other "
        "work on that machine, memory that is full, or Python's garbage collection."
    )


ADVICE: dict[str, Callable[[Diagnosis], str]] = {
    "bubble": _bubble,
    "imbalance": _imbalance,
    "transfers": _transfers,
    "host": _host,
    "recomputation": _recomputation,
    "stragglers": _stragglers,
}
