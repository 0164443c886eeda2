"""Graph -> Profile, by running it: each op on its own, forward and backward, on real tensors.

A profiler on the whole model would report kernels, not ops, and running the model would change it. Here an op gets its
inputs as leaves of autograd, so that its backward runs alone, and gets a copy of what it writes: buffers, gradients,
random state and the caller's tensors do not change.

    values      x ──▶ conv ──▶ h ──▶ relu_ ──▶ y          kept from op to op, freed after the last reader
                       │               │
    leaves        conv(x', w')    relu_(clone h')         repeated, to time them
                       ▼               ▼
                  grad(·, x' w')  grad(·, h')

Autograd's hooks say what it keeps, memory by memory: memory of parameters and buffers never counts, any other once, at
the first op that keeps it. So the sum over all ops is what the whole model keeps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fxpipe.ir.graph.evaluate_graph import call, enter
from fxpipe.ir.graph.graph import Graph, Op
from fxpipe.ir.graph.model_devices import capture_device, relocate
from fxpipe.ir.plan.profile import OpCost, Profile
from fxpipe.runtime.accelerator import has_streams
from fxpipe.runtime.random import fork_rng
from fxpipe.torch_internals.device_work import keep_busy
from fxpipe.torch_internals.pytrees import tree_leaves, tree_map
from fxpipe.torch_internals.tensor_memory import memory_key, storage_key

Values = dict[str, Any]
AHEAD = 500_000  # cycles of a GPU, for which it waits while the host launches an op
T = TypeVar("T")


def measure(
    graph: Graph,
    inputs: Mapping[str, Any],
    states: Mapping[str, Any],
    device: str = "cpu",
    *,
    repeats: int = 5,
    warmup: int = 1,
    budget: float = 30.0,
) -> Profile:
    """The measured costs of a micro-batch. `inputs` and `states` are by name in the graph; constants may be left out.

    Each op is timed `repeats` times after `warmup` runs, and the median counts. Measuring takes about `budget` seconds,
    with at least one run for each op.
    """
    here = torch.device(device)
    graph = _on(graph, here)
    share = budget / max(1, len(graph.ops))
    costs: list[OpCost] = []
    with fork_rng([here] if has_streams(here) else []), torch.inference_mode(False), torch.enable_grad():
        run = _Run.start(graph, inputs, states, here)
        for position in range(len(graph.ops)):
            forward, backward = run.timing(position, warmup, repeats, share)
            costs.append(replace(run.advance(position), forward=forward, backward=backward))
        batch = run.batch
    return Profile(graph.model, batch, device, "measured", tuple(costs))


def _on(graph: Graph, here: torch.device) -> Graph:
    """The graph with the device of capture replaced by the one to measure on."""
    captured = capture_device(graph)
    if captured is None:
        return graph
    return replace(graph, ops=tuple(relocate(op, captured, here, here.type) for op in graph.ops))


@dataclass(frozen=True)
class _Run:
    """A walk over the graph, op by op: the values alive now, and the memory that autograd has kept so far."""

    graph: Graph
    here: torch.device
    batch: int
    values: Values  # leaves that need gradient where the value does
    states: frozenset[str]
    last: Mapping[str, int]  # the position of each name's last reader; far away for outputs
    fixed: frozenset[int]  # memory of states
    kept: set[int]  # memory of values that some op has kept so far
    owners: Counter[int]  # for each memory the number of values in it
    unused: set[str]  # parameters that no op has used so far

    @classmethod
    def start(cls, graph: Graph, inputs: Mapping[str, Any], states: Mapping[str, Any], here: torch.device) -> _Run:
        held = {state.name: state.value for state in graph.states if state.kind == "constant"} | dict(states)
        written = {name for op in graph.ops for name in op.writes}
        parameters = {state.name for state in graph.states if state.kind == "parameter"}
        values = {name: _leaf(value, here, name in written or name not in parameters) for name, value in held.items()}
        fixed = frozenset(memory for value in values.values() for memory in _memories(value))
        values |= {name: _leaf(value, here, bool(written)) for name, value in inputs.items()}
        values |= {size.name: values[size.input].shape[size.dim] for size in graph.sizes}
        batched = (values[item.name].shape[item.batch_dim] for item in graph.inputs if item.batch_dim is not None)
        last = {name: position for position, op in enumerate(graph.ops) for name in (*op.reads, *op.writes)}
        last |= {output.value: len(graph.ops) for output in graph.outputs}
        owners = Counter(memory for value in values.values() for memory in _memories(value))
        return cls(graph, here, next(batched, 1), values, frozenset(held), last, fixed, set(), owners, parameters)

    # time ------------------------------------------------------------------------------------

    def timing(self, position: int, warmup: int, repeats: int, budget: float) -> tuple[float, float]:
        """Median seconds of forward and of backward of an op."""
        started = time.perf_counter()
        times: list[tuple[float, float]] = []
        for attempt in range(warmup + repeats):
            if attempt == warmup:
                times.clear()
            times.append(self.once(position))
            if time.perf_counter() - started > budget:
                break
        return median(forward for forward, _ in times), median(backward for _, backward in times)

    def once(self, position: int) -> tuple[float, float]:
        """Seconds of one forward and one backward, on leaves of their own."""
        op = self.graph.ops[position]
        leaves, values, _ = self.copies(op)
        _, forward = _timed(self.here, lambda: _forward(op, values))
        read = self.last.get(op.name, -1) > position
        results = [t for t in _tensors(values[op.name]) if read and _differentiable(t, leaves)]
        if not results or not leaves:
            return forward, 0.0
        gradients = [torch.ones_like(t) for t in results]
        _, backward = _timed(self.here, lambda: torch.autograd.grad(results, leaves, gradients, allow_unused=True))
        return forward, backward

    def copies(self, op: Op) -> tuple[list[Tensor], Values, dict[int, int]]:
        """Leaves for all that the op reads, the values to run it on, and for each clone's memory the memory it stands
        for. A leaf cannot be written in place, so the op writes into a clone of it."""
        names = dict.fromkeys(name for name in (*op.reads, *op.writes) if name in self.values)
        leaves = {name: _leaf(self.values[name], self.here) for name in names}
        values = {name: tree_map(_clone, leaf) if name in op.writes else leaf for name, leaf in leaves.items()}
        clones = (zip(_memories(values[name]), _memories(leaves[name]), strict=True) for name in op.writes)
        needing = [t for leaf in leaves.values() for t in _tensors(leaf) if t.requires_grad]
        return needing, values, {clone: memory for pairs in clones for clone, memory in pairs}

    # one op ahead ----------------------------------------------------------------------------

    def advance(self, position: int) -> OpCost:
        """Run the op for its result and count what it keeps. `forward` is the time of this one run."""
        op = self.graph.ops[position]
        found, seconds = self.observed(op)
        new = {memory: size for memory, size in found.items() if memory not in self.fixed and memory not in self.kept}
        result = self.values[op.name]
        self.owners.update(_memories(result))
        self.kept.update(memory for memory in new if self.owners[memory])
        first_used = self.unused.intersection(op.reads)
        self.unused.difference_update(first_used)
        parameters = sum(_size(self.values[name]) for name in first_used)
        self.free(position)
        return OpCost(op.name, seconds, saved=sum(new.values()), output=_size(result), parameters=parameters)

    def observed(self, op: Op) -> tuple[dict[int, int], float]:
        """Run the op and add its result to the values. Returns the bytes that autograd keeps, by memory, and the
        seconds of this run."""
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            found[storage_key(storage)] = storage.nbytes()
            return tensor

        leaves, values, stands_for = self.copies(op)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            _, seconds = _timed(self.here, lambda: _forward(op, values))
        result = values[op.name]
        grads = [_differentiable(t, leaves) for t in _tensors(result)]
        if op.writes:  # once more on the values themselves, so that all views of them change
            with torch.no_grad():
                _forward(op, self.values)
            stands_for |= dict(zip(_memories(result), _memories(self.values[op.name]), strict=True))
            result = self.values[op.name]
        self.values[op.name] = _marked(result, grads)
        return {stands_for.get(memory, memory): size for memory, size in found.items()}, seconds

    def free(self, position: int) -> None:
        """Forget the values that were read for the last time."""
        op = self.graph.ops[position]
        for name in {*op.reads, *op.writes, op.name} - self.states:
            if self.last.get(name, -1) <= position:
                for memory in _memories(self.values.pop(name)):
                    self.owners[memory] -= 1
                    if not self.owners[memory]:
                        self.kept.discard(memory)  # other memory may get the same number


def _forward(op: Op, values: Values) -> None:
    with ExitStack() as contexts:
        for region in op.regions:
            contexts.enter_context(enter(region))
        values[op.name] = call(op, values)


def _timed(here: torch.device, work: Callable[[], T]) -> tuple[T, float]:
    """The result of the work and the seconds it took, on the device's own clock, with the host ahead of the device."""
    if not has_streams(here):
        started = time.perf_counter()
        return work(), time.perf_counter() - started
    with torch.accelerator.device_index(here.index):
        start, end = (torch.Event(here, enable_timing=True) for _ in range(2))
        keep_busy(here, AHEAD)  # else the device would wait for the host to launch the work, and that would count
        start.record()
        result = work()
        end.record()
        end.synchronize()
    return result, float(start.elapsed_time(end)) / 1e3


def _leaf(value: Any, here: torch.device, copied: bool = False) -> Any:
    """The value with its tensors as leaves of autograd, which share the tensors' memory unless `copied`."""

    def one(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        own = item.detach().to(here)
        own = own.clone() if copied or item.is_inference() else own
        return own.requires_grad_(item.requires_grad)

    return tree_map(one, value)


def _clone(item: Any) -> Any:
    return item.clone() if isinstance(item, Tensor) else item


def _marked(result: Any, grads: Sequence[bool]) -> Any:
    """The result with its tensors as leaves; `grads` says which of them need a gradient."""
    grad = iter(grads)
    return tree_map(lambda t: t.detach().requires_grad_(next(grad)) if isinstance(t, Tensor) else t, result)


def _differentiable(result: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether gradients flow from the result to a leaf. `requires_grad` alone does not tell: it is set on a view made
    under `no_grad`."""
    return result.grad_fn is not None or any(result is leaf for leaf in leaves)


def _tensors(nest: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor))


def _memories(nest: Any) -> list[int]:
    """A number for the memory of each tensor, unique among memory that is alive."""
    return [memory_key(t) for t in _tensors(nest)]


def _size(nest: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(nest))
