"""A graph from torch.compile as a pipeline: in micro-batches where that is correct, else in one micro-batch; and
without a pipeline where that is not worth it.

    called with a batch of 8 ─▶ seen before? ─yes─▶ run
                                     │no
      fewer ops with parameters than stages ─▶ plain
      holds for micro-batches ───────────────▶ cut       else a warning says why not, and
      can be captured at all ────────────────▶ whole     what to write
      else ──────────────────────────────────▶ plain

torch.compile guards the devices of tensors, so the model's tensors do not move: stages on other devices work on copies,
and results are returned on the device that torch.compile expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.batching.mixed_samples import refuse_unmeant
from fxpipe.capture.batch_size.batch_size_checks import check_outputs
from fxpipe.capture.call_arguments import cut_along
from fxpipe.capture.tracing.lifted_graph import CapturedGraph, capture_lifted, lift, not_cut
from fxpipe.capture.tracing.torch_modes import check_modes
from fxpipe.codegen.package.load_package import bind
from fxpipe.codegen.package.package_files import constants
from fxpipe.errors import CaptureError, InputError, warn
from fxpipe.ir.graph.value_types import TensorType, ValueType
from fxpipe.pipe.interpreter.fork_lock import Lock
from fxpipe.pipe.options.compile_options import Options
from fxpipe.pipe.progress import timed, working
from fxpipe.pipe.running_package import RunningPackage
from fxpipe.pipe.saved.temporary_folder import Folder
from fxpipe.profiling import estimate
from fxpipe.runtime.microbatch import split_sizes

from . import batch_statistics
from .build import build
from .build_report import dump
from .call_binding import micro_batch_sizes, with_states
from .local_cluster import local_cluster


class BuiltGraph:
    """A captured graph with its build and the package that runs it."""

    def __init__(self, captured: CapturedGraph, flat: tuple[Any, ...], options: Options, number: int) -> None:
        inputs = captured.inputs(flat)
        sizes = micro_batch_sizes(captured.graph, inputs, options.chunks)
        cluster = options.cluster or local_cluster(options.devices)
        self.chunks = options.chunks
        with working(f"planning graph {number} of torch.compile and writing its stages"):
            with timed("profiling"):
                profile = estimate(captured.graph, sizes, cluster.device(options.devices[0]))
            self.build = build(captured.graph, profile, sizes, cluster, options, None, {})
        if options.dump is not None:
            dump(self.build, options.dump, number)
        self._folder = Folder()
        self._live = RunningPackage(self._folder.new(), self.build.files)
        self.captured = self._bound(captured)

    def _bound(self, captured: CapturedGraph) -> CapturedGraph:
        """The graph, to whose constants the package is bound now."""
        made = with_states(self.build, captured.graph)
        held = constants(made.program, made.whole)
        self._live.bind(lambda package: bind(package, nn.Module(), held, captured.lifted.held, move=False))
        return captured

    def hold(self, new: Mapping[str, Tensor]) -> None:
        """Replace tensors of the model, by path, in all stages."""
        for stage in self._live.scheduler.all_stages:
            for path in new.keys() & set(stage.states):
                stage.replace(path, new[path])

    def run(self, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the traced graph returns for its flat arguments."""
        captured = self.captured.renewed(flat)
        if captured is not self.captured:
            self.captured = self._bound(captured)
        results = self._live.scheduler.run(captured.inputs(flat), self.chunks)
        types = captured.graph.types
        outputs = captured.graph.returned
        return captured.outputs(tuple(map(at_home, results, (types[output.value] for output in outputs))), flat)


def at_home(result: Any, kind: ValueType) -> Any:
    """The result on the device that it has in the plain model."""
    return result.to(kind.device) if isinstance(result, Tensor) and isinstance(kind, TensorType) else result


@dataclass(frozen=True)
class Way:
    """How calls of one batch size are run: by `live`, or, if it is None, as the plain graph. `why`: the reason for no
    better way, or a note about this one."""

    live: BuiltGraph | None
    why: str = ""


class Compiled:
    """The callable that replaces a graph traced by torch.compile. `number` counts these graphs."""

    def __init__(self, number: int, module: fx.GraphModule, options: Options) -> None:
        self.number = number
        self.options = options
        self.module = module
        self.lifted = lift(module)
        self.ways: dict[tuple[int, ...], Way] = {}
        self._lives: dict[bool, BuiltGraph] = {}  # by whether they cut the batch
        self._shapes: tuple[torch.Size, ...] = ()
        self._lock = Lock()

    def __call__(self, *flat: Any) -> tuple[Any, ...]:
        check_modes("call the model in it without torch.compile")
        with self._lock:
            self._hold(flat)
            sizes = self.sizes(flat)
            way = self.ways.get(sizes)
            if way is None:
                way = self.ways[sizes] = self._choose(flat, sizes)
            if way.live is not None:
                return way.live.run(flat)
        result: tuple[Any, ...] = self.module(*flat)
        return result

    def _hold(self, flat: tuple[Any, ...]) -> None:
        """Use the model's current tensors. If plain tensors have other shapes than before, forget all captures."""
        new = self.lifted.hold(flat)
        for live in self._lives.values() if new else ():
            live.hold(new)
        rows = zip(self.lifted.arguments, flat, strict=True)
        shapes = tuple(value.shape for item, value in rows if item.kind == "constant")
        if shapes != self._shapes:
            self._shapes = shapes
            self.ways.clear()
            self._lives.clear()

    def sizes(self, flat: tuple[Any, ...]) -> tuple[int, ...]:
        """The different sizes of the inputs along their batch dimensions: one size, if all agree."""
        dim = self.options.batch_dim
        rows = zip(self.lifted.arguments, flat, strict=True)
        given = [(value, cut_along(dim, item.path, value)) for item, value in rows if item.kind == "input"]
        return tuple(dict.fromkeys(value.shape[cut] for value, cut in given if cut is not None))

    def _choose(self, flat: tuple[Any, ...], sizes: tuple[int, ...]) -> Way:
        """The best way that is correct: micro-batches, else one micro-batch, else the plain graph."""
        ops, using = self.lifted.work
        stages = len(self.options.devices)
        if using < stages:
            return Way(None, f"{using} of {ops} ops read parameters, which is too few for {stages} stages")
        why = ""
        if self.options.chunks > 1 and sizes and max(sizes) > 1:
            try:
                live = self._cut(flat)
                return Way(live, "; ".join(f"mixes samples: {mixed.origin}" for mixed in live.captured.graph.mixed))
            except (CaptureError, InputError) as error:
                why = str(error)
        try:
            way = Way(self._whole(flat), why)
        except CaptureError as error:
            way = Way(None, str(error))
        if way.why:
            self._warn(way)
        return way

    def _cut(self, flat: tuple[Any, ...]) -> BuiltGraph:
        """The graph in micro-batches. Raises CaptureError or InputError if that is not correct."""
        live = self._lives.get(True)
        if live is None:
            live = self._lives[True] = self._captured(flat)
            rows = split_sizes(max(self.sizes(flat)), self.options.chunks)
            if len(rows) > 1 and (written := batch_statistics.written_buffers(live.build.graph)):
                batch_statistics.tell_written(written, len(rows))
            if live.build.batch_norms and self.options.deferred_batch_norm is None:
                batch_statistics.tell(live.build.batch_norms, max(self.sizes(flat)), rows)
        else:
            live.captured.check(flat, self._micro_batches)
        check_outputs(live.captured.graph, max(self.sizes(flat)), partial(split_sizes, chunks=self.options.chunks))
        refuse_unmeant(live.captured.graph)
        return live

    def _captured(self, flat: tuple[Any, ...]) -> BuiltGraph:
        dim, reduce = self.options.batch_dim, self.options.known_reduce
        captured = capture_lifted(self.name, self.lifted, flat, dim, reduce=reduce, sizes=self._micro_batches)
        return BuiltGraph(captured, flat, self.options, self.number)

    def _whole(self, flat: tuple[Any, ...]) -> BuiltGraph:
        """The graph in one micro-batch."""
        if False not in self._lives:
            captured = capture_lifted(self.name, self.lifted, flat, not_cut(self.lifted))
            self._lives[False] = BuiltGraph(captured, flat, replace(self.options, chunks=1), self.number)
        return self._lives[False]

    def _micro_batches(self, batch: int) -> Sequence[int]:
        """The batch sizes that the graph must be valid for: those of micro-batches, and the whole batch, as traced."""
        return (*split_sizes(batch, self.options.chunks), batch)

    @property
    def name(self) -> str:
        return f"Graph{self.number}"

    def _warn(self, way: Way) -> None:
        how = "runs in one micro-batch" if way.live is not None else "runs as it is, not as a pipeline"
        warn(f"graph {self.number} of torch.compile {how}: {way.why}")
