"""`fxpipe.compile` and `fxpipe.load`: the two ways to a pipe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never

import torch
from torch import nn

from fxpipe.api.self_check import check_once
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.sample_lists import BatchDim
from fxpipe.passes import Pass
from fxpipe.pipe.build.apply_strategy import RequestedPlan
from fxpipe.pipe.build.call_binding import as_call
from fxpipe.pipe.drop_in_module import check_model
from fxpipe.pipe.options.check_options import check
from fxpipe.pipe.options.compile_options import backend_of
from fxpipe.pipe.options.compile_table import COMPILE
from fxpipe.pipe.options.option_forms import check as check_values
from fxpipe.pipe.options.option_table import LOAD
from fxpipe.pipe.options.read_options import read_options
from fxpipe.pipe.options.unknown_options import refuse_unknown
from fxpipe.pipe.pipe import Pipe
from fxpipe.pipe.ranks.process_group import find_world
from fxpipe.pipe.saved.loaded_pipe import Loaded, load_here
from fxpipe.schedules.make_schedule import Own

if TYPE_CHECKING:
    from fxpipe.capture.tracing.rewriting.graph_view import Transform

# Of a type of their own: the same words, given by the user, may contradict a plan.
SCHEDULE, CUT, PROFILE = (COMPILE[name].default for name in ("schedule", "cut", "profile"))


def compile(
    model: nn.Module,
    devices: int | str | torch.device | Sequence[str | torch.device] | Cluster | None = None,
    chunks: int | None = None,
    *,
    example_inputs: Any = None,
    batch_dim: BatchDim = 0,
    dynamic: bool = True,
    reduce: str | Mapping[str, str] = "auto",
    deferred_batch_norm: bool | None = None,
    cut: str | Sequence[int] | Sequence[str] = CUT,
    replicas: Sequence[int] | None = None,
    plan: RequestedPlan | None = None,
    profile: str | Profile = PROFILE,
    schedule: Own = SCHEDULE,
    stages_per_device: int | Literal["auto"] = "auto",
    warmup: Sequence[int] | Literal["auto"] = "auto",
    checkpoint: str | Collection[int] = "auto",
    memory_limit: int | Literal["device"] | None = None,
    offload: Collection[int] = (),
    group: Any = None,
    timeout: float = 300.0,
    check_inputs: bool = True,
    backward: str = "auto",
    overlap_pairs: bool = False,
    compile_stages: bool | str | Callable[..., Any] = False,
    transforms: Sequence[Transform] = (),
    passes: Sequence[Pass] = (),
    dump: str | Path | None = None,
    **unknown: Never,
) -> Pipe:
    """A module that computes what `model` computes, as a pipeline over `devices`, with the model's own gradients.

    The model is captured, planned and turned into code at the first call of each kind, or at once for `example_inputs`.
    Two calls are of one kind if both are plain calls or both are steps, the model is in the same mode (training or
    eval), and the arguments have the same nesting, dtypes and sizes; the size of the batch may differ, and the mode if
    it only switches dropouts. See docs/guides/capture.md.

    Parameters and buffers move to the devices of their stages at the first call, or at once with `example_inputs`. They
    stay the same objects: an optimizer may be made before or after.

    Only `model`, `devices` and `chunks` must be given. What to set when is on docs/reference/options.md. Where an
    option is "auto", `pipe.explain()` says what was chosen, and why.

    **model**: what is compiled, on which devices, and how its batches are cut

    - `devices`: a number of accelerators, such as CUDA devices, or of CPU workers, if there are not as many
      accelerators. CPU workers are threads of this process; they are named "cpu:0", "cpu:1" and so on, and share its
      cores. Or a kind, such as "cuda": all of its devices. Or a list of devices, or a `Cluster`. Each device runs one
      stage, or two if the list has it twice, or several if `schedule` says so. Inputs may be on any device; an output
      is on the device of the stage that makes it. Default None: it must be given, unless a plan or a group has the
      devices; with more of them stages are shorter, and wait longer for each other.
    - `chunks`: the largest number of micro-batches that a batch is cut into. Their sizes differ by at most one sample;
      a batch with fewer samples makes fewer micro-batches. Default None: it must be given, unless a plan has it; with
      more of them devices wait less, and each op is smaller, so less efficient.
    - `example_inputs`: inputs, to compile at once: a tuple of arguments, a dict of keyword arguments, or one tensor.
      Default None: the first call shows what inputs are like; that call waits for the capture.
    - `batch_dim`: the dimension along which all inputs are cut; or a dict from names of arguments (or "target", that of
      a step) to dimensions, with None for one that each micro-batch gets whole, as in `{"mask": None}`; others are cut
      along 0. The name of a list, tuple or dict stands for all tensors in it; "batch['ids']" is one of them. "items"
      for a list whose items are the samples, as one of dicts is anyway; `fxpipe.rows(x)` for rows that x counts.
      Default 0: nearly all models have their samples there; an input that has none, or has them elsewhere, must be
      named.
    - `dynamic`: True: the sizes of integer tensors, such as the length of tokens, are captured as symbols, so that
      another length needs no capture of its own; a size that the model or backward="code" must know as a number stays
      one. False: like the sizes of other tensors, they are numbers in the first capture, and symbols once a second
      length is captured. With a strategy or a plan of fxpipe.plan, it counts as False.
      Default True: texts differ in length; the first capture takes longer, as sizes are symbols.
    - `reduce`: how an output without batch dimension is combined from those of the micro-batches: "mean" or "sum", or a
      dict of these by output, with the name that the error tells ("loss" is the loss of a step). "auto": as the ops
      show; sums and means over the samples are exact, and so is what needs the whole batch behind the last layer, such
      as a contrastive loss, for which all forwards come first, as in GPipe. If each micro-batch may have a loss of its
      own, write "mean"; for a term of a loss, by its variable's name, {"aux_loss": "mean"}. If the model mixes samples
      between layers, a micro-batch mixes only its own, with a MixedSamplesWarning. To accept that, write
      `reduce="cat"`, or a dict: "cat" for outputs with a batch dimension, else "mean" or "sum". Default "auto": the ops
      of a loss show whether it is a mean or a sum; where it is neither, it is computed once, from what all
      micro-batches give.
    - `deferred_batch_norm`: None: running statistics are those of micro-batches, with a BatchStatisticsWarning. False:
      the same, without the warning. True: they are those of whole batches; each micro-batch is still normalised by its
      own mean and variance. Default None: nothing is computed for it; a model with BatchNorm keeps statistics of
      micro-batches, and a warning says so.

    **cutting**: which ops form a stage, and where it runs

    - `cut`: "time" (makes the slowest stage as fast as possible), "memory" (the fullest as empty), a list of the
      modules that begin a stage, as in `["encoder.3", "head"]`, or a list with the number of blocks of each stage.
      Blocks are the children of an `nn.Sequential`, or modules such as "encoder.layers.3" and "head"; if the list does
      not add up, the error names them. Default "time": the slowest stage sets the pace of all; a stage that computes
      little may hold much.
    - `replicas`: how many devices run each stage in `step()`, as in `devices=3, replicas=(2, 1)`: the devices are dealt
      to the stages in order, and each device of a stage gets a slice of every micro-batch. If two stages have one
      device in common, they must have the same devices. Default None: one each, as replicas add up their gradients in
      every step; a stage that cannot be cut further holds up the others.
    - `plan`: what decides where everything runs, in place of the options that say it one by one. Those that contradict
      it are refused. There are three forms; each of the first two may also be the path of its JSON file. Default None:
      a stage on each device, cut as evenly as can be, takes no search; a searched plan may be faster.

      A plan of stages: a `Plan`, or what `fxpipe.plan` or `pipe.diagnose().replan()` returned. It decides stages,
      devices, chunks, schedule and recomputation. If `devices` are given, the first of them takes the place of the
      plan's first device, and so on. A `Cluster` that has all of the plan's devices replaces none of them. Predictions
      are for the cluster that the plan was made for, if its devices stay.

      A strategy, which also cuts operators: what `fxpipe.search` returned, or a pair
      (`fxpipe.ir.operators.operators.OperatorGraph`, `fxpipe.ir.operators.strategy.Strategy`). `devices` stand for
      those of its cluster, in order; if not given, a count of as many. `chunks` is 1 if not given; a batch that is no
      multiple of it raises InputError.

      Or a function of the captured graph and its sizes for one micro-batch, such as {"b": 8}, that returns a
      `fxpipe.ir.operators.placed_graph.Placed`, which has a device for each op.
    - `profile`: "estimate" (FLOPs and bytes; runs nothing), "measure" (times each op), or a `Profile` made before.
      Default "estimate": it runs nothing, and is the same on every machine; cuts are less even where ops are slow for
      their FLOPs.

    **running**: the order of a step, and what it keeps in memory

    - `schedule`: the order of `step()`; docs/guides/schedules.md has a picture of each. With one stage on each device:
      "gpipe", "1f1b" (early backward), "1f1b-late" (more forwards before it), "zb-h1" and "zb-h2" (backward in two
      halves). With several: "interleaved", "interleaved-late", "looped-bfs", "zb-v", "dualpipe-v". "auto": the one with
      the shortest simulated step that fits into memory. Or your own: a grid such as `print(pipe.schedule)` shows, or
      CSV with a line for each device, or a `Schedule`, or a function of (number of stages, number of micro-batches)
      that returns one of these. A plain call always has GPipe's order, as autograd can only begin with the loss of the
      whole batch. Default "gpipe": it is the simplest order, and that of a plain call; something of every micro-batch
      is kept until all forwards are done.
    - `stages_per_device`: how many stages each device runs, for "interleaved" and "looped-bfs". Default "auto": as few
      as the schedule can have, 1 or 2; with more, devices wait less and send more.
    - `warmup`: for "1f1b", how many forwards each stage runs before its first backward; of four stages (4, 3, 2, 1).
      Default "auto": as many as keep the stages busy, if they fit into memory; each one keeps one more micro-batch.
    - `checkpoint`: activation checkpointing: for which micro-batches forward is recomputed in backward, instead of
      keeping what it computed: "never" (none), "except_last" (all of a batch but the last), "always" (all).
      "selective", with backward="code": only ops that are cheap to compute are recomputed, where less is kept then;
      calls, and stages that autograd trains, run as with "except_last". A set of stage numbers: "except_last" for
      these, "never" for the others. "auto": for each stage the first of "never", "selective" and "except_last" with
      which its device keeps no more, at its simulated peak, than if all stages had "except_last"; with `memory_limit`,
      what is the fastest within it. If backward follows right on its forward, nothing is recomputed. Default "auto": it
      saves memory where it can, as a step that does not fit cannot run; these stages compute up to a third more.
    - `memory_limit`: the bytes that each device may use in a step. What stages recompute is then chosen so that the
      simulated step is the shortest within the limit. That holds for batches of the size of the first; larger ones may
      need more. On CPU workers only what is kept for backward counts, as in `pipe.timeline.high_water`: exact with
      backward="code", otherwise estimated. On accelerators parameters, gradients and Adam's state count too. "device":
      the memory of the accelerator, or of the given `Cluster`. If nothing fits, the error says what would. Not beside
      another `checkpoint` than "auto". Default None: what a step keeps is an estimate, unless backward is code; what
      would have fitted may be recomputed.
    - `offload`: a set of numbers of stages on accelerators, as in `{0}`: in `step()`, their activations wait for
      backward in host memory. Default (): none, as values have to move to the host and back in time; all activations
      stay on the device.

    **ranks**: with a process for each device

    - `group`: the processes that are the devices, rank 0 the first, as a ProcessGroup or a DeviceMesh of one dimension;
      `devices` may then be left out. None: all ranks, if torchrun started the script or a process group of several
      ranks is initialized, unless `devices` is a list or a kind: these mean devices of this process. The result is a
      `fxpipe.pipe.ranks.rank_pipe.RankPipe`; see there how to call it, and `parallelize` for several pipes side by
      side. Default None: all ranks if torchrun started them, else this process alone; its CPU workers share its cores.
    - `timeout`: seconds after which a rank that does not answer counts as lost; while ranks compile, an hour more.
      Default 300.0: a busy machine may stall for minutes; a rank that hangs is noticed no sooner.
    - `check_inputs`: raise an error if ranks are given different values of the same argument. Default True: ranks with
      different batches would train wrongly without any error; each call sums up its inputs.

    **code**: what is generated, and what you change of it

    - `backward`: what computes the gradients in `step()`: "code": the file of each stage has its backward as code to
      read, with the user's lines; or "autograd". A stage that cannot be traced keeps autograd; `explain()` and its file
      say why. With "code" a model may be captured again with numbers for its sizes, if more stages can be traced then.
      Code is not for strategies, ZeRO-3, `offload` and `compile_stages="device_graphs"`; then "auto" is "autograd".
      Default "auto": code is faster, keeps less, and can be read; autograd computes what cannot be written as code.
    - `overlap_pairs`: with backward="code", forward and backward of different micro-batches side by side on a device
      run as one function that has the lines of both in turns. See docs/guides/schedules.md. Default False: it pays only
      where stages send something in their middle; such stages wait for what they send.
    - `compile_stages`: run each stage through `torch.compile`, with Inductor (True), or with a backend, by name or as a
      function; "device_graphs" records each stage on an accelerator once, on CUDA as a CUDA graph, and replays it.
      Random ops and the model's own autograd functions stay outside. In schedules that split backward, a compiled stage
      does its whole backward in the first half, unless `backward="code"`. Default False: compiling takes seconds to
      minutes for each stage; ops run one by one, as in the plain model.
    - `transforms`: functions of your own from `torch.fx.GraphModule` to `torch.fx.GraphModule`, run in this order on
      each captured graph before it is cut: to fuse a pattern, or to quantise weights. The model's tensors are
      attributes of the module. Inputs, outputs and parameters must stay; a new tensor is a buffer of the module.
      Default (): the graph has the lines of the model; what could be fused or quantised stays as it is.
    - `passes`: functions of your own from (`fxpipe.ir.program.program.Program`, `fxpipe.passes.PassContext`) to a
      `Program`, run in this order after fxpipe's; docs/contributing.md has an example. Stages, their devices and
      parameters, inputs and outputs must stay. `pipe.trail` has the program after each. Default (): fxpipe's own passes
      keep every gradient; what only your model allows is left undone.
    - `dump`: a folder for text files of the graph, the program after each pass, profile, schedule and timeline, and the
      generated code; the environment variable FXPIPE_DUMP does the same. Default None: nothing is written unless you
      ask, here or by FXPIPE_DUMP; a pipe that is gone cannot be looked at.

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
    asked = {name: value for name, value in locals().items() if name in COMPILE}
    refuse_unknown("fxpipe.compile", unknown, tuple(COMPILE))
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


def load(
    folder: str | Path,
    model: nn.Module,
    *,
    compile_stages: bool | str | Callable[..., Any] = False,
    group: Any = None,
    timeout: float = 300.0,
    check_inputs: bool = True,
    **unknown: Never,
) -> Loaded:
    """The pipe in a folder that `pipe.save` wrote, edits included, with the tensors of `model`.

    Nothing is captured: the pipe takes calls of the kind that it was saved for, and raises InputError for others. Its
    devices are those of the package; with several ranks, rank 0 runs the first of them, and so on, and all must have
    the same files. `compile_stages`, `group`, `timeout` and `check_inputs` are those of `fxpipe.compile`. Raises:

    - PlanError for invalid or unknown options;
    - PackageError if the folder is not a package, is for other devices than the ranks have, or does not fit the model;
    - CompileError if a stage that was edited cannot be compiled;
    - RankError on every rank if one of them has failed or has other files.
    """
    refuse_unknown("fxpipe.load", unknown, ("folder", "model", "group", *LOAD))
    check_values(LOAD, {"compile_stages": compile_stages, "timeout": timeout, "check_inputs": check_inputs})
    check_model(model, "load")
    world, backend = find_world(None, group, timeout), backend_of(compile_stages)
    if world is None:
        return load_here(Path(folder), model, backend)
    from fxpipe.pipe.ranks.loaded_rank_pipe import load_on_rank  # late, as above

    return load_on_rank(Path(folder), model, world, backend, check_inputs)
