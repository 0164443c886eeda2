"""The options of the other public functions than `fxpipe.compile`: the forms of their values, examples, and a line for
the command line.

Values that contradict another option (a stage that does not exist, a schedule for another placement) are found by
`check` in `compile_options.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster, Device
from fxpipe.ir.cluster.matrix_speed import STORED
from fxpipe.ir.cluster.published_clusters import PRESETS, preset
from fxpipe.planning.hybrid.plan_request import ASKED_SHARDINGS
from fxpipe.planning.hybrid.planners import PLANNERS
from fxpipe.schedules.make_schedule import AUTO, LOOPED, STRAIGHT

from .compile_table import CHUNKS, COMPILE, DEVICE, SECONDS
from .option_forms import (
    Option,
    above_zero,
    flag,
    function,
    instance,
    many,
    one_of,
    table,
    where,
    whole,
)

METHODS = ("leaps", "mcmc")  # of `fxpipe.search`


def _is_preset(value: Any) -> bool:
    return isinstance(value, str) and value.partition(":")[0] in PRESETS


def read_cluster(cluster: Cluster | str) -> Cluster:
    """The cluster itself, or the published one of this name. Raises PlanError if the name is not known."""
    try:
        return preset(cluster) if isinstance(cluster, str) else cluster
    except ValueError as error:
        raise PlanError(str(error)) from None


NAMED_CLUSTER = where(_is_preset, ", ".join(map(repr, PRESETS)), str, lambda: tuple(PRESETS))
DTYPE = Option(
    "dtype", "the element type to estimate for, the model's if not given", (one_of(*STORED),), "bf16", unset=True
)
COPIES = Option(
    "parameter_copies", "bytes in memory for each byte of parameters", (above_zero("a number above 0"),), 4, unset=True
)
CLUSTER = Option("cluster", "", (NAMED_CLUSTER, instance((Cluster,), "a Cluster")), "k80:8")

LOAD = {name: COMPILE[name] for name in ("compile_stages", "timeout", "check_inputs")}

PLAN = table(
    CLUSTER,
    Option("batch_size", "samples in a training step", (whole(1),), 64),
    Option("planner", "what makes the plan", (one_of(*PLANNERS),), "dapple"),
    Option("micro_batches", "into how many a step is cut, or auto: the planner's choice", (one_of(AUTO), CHUNKS), 8),
    Option("tensor_parallel", "over how many devices of a server each op is cut, several to try, or auto",
           (whole(1), one_of("auto"), many(whole(1), "a list of numbers of devices", least=1)), (1, 2, 4, 8)),
    Option("schedule", "1f1b or 1f1b-late, if not given", (one_of(*STRAIGHT, *LOOPED, AUTO),), "1f1b", unset=True),
    COMPILE["stages_per_device"],
    Option("recompute", "all stages or none, or auto: those that do not fit otherwise", (one_of(AUTO), flag()), True),
    Option("all_reduce", "when replicas add up gradients", (one_of("end", "overlap"),), "overlap"),
    COPIES,
    Option("optimizer_sharding", "replicas share out the optimizer's state (zero1), also parameters (zero3), or auto",
           (one_of(*ASKED_SHARDINGS),), "zero1"),
    DTYPE,
    Option("most_layers", "into how many layers a model is cut at most", (whole(1),), 64, unset=True),
    Option("time_limit", "seconds that the search may take", (SECONDS,), 30),
)  # fmt: skip

SEARCH = table(
    CLUSTER,
    Option("batch_size", "samples in a training step, those of the inputs if not given", (whole(1),), 64, unset=True),
    Option("micro_batches", "into how many a step is cut, or auto: the best number", (one_of(AUTO), CHUNKS), AUTO),
    Option("budget", "seconds that the search may take", (SECONDS,), 60),
    Option("seed", "of what the search draws", (whole(0),), 0),
    COPIES,
    DTYPE,
    Option("progress", "", (flag(),), True, unset=True),
    Option("method", "mcmc is the published search", (one_of(*METHODS),), "leaps"),
)

PROFILE = table(
    Option(
        "device", "", (DEVICE, instance((Device, Cluster), "a Device or Cluster to estimate for")), "cuda:0", unset=True
    ),
    Option("batch", "samples of a micro-batch", (whole(1),), 64, unset=True),
    COMPILE["batch_dim"],
    COMPILE["reduce"],
    DTYPE,
)

STEP = table(
    Option("loss_fn", "", (function("a function of output and target"),), None, unset=True),
    Option("outputs", "", (flag(),), True),
    Option("scaler", "", (instance((torch.amp.GradScaler,), "a torch.amp.GradScaler"),), None, unset=True),
    Option("accumulate", "", (whole(1),), 4),
    Option("timeline", "", (flag(),), True),
    Option("rounds", "", (whole(1),), 5),
)


def check_step(**values: Any) -> None:
    """Raise PlanError for an invalid option of a step. Options that are None or False are not checked, to save time in
    every step."""
    for name, value in values.items():
        if value is not None and value is not False:
            STEP[name].take(value)


def check_accumulate(count: Any) -> int:
    """The number of steps that add up to one update. Raises PlanError unless it is a whole number of at least 1."""
    return 1 if count == 1 else int(STEP["accumulate"].take(count))
