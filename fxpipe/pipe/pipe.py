"""The pipe: a drop-in module that captures the model at each new kind of call and runs the generated pipeline.

    call ─capture▶ a kind seen before? ──yes──▶ its scheduler runs the batch
                        │no
                        └▶ capture, build (see `build.py`), keep it

One pipe holds several builds (train, eval, another number or shape) and one set of parameters: the first build decides
where each parameter lives, later ones follow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from fxpipe.capture.call_arguments import NO_TARGET, RequestedCall
from fxpipe.codegen.graph_modules import graph_module, stage_module
from fxpipe.codegen.package.load_package import tensors_of
from fxpipe.engines.local.memory_dry_run import without_memory
from fxpipe.errors import FxpipeError
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.program.device_programs import DevicePrograms
from fxpipe.ir.program.program import Program
from fxpipe.ir.program.transfers import add_transfers
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.timeline import Timeline, with_memory_of
from fxpipe.pipe.build.build import Build, rehearsed
from fxpipe.pipe.build.build_cache import BuildCache
from fxpipe.pipe.build.build_report import explain
from fxpipe.pipe.build.call_binding import batch_size
from fxpipe.pipe.options.compile_options import Options
from fxpipe.pipe.options.option_table import check_accumulate, check_step
from fxpipe.pipe.progress import timed
from fxpipe.pipe.results import pipe_picture, pipe_report
from fxpipe.pipe.results.compare_timelines import Timed, beside_predicted, check_rehearsal, diagnosed
from fxpipe.pipe.results.comparison import Comparison
from fxpipe.pipe.results.diagnosis import Diagnosis
from fxpipe.pipe.saved.save_package import save_package
from fxpipe.pipe.verify.verification import Verified, verify
from fxpipe.runtime import Stage
from fxpipe.runtime.microbatch import split_sizes

from .drop_in_module import NOT_TIMED, DropInModule, Forward, State, check_grad
from .libraries.step_arguments import without_cache
from .materialize import Init, materialize
from .processes import Processes, StepOptions, Tensors
from .ranks.rank_arguments import CallArguments
from .running_package import Scheduler

if TYPE_CHECKING:
    from .ranks.rank_builds import RankBuilds


@dataclass(kw_only=True)
class PipeState(State):
    """What a `Pipe` has besides the model.

    - `cache`: the builds; `kinds`: the builds that all processes have agreed on.
    - `timed`: the last step with a timeline.
    - `rehearsed`: the build of the last rehearsal, and the predicted timeline.
    """

    cache: BuildCache
    kinds: BuildCache | RankBuilds
    timed: Timed | None = None
    rehearsed: tuple[Build, Timeline] | None = None


class Pipe(DropInModule):
    """The module that `fxpipe.compile` returns: it is called like the model, and `step` computes loss and gradients.
    `pipe.model` is the model. Before the first call, `plan`, `schedule`, `explain` and the like raise FxpipeError."""

    _state: PipeState

    def __init__(self, model: nn.Module, options: Options, state: PipeState | None = None) -> None:
        """Called by `fxpipe.compile`. `state`: None for a pipe in one process."""
        if state is None:
            cache = BuildCache(model, options)
            state = PipeState(cache=cache, kinds=cache, processes=Processes(), tensors=Tensors(model))
        super().__init__(model, state)

    @property
    def options(self) -> Options:
        """The arguments of `fxpipe.compile`, as attributes; those that were not given have their defaults."""
        return self._state.cache.options

    # Running ----------------------------------------------------------------------------------------------------------

    @Forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch, computed in micro-batches by the stages. Of a stage with replicas,
        this uses only the first device.

        Arguments are the model's own. Raises InputError if they cannot be cut into micro-batches, CaptureError if the
        model cannot be captured, and whatever the model raises, with a note of stage, micro-batch and line. A model
        without ops is called as it is.
        """
        cache, processes = self._state.cache, self._state.processes
        processes.check_forward()

        def call(given: CallArguments) -> Any:
            return cache.call(given[0], given[1], self._runner(None))

        return processes.call(call, (args, kwargs, NO_TARGET), "forward")

    def step(
        self,
        *args: Any,
        target: Any = NO_TARGET,
        loss_fn: Callable[..., Any] | None = None,
        outputs: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        timeline: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of a whole batch, in the order of the schedule. Returns the loss of the batch, detached;
        the gradients are added to the parameters' gradients, as by `loss.backward()`. `torch.autocast` applies as to
        the plain model.

        - `args`, `kwargs`: the model's own. If an argument of the model's forward has the name of one here, such as
          `target`, pass it by position. A model of transformers is passed `use_cache=False` if nothing else is said.
        - `target`: a tensor, or lists, tuples and dicts of tensors; cut like the arguments, by `batch_dim`.
        - `loss_fn(output, target)`, or `loss_fn(output)` without a target, returns one number or one for each sample.
          Whether one number is a mean or a sum over the samples is read from its ops; if it is neither, it is computed
          once, from what all micro-batches give, and all forwards come first. Of one for each sample, `step` returns
          all, with the gradients of their sum. Without it, the model must return its loss, or an object with `.loss`.
        - `outputs`: return (loss, what the model returns), detached.
        - `scaler`: a `torch.amp.GradScaler`, over ranks a `fxpipe.GradScaler`: gradients of `scaler.scale(loss)`.
        - `accumulate`: the number of calls of `step` for one update. The gradients of each call are divided by it, as
          by `(loss / accumulate).backward()`; the returned loss is neither divided nor scaled.
        - `timeline`: record when each action runs, for `pipe.timeline`, `compare()` and `diagnose()`.

        If anything fails, no gradient is added, and the pipe can be used again at once. (Buffers that forward has
        changed by then are not restored.) Raises as a call does, and whatever the loss raises.
        """
        cache, processes = self._state.cache, self._state.processes

        def call(given: CallArguments) -> Any:
            check_grad()
            check_step(outputs=outputs, scaler=scaler, timeline=timeline)
            processes.check_scaler(scaler)
            run = self._runner(StepOptions(scaler, check_accumulate(accumulate), timeline))
            return cache.step_capture.step(*given, loss_fn, outputs, run)

        kwargs = kwargs if outputs else without_cache(self.model, args, kwargs)
        loss, output = processes.call(call, (args, kwargs, target), "step")
        return (loss, output) if outputs else loss

    def _runner(self, step: StepOptions | None) -> Callable[[Graph, tuple[Any, ...]], tuple[Any, ...]]:
        """A function that runs this process's part of the graph of a step, or of a call, on its flat inputs."""

        def run(graph: Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            made, kind = self._state.kinds.agree(graph, inputs)
            self._state.cache.runs(made, graph, inputs)
            live = self._state.kinds.live(made)
            found, timeline = self._state.processes.take(live, inputs, self.options.chunks, step, kind)
            if timeline is not None:
                self._state.timed = Timed(made, timeline, without_memory(inputs))
            return found

        return run

    def rehearse(
        self,
        *args: Any,
        target: Any = NO_TARGET,
        loss_fn: Callable[..., Any] | None = None,
        rounds: int = 5,
        **kwargs: Any,
    ) -> Timeline:
        """Predict the timeline of `step` with these arguments. The step runs once, to record what stages receive. Then
        each worker runs its own forwards and backwards `rounds` times on what was recorded, without waiting for others,
        and the step is simulated with these times. Model, gradients and random state do not change. Only for CPU
        workers, also over ranks: they slow each other down in ways that a profile of single ops does not show. Raises
        FxpipeError for GPUs and for stages with replicas."""
        cache, kinds, processes = self._state.cache, self._state.kinds, self._state.processes

        def run(graph: Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            made, kind = kinds.agree(graph, inputs)
            check_rehearsal(made)
            times, outputs, memory = processes.rehearse(kinds.live(made), inputs, self.options.chunks, rounds, kind)
            chunks = len(split_sizes(batch_size(graph, inputs), self.options.chunks))
            self._state.rehearsed = made, with_memory_of(rehearsed(made, chunks, times), memory)
            return outputs

        def call(given: CallArguments) -> None:
            check_grad()
            check_step(rounds=rounds)
            cache.step_capture.step(*given, loss_fn, False, run)

        processes.call(call, (args, without_cache(self.model, args, kwargs), target), "rehearse")
        assert self._state.rehearsed is not None
        return self._state.rehearsed[1]

    def verify(
        self, *args: Any, target: Any = NO_TARGET, loss_fn: Callable[..., Any] | None = None, **kwargs: Any
    ) -> Verified:
        """Whether a call and a step with the arguments of `step` compute the same as the plain model: outputs, loss,
        all gradients and buffers. A difference is not raised: `.ok` is false, `str` of the result says what differs,
        and where first, and `.save(path)` writes a report for an issue.

        Copies of the plain model run in its own dtype and in float64. The pipe's results may be about ten times as far
        from those in float64 as the plain model's. If results depend on the micro-batch (BatchNorm, dropout, lines that
        mix samples, buffers that forward writes), the copies run on each micro-batch. Gradients, buffers, attributes
        and random state are restored. Raises FxpipeError if the model cannot be copied, and what call or step raise."""
        self._state.processes.check_alone("verify")
        check_grad()
        with self._state.lock:
            return verify(self._state.cache, args, kwargs, target, loss_fn)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """All that the first call with these arguments does before it runs: capture, plan, write code. The first `step`
        captures again, with the loss; parameters stay where they are. The model may be on the meta device."""
        cache, processes = self._state.cache, self._state.processes

        def call(given: CallArguments) -> None:
            with timed("capture"):
                graph, inputs = cache.call_capture.with_inputs(RequestedCall(given[0], given[1]))
            made, kind = self._state.kinds.agree(graph, inputs)
            if not any(tensor.is_meta for tensor in self.held_tensors().values()):
                cache.live(made)
            processes.prepared(kind)

        processes.call(call, (args, kwargs, NO_TARGET))

    def materialize(
        self,
        seed: int = 0,
        *,
        init: Init | None = None,
        checkpoint: str | Path | None = None,
        stages: Collection[int] | None = None,
    ) -> None:
        """Replace the model's tensors on the meta device by tensors with values, as `fxpipe.materialize` does: those
        that this process needs, or only those of `stages`; tensors that no stage uses belong to stage 0. The values do
        not depend on the plan. They are made on the CPU, and move to the stages' devices at the next call."""
        with self._state.lock:
            only = self.keys_here() if stages is None else self.keys_of(stages)
            materialize(self.model, seed, init=init, checkpoint=checkpoint, only=only)

    def keys_here(self) -> Collection[str] | None:
        """The names of the parameters and buffers that this process needs. Returns None in one process: all."""
        return None

    def keys_of(self, stages: Collection[int]) -> frozenset[str]:
        """The names of the parameters and buffers that belong to these stages. Raises FxpipeError before the first
        call, which decides the stages."""
        tensors = tensors_of(self.model)
        homes = self._state.cache.homes(tensors)
        return frozenset(key for key, tensor in tensors.items() if homes.get(id(tensor), 0) in stages)

    def torch_stages(
        self, stages: Collection[int], device: str | torch.device | None = None, group: Any = None
    ) -> list[Any]:
        """These stages as `PipelineStage`s of torch.distributed.pipelining, on `device`, for the ranks of `group`, for
        torch's schedules. They are for calls of the kind that was compiled or run last. On each of `world` ranks:

            pipe = fxpipe.compile(model, devices=["cpu"] * world, chunks=8, example_inputs=batch)
            (stage,) = pipe.torch_stages([rank], device)
            Schedule1F1B(stage, 8, loss_fn).step(batch)  # and step(target=..., losses=...) on the last rank

        torch's stages are a chain: skips and tied weights are relayed through the stages between. All micro-batches
        must have the same size, and the last stage returns its tensors in the order in which the model returns them.
        Raises FxpipeError after a `step`, with deferred BatchNorm, and if a loss in the model needs the whole batch."""
        from fxpipe.pipe.build.torch_pipelining import torch_stages  # late: it takes as long as the rest of fxpipe

        with self._state.lock:
            folder, passes = self._state.cache.folder.new(), self.options.passes
            return torch_stages(self.model, self.build, folder, stages, device, group, passes)

    def close(self) -> None:
        """End the worker threads and remove the generated files. A pipe that is garbage collected closes itself."""
        with self._state.lock:
            self._state.closed = True
            self._state.cache.close()

    # Looking ----------------------------------------------------------------------------------------------------------

    draw, _repr_svg_, _repr_html_ = pipe_picture.draw, pipe_picture.svg, pipe_picture.html
    report = pipe_report.report

    @property
    def build(self) -> Build:
        """All that was made for the kind of call that was compiled or run last: `.graph`, `.profile`, `.program` ..."""
        self.check_open()
        if self._state.cache.last is None:
            raise FxpipeError("nothing is compiled yet: call the pipe once, or pass example_inputs to fxpipe.compile")
        return self._state.cache.last

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that runs the stages; `.source` is the text of its file."""
        return self._state.cache.live(self.build).scheduler

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that run, as modules; `.source` is the text of each one's file."""
        return self.scheduler.stages

    @property
    def plan(self) -> Plan:
        """Which ops form which stage, and on which device each stage runs."""
        return self.build.plan

    @property
    def schedule(self) -> Schedule:
        """The order of each device's actions, in the last call that ran: a batch of fewer samples than `chunks` has
        fewer micro-batches. Prints as a grid."""
        return self._state.cache.schedule(self.build)

    @property
    def timeline(self) -> Timeline:
        """When each action of the last `step(..., timeline=True)` ran; FxpipeError if there was none. Prints as a
        table. `fxpipe.viz.text_timeline.bars` makes bars for a terminal, `chrome_trace.trace` a file for Perfetto."""
        return self._timed().timeline

    @property
    def programs(self) -> DevicePrograms:
        """The device programs: what each device runs, sends and receives, in order. Prints as a listing."""
        return add_transfers(self.build.schedule, self.build.program)

    @property
    def files(self) -> Mapping[str, str]:
        """The generated package: text by file name."""
        return self.build.files

    @property
    def trail(self) -> Mapping[str, Program | Placed]:
        """The program after each pass that changed it, by the pass's name, in order, from `pipe.trail["cut"]` on. With
        a strategy, "shard" comes first: the graph with a device for each op."""
        return self.build.trail

    @property
    def graph_module(self) -> fx.GraphModule:
        """The captured graph as a `torch.fx.GraphModule` with the model's own tensors, a new one each time: for tools
        that read these. It runs a whole batch at once. After a `step`, its loss is in it: it returns (loss, output)."""
        return graph_module(self.build.graph, self._state.cache.tensors(self.build.graph))

    @property
    def stage_modules(self) -> tuple[fx.GraphModule, ...]:
        """Each stage as a `torch.fx.GraphModule` that takes the values that the stage receives for a micro-batch, and
        returns those that it sends."""
        program, tensors = self.build.program, self._state.cache.tensors(self.build.graph)
        return tuple(stage_module(program, index, tensors) for index in range(len(program.stages)))

    def explain(self) -> str:
        """A table: per stage its ops, parameters, time, memory and traffic; then the portals (values that skip stages)
        and shared parameters. With a strategy, how each operator is cut, and the table by devices."""
        return explain(self.build, self._state.cache.backend)

    def compare(self) -> Comparison:
        """The predicted and the measured timeline of the last step with `timeline=True`; FxpipeError if there was none.
        Prints as a table. The prediction is that of the last `rehearse`, if it was for the same kind of step, else the
        simulation with the profile.

        The memory of a CPU worker is the most bytes that are kept for its backward at any moment, without parameters,
        each storage counted once: predicted exactly, by a run of the step on meta tensors, or by that of `rehearse`; if
        there is none, by the profile. A line below the table says which."""
        self.check_open()
        with self._state.lock:
            return beside_predicted(self._state.cache, self._timed(), self._state.rehearsed)

    def diagnose(self) -> Diagnosis:
        """Where the time of the last step with `timeline=True` went, on each device. Prints as a table, with the
        prediction of `compare`, then what costs most and what to change; `.replan()` plans again with these times.
        Raises FxpipeError if there was no such step. With several ranks, any rank may call it alone."""
        self.check_open()
        return diagnosed(self._timed(), self._state.rehearsed, self.options)

    def _timed(self) -> Timed:
        """The last step with a timeline. Raises FxpipeError if there is none."""
        if self._state.timed is None:
            raise FxpipeError(NOT_TIMED)
        return self._state.timed

    # Keeping ----------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write the files for the kind of call that was compiled or run last, to be read, edited, and run again by
        `fxpipe.load`; if that was a step, also by several ranks, one for each device. All ranks call this, and rank 0
        writes. Raises PackageError if the folder is not empty, unless `overwrite` is true."""
        cache, processes = self._state.cache, self._state.processes
        processes.write(lambda: save_package(cache, self.build, Path(folder), overwrite))

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipe:
        """A new pipe around a copy of the model; it compiles at its first call."""
        return Pipe(copy.deepcopy(self.model, memo), self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle has the model and the options."""
        return Pipe, (self.model, self.options)
