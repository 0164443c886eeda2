"""The pipe: a drop-in module that captures the model at each new kind of call and runs the generated pipeline.

    call ─front─▶ a kind seen before? ──yes──▶ its scheduler runs the batch
                        │no
                        └▶ capture, walk the street, keep the build

One pipe holds several builds (train, eval, another number or shape) and one set of parameters: the first build decides
where each parameter lives, later ones follow.
"""

from __future__ import annotations

import copy
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from . import sharded
from .calls import batch_size, check_even, given, kind_of, match, micro_batch_sizes, real, with_states
from .capture import NO_TARGET, Front, Stepper
from .clock import timed
from .codegen.load import bind, load_package, tensors_of, unload, worker_device
from .codegen.package import constants, save, write
from .codegen.wires import wires
from .compiled_stages import compile_stages
from .engines.local import Pipeline
from .engines.rehearsal import rehearse
from .engines.timed import take_step
from .errors import FxpipeError, PackageError
from .inspection import Inspected
from .ir.cluster import Cluster
from .ir.evaluate import with_totals
from .ir.graph import Graph
from .ir.opaque import opaques
from .ir.profile import Profile
from .ir.timeline import Timeline
from .ir.wires import Wires
from .machine import local_cluster
from .materialize import Init, materialize
from .options import Options, backend_of, every_device
from .planning import homes
from .profiling import estimate, measure
from .report import dump
from .runtime.microbatch import scatter, split_sizes
from .shell import Forward, check_grad
from .street import Build, Home, build, rehearsed


@dataclass
class Live:
    """What runs a build: its package, imported, and the scheduler whose stages hold the model's tensors. `version`
    tells which of the model's tensors those are: a user may put others in their place. Constants are the build's."""

    build: Build
    package: ModuleType
    scheduler: Pipeline
    version: int


class Pipe(Inspected):
    """What `fxpipe.compile` returns; see there."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__(model)
        sizes = partial(split_sizes, chunks=options.chunks)
        whole = options.chunks == 1 and not any(options.replicas.values())
        reduce = options.reduce or ("mean" if whole else None)  # of one value, any would do
        own: dict[str, Any] = {
            "options": options,
            "_backend": backend_of(options.compile_stages),
            "_front": Front(model, options.batch_dim, reduce=reduce, sizes=sizes),
            "_stepper": Stepper(model, options.batch_dim, reduce=reduce, sizes=sizes),
            "_builds": {},
            "_lives": {},
            "_last": None,
            "_timeline": None,
            "_timed": None,
            "_rehearsed": None,
            "_home": None,
            "_closed": False,
            "_folder": tempfile.TemporaryDirectory(prefix="fxpipe-"),
        }
        self.__dict__.update(own)

    # Running ----------------------------------------------------------------------------------------------------------

    @Forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch, computed in micro-batches by the stages; of a stage with replicas
        by the first, for calls are not cut further than that.

        Arguments are the model's own. Raises InputError where they cannot be cut into micro-batches, CaptureError where
        the model cannot be captured, and whatever the model raises, with a note of stage, micro-batch and line.
        """
        with self._lock:
            return self._front(args, kwargs, self._run)

    def step(
        self,
        *args: Any,
        target: Any = NO_TARGET,
        loss_fn: Callable[..., Any] | None = None,
        outputs: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        timeline: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of a whole batch, in the order of the schedule: the loss of the batch, detached; the
        gradients are added to the parameters', as `loss.backward()` would.

        - `args`, `kwargs`: the model's own; `target`: any nest of tensors, cut like them; what the model's forward
          calls `target`, `loss_fn` and so on goes by position.
        - `loss_fn(output, target)`, or of the output alone where there is no target, returns one number, whose mean or
          sum over the samples is told from its ops (else say `reduce=` in `fxpipe.compile`), or one for each sample:
          then the gradients are those of their sum. Without it the model returns its loss, or an object with `.loss`.
        - `outputs`: return (loss, what the model returns), detached.
        - `scaler`: multiplies the gradients with the scale of a `torch.amp.GradScaler`, as `scaler.scale(loss)` does.
        - `timeline`: note when each action ran; `pipe.timeline` has it then, and `pipe.compare()` puts it beside what
          was predicted.

        A step is all or nothing: if anything fails, no gradient is added, and the error says where; the next step
        works, in new threads if some are gone. (Buffers keep what forward has written until then.) Raises InputError,
        CaptureError, and whatever the model or the loss raises, with a note of stage, micro-batch and line.
        """
        check_grad()

        def run(graph: Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            scheduler: Any = self._live(self._built(graph, inputs)).scheduler
            found, timed_step = take_step(scheduler, inputs, self.options.chunks, scaler, timeline)
            if timeline:
                self.__dict__["_timeline"] = timed_step
                self.__dict__["_timed"] = self.build
            return found

        with self._lock:
            loss, output = self._stepper.step(args, kwargs, target, loss_fn, outputs, run)
        return (loss, output) if outputs else loss

    def rehearse(
        self,
        *args: Any,
        target: Any = NO_TARGET,
        loss_fn: Callable[..., Any] | None = None,
        rounds: int = 5,
        **kwargs: Any,
    ) -> Timeline:
        """The timeline of a step of this kind, predicted from its actions, which are timed here: each worker runs its
        row and waits for nobody, `rounds` times. Arguments are those of `step`. Nothing of the model changes.

        This is for CPU workers, which slow each other down in ways that no profile of single ops knows of.
        """
        check_grad()

        def run(graph: Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            made = self._built(graph, inputs)
            if not all(label.startswith("cpu") for label in made.program.devices):
                raise FxpipeError("rehearse is for CPU workers; what a GPU takes is measured by profile='measure'")
            if any(stage.replicas for stage in made.plan.stages):
                raise FxpipeError("rehearse is for stages without replicas; see step(..., timeline=True)")
            scheduler: Any = self._live(made).scheduler
            times, outputs = rehearse(scheduler, inputs, self.options.chunks, rounds)
            chunks = len(split_sizes(batch_size(graph, inputs), self.options.chunks))
            self.__dict__["_rehearsed"] = made, rehearsed(made, chunks, times)
            return outputs

        with self._lock:
            self._stepper.step(args, kwargs, target, loss_fn, False, run)
            predicted: Timeline = self._rehearsed[1]
        return predicted

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture, plan and generate for this kind of call, without running it. The model may be on the meta device."""
        with self._lock:
            with timed("capture"):
                graph = self._front.capture(args, kwargs)
            found: dict[str, Any] = {}
            match(graph.call, (args, kwargs), found)
            made = self._built(graph, tuple(found[item.name] for item in graph.inputs if item.path))
            if not any(tensor.is_meta for tensor in self.model.state_dict().values()):
                self._live(made)

    def materialize(
        self,
        seed: int = 0,
        *,
        init: Init | None = None,
        checkpoint: str | Path | None = None,
        stages: Collection[int] | None = None,
    ) -> None:
        """Give the model's tensors that are on the meta device memory and values, as `fxpipe.materialize` does: they
        depend on the seed (or `init`, or the checkpoint) and on nothing of the plan. `stages`: only those that have
        their home in one of these; what no stage uses is at home in the first."""
        with self._lock:
            only = self.keys_here() if stages is None else self.keys_of(stages)
            materialize(self.model, seed, init=init, checkpoint=checkpoint, only=only)

    def keys_here(self) -> Collection[str] | None:
        """The keys of the model's tensors that this process needs; None: all."""
        return None

    def keys_of(self, stages: Collection[int]) -> frozenset[str]:
        """The keys of the model's tensors that are at home in these stages. Raises FxpipeError before the first call,
        which decides."""
        if self._home is None:
            raise FxpipeError("it is not decided yet which stage has what: pass example_inputs to fxpipe.compile")
        tensors = tensors_of(self.model)
        homes = self._homes(tensors)
        return frozenset(key for key, tensor in tensors.items() if homes.get(id(tensor), 0) in stages)

    def _homes(self, tensors: Mapping[str, Tensor]) -> dict[int, int]:
        """The stages of tensors of the model that a stage uses, by their ids."""
        return {id(tensors[key]): stage for key, stage in self._home.stages.items() if key in tensors}

    def torch_stages(
        self, stages: Collection[int], device: str | torch.device | None = None, group: Any = None
    ) -> list[Any]:
        """These stages as `PipelineStage`s of torch.distributed.pipelining, on `device`, for the ranks of `group`: what
        torch's schedules take, for calls of the kind that was compiled or run last.

            pipe = fxpipe.compile(model, devices=["cpu"] * world, chunks=8, example_inputs=batch)
            (stage,) = pipe.torch_stages([rank], device)
            Schedule1F1B(stage, 8, loss_fn).step(batch)  # and step(target=..., losses=...) on the last rank

        torch's stages are a chain: skips and tied weights are relayed through the stages between. Micro-batches are all
        of the same size there, and the order of the last stage's tensors is that in which the model returns them.
        Raises FxpipeError for a model whose loss or statistics are those of the whole batch.
        """
        from .pipelining import torch_stages  # here, for what it imports takes as long as the rest of fxpipe

        with self._lock:
            return torch_stages(self, stages, device, group)

    def _run(self, graph: Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The flat outputs for the flat inputs of a call of this kind."""
        return self._live(self._built(graph, inputs)).scheduler.run(inputs, self.options.chunks)

    def _built(self, graph: Graph, inputs: Sequence[Any]) -> Build:
        """The build for a kind of call, made if there is none yet."""
        if self._closed:
            raise FxpipeError("this pipe is closed; compile the model again")
        sizes = None
        if self.options.place is not None:
            check_even(batch_size(graph, inputs), self.options.chunks)
            sizes = micro_batch_sizes(graph, inputs, self.options.chunks)
        key = kind_of(graph, self.model.training, sizes)
        made: Build | None = self._builds.get(key)
        if made is None:
            made = self._builds[key] = self._make(replace(graph, training=self.model.training), inputs)
            if self._home is None and self.options.place is None:
                self.__dict__["_home"] = Home(made.plan, homes(graph, made.plan))
            if self.options.dump is not None:
                dump(made, self.options.dump, len(self._builds))
        elif made.graph.states is not graph.states:
            made = self._builds[key] = with_states(made, graph)
        self.__dict__["_last"] = made
        return made

    def _make(self, graph: Graph, inputs: Sequence[Any]) -> Build:
        """The street from a graph on."""
        sizes = micro_batch_sizes(graph, inputs, self.options.chunks)
        cluster = self.options.cluster or local_cluster(every_device(self.options))
        if self.options.place is not None:
            return sharded.build(graph, sizes, cluster, self.options)
        with timed("profiling"):
            profile = self._profile(graph, inputs, sizes, cluster)
        return build(graph, profile, sizes, cluster, self.options, self._home)

    def _profile(self, graph: Graph, inputs: Sequence[Any], sizes: Mapping[str, int], cluster: Cluster) -> Profile:
        """What the ops cost for one micro-batch, on the first device."""
        label = self.options.devices[0]
        if isinstance(self.options.profile, Profile) and self._home is None:
            return self.options.profile
        if self.options.profile != "measure":  # or a profile that was given, which speaks of the first kind of call
            return estimate(graph, sizes, cluster.device(label))
        tensors = tensors_of(self.model)
        if graph.loss is not None:
            tensors |= self._stepper.tensors
        values = {item.name: value for item, value in given(graph, inputs)}
        with torch.no_grad():
            whole = with_totals(graph, values, real(graph.totals, tensors) if graph.totals is not None else {})
        rows = split_sizes(batch_size(graph, inputs), self.options.chunks)
        pieces = {item.name: scatter(whole[item.name], item.batch_dim, rows)[0] for item in graph.inputs}
        states = real(graph, tensors)
        return measure(graph, pieces, states, str(worker_device(label)))

    def _live(self, made: Build) -> Live:
        """The build's package, imported, with the tensors that the model has now."""
        key = kind_of(made.graph, made.graph.training, None if self.options.place is None else made.sizes)
        live: Live | None = self._lives.get(key)
        others: dict[str, Tensor] = {}
        version = self._front.twins.version
        if made.graph.loss is not None:
            others, version = self._stepper.tensors, self._stepper.version
        if live is None:
            folder = Path(self._folder.name) / str(len(self._lives))
            with timed("loading"):
                write(made.files, folder)
                package = load_package(folder)
                if self._backend is not None:
                    compile_stages(package, self._backend)
                weakref.finalize(self, unload, package)
                live = Live(made, package, self._bound(package, made, others), version)
            self._lives[key] = live
        elif live.version != version or live.build is not made:
            live.scheduler.close()
            live.scheduler = self._bound(live.package, made, others)
            live.version, live.build = version, made
        return live

    def _bound(self, package: ModuleType, made: Build, others: Mapping[str, Tensor]) -> Pipeline:
        calls = {opaque.path: opaque for opaque in opaques(made.graph)}
        bound: Pipeline = bind(package, self.model, constants(made.program, made.totals), others, calls)
        return bound

    def close(self) -> None:
        """End the worker threads and remove the generated files. A pipe that is garbage collected closes itself."""
        with self._lock:
            self.__dict__["_closed"] = True
            for live in self._lives.values():
                live.scheduler.close()
                unload(live.package)
            self._folder.cleanup()

    # Keeping ----------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write the package of the last kind of call, to be read, edited, and run again by `fxpipe.load`: after a step
        also over ranks, one for each device.

        Raises PackageError if the folder has something in it already, unless `overwrite` is true."""
        path = Path(folder)
        if path.exists() and any(path.iterdir()) and not overwrite:
            raise PackageError(f"{path} is not empty; choose another folder, or save(..., overwrite=True)")
        made = self.build
        save(made.program, made.files, path, made.totals, self._wires(made))

    def _wires(self, made: Build) -> Wires | None:
        """What moves in a step, if each of its devices can be a process."""
        if made.graph.loss is None and not self.options.ranks:
            return None
        if self.options.place is not None:
            return None
        return wires(made.program, made.schedule)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipe:
        """A pipe of its own around a copy of the model. It compiles anew at its first call."""
        return Pipe(copy.deepcopy(self.model, memo), self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled is the model and how to compile it."""
        return Pipe, (self.model, self.options)
