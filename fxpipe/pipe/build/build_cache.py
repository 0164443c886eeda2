"""The builds of one model: made at the first call of each kind; loaded, and bound to the model's tensors, to run.

graph, inputs ─▶ of a kind seen before? ──yes──▶ its build ─▶ live: the package that runs
                          │no
                          └▶ built; the first build decides where each parameter lives
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fxpipe.capture import NoOps, StaticSizesRequired
from fxpipe.codegen.package.load_package import bind, tensors_of, worker_device
from fxpipe.codegen.package.package_files import constants, with_mode
from fxpipe.errors import FxpipeError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.opaque_call import opaques
from fxpipe.ir.graph.value_types import BATCH
from fxpipe.ir.plan.plan import with_modes
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.program.program import Program
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.schedule.sub_schedule import only
from fxpipe.ir.units import show_bytes
from fxpipe.pipe.drop_in_module import check_no_pipe_in
from fxpipe.pipe.interpreter.garbage_collection import rare_collections
from fxpipe.pipe.options.compile_options import Options, backend_of, every_device
from fxpipe.pipe.progress import timed, working
from fxpipe.pipe.running_package import RunningPackage, Scheduler
from fxpipe.pipe.saved.loss_fingerprint import rows
from fxpipe.pipe.saved.model_fingerprint import fingerprint
from fxpipe.pipe.saved.temporary_folder import Folder
from fxpipe.planning import Placement, homes
from fxpipe.profiling import estimate
from fxpipe.runtime.accelerator import is_here
from fxpipe.runtime.microbatch import split_sizes

from . import batch_statistics, sharded_build
from .build import Build, build
from .build_report import borrowed_share, dump
from .call_binding import (
    SPARSE,
    batch_size,
    check_even,
    kind_of,
    layouts,
    measured,
    micro_batch_sizes,
    sparse_inputs,
    with_states,
)
from .checkpoint_choice import tell_of_checkpoints
from .local_cluster import local_cluster

MOST_RUNNING = 16  # packages that are kept with their worker threads
MUCH = 0.1  # of the bytes that a kind of call uses, what it may borrow without a word

log = logging.getLogger("fxpipe")


class BuildCache:
    """The builds of a model, by kind of call.

    - `call_capture`, `step_capture`: capture calls and steps.
    - `builds`, `lives`: the builds, and the packages that run them, the last used last; of those only some are kept.
    - `last`: the build of the last call that was compiled or run.
    - `ran`: the build of the last call that was run, and how many micro-batches its batch had.
    - `home`: what the first build decides for all others; `owners`: the device that owns each parameter and buffer,
      by all of its paths.
    - `make`, `bind`: functions that make a build from a graph, and a scheduler from a package.
    - `leads`: whether this process warns and shows progress.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        make: Make | None = None,
        bind: Bind | None = None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        from fxpipe.capture import CallCapture, StepCapture  # late: torch's Dynamo takes more than a second

        self.model, self.options, self.leads = model, options, leads
        self._make, self._bind = make or build_here, bind or bind_here
        self.backend = backend_of(options.compile_stages)
        sizes = partial(split_sizes, chunks=options.chunks)
        whole = options.chunks == 1 and not any(options.replicas.values())
        reduce = options.known_reduce or ("mean" if whole else None)  # with one micro-batch, any reduction is right
        work = partial(begin, model, leads)
        how: dict[str, Any] = {"reduce": reduce, "sizes": sizes, "work": work, "transforms": options.transforms}
        how["uncut"] = whole and options.place is None
        how["dynamic"] = options.dynamic and options.place is None  # a strategy is for operators of these sizes
        self.call_capture = CallCapture(model, options.batch_dim, **how)
        self.step_capture = StepCapture(model, options.batch_dim, **how)
        for capture in (self.call_capture, self.step_capture.call_capture):
            capture.twins.frozen_later = options.ranks
            if is_here(first := worker_device(options.devices[0])):
                capture.twins.in_place_of_meta = first
        # The first build spreads the tensors over the devices of the stages, whichever of the two has captured it.
        self.step_capture.call_capture.twins.first_devices = self.call_capture.twins.first_devices
        self.builds: dict[tuple[Any, ...], Build] = {}
        self.lives: dict[tuple[Any, ...], RunningPackage] = {}
        self.last: Build | None = None
        self.ran: tuple[Build | None, int] = None, 0
        self.home: Placement | None = None
        self.owners: dict[str, str] = {}
        self.folder = Folder()
        self._told_statistics = self._told_loans = self._told_checkpoints = False

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run) -> Any:
        """The model's result; `run` runs the captured graph. In one process, a model without ops is called as it is."""
        try:
            return self.call_capture(args, kwargs, run)
        except NoOps:
            if self.options.ranks:
                raise
            return self.model(*args, **kwargs)

    def agree(self, graph: Graph, inputs: Sequence[Any]) -> tuple[Build, int]:
        """The build for a kind of call, and a number, which is 0 in one process (ranks must agree on it)."""
        return self.built(graph, inputs), 0

    def kind(self, graph: Graph, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The key of the build for a call. Raises InputError if a strategy cannot be used for this batch."""
        sizes = None
        if self.options.place is not None:
            check_even(batch_size(graph, inputs), self.options.chunks)
            sizes = micro_batch_sizes(graph, inputs, self.options.chunks)
        return *kind_of(graph, bool(self.model.training), sizes), *sparse_inputs(graph, inputs)

    def built(self, graph: Graph, inputs: Sequence[Any]) -> Build:
        """The build for a kind of call, made if there is none yet."""
        key = self.kind(graph, inputs)
        made = self.builds.get(key)
        if made is None:
            trained = None if self.model.training else self.builds.get(kind_of(graph, True, None))
            if trained is not None and not (self.options.ranks or opaques(graph)):  # ranks make all builds together
                made = in_evaluation(trained)
            else:
                mode = "training" if self.model.training else "evaluation"
                found = () if graph.loss is None else rows(self.step_capture.loss_fn)
                lie = layouts(graph, self.tensors(graph), inputs, self.options.backward == "code")
                whole = replace(graph, training=bool(self.model.training), fingerprint=found, layouts=lie)
                made = self._equal(whole)
            if made is None:
                with begin(self.model, self.leads, f"planning {graph.model} in {mode}, and writing its stages"):
                    made = replace(self._make(self, whole, inputs), source=fingerprint(self.model))
                    if self.step_capture.dynamic and self.options.backward == "code" and not self.options.ranks:
                        check_lengths(made.program)
            self.builds[key] = made
            if self.home is not None:
                self._tell_loans(made)
            if self.options.place is None or self.options.ranks:
                self._assign_owners(graph, made)
            if self.options.dump is not None:
                dump(made, self.options.dump, len(self.builds))
            if not self._told_checkpoints and self.leads() and (graph.loss is not None or graph.training):
                self._told_checkpoints = tell_of_checkpoints(made.plan, graph)
        elif made.graph.states is not graph.states:
            made = self.builds[key] = with_states(made, graph)
        self.last = made
        if not self._told_statistics and (made.batch_norms or batch_statistics.written_buffers(graph)):
            self._tell_statistics(made, batch_size(graph, inputs))
        return made

    def _equal(self, graph: Graph) -> Build | None:
        """The build of an equal graph, if there is one: a model may be captured again that computes the same, as after
        a first forward that has set an attribute."""
        if self.options.ranks or self.options.place is not None or opaques(graph):
            return None
        # 1, 1.0 and True are equal, and so are 0.0 and -0.0; their texts are not.
        equal = (one for one in self.builds.values() if one.graph == graph and str(one.graph) == str(graph))
        return next((replace(with_states(one, graph), source=fingerprint(self.model)) for one in equal), None)

    def runs(self, made: Build, graph: Graph, inputs: Sequence[Any]) -> None:
        """Note that a build runs on these inputs."""
        self.ran = made, len(split_sizes(batch_size(graph, inputs), self.options.chunks))

    def schedule(self, made: Build) -> Schedule:
        """The schedule of a build, with as many micro-batches as the last call had, if it ran this build."""
        ran, count = self.ran
        return only(made.schedule, count) if ran is made and count < made.plan.chunks else made.schedule

    def _assign_owners(self, graph: Graph, made: Build) -> None:
        """Note which device owns what, from now on. The first build decides for all tensors of the model, unless an
        earlier pipe has: the first device gets those that it does not use. Those of a loss function are decided when
        they are first used."""
        labels = [stage.device for stage in (made.plan if self.options.place is None else made.program).stages]
        of = {label: stage for stage, label in reversed([*enumerate(labels)])}
        stages = homes(graph, made.plan) if self.options.place is None else owned(made.program)
        stages = {path: of.get(self.owners.get(path, ""), stage) for path, stage in stages.items()}
        for path, stage in stages.items():
            self.owners.setdefault(path, labels[stage])
        if self.home is None:
            plan = made.plan
            if self.options.saves_only:  # what saves memory in a step may not in a call, and the other way round
                plan = with_modes(plan, ["except_last"] * len(plan.stages))
            self.home = Placement(plan, stages, graph, made.sizes, made.profile)
            tensors = tensors_of(self.model)
            by_tensor = {id(tensors[path]): label for path, label in self.owners.items() if path in tensors}
            for path, tensor in tensors.items():
                self.owners[path] = by_tensor.get(id(tensor), self.options.devices[0])
        elif new := tensors_of(self.model).keys() & stages.keys() - self.home.stages.keys():  # since the first build
            places = {stage.device: number for number, stage in reversed([*enumerate(self.home.plan.stages)])}
            found = {path: places[self.owners[path]] for path in new if self.owners[path] in places}
            self.home = replace(self.home, stages={**self.home.stages, **found})

    def _tell_loans(self, made: Build) -> None:
        """Say once if a later kind of call borrows a good part of the model's tensors. What the first one borrows too
        is how its plan works: with tensor parallelism one rank owns a tensor, and others use parts of it."""
        if not self.options.ranks or self._told_loans or not self.leads():
            return
        (moved, share), (_, usual) = borrowed_share(made), borrowed_share(next(iter(self.builds.values())))
        if share - usual > MUCH:
            self._told_loans = True
            log.warning(
                "this kind of call uses tensors in other stages than the first one did, and borrows %s from other "
                "ranks in each call, %.0f%% of what it uses; give the inputs of the kind that is called most as "
                "example_inputs to fxpipe.compile, which decides the stages",
                show_bytes(moved), 100 * share,
            )  # fmt: skip

    @property
    def first(self) -> Graph | None:
        """The graph of the first kind of call, if there was one."""
        if self.home is not None:
            return self.home.graph
        return next((made.graph for made in self.builds.values()), None)

    def follow(self, other: BuildCache) -> None:
        """Keep the tensors where a pipe of another copy of the model has them."""
        self.home, self.owners = other.home, dict(other.owners)

    def _tell_statistics(self, made: Build, batch: int) -> None:
        """Warn once about norms that use the statistics of micro-batches, and of buffers that each of them writes."""
        rows = split_sizes(batch, self.options.chunks)
        if not self.leads() or len(rows) == 1:
            return
        self._told_statistics = True
        if written := batch_statistics.written_buffers(made.graph):
            batch_statistics.tell_written(written, len(rows))
        if made.batch_norms and self.options.deferred_batch_norm is None and not made.plan.deferred_batch_norm:
            batch_statistics.tell(made.batch_norms, batch, rows)

    def profile(self, graph: Graph, inputs: Sequence[Any], sizes: Mapping[str, int], cluster: Cluster) -> Profile:
        """The profile of one micro-batch on the first device."""
        label = self.options.devices[0]
        if self.home is not None and (known := self.home.profile_of(graph, sizes)) is not None:
            return known
        if isinstance(self.options.profile, Profile) and self.home is None:
            return self.options.profile
        if (
            self.options.profile != "measure"
        ):  # "estimate", or a given profile, which is for the first kind of call only
            return estimate(graph, sizes, cluster.device(label))
        rows = split_sizes(batch_size(graph, inputs), self.options.chunks)
        return measured(graph, inputs, self.tensors(graph), rows, str(worker_device(label)))

    def tensors(self, graph: Graph) -> dict[str, Tensor]:
        """The tensors of the model, and of the loss function of the last step, by path."""
        return tensors_of(self.model) | (self.step_capture.tensors if graph.loss is not None else {})

    def live(self, made: Build) -> RunningPackage:
        """The build's package, imported and bound to the tensors that the model has now."""
        key = kind_of(made.graph, made.graph.training, None if self.options.place is None else made.sizes)
        key += tuple(item.name for item in made.graph.inputs if made.graph.layouts.get(item.name) == SPARSE)
        others = self.step_capture.tensors if made.graph.loss is not None else {}
        version = self.call_capture.twins.version, self.step_capture.version  # either may have captured a call
        live = self.lives.get(key) or RunningPackage(self.folder.new(), made.files, self.backend)
        if live.version != (version, made):
            live.bind(partial(self._bind, self.model, made, others), (version, made))
        self.lives.pop(key, None)
        self.lives[key] = live
        while len(self.lives) > MOST_RUNNING:
            self.lives.pop(next(iter(self.lives))).close()
        return live

    def homes(self, tensors: Mapping[str, Tensor]) -> dict[int, int]:
        """The stage of each of the model's `tensors` that a stage uses, by `id`. Raises FxpipeError before the first
        call, which decides the stages."""
        if self.home is None:
            raise FxpipeError("it is not decided yet which stage has what: pass example_inputs to fxpipe.compile")
        return {id(tensors[key]): stage for key, stage in self.home.stages.items() if key in tensors}

    def close(self) -> None:
        """End the worker threads and remove the generated files."""
        for live in self.lives.values():
            live.close()
        self.folder.remove()


def in_evaluation(trained: Build) -> Build:
    """The build of a graph that was captured in training, and whose guards hold in evaluation too: nothing depends on
    the mode."""
    graph = replace(trained.graph, training=False)
    files = with_mode(trained.files, trained.graph.training, False)
    program = replace(trained.program, graph=replace(trained.program.graph, training=False))
    return replace(trained, graph=graph, program=program, files=files)


def check_lengths(program: Program) -> None:
    """Raise StaticSizesRequired if backward might be code in more stages if all sizes but the batch's were numbers."""
    if program.graph.loss is not None and any(size.name != BATCH for size in program.graph.sizes):
        for stage in program.stages:
            if stage.autograd_for_sizes:
                raise StaticSizesRequired(stage.autograd_because)


def owned(program: Program) -> dict[str, int]:
    """The stage that owns each parameter and buffer, or parts of it, by its path."""
    states = ((program.state(name), stage.index) for stage in program.stages for name in stage.states)
    return {state.path: stage for state, stage in states if state.kind != "constant"}


Run = Callable[[Graph, tuple[Any, ...]], tuple[Any, ...]]
Make = Callable[[BuildCache, Graph, Sequence[Any]], Build]
Bind = Callable[[nn.Module, Build, Mapping[str, Tensor], ModuleType], Scheduler]


@contextmanager
def begin(model: nn.Module, leads: Callable[[], bool], what: str) -> Iterator[None]:
    """A context for a capture or a plan, which shows its progress. Raises PlanError if there is a pipe in the model."""
    check_no_pipe_in(model)
    with working(what, leads=leads()), rare_collections():
        yield


def build_here(cache: BuildCache, graph: Graph, inputs: Sequence[Any]) -> Build:
    """The build of a graph on this machine."""
    options = cache.options
    sizes = micro_batch_sizes(graph, inputs, options.chunks)
    cluster = options.cluster or local_cluster(every_device(options))
    if options.place is not None:
        return sharded_build.build(graph, sizes, cluster, options, cache.owners, cache.first)
    with timed("profiling"):
        profile = cache.profile(graph, inputs, sizes, cluster)
    return build(graph, profile, sizes, cluster, options, cache.home, cache.owners)


def bind_here(model: nn.Module, made: Build, others: Mapping[str, Tensor], package: ModuleType) -> Scheduler:
    """The scheduler of a package with all stages in this process. `others`: the tensors of the loss function."""
    calls = {opaque.called: opaque for opaque in opaques(made.graph)}
    stay = [made.program.state(loan.state).path for loan in made.program.written_loans]
    bound: Scheduler = bind(package, model, constants(made.program, made.whole), others, calls, stay=stay)
    return bound
