"""What a model is put through: pipes with random options, and on each some runs, of random batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.schedule.schedule import Action, Schedule, needs
from fxpipe.planning.stages.device_segments import blocks
from fxpipe.planning.stages.op_order import requirements
from fxpipe.schedules.make_schedule import SCHEDULES

CHECKPOINTS = ("never", "except_last", "always")
NAMES = tuple(name for name in SCHEDULES if name != "forward-only")

WHAT = ("call", "eval", "infer", "step", "faulty call", "faulty step", "ranks")
TWICE = ("interleaved", "looped-bfs", "zb-v", "dualpipe-v")  # two stages on each device


@dataclass(frozen=True)
class Run:
    """`what`: "call", "eval" and "infer" call the pipe, the last without gradients; "step"; "faulty call" and "faulty
    step" fail, and are followed by one that does not; "ranks" is a step over two processes."""

    what: str
    batch: int
    seed: int = 0

    @property
    def training(self) -> bool:
        return self.what not in ("eval", "infer")

    @property
    def backward(self) -> bool:
        return self.what != "infer"

    @property
    def step(self) -> bool:
        return self.what.endswith(("step", "ranks"))


@dataclass(frozen=True)
class Setting:
    """A pipe: options of `fxpipe.compile`, and its runs. `strategy` is the seed of a random placement of ops, and
    `schedule`, if it is a number, that of a random order."""

    options: Mapping[str, Any]
    runs: tuple[Run, ...] = field(default=())

    @property
    def chunks(self) -> int:
        return int(self.options["chunks"])

    @property
    def step(self) -> bool:
        return self.runs[0].step

    @property
    def kind(self) -> str:
        options = self.options
        given = [name for name in ("replicas", "strategy", "deferred_batch_norm") if options.get(name) is not None]
        return (
            given[0]
            if given
            else self.runs[0].what
            if self.runs[0].what == "ranks"
            else "step"
            if self.step
            else "call"
        )


def drawn(rng: Random, flags: frozenset[str], modules: Sequence[str] = (), *, ranks: float = 0.06) -> list[Setting]:
    """The pipes for a model with these submodules, in the order of their first use: three or four that are called, as
    many that step, now and then one over ranks."""
    reduce = {"reduce": "cat"} if "mixes" in flags and "own loss" not in flags else {}
    called, stepped = rng.randint(1, 6), rng.choice([1, 2, 3, 3, 4, 5, 8])
    settings = []
    for turn in range(3):
        runs = [Run("call", batch_of(rng)) for _ in range(2)]
        if turn == 0:  # each is captured by itself, which takes longer than all else
            runs += [Run(what, batch_of(rng)) for what in ("eval", "infer") if rng.random() < 0.4]
        runs += [Run("faulty call", batch_of(rng), rng.randrange(1 << 30))] if turn else []
        options = options_of(rng, called)
        if modules and rng.random() < 0.15:
            begins = sorted(rng.sample(range(len(modules)), min(len(modules), rng.randint(1, 3))))
            options |= {"devices": len(begins) + 1, "cut": [modules[k] for k in begins]}
        settings.append(Setting(options | reduce, tuple(runs)))
    for turn in range(3):
        runs = [Run("step", batch_of(rng)) for _ in range(2)]
        runs += [Run("faulty step", batch_of(rng), rng.randrange(1 << 30))] if turn else []
        # What forward writes is written in the order of the schedule, which for a random one is not the plain loop's.
        own = 0.0 if "buffers" in flags else 0.15
        settings.append(Setting(step_options(rng, stepped, own) | reduce, tuple(runs)))
    if not flags & {"random", "mixes", "buffers"}:
        count = rng.choice([(1, 2), (2, 1), (2, 2), (1, 3)])
        options = step_options(rng, stepped, 0.0) | {"devices": sum(count), "replicas": count} | reduce
        settings.append(Setting(options, tuple(Run("step", batch_of(rng)) for _ in range(2))))
    if rng.random() < 0.4 and not flags & {"random", "norm"}:
        what, chunks = rng.choice([("call", called), ("step", stepped)])
        options = {"devices": rng.randint(1, 4), "chunks": chunks, "strategy": rng.randrange(1 << 30)}
        options |= {"checkpoint": rng.choice(CHECKPOINTS), "schedule": rng.choice(["gpipe", "1f1b", "zb-h1"])}
        settings.append(Setting(options | reduce, tuple(Run(what, chunks * k) for k in rng.sample((1, 2, 3), 2))))
    if "norm" in flags:
        options = options_of(rng, called) | {"deferred_batch_norm": True} | reduce
        settings.append(Setting(options, tuple(Run("call", max(2 * called, batch_of(rng))) for _ in range(2))))
    if rng.random() < ranks:
        options = {"chunks": rng.randint(1, 4), "schedule": rng.choice(NAMES), "checkpoint": rng.choice(CHECKPOINTS)}
        settings.append(Setting(options | reduce, tuple(Run("ranks", batch_of(rng)) for _ in range(2))))
    return settings


def batch_of(rng: Random) -> int:
    return rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 12))


def options_of(rng: Random, chunks: int) -> dict[str, Any]:
    count = rng.randint(1, 4)
    devices: Any = count if rng.random() < 0.6 else [f"cpu:{rng.randrange(3)}" for _ in range(count)]
    checkpoint: Any = rng.choice(CHECKPOINTS)
    if rng.random() < 0.2:
        checkpoint = sorted(rng.sample(range(count), rng.randint(0, count)))
    return {
        "devices": devices,
        "chunks": chunks,
        "checkpoint": checkpoint,
        "cut": rng.choice(["time", "time", "memory"]),
    }


def step_options(rng: Random, chunks: int, own: float) -> dict[str, Any]:
    """Options of a pipe that steps; so many of them have an order that nobody would write."""
    schedule = rng.choice([*NAMES, "auto"])
    devices = rng.randint(1, 2 if schedule in TWICE else 4)
    options: dict[str, Any] = {"devices": devices, "chunks": chunks, "schedule": schedule}
    options["checkpoint"] = rng.choice(CHECKPOINTS)
    if rng.random() < own:  # of stages dealt to workers at random
        labels = [f"cpu:{rng.randrange(3)}" for _ in range(rng.randint(1, 4))]
        return options | {"devices": labels, "schedule": rng.randrange(1 << 30)}
    if schedule == "1f1b" and rng.random() < 0.2:
        options["warmup"] = sorted((rng.randint(1, 4) for _ in range(devices)), reverse=True)
    return options


def anywhere(devices: int, seed: int) -> Any:
    """Places what must stay together on a device drawn at random."""

    def place(graph: Graph, sizes: Mapping[str, int]) -> Placed:
        rng = Random(seed)
        drawn = ((rng.randrange(devices), block) for block in blocks(graph, requirements(graph)))
        return Placed(graph, {graph.ops[at].name: device for device, block in drawn for at in block})

    return place


def any_order(labels: Sequence[str], seed: int) -> Callable[[int, int], Schedule]:
    """Actions of stages on these devices in an order drawn at random, cut into the rows of the devices."""

    def schedule(stages: int, chunks: int) -> Schedule:
        rng = Random(f"{seed} {chunks}")
        tasks = list(product(range(stages), range(chunks)))
        todo = [Action("F", *task) for task in tasks]
        todo += [Action(kind, *task) for task in tasks for kind in rng.choice(["B", "IW"])]
        everything = Schedule("random", (tuple(todo),))
        order: dict[Action, None] = {}
        while todo:
            order[rng.choice([one for one in todo if all(need in order for need in needs(everything, one))])] = None
            todo = [one for one in todo if one not in order]
        rows = ([one for one in order if labels[one.stage] == label] for label in dict.fromkeys(labels))
        return Schedule("random", tuple(tuple(row) for row in rows))

    return schedule


def arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `fxpipe.compile`."""
    found = dict(options)
    if "strategy" in found:
        found["plan"] = anywhere(found["devices"], found.pop("strategy"))
    if isinstance(found.get("schedule"), int):
        found["schedule"] = any_order(found["devices"], found["schedule"])
    if isinstance(found.get("checkpoint"), (list, tuple)):
        found["checkpoint"] = set(found["checkpoint"])
    return found
