"""The schedules by name: `placement` gives each stage its device, `make` makes the rows.

    name              stages on the devices a, b            what it is
    gpipe             a b        each device once           all forwards, then all backwards
    1f1b, 1f1b-late   a b                                   early backward, DAPPLE's warm-ups P_A and P_B
    zb-h1, zb-h2      a b                                   split backward; the memory of 1F1B, or twice that
    interleaved       a b a b    each in turn               1F1B through several loops; interleaved-late: as Megatron
    looped-bfs        a b a b                               all micro-batches of a loop before the next loop
    zb-v, dualpipe-v  a b b a    down and up again          split backward, stages of half the size
    forward-only      any                                   for inference

A schedule for straight pipelines runs on any list of devices; rows of the same device are joined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from fxpipe.errors import did_you_mean
from fxpipe.ir.schedule.schedule import Schedule, load_csv, parse, plain
from fxpipe.ir.schedule.schedule_check import check
from fxpipe.ir.schedule.sub_schedule import share

from .dual_pipe_v import dual_pipe_v
from .interleaved import interleaved, interleaved_late, looped_bfs
from .one_f_one_b import early, forward_only, gpipe, late, one_f_one_b
from .zero_bubble import zb_h1, zb_h2, zb_v

Generate = Callable[[int, int, int], Schedule]  # stages, chunks, devices
Own = str | Schedule | Callable[[int, int], Schedule | str]


class Form(NamedTuple):
    """How the stages of a schedule are placed ("straight", "in turn", "v" or "any"), and the function that makes it."""

    shape: str
    generate: Generate


def _straight(generate: Callable[[int, int], Schedule]) -> Form:
    return Form("straight", lambda stages, chunks, devices: generate(stages, chunks))


def _v(generate: Callable[[int, int], Schedule]) -> Form:
    return Form("v", lambda stages, chunks, devices: generate(stages, chunks))


def _late(stages: int, chunks: int) -> Schedule:
    return replace(one_f_one_b(stages, chunks, late(stages)), name="1f1b-late")


SCHEDULES: dict[str, Form] = {
    "gpipe": _straight(gpipe),
    "1f1b": _straight(one_f_one_b),
    "1f1b-late": _straight(_late),
    "zb-h1": _straight(zb_h1),
    "zb-h2": _straight(zb_h2),
    "interleaved": Form("in turn", interleaved),
    "interleaved-late": Form("in turn", interleaved_late),
    "looped-bfs": Form("in turn", looped_bfs),
    "zb-v": _v(zb_v),
    "dualpipe-v": _v(dual_pipe_v),
    "forward-only": Form("any", lambda stages, chunks, devices: forward_only(stages, chunks)),
}

STRAIGHT = tuple(name for name, made in SCHEDULES.items() if made.shape == "straight")
LOOPED = tuple(name for name, made in SCHEDULES.items() if made.shape in ("in turn", "v"))
IN_TURN = tuple(name for name, made in SCHEDULES.items() if made.shape == "in turn")
FORWARDS_FIRST = ("gpipe", "looped-bfs")  # those in which all forwards of a stage come before its first backward
SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")  # those with backward in two halves
AUTO: Final = "auto"  # the fastest, as simulated, of those that fit into memory
WARM = {"1f1b": early, "1f1b-late": late}  # those that take `warmup` and `limit`


# Where stages stand ---------------------------------------------------------------------------------------------


def placement(name: str, devices: Sequence[str], stages_per_device: int | None = None) -> tuple[str, ...]:
    """The device of each stage under this schedule. A device gets `stages_per_device` stages, by default one, or two if
    the schedule needs several. Raises ValueError for devices or numbers that the schedule cannot have.

    >>> placement("gpipe", ("a", "b")), placement("interleaved", ("a", "b")), placement("zb-v", ("a", "b"))
    (('a', 'b'), ('a', 'b', 'a', 'b'), ('a', 'b', 'b', 'a'))
    """
    shape, several = form(name).shape, stages_per_device
    if not devices:
        raise ValueError(f"{name} has no devices to stand on")
    if shape in ("in turn", "v") and len(set(devices)) < len(devices):
        raise ValueError(f"{name} deals its stages to the devices itself; name each of {list(devices)} once")
    if several is not None and several < 1:
        raise ValueError(f"stages_per_device is {several}; a device needs at least one")
    if shape == "v" and several not in (None, 2):
        raise ValueError(f"{name} has two stages on each device, not {several}; 'interleaved' has any number")
    if shape == "straight" and several not in (None, 1):
        raise ValueError(f"{name} has one stage on each device, not {several}; write schedule='interleaved'")
    if shape == "v":
        return (*devices, *reversed(devices))
    return tuple(devices) * (several or (2 if shape == "in turn" else 1))


def form(name: str) -> Form:
    """The entry of `SCHEDULES`. Raises ValueError for a name that is not there."""
    if name not in SCHEDULES:
        raise ValueError(
            f"there is no schedule {name!r}; write one of {', '.join(SCHEDULES)}, or a grid such as "
            f"'F0 F1 B0 B1', a line for each device{did_you_mean(name, SCHEDULES)}"
        )
    return SCHEDULES[name]


def _stands(name: str, shape: str, stage_devices: Sequence[str]) -> None:
    """Raise ValueError if the stages are not placed as the schedule needs it."""
    labels = tuple(dict.fromkeys(stage_devices))
    turn = tuple(labels[s % len(labels)] for s in range(len(stage_devices)))
    wanted = {"in turn": turn, "v": (*labels, *reversed(labels))}.get(shape, tuple(stage_devices))
    if tuple(stage_devices) != wanted:
        shapes = {"in turn": "deals its stages to the devices in turn", "v": "has its stages in a V"}
        raise ValueError(
            f"{name} {shapes[shape]}, here as {', '.join(wanted)}, but the stages are on {', '.join(stage_devices)}; "
            f"place them so, or write a schedule for any placement: {', '.join(STRAIGHT)}"
        )


# What they run --------------------------------------------------------------------------------------------------


def make(
    schedule: Own,
    stage_devices: Sequence[str],
    chunks: int,
    warmup: Sequence[int] | None = None,
    limit: int | None = None,
) -> Schedule:
    """The schedule for stages on these devices: a row for each different device, in order of first appearance.

    `schedule` is a name of `SCHEDULES`, or your own: a Schedule, a grid or CSV as text, or a function of (stages,
    chunks) that returns one of these. 1F1B takes the `warmup` of each stage, or a `limit`: how many micro-batches fit
    into a device's memory. Raises ValueError for a schedule that cannot run or is not one for these stages.

    >>> print(make("1f1b", ("cuda:0", "cuda:1"), chunks=3))
    1f1b: 2 stages, 3 micro-batches
    clock      0   1   2   3   4   5   6   7
    device 0  F0  F1      B0  F2  B1      B2
    device 1      F0  B0  F1  B1  F2  B2
    """
    if not stage_devices:
        raise ValueError("a schedule needs at least one stage")
    if warmup is not None or limit is not None:
        schedule = _warm(schedule, len(stage_devices), chunks, warmup, limit)
    if isinstance(schedule, str) and not is_grid(schedule):
        return _named(schedule, stage_devices, chunks)
    made = schedule(len(stage_devices), chunks) if callable(schedule) else schedule
    return _fitted(_read(made) if isinstance(made, str) else made, stage_devices, chunks)


def _named(name: str, stage_devices: Sequence[str], chunks: int) -> Schedule:
    shape, generate = form(name)
    _stands(name, shape, stage_devices)
    made = generate(len(stage_devices), chunks, len(set(stage_devices)))
    return made if shape in ("in turn", "v") else share(made, stage_devices)


def _warm(schedule: Own, stages: int, chunks: int, warmup: Sequence[int] | None, limit: int | None) -> Schedule:
    if not isinstance(schedule, str) or schedule not in WARM:
        own = repr(schedule) if isinstance(schedule, str) and not is_grid(schedule) else "one of your own"
        raise ValueError(
            f"{'limit' if warmup is None else 'warmup'} is for schedule={' and '.join(map(repr, WARM))}, and schedule "
            f"is {own}"
        )
    if warmup is not None and limit is not None:
        raise ValueError("warmup says how far each stage runs ahead, and limit how far it may: write one of them")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; at least one micro-batch has to fit into a device")
    ahead = WARM[schedule](stages, limit) if warmup is None else warmup
    return replace(one_f_one_b(stages, chunks, ahead), name=schedule)


def is_grid(text: str) -> bool:
    """Whether a text is a grid or CSV, and not a name: it has an action or several lines."""
    return re.search(r"(?<!\w)\d*[FBIW]\d+(?!\w)", text) is not None or "\n" in text


def _read(text: str) -> Schedule:
    commas = re.search(r"[FBIW]\d+\s*,|,\s*\d*[FBIW]\d", text)
    return load_csv(text, "by hand") if commas else parse(text)


def _fitted(schedule: Schedule, stage_devices: Sequence[str], chunks: int) -> Schedule:
    """The schedule with its rows in the order of the devices. Raises ValueError if it is not one for these stages, or
    cannot run."""
    if schedule.pairs:
        raise ValueError(
            f"the schedule {schedule.name!r} has pairs, such as {min(schedule.pairs).short}+; leave out each +, and "
            "write overlap_pairs=True"
        )
    check(schedule)
    if schedule.num_stages != len(stage_devices):
        raise ValueError(_other(schedule, "stages", schedule.num_stages, len(stage_devices)))
    if schedule.chunks != chunks:
        raise ValueError(_other(schedule, "micro-batches", schedule.chunks, chunks) + f", or chunks={schedule.chunks}")
    if plain(schedule):
        return share(schedule, stage_devices)
    rows = dict(zip(schedule.stages, schedule.devices, strict=True))
    stages: dict[str, list[int]] = {}
    for stage, device in enumerate(stage_devices):
        stages.setdefault(device, []).append(stage)
    for device, here in stages.items():
        if tuple(here) not in rows:
            raise ValueError(
                f"the schedule {schedule.name!r} has no row for {device}, which runs the stages {here}; its rows are "
                f"of {', '.join(str(list(row)) for row in rows)}"
            )
    return Schedule(schedule.name, tuple(rows[tuple(here)] for here in stages.values()))


def _other(schedule: Schedule, what: str, has: int, wants: int) -> str:
    return f"the schedule {schedule.name!r} is for {has} {what}, and the pipe has {wants}; write one for {wants}"
