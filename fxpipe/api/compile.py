"""`fxpipe.compile` and `fxpipe.load`: the two ways to a pipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import nn

from fxpipe.api.self_check import check_once
from fxpipe.errors import PlanError
from fxpipe.ir import dataclass_json
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.plan import plan_file
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.plan.plan_file import PlanFile, StagePlace
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.sample_lists import BatchDim
from fxpipe.passes import Pass
from fxpipe.pipe.build.apply_strategy import (
    RequestedCall,
    Sharing,
    place_of,
    shared_plan,
    strategy_devices,
    strategy_of,
    way_of,
)
from fxpipe.pipe.build.call_binding import as_call
from fxpipe.pipe.drop_in_module import check_model
from fxpipe.pipe.options.compile_options import (
    Options,
    Place,
    backend_of,
    check,
    deal,
    device_labels,
    is_local,
    stage_devices,
)
from fxpipe.pipe.options.option_conflicts import refuse_beside_plan, refuse_beside_strategy, refuse_optimizer_sharding
from fxpipe.pipe.options.option_forms import Default, refuse_unknown
from fxpipe.pipe.options.option_forms import check as check_values
from fxpipe.pipe.options.option_table import COMPILE, LOAD
from fxpipe.pipe.pipe import Pipe
from fxpipe.pipe.ranks.process_group import find_world
from fxpipe.pipe.results.planned import Planned, cluster_in
from fxpipe.pipe.results.replanned import Replanned
from fxpipe.pipe.saved.loaded_pipe import Loaded, load_here
from fxpipe.schedules.make_schedule import Own

if TYPE_CHECKING:
    from fxpipe.capture.tracing.rewriting.graph_view import Transform

# Parameters of `compile` that are not in Options.
ASIDE = ("model", "example_inputs", "group", "timeout", "check_inputs", "unknown")
CHECKPOINT, SCHEDULE, CUT, PROFILE = map(Default, ("except_last", "gpipe", "time", "estimate"))


def compile(
    model: nn.Module,
    devices: int | str | torch.device | Sequence[str | torch.device] | Cluster | None = None,
    chunks: int | None = None,
    *,
    checkpoint: str | Collection[int] = CHECKPOINT,
    memory_limit: int | None = None,
    schedule: Own = SCHEDULE,
    stages_per_device: int | None = None,
    replicas: Sequence[int] | None = None,
    warmup: Sequence[int] | None = None,
    offload: Collection[int] = (),
    cut: str | Sequence[int] | Sequence[str] = CUT,
    plan: Plan | Planned | Replanned | str | Path | None = None,
    strategy: RequestedCall | None = None,
    profile: str | Profile = PROFILE,
    batch_dim: BatchDim = 0,
    dynamic: bool = True,
    reduce: str | Mapping[str, str] | None = None,
    deferred_batch_norm: bool | None = None,
    backward: str = "autograd",
    overlap_pairs: bool = False,
    compile_stages: bool | str | Callable[..., Any] = False,
    transforms: Sequence[Transform] = (),
    passes: Sequence[Pass] = (),
    example_inputs: Any = None,
    dump: str | Path | None = None,
    group: Any = None,
    timeout: float = 300.0,
    check_inputs: bool = True,
    **unknown: Never,
) -> Pipe:
    """A module that computes what `model` computes, as a pipeline over `devices`, with the model's own gradients.

    The model is captured, planned and turned into code at the first call of each kind, or at once for `example_inputs`
    (a tuple of arguments, a dict of keyword arguments, or one tensor). Two calls are of one kind if both are plain
    calls or both are steps, the model is in the same mode (training or eval), and the arguments have the same nesting,
    dtypes and sizes; the size of the batch may differ, and the mode if it only switches dropouts. See
    docs/guides/capture.md.

    Parameters and buffers move to the devices of their stages at the first call, or at once with `example_inputs`. They
    stay the same objects: an optimizer may be made before or after. `devices` and `chunks` must be given, unless a plan
    or strategy has them.

    - `devices`: a number of accelerators, such as CUDA devices, or of CPU workers, if there are not as many
      accelerators. CPU workers are threads of this process; they are named "cpu:0", "cpu:1" and so on, and share its
      cores. Or a kind, such as "cuda": all of its devices. Or a list of devices, or a `Cluster`. Each device runs one
      stage, or two if the list has it twice, or several if `schedule` says so. Inputs may be on any device; an output
      is on the device of the stage that makes it.
    - `chunks`: the largest number of micro-batches that a batch is cut into. Their sizes differ by at most one sample;
      a batch with fewer samples makes fewer micro-batches.
    - `checkpoint`: which micro-batches are recomputed in backward instead of kept: "never" (none), "except_last" (all
      of a batch but the last), "always" (all). "selective", with backward="code": what is cheap to compute is
      recomputed where that keeps less; calls, and stages that autograd trains, run as with "except_last". A set of
      stage numbers: "except_last" for these, "never" for the others. "auto": for each stage the one of these four with
      which the simulated step is shortest, within `memory_limit`. If not given: "except_last" for the stages where
      a device then keeps less at its simulated peak, else "never". No forward runs again right before its backward.
    - `memory_limit`: for checkpoint="auto", the bytes that each device may use in a step. It holds for batches of the
      size of the first; larger ones may need more. On CPU workers only what is kept for backward counts, as in
      `pipe.timeline.high_water`: exact with backward="code", otherwise estimated. On accelerators parameters, gradients
      and Adam's state count too. If no limit is given, it is the memory of the accelerator, or of the given `Cluster`;
      CPU workers need a limit. If nothing fits, the error says what would.
    - `offload`: a set of numbers of stages on accelerators, as in `{0}`: in `step()`, their activations wait for
      backward in host memory.
    - `cut`: "time" (makes the slowest stage as fast as possible), "memory", a list of the modules that begin a stage,
      as in `["encoder.3", "head"]`, or a list with the number of blocks of each stage. Blocks are the children of an
      `nn.Sequential`, or modules such as "encoder.layers.3" and "head"; if the list does not add up, the error names
      them.
    - `schedule`: the order of `step()`; docs/guides/schedules.md has a picture of each. With one stage on each device:
      "gpipe", "1f1b" (early backward), "1f1b-late" (more forwards before it), "zb-h1" and "zb-h2" (backward in two
      halves). With several: "interleaved", "looped-bfs", "zb-v", "dualpipe-v". "auto": the one with the shortest
      simulated step that fits into memory. Or your own: a grid such as `print(pipe.schedule)` shows, or CSV with a line
      for each device, or a `Schedule`, or a function of (number of stages, number of micro-batches) that returns one of
      these. A plain call always has GPipe's order, as autograd can only begin with the loss of the whole batch.
    - `stages_per_device`: for "interleaved" and "looped-bfs"; 2 if not given.
    - `warmup`: for "1f1b", how many forwards each stage runs before its first backward; of four stages (4, 3, 2, 1).
    - `replicas`: how many devices run each stage in `step()`, as in `devices=3, replicas=(2, 1)`: the devices are dealt
      to the stages in order, and each device of a stage gets a slice of every micro-batch. If two stages have one
      device in common, they must have the same devices.
    - `plan`: a `Plan`, what `fxpipe.plan` or `pipe.diagnose().replan()` returned, or the path of a JSON file of one of
      these. The plan decides stages, devices, chunks, schedule and recomputation; options that contradict it are
      refused. If `devices` are given, the first of them takes the place of the plan's first device, and so on. A
      `Cluster` that has all of the plan's devices replaces none of them. Predictions are for the cluster that the plan
      was made for, if its devices stay.
    - `strategy`: how each operator is cut and where its parts run: what `fxpipe.search` returned, the path of its JSON
      file, or a pair (`fxpipe.ir.operators.operators.OperatorGraph`, `fxpipe.ir.operators.strategy.Strategy`).
      `devices` stand for those of its cluster, in order; if not given, a count of as many. `chunks` is 1 if not given;
      a batch that is no multiple of it raises InputError. Or a function of the captured graph and its sizes for one
      micro-batch, such as {"b": 8}, that returns a `fxpipe.ir.operators.placed_graph.Placed`, which has a device for
      each op.
    - `profile`: "estimate" (FLOPs and bytes; runs nothing), "measure" (times each op), or a `Profile` made before.
    - `batch_dim`: the dimension along which all inputs are cut; or a dict from names of arguments (or "target", that of
      a step) to dimensions, with None for one that each micro-batch gets whole, as in `{"mask": None}`; others are cut
      along 0. The name of a list, tuple or dict stands for all tensors in it; "batch['ids']" is one of them. "items"
      for a list whose items are the samples, as one of dicts is anyway; `fxpipe.rows(x)` for rows that x counts.
    - `dynamic`: True: the sizes of tensors of whole numbers, such as the length of tokens, are symbols, so that another
      length needs no capture; where the model, or backward="code", needs a number, it is one. False, and with a
      strategy, a plan of fxpipe.plan, or backward="code" over ranks: a number until there were two, as in others.
    - `reduce`: how an output without batch dimension is combined from those of the micro-batches: "mean" or "sum", or a
      dict of these by output, with the name that the error tells ("loss" is the loss of a step). Sums and means over
      the samples stay exact without it; of a loss, it is about the other summands, by their variables' names, as in
      {"aux_loss": "mean"}. If the model mixes samples, a micro-batch mixes only its own, with a MixedSamplesWarning. To
      accept that, write `reduce="cat"`, or a dict: "cat" for outputs with a batch dimension, else "mean" or "sum".
    - `deferred_batch_norm`: None: running statistics are those of micro-batches, with a BatchStatisticsWarning. False:
      the same, without the warning. True: they are those of whole batches; each micro-batch is still normalised by its
      own mean and variance.
    - `backward`: what computes the gradients in `step()`: "autograd"; or "code" (experimental): the file of each stage
      has its backward as code to read, with the user's lines. A stage that cannot be traced keeps autograd; `explain()`
      and its file say why. Not together with `strategy`, `offload` or `compile_stages="device_graphs"`.
    - `overlap_pairs`: with backward="code", forward and backward of different micro-batches side by side on a device
      run as one function that has the lines of both in turns. See docs/guides/schedules.md.
    - `compile_stages`: run each stage through `torch.compile`, with Inductor (True), or with a backend, by name or as a
      function; "device_graphs" records each stage on an accelerator once, on CUDA as a CUDA graph, and replays it.
      Random ops and the model's own autograd functions stay outside. In schedules that split backward, a compiled stage
      does its whole backward in the first half, unless `backward="code"`.
    - `transforms`: functions of your own from `torch.fx.GraphModule` to `torch.fx.GraphModule`, run in this order on
      each captured graph before it is cut: to fuse a pattern, or to quantise weights. The model's tensors are
      attributes of the module. Inputs, outputs and parameters must stay; a new tensor is a buffer of the module.
    - `passes`: functions of your own from (`fxpipe.ir.program.program.Program`, `fxpipe.passes.PassContext`) to a
      `Program`, run in this order after fxpipe's; docs/contributing.md has an example. Stages, their devices and
      parameters, inputs and outputs must stay. `pipe.trail` has the program after each.
    - `dump`: a folder for text files of the graph, the program after each pass, profile, schedule and timeline, and the
      generated code; the environment variable FXPIPE_DUMP does the same.
    - `group`: the processes that are the devices, rank 0 the first, as a ProcessGroup or a DeviceMesh of one dimension;
      `devices` may then be left out. If no group is given, but torchrun started the script, or a process group of
      several ranks is initialized, it is all ranks, unless `devices` is a list or a kind: these mean devices of this
      process. The result is a `fxpipe.pipe.ranks.rank_pipe.RankPipe`; see there how to call it, and `parallelize` for
      several pipes side by side.
    - `timeout`: seconds after which a rank that does not answer counts as lost; while ranks compile, an hour more.
    - `check_inputs`: with a group, raise an error if ranks are given different values of the same argument.

    Raises PlanError for invalid or unknown options, FxpipeError for a torch that is not right; at the first call
    CaptureError, InputError, CompileError of a stage, or PlanError for what a transform or pass returns, with its name.

    >>> import torch, fxpipe
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> pipe = fxpipe.compile(model, devices=2, chunks=4)
    >>> x = torch.randn(8, 4)
    >>> torch.allclose(pipe(x), model(x), atol=1e-6)
    True
    >>> pipe.close()
    """
    asked = {name: value for name, value in locals().items() if name not in ASIDE}
    refuse_unknown("fxpipe.compile", unknown, (*asked, "example_inputs", "group", "timeout", "check_inputs"))
    check_values(COMPILE, {"timeout": timeout, "check_inputs": check_inputs})
    check_model(model, "compile")
    check_once(compile)
    world = find_world(devices, group, timeout)
    options = read_options(asked if world is None else asked | {"devices": world.labels}, world is not None)
    if world is None:
        pipe = Pipe(model, options)
    else:
        from fxpipe.pipe.ranks.rank_pipe import RankPipe  # late: torch's sharded tensors take a second

        pipe = RankPipe(model, check(replace(options, ranks=True)), world, check_inputs)
    if example_inputs is not None:
        args, kwargs = as_call(example_inputs)
        pipe.prepare(*args, **kwargs)
    return pipe


def read_options(asked: Mapping[str, Any], ranks: bool = False) -> Options:
    """The checked options for these arguments of `compile`; other arguments have their defaults. `ranks`: whether each
    device is a rank."""
    defaults = {one.name: one.default for one in signature(compile).parameters.values() if one.name not in ASIDE}
    given = defaults | {name: COMPILE[name].take(value) for name, value in asked.items()}
    devices, chunks, replicas, schedule = (given[name] for name in ("devices", "chunks", "replicas", "schedule"))
    told = {name: value for name, value in given.items() if not isinstance(value, Default)}
    shared = shared_plan(given["plan"])
    chosen, planned_for = (None, None) if shared else read_plan(given["plan"])
    place: Place | None = None
    cluster = devices if isinstance(devices, Cluster) else None
    if given["strategy"] is not None:
        place, count = place_of(given["strategy"])
        refuse_beside_strategy(told, strategy_of(place))
        labels = strategy_devices(devices, count)
        chunks, schedule, given["checkpoint"] = way_of(strategy_of(place), given, told)
        replica_groups = deal(labels, None)
    elif shared is not None:
        refuse_beside_plan(shared.plan, told)
        place, schedule, chunks = Sharing(shared.plan, shared.shardings), shared.plan.schedule, shared.plan.chunks
        labels, given["checkpoint"] = _shared_devices(shared, devices), "never"  # but for stages of the plan
        refuse_optimizer_sharding(shared.plan, labels, ranks, told)
        cluster = cluster or (shared.cluster if devices is None else None)
        replica_groups = deal(labels, None)
    elif chosen is not None:
        before, chosen = chosen, runnable(chosen, devices)
        given["dynamic"] &= planned_for is None  # fxpipe.plan names the ops of one size
        stays = planned_for is not None and chosen == before and named(chosen).keys() <= set(planned_for.labels)
        cluster = cluster or (planned_for if stays else None)
        refuse_beside_plan(chosen, told)
        refuse_optimizer_sharding(chosen, named(chosen), ranks, told)
        labels, chunks, schedule = tuple(stage.device for stage in chosen.stages), chosen.chunks, chosen.schedule
        replica_groups = {stage.device: stage.replicas for stage in chosen.stages}
        given["deferred_batch_norm"] = chosen.deferred_batch_norm or given["deferred_batch_norm"]
    elif devices is None or chunks is None:
        raise PlanError("say how many: fxpipe.compile(model, devices=4, chunks=8)")
    else:
        labels = device_labels(devices)
        replica_groups = deal(labels, replicas)
        labels = labels if replicas is None else tuple(replica_groups)
        labels = stage_devices(labels, schedule, given["stages_per_device"])
    folder = given["dump"] or os.environ.get("FXPIPE_DUMP")
    as_they_are = (
        "warmup", "checkpoint", "cut", "profile", "batch_dim", "dynamic", "reduce", "deferred_batch_norm",
        "compile_stages", "transforms", "passes", "backward", "overlap_pairs", "memory_limit",
    )  # fmt: skip
    options = Options(
        devices=labels,
        chunks=chunks,
        schedule=schedule,
        offload=frozenset(given["offload"]),
        cluster=cluster,
        plan=chosen,
        dump=Path(folder) if folder else None,
        replicas=replica_groups,
        place=place,
        **{name: given[name] for name in as_they_are if given[name] is not None},
    )
    return check(options)


def _shared_devices(
    shared: Planned, devices: int | str | Sequence[str | torch.device] | Cluster | None
) -> tuple[str, ...]:
    """The labels of all devices of a plan with tensor parallelism, stage by stage."""
    named = tuple(shared.cluster.labels[at] for stage in shared.layers.stages for at in stage.devices)
    if devices is None and not all(map(is_local, named)):
        raise PlanError(_elsewhere(named))
    labels = named if devices is None else device_labels(devices)
    if len(set(labels)) != len(named):
        raise PlanError(f"the plan is for {len(named)} devices ({', '.join(named)}), and devices names {len(labels)}")
    return labels


def _elsewhere(named: Sequence[str]) -> str:
    return (
        f"the plan is for {', '.join(named)}; say which devices of this machine stand for them, as in "
        f"devices={len(named)}"
    )


def read_plan(
    plan: Plan | Planned | Replanned | str | Path | None,
) -> tuple[Plan | PlanFile | None, Cluster | None]:
    """The plan itself, or the one in a file, and the cluster that it was made for, if that is known. Raises PlanError,
    with the place in the file, if it is not a plan."""
    if isinstance(plan, (str, Path)):
        try:
            text = Path(plan).read_text(encoding="utf-8")
            return plan_file.load(text), cluster_in(text)
        except (OSError, ValueError) as error:
            raise PlanError(f"no plan can be read from {str(plan)!r}: {error}") from None
    if isinstance(plan, Replanned):
        return plan_file.load(plan.text), None
    found, cluster = (plan.plan, plan.cluster) if isinstance(plan, Planned) else (plan, None)
    if found is None:
        return None, None
    try:
        dataclass_json.check(found)
    except ValueError as error:
        raise PlanError(f"plan cannot be used: {error}") from None
    return found, cluster


def runnable(
    plan: Plan | PlanFile, devices: int | str | Sequence[str | torch.device] | Cluster | None
) -> Plan | PlanFile:
    """The plan on devices of this machine. Raises PlanError if it cannot run."""
    replica_groups: dict[str, tuple[str, ...]] = {}
    stages: tuple[StagePlan | StagePlace, ...] = plan.stages
    for index, stage in enumerate(stages):
        own = stage.devices
        if len(set(own)) < len(own) or any(replica_groups.setdefault(label, own) != own for label in own):
            raise PlanError(
                f"stage {index} of the plan is on {', '.join(own)}: stages that share a device share all of "
                "theirs, each named once"
            )
        if isinstance(stage, StagePlan) and not stage.ops:
            raise PlanError(
                f"stage {index} of the plan has no ops: it was made for a chain of layers; plan the model itself, as "
                "in fxpipe.plan(model, cluster, batch_size, example_inputs=(x,))"
            )
    names = named(plan)
    if devices is None:
        if not all(map(is_local, names)):
            raise PlanError(_elsewhere(tuple(names)))
        return plan
    labels = device_labels(devices)
    if isinstance(devices, Cluster) and names.keys() <= set(labels):
        return plan
    if len(labels) != len(names):
        raise PlanError(f"the plan is for {len(names)} devices ({', '.join(names)}), and devices names {len(labels)}")
    stands_for = dict(zip(names, labels, strict=True))
    renamed: Any = tuple(
        replace(stage, device=stands_for[stage.device], replicas=tuple(stands_for[label] for label in stage.replicas))
        for stage in stages
    )
    return replace(plan, stages=renamed)


def named(plan: Plan | PlanFile) -> dict[str, None]:
    """The labels of the plan's devices, in the order of their first stages."""
    stages: tuple[StagePlan | StagePlace, ...] = plan.stages
    return dict.fromkeys(label for stage in stages for label in stage.devices)


def load(
    folder: str | Path,
    model: nn.Module,
    *,
    compile_stages: bool | str | Callable[..., Any] = False,
    group: Any = None,
    timeout: float = 300.0,
    check_inputs: bool = True,
) -> Loaded:
    """The pipe in a folder that `pipe.save` wrote, edits included, with the tensors of `model`.

    Nothing is captured: the pipe takes calls of the kind that it was saved for, and raises InputError for others. Its
    devices are those of the package; with several ranks, rank 0 runs the first of them, and so on, and all must have
    the same files. `compile_stages`, `group`, `timeout` and `check_inputs` are those of `fxpipe.compile`. Raises:

    - PackageError if the folder is not a package, is for other devices than the ranks have, or does not fit the model;
    - CompileError if a stage that was edited cannot be compiled;
    - RankError on every rank if one of them has failed or has other files.
    """
    check_values(LOAD, {"compile_stages": compile_stages, "timeout": timeout, "check_inputs": check_inputs})
    check_model(model, "load")
    world, backend = find_world(None, group, timeout), backend_of(compile_stages)
    if world is None:
        return load_here(Path(folder), model, backend)
    from fxpipe.pipe.ranks.loaded_rank_pipe import load_on_rank  # late, as above

    return load_on_rank(Path(folder), model, world, backend, check_inputs)
