"""The options of `fxpipe.compile`, in the order of its signature: what each is, its forms, its default, and why that.

The command line, the docstring and docs/reference/options.md have these groups and these words; tests compare them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from fxpipe.capture.twins.untraced_lists import ITEMS
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.plan.plan import CHECKPOINT_MODES, MOST_CHUNKS, Plan
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.sample_lists import RowCounts
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.pipe.build.compiled.device_graphs import NAME
from fxpipe.pipe.results.planned import Planned
from fxpipe.pipe.results.replanned import Replanned
from fxpipe.pipe.results.searched import Searched
from fxpipe.schedules.make_schedule import AUTO, SCHEDULES, is_grid

from .compile_options import DEVICE_MEMORY
from .option_forms import (
    Default,
    Option,
    above_zero,
    anything,
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
BACKWARDS = (AUTO, "autograd", "code")


def _is_grid(value: Any) -> bool:
    return isinstance(value, str) and is_grid(value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], OperatorGraph)


def backends() -> Collection[str]:
    """The backends that torch.compile knows by name, and ours."""
    return [*torch.compiler.list_backends(exclude_tags=()), NAME]


def meant_checkpoint(value: Any) -> tuple[str, str] | None:
    """What is meant by a checkpoint that is none.

    >>> meant_checkpoint(True), meant_checkpoint("3")
    (('always', "'always'"), None)
    """
    if value is True or value in ("all", "full", "true", "True"):
        return "always", "'always'"
    return ("never", "'never'") if value is False or value in ("none", "false", "False") else None


def meant_bytes(value: Any) -> tuple[int, str] | None:
    """The number of bytes that a text such as "8GB" means, and how Python writes it.

    >>> meant_bytes("8GB"), meant_bytes("2 KiB"), meant_bytes("all")
    ((8000000000, '8 * 10**9'), (2048, '2 * 2**10'), None)
    """
    match = re.fullmatch(r"(\d+)\s*([KMGT])(I?)B?", value.strip(), re.IGNORECASE) if isinstance(value, str) else None
    if match is None:
        return None
    thousands = "KMGT".index(match[2].upper()) + 1
    base, power = (2, 10 * thousands) if match[3] else (10, 3 * thousands)
    return int(match[1]) * base**power, f"{match[1]} * {base}**{power}"


DIM = whole(-64, "a dimension")
CHUNKS = whole(1, most=MOST_CHUNKS)
SECONDS = above_zero("a number of seconds above 0")
DEVICE = instance((str, torch.device), "a device", str)
STAGES = many(whole(0), "a set of stages", Collection, frozenset)
AUTOMATIC = one_of(AUTO)
REDUCE = (one_of(AUTO, *HOW), by_name(one_of(*HOW), "a dict of 'mean', 'sum' or 'cat' by output"))
HOW_CUT = or_instance(RowCounts, or_word(ITEMS, or_none(DIM, "a dimension or None"), "a dimension, 'items' or None"))
BATCH_DIM = (DIM, by_name(HOW_CUT, "a dict of a dimension, 'items', fxpipe.rows(...) or None by input"))


class Group(NamedTuple):
    """What options of one kind decide, and these options."""

    about: str
    options: tuple[Option, ...]


GROUPS = {
    "model": Group("what is compiled, on which devices, and how its batches are cut", (
        Option("devices", "what runs the stages: a count, a kind, a list or a Cluster",
               (whole(1, "a count of at least 1"), many(DEVICE, "a list of devices", least=1), DEVICE,
                instance((Cluster,), "a Cluster")), ["cuda:0", "cuda:1"], unset=True,
               why="it must be given, unless a plan or a group has the devices; with more of them stages are shorter, "
                   "and wait longer for each other"),
        Option("chunks", "how many micro-batches a batch is cut into, at most", (CHUNKS,), 8, unset=True,
               why="it must be given, unless a plan has it; with more of them devices wait less, and each op is "
                   "smaller, so less efficient"),
        Option("example_inputs", "inputs, to compile at once", (anything("the model's arguments"),), unset=True,
               why="the first call shows what inputs are like; that call waits for the capture"),
        Option("batch_dim", "the dimension of the inputs that is cut", BATCH_DIM, {"mask": None}, default=0,
               why="nearly all models have their samples there; an input that has none, or has them elsewhere, must "
                   "be named"),
        Option("dynamic", "whether another length of tokens or masks needs no capture of its own", (flag(),), True,
               default=True,
               why="texts differ in length; the first capture takes longer, as sizes are symbols"),
        Option("reduce", "how an output without batch dimension is put together", REDUCE, {"loss": "mean"},
               default=AUTO,
               why="the ops of a loss show whether it is a mean or a sum; where it is neither, it is computed once, "
                   "from what all micro-batches give"),
        Option("deferred_batch_norm", "whether running statistics are those of whole batches", (flag(),), True,
               unset=True,
               why="nothing is computed for it; a model with BatchNorm keeps statistics of micro-batches, and a "
                   "warning says so"),
    )),
    "cutting": Group("which ops form a stage, and where it runs", (
        Option("cut", "what is made even, or the modules that begin a stage, or the blocks of each stage",
               (one_of("time", "memory"), many(whole(0), "a list with the number of blocks of each stage"),
                many(instance((str,), "a name", str), "a list of the modules that begin a stage")),
               ["encoder.3", "head"], default=Default("time"),
               why="the slowest stage sets the pace of all; a stage that computes little may hold much"),
        Option("replicas", "how many devices run each stage",
               (many(whole(1), "a list of counts of at least 1", least=1),), (2, 1), unset=True,
               why="one each, as replicas add up their gradients in every step; a stage that cannot be cut further "
                   "holds up the others"),
        Option("plan", "where everything runs: a JSON file of `fxpipe plan` or `fxpipe search`",
               (path("the path of a JSON file"),
                instance((Plan, Planned, Replanned, Searched), "what fxpipe.plan, fxpipe.search or replan returned"),
                where(_is_pair, "a pair of an OperatorGraph and its Strategy"),
                function("a function that places ops")), "plan.json", unset=True,
               why="a stage on each device, cut as evenly as can be, takes no search; a searched plan may be faster"),
        Option("profile", "what ops cost: from FLOPs and bytes, or timed",
               (one_of("estimate", "measure"), instance((Profile,), "a Profile")), "measure",
               default=Default("estimate"),
               why="it runs nothing, and is the same on every machine; cuts are less even where ops are slow for their "
                   "FLOPs"),
    )),
    "running": Group("the order of a step, and what it keeps in memory", (
        Option("schedule", "the order of step()",
               (one_of(*SCHEDULES, AUTO),
                where(_is_grid, "a grid such as 'F0 F1 B0 B1' with a line for each device", str),
                instance((Schedule,), "a Schedule"),
                function("a function that makes one")), "1f1b", default=Default("gpipe"),
               why="it is the simplest order, and that of a plain call; something of every micro-batch is kept until "
                   "all forwards are done"),
        Option("stages_per_device", "how many stages each device runs, with 'interleaved' and 'looped-bfs'",
               (AUTOMATIC, whole(1)), 3, default=AUTO,
               why="as few as the schedule can have, 1 or 2; with more, devices wait less and send more"),
        Option("warmup", "how many forwards each stage runs ahead, with '1f1b'",
               (AUTOMATIC, many(whole(0), "a list of counts")), (3, 1), default=AUTO,
               why="as many as keep the stages busy, if they fit into memory; each one keeps one more micro-batch"),
        Option("checkpoint", "which micro-batches are recomputed in backward",
               (one_of(AUTO, *CHECKPOINT_MODES), STAGES), {0, 2}, default=AUTO,
               why="it saves memory where it can, as a step that does not fit cannot run; these stages compute up "
                   "to a third more", instead=meant_checkpoint),
        Option("memory_limit", "bytes that a device may use, or 'device' for all that it has",
               (whole(1), one_of(DEVICE_MEMORY)), 2 * 10**9, unset=True,
               why="what a step keeps is an estimate, unless backward is code; what would have fitted may be "
                   "recomputed", instead=meant_bytes),
        Option("offload", "stages on accelerators whose activations wait in host memory", (STAGES,), {0},
               default=(),
               why="none, as values have to move to the host and back in time; all activations stay on the device"),
    )),
    "ranks": Group("with a process for each device", (
        Option("group", "the processes that are the devices", (anything("a ProcessGroup or a DeviceMesh"),), unset=True,
               why="all ranks if torchrun started them, else this process alone; its CPU workers share its cores"),
        Option("timeout", "seconds after which a rank that does not answer is lost", (SECONDS,), 60, default=300.0,
               why="a busy machine may stall for minutes; a rank that hangs is noticed no sooner"),
        Option("check_inputs", "whether ranks compare the values of the arguments that they are given", (flag(),),
               False, default=True,
               why="ranks with different batches would train wrongly without any error; each call sums up its inputs"),
    )),
    "code": Group("what is generated, and what you change of it", (
        Option("backward", "what computes the gradients of a step: autograd, or generated code",
               (one_of(*BACKWARDS),), "code", default=AUTO,
               why="code is faster, keeps less, and can be read; autograd computes what cannot be written as code"),
        Option("overlap_pairs", "whether a forward and the backward beside it run as one function", (flag(),), True,
               default=False,
               why="it pays only where stages send something in their middle; such stages wait for what they send"),
        Option("compile_stages", "the backend of torch.compile for each stage, Inductor if none is named",
               (flag(), one_of(more=backends, text="the name of a backend of torch.compile"), function("a function")),
               "inductor", default=False,
               why="compiling takes seconds to minutes for each stage; ops run one by one, as in the plain model"),
        Option("transforms", "functions that change the captured graph, a torch.fx.GraphModule",
               (many(function("a function"), "a list of functions from GraphModule to GraphModule"),), default=(),
               why="the graph has the lines of the model; what could be fused or quantised stays as it is"),
        Option("passes", "functions that change the program of the stages",
               (many(function("a function"), "a list of functions of a Program and a PassContext"),), default=(),
               why="fxpipe's own passes keep every gradient; what only your model allows is left undone"),
        Option("dump", "a folder for everything made on the way", (path("the path of a folder"),), "out", unset=True,
               why="nothing is written unless you ask, here or by FXPIPE_DUMP; a pipe that is gone cannot be looked "
                   "at"),
    )),
}  # fmt: skip

COMPILE = table(*(option for group in GROUPS.values() for option in group.options))
