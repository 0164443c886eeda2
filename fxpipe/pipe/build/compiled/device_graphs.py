"""Device graphs: work of an accelerator that is recorded once, and from then on launched as a whole.

    args ─copy─▶ memory of the graph ─launch─▶ memory of the graph ─copy─▶ results

To the host a graph is one launch, whatever number of operations it has; so the host, and with it Python's interpreter
lock, has less to do for each action. A graph reads and writes the same memory each time. Forwards of several
micro-batches wait for their backward at the same time, so their results must outlive the next launch: they are copied
to memory of their own. So are arguments to the graph's memory, unless they are where they were in all runs before, as
parameters are.

Each piece of a stage has a graph for forward and one for backward (`compiled_stages.py`), and these for each size of
micro-batch. Pieces have no random ops: these run between graphs, as they do without, so the numbers are the same.

This file alone knows what kinds of devices differ in. CUDA's graphs are a class of their own up to PyTorch 2.13, other
accelerators have theirs in `torch.accelerator`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor, fx

from fxpipe.runtime.accelerator import has_streams
from fxpipe.runtime.random import nobody_draws
from fxpipe.runtime.streams import new_stream, use_stream
from fxpipe.torch_internals.compiling.inductor import autograd_backend, takes_a_list
from fxpipe.torch_internals.tensor_memory import copy_all, memory_key

NAME = "device_graphs"
WARMUP = 2  # runs before the one that is recorded: libraries set themselves up in the first, and memory moves
MODE: Final = "thread_local"  # other threads, which have other devices, go on while one records

Function = Callable[[list[Any]], Sequence[Any]]
Place = tuple[int, tuple[int, ...]]

_one_at_a_time = Lock()


def refusal(device: torch.device) -> str | None:
    """Why work of the device cannot be recorded; None if it can."""
    if not has_streams(device):
        return f"{device} has no graphs: they are for accelerators"
    if device.type == "cuda":
        return None
    if not hasattr(torch.accelerator, "Graph"):
        return f"PyTorch {torch.__version__} has graphs of CUDA devices alone"
    try:
        torch.accelerator.Graph()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


@contextmanager
def recording(device: torch.device) -> Iterator[Any]:
    """In this context this thread's work for the device is recorded, in the graph that the context gives, and not
    run."""
    cuda = device.type == "cuda"
    graph: Any = torch.cuda.CUDAGraph() if cuda else torch.accelerator.Graph(capture_error_mode=MODE)
    # A stream of its own, for the default one cannot be recorded, and what other threads give to the same stream would
    # be recorded too: no other has this priority. It does no work, so nothing waits for it.
    with _one_at_a_time, nobody_draws(), _no_collection(), use_stream(new_stream(device, priority=-1)):
        graph.capture_begin(**({"capture_error_mode": MODE} if cuda else {}))
        try:
            yield graph
        except BaseException:
            with suppress(Exception):  # it fails too, and says less
                graph.capture_end()
            raise
        graph.capture_end()


@contextmanager
def _no_collection() -> Iterator[None]:
    """A context without garbage collection: what is collected may free memory of the device, which ends a recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def device_graphs(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend of torch.compile: forward and backward of the graph as device graphs."""
    run: Callable[..., Any] = autograd_backend(recorded)(graph, inputs)
    return run


def recorded(graph: fx.GraphModule, inputs: Sequence[Any]) -> Function:
    """The function of a graph without gradients and without writes to its inputs, recorded after a warm-up. Raises
    RuntimeError for a device without graphs."""
    devices = {x.device for x in inputs if isinstance(x, Tensor)}
    for device in devices:
        if reason := refusal(device):
            raise RuntimeError(reason)
    if len(devices) > 1:
        raise RuntimeError(f"a graph is of one device, and this piece has tensors on {sorted(map(str, devices))}")

    def function(args: list[Any]) -> Sequence[Any]:
        found: Sequence[Any] = graph.forward(*args)
        return found

    made = Recorded(function, devices.pop()) if devices else function

    def run(args: list[Any]) -> Sequence[Any]:
        return made(args)

    return takes_a_list(run)


class Recorded:
    """A function of tensors and numbers, recorded for each size of its arguments."""

    def __init__(self, function: Function, device: torch.device) -> None:
        self.function, self.device = function, device
        self._sizes: dict[tuple[Any, ...], _OneSize] = {}
        self._lock = Lock()  # autograd's thread may recompute while the worker's runs forward

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        key = tuple([x.shape if isinstance(x, Tensor) else x for x in args])
        with self._lock:
            found = self._sizes.get(key)
            if found is None:
                found = self._sizes[key] = _OneSize(args)
            return found.run(self.function, args, self.device)


class _OneSize:
    """The runs with arguments of one size.

    - `places`: by argument, where it was in all runs so far; arguments that have moved are not in it.
    - `runs`: how many there were before the graph.
    - `graph`: the recorded function, once it is.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self.places = {k: place(x) for k, x in enumerate(args) if isinstance(x, Tensor)}
        self.runs = 0
        self.graph: _Graph | None = None

    def run(self, function: Function, args: list[Any], device: torch.device) -> Sequence[Any]:
        moved = [k for k, before in self.places.items() if place(args[k]) != before]
        if moved:
            for k in moved:
                del self.places[k]
            self.graph = None
        if self.runs < WARMUP:
            self.runs += 1
            return function(args)
        if self.graph is None:
            self.graph = _Graph(function, args, self.places, device)
        return self.graph.launch(args)


def place(x: Tensor) -> Place:
    return x.data_ptr(), x.stride()


class _Graph:
    """A recorded function, the memory of the arguments that are copied there, and that of its results."""

    def __init__(self, function: Function, args: Sequence[Any], fixed: Collection[int], device: torch.device) -> None:
        tensors = [k for k, x in enumerate(args) if isinstance(x, Tensor)]
        self.copied = [k for k in tensors if k not in fixed]
        memory = {k: args[k].detach().clone() for k in self.copied}  # values, for a device may compute as it records
        inputs = [memory.get(k, x.detach() if isinstance(x, Tensor) else x) for k, x in enumerate(args)]
        self.memory = [memory[k] for k in self.copied]
        with recording(device) as self.graph, torch.no_grad():
            found = function(list(inputs))
        same = {id(inputs[k]): k for k in tensors}
        owners = {memory_key(inputs[k]): k for k in fixed}
        self.results: list[Any] = []  # numbers as they are; of the others None
        self.made: dict[int, Tensor] = {}  # by result, its memory in the graph
        self.given: dict[int, int] = {}  # by result, the argument that it is
        self.views: dict[int, tuple[int, tuple[Any, ...]]] = {}  # by result, the argument that it is a view of, and how
        for place, y in enumerate(found):
            self.results.append(None if isinstance(y, Tensor) else y)
            if not isinstance(y, Tensor):
                continue
            if id(y) in same:
                self.given[place] = same[id(y)]
            elif (owner := owners.get(memory_key(y))) is not None:
                offset = y.storage_offset() - inputs[owner].storage_offset()
                self.views[place] = owner, (y.size(), y.stride(), offset)
            else:
                self.made[place] = y

    def launch(self, args: Sequence[Any]) -> list[Any]:
        """The results for these arguments, in memory of their own, or of the arguments."""
        if self.copied:
            copy_all(self.memory, [args[k] for k in self.copied])
        self.graph.replay()
        results = list(self.results)
        for place, k in self.given.items():
            results[place] = args[k]
        for place, (k, (size, stride, offset)) in self.views.items():
            results[place] = args[k].as_strided(size, stride, args[k].storage_offset() + offset)
        if self.made:
            copies = [torch.empty_like(y) for y in self.made.values()]
            copy_all(copies, list(self.made.values()))
            for place, y in zip(self.made, copies, strict=True):
                results[place] = y
        return results
