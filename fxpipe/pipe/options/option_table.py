"""Every option of the public functions: the forms of its value, an example, and a line for the command line.

Values that contradict another option (a stage that does not exist, a schedule for another placement) are found by
`check` in `compile_options.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from fxpipe.capture.twins.untraced_lists import ITEMS
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster, Device
from fxpipe.ir.cluster.matrix_speed import STORED
from fxpipe.ir.cluster.published_clusters import PRESETS, preset
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.plan.plan import CHECKPOINT_MODES, MOST_CHUNKS, Plan
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.sample_lists import RowCounts
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.pipe.build.compiled.device_graphs import NAME
from fxpipe.pipe.results.planned import Planned
from fxpipe.pipe.results.replanned import Replanned
from fxpipe.pipe.results.searched import Searched
from fxpipe.planning.hybrid.plan_request import ASKED_SHARDINGS
from fxpipe.planning.hybrid.planners import PLANNERS
from fxpipe.schedules.make_schedule import AUTO, LOOPED, SCHEDULES, STRAIGHT, is_grid

from .option_forms import (
    Option,
    above_zero,
    by_name,
    flag,
    function,
    instance,
    many,
    one_of,
    or_instance,
    or_none,
    or_word,
    path,
    table,
    where,
    whole,
)

HOW = ("mean", "sum", "cat")  # how the outputs of micro-batches are combined
BACKWARDS = ("autograd", "code")
METHODS = ("leaps", "mcmc")  # of `fxpipe.search`


def _is_grid(value: Any) -> bool:
    return isinstance(value, str) and is_grid(value)


def _is_preset(value: Any) -> bool:
    return isinstance(value, str) and value.partition(":")[0] in PRESETS


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], OperatorGraph)


def backends() -> Collection[str]:
    """The backends that torch.compile knows by name, and ours."""
    return [*torch.compiler.list_backends(exclude_tags=()), NAME]


def read_cluster(cluster: Cluster | str) -> Cluster:
    """The cluster itself, or the published one of this name. Raises PlanError if the name is not known."""
    try:
        return preset(cluster) if isinstance(cluster, str) else cluster
    except ValueError as error:
        raise PlanError(str(error)) from None


DIM = whole(-64, "a dimension")
CHUNKS = whole(1, most=MOST_CHUNKS)
SECONDS = above_zero("a number of seconds above 0")
DEVICE = instance((str, torch.device), "a device", str)
STAGES = many(whole(0), "a set of stages", Collection, frozenset)
REDUCE = (one_of(*HOW), by_name(one_of(*HOW), "a dict of these by output"))
HOW_CUT = or_instance(RowCounts, or_word(ITEMS, or_none(DIM, "a dimension or None"), "a dimension, 'items' or None"))
BATCH_DIM = (DIM, by_name(HOW_CUT, "a dict of a dimension, 'items', fxpipe.rows(...) or None by input"))
NAMED_CLUSTER = where(_is_preset, ", ".join(map(repr, PRESETS)), str, lambda: tuple(PRESETS))
DTYPE = Option(
    "dtype", "the element type to estimate for, the model's if not given", (one_of(*STORED),), "bf16", unset=True
)
COPIES = Option(
    "parameter_copies", "bytes in memory for each byte of parameters", (above_zero("a number above 0"),), 4, unset=True
)
CLUSTER = Option("cluster", "", (NAMED_CLUSTER, instance((Cluster,), "a Cluster")), "k80:8")

COMPILE = table(
    Option("devices", "how many, or one for each stage",
           (whole(1, "a count of at least 1"), many(DEVICE, "a list of devices", least=1), DEVICE,
            instance((Cluster,), "a Cluster")), ["cuda:0", "cuda:1"], unset=True),
    Option("chunks", "how many micro-batches a batch is cut into, at most", (CHUNKS,), 8, unset=True),
    Option("checkpoint", "which micro-batches are recomputed in backward",
           (one_of(*CHECKPOINT_MODES, AUTO), STAGES), {0, 2}),
    Option("memory_limit", "bytes that a device may use, for checkpoint 'auto'", (whole(1),), 2 * 10**9, unset=True),
    Option("schedule", "the order of step()",
           (one_of(*SCHEDULES, AUTO), where(_is_grid, "a grid such as 'F0 F1 B0 B1' with a line for each device", str),
            instance((Schedule,), "a Schedule"),
            function("a function that makes one")), "1f1b"),
    Option("stages_per_device", "for 'interleaved' and 'looped-bfs'", (whole(1),), 2, unset=True),
    Option("replicas", "how many devices run each stage",
           (many(whole(1), "a list of counts of at least 1", least=1),), (2, 1), unset=True),
    Option("warmup", "how many forwards each stage runs ahead, for '1f1b'", (many(whole(0), "a list of counts"),),
           (3, 1), unset=True),
    Option("offload", "stages on accelerators whose activations wait in host memory", (STAGES,), {0}),
    Option("cut", "what is made even, or how many blocks each stage has, or the modules that begin a stage",
           (one_of("time", "memory"), many(whole(0), "a list with the number of blocks of each stage"),
            many(instance((str,), "a name", str), "a list of the modules that begin a stage")), ["encoder.3", "head"]),
    Option("plan", "a plan made before, in its JSON file",
           (path("the path of a plan's JSON file"),
            instance((Plan, Planned, Replanned), "what fxpipe.plan or replan returned")),
           "plan.json", unset=True),
    Option("strategy", "how each operator is cut, a JSON file of `fxpipe search`",
           (path("the path of a strategy's JSON file"), instance((Searched,), "what fxpipe.search returned"),
            where(_is_pair, "a pair of an OperatorGraph and its Strategy"),
            function("a function that places ops")), "strategy.json", unset=True),
    Option("profile", "what ops cost: from FLOPs and bytes, or timed",
           (one_of("estimate", "measure"), instance((Profile,), "a Profile")), "measure"),
    Option("batch_dim", "the dimension of the inputs that is cut", BATCH_DIM, {"mask": None}),
    Option("dynamic", "whether another length of tokens or masks needs no capture of its own", (flag(),), True),
    Option("reduce", "how an output without batch dimension is put together", REDUCE, {"loss": "mean"}, unset=True),
    Option("deferred_batch_norm", "running statistics of whole batches", (flag(),), True, unset=True),
    Option("backward", "what computes the gradients of a step: autograd, or generated code", (one_of(*BACKWARDS),),
           "code"),
    Option("overlap_pairs", "run a forward and the backward beside it as one function", (flag(),), True),
    Option("compile_stages", "run each stage through torch.compile, with this backend or Inductor",
           (flag(), one_of(more=backends, text="the name of a backend of torch.compile"), function("a function")),
           "inductor"),
    Option("transforms", "functions that change the captured graph, a torch.fx.GraphModule",
           (many(function("a function"), "a list of functions from GraphModule to GraphModule"),), ()),
    Option("passes", "functions that change the program of the stages",
           (many(function("a function"), "a list of functions of a Program and a PassContext"),), ()),
    Option("dump", "a folder for everything made on the way", (path("the path of a folder"),), "out", unset=True),
    Option("timeout", "seconds after which a rank that does not answer is lost", (SECONDS,), 60),
    Option("check_inputs", "whether ranks compare the values of the arguments that they are given", (flag(),), False),
)  # fmt: skip

LOAD = {name: COMPILE[name] for name in ("compile_stages", "timeout", "check_inputs")}

PLAN = table(
    CLUSTER,
    Option("batch_size", "samples in a training step", (whole(1),), 64),
    Option("planner", "what makes the plan", (one_of(*PLANNERS),), "dapple"),
    Option("micro_batches", "the planner's choice, if not given", (CHUNKS,), 8, unset=True),
    Option("tensor_parallel", "over how many devices of a server each op is cut, several to try, or auto",
           (whole(1), one_of("auto"), many(whole(1), "a list of numbers of devices", least=1)), (1, 2, 4, 8)),
    Option("schedule", "1f1b or 1f1b-late, if not given", (one_of(*STRAIGHT, *LOOPED, AUTO),), "1f1b", unset=True),
    COMPILE["stages_per_device"],
    Option("recompute", "all stages or none; the planner's choice, if not given", (flag(),), True, unset=True),
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
    Option("batch", "samples in a training step, those of the inputs if not given", (whole(1),), 64, unset=True),
    Option("micro_batches", "into how many a step is cut, or auto: the best number", (CHUNKS, one_of(AUTO)), AUTO),
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
