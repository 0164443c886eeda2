"""`pipe.verify(...)`: whether a pipe computes the same as the plain model, on this machine, with these inputs.

    what               pipe      plain     may be          each is the largest distance from the plain model in float64
    loss               1.2e-07   0.9e-07   1.4e-06
    gradient of w      3.1e+00   2.0e-07   4.5e-06  differs

The plain model has rounding errors too. So both are compared with the plain model in float64, and the error of the pipe
may be a few times that of the plain model. If the model does not run in float64, the pipe is compared with the plain
model itself.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from fxpipe.capture.model_with_loss import own_loss
from fxpipe.capture.twins.attribute_changes import Snapshot
from fxpipe.errors import FxpipeError
from fxpipe.ir.graph.graph import Graph
from fxpipe.pipe.build.build import Build
from fxpipe.pipe.build.build_cache import BuildCache
from fxpipe.pipe.build.call_binding import batch_size, given
from fxpipe.runtime.accelerator import has_streams, kinds
from fxpipe.runtime.microbatch import split_sizes
from fxpipe.runtime.random import fork_rng
from fxpipe.torch_internals.tensor_memory import has_late_hooks

from .divergence import Place, Run, find_backward, find_forward, watched
from .environment import describe
from .plain_run import (
    SEED,
    Case,
    Cut,
    Results,
    backward_from,
    by_micro_batch,
    copied,
    parameters,
    results,
    roots,
    run_plain,
    without_autocast,
)  # fmt: skip

TIMES = 10  # a pipe's error may be this many times the plain model's, because it adds up in another order,
DIGITS = 32  # plus this many times the last digit of the scale: the largest value
SMALL = 1e-3  # plus this part of the largest value of all results of its kind
FLOAT64 = 1e-9  # the bound relative to the scale, if there is no more exact reference


@dataclass(frozen=True)
class Compared:
    """One result of a call or a step.

    - `way`: "call" or "step".
    - `what`: the name of the result.
    - `off`: the largest distance of the pipe from the reference.
    - `plain`: the largest distance of the plain model from it.
    - `bound`: the distance that the pipe may have.
    - `why`: a difference that is not a distance, such as another shape.
    """

    way: str
    what: str
    off: float
    plain: float
    bound: float
    why: str = ""

    @property
    def ok(self) -> bool:
        return not self.why and self.off <= self.bound


@dataclass(frozen=True)
class Verified:
    """What `pipe.verify` found.

    - `ok`: whether nothing differs by more than rounding explains.
    - `compared`: for each output, loss, gradient and buffer, its distance from the reference, and how large it may be.
    - `place`: the first stage, micro-batch and op where the pipe and the plain model differ; None if they do not, or
      it was not found.
    - `notes`: what was not compared, and why; and what the results were compared with, if not the whole batch in
      float64.
    - `facts`: the machine, the options, the plan and the schedule, by title.
    """

    model: str
    compared: tuple[Compared, ...]
    place: Place | None
    notes: tuple[str, ...]
    facts: Mapping[str, str] = field(repr=False)

    @property
    def ok(self) -> bool:
        return bool(self.compared) and all(one.ok for one in self.compared)

    def __str__(self) -> str:
        ways = ", ".join(dict.fromkeys(one.way for one in self.compared))
        wrong = [one for one in self.compared if not one.ok]
        if self.ok:
            head = f"{self.model}: ok. {len(self.compared)} results of {ways} are those of the plain model"
        else:
            head = f"{self.model}: {len(wrong)} of {len(self.compared)} results of {ways} are not the plain model's"
        lines = [head]
        if self.place is not None:
            lines.append(f"they part {self.place}")
        shown = wrong or [max(self.compared, key=lambda one: one.off / (one.bound or 1))] if self.compared else []
        lines += ["", table(shown[:20]), *([f"... and {len(shown) - 20} more"] if len(shown) > 20 else [])]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__  # what a notebook's cell or the interpreter shows

    def save(self, path: str | Path) -> None:
        """Write a report for an issue to a file: versions, devices, options, plan, schedule and all compared
        results."""
        parts = [str(self), "", "all results", table(self.compared)]
        for title, text in self.facts.items():
            parts += ["", f"---- {title}", text]
        Path(path).write_text("\n".join(parts) + "\n", encoding="utf-8")


def table(compared: Sequence[Compared]) -> str:
    """A table of the results: the errors of the pipe and of the plain model, and the bound."""
    rows = [
        (one.way, one.what, f"{one.off:.1e}", f"{one.plain:.1e}", f"{one.bound:.1e}",
         "" if one.ok else one.why or "differs")
        for one in compared
    ]  # fmt: skip
    return tabulate(rows, headers=("in", "what", "pipe off", "plain off", "may be", ""), disable_numparse=True)


# Comparing ------------------------------------------------------------------------------------------------------------


def compare(way: str, got: Results, plain: Results, exact: Results | None, digits: float) -> Iterator[Compared]:
    """Compare all results of one way ("call" or "step"). `digits`: the relative size of the last digit."""
    for kind in ("outputs", "gradients", "buffers"):
        pipe_s, plain_s = getattr(got, kind), getattr(plain, kind)
        exact_s = plain_s if exact is None else getattr(exact, kind)
        largest = max((_largest(x) for x in exact_s.values()), default=0.0)
        for name in dict.fromkeys((*plain_s, *pipe_s)):
            values = (pipe_s.get(name), plain_s.get(name), exact_s.get(name))
            yield _compare(way, name, *values, digits, largest, exact is not None)


def _compare(
    way: str, name: str, got: Any, plain: Any, exact: Any, digits: float, largest: float, beside: bool
) -> Compared:
    if not isinstance(got, Tensor) or not isinstance(plain, Tensor):
        equal = got is plain or (not isinstance(got, Tensor) and not isinstance(plain, Tensor) and got == plain)
        return Compared(way, name, 0.0, 0.0, 0.0, "" if equal else _instead(got, plain))
    if got.shape != plain.shape or got.dtype != plain.dtype:
        return Compared(way, name, 0.0, 0.0, 0.0, _instead(got, plain))
    a, b, c = (x.detach().cpu().to(torch.complex128 if x.is_complex() else torch.float64) for x in (got, plain, exact))
    if not (got.is_floating_point() or got.is_complex()):
        wrong = int((a != b).sum())
        return Compared(way, name, float(wrong), 0.0, 0.0)
    if not torch.equal(a.isfinite(), b.isfinite()):
        return Compared(way, name, 0.0, 0.0, 0.0, "is not finite where the plain model's is, or the other way around")
    there = b.isfinite() & c.isfinite()
    off, error = _distance(a, c, there), _distance(b, c, there)
    scale = _largest(c) + SMALL * largest
    bound = TIMES * error + DIGITS * digits * scale if beside else max(FLOAT64, 1e3 * digits) * scale
    return Compared(way, name, off, error, bound)


def _distance(a: Tensor, b: Tensor, there: Tensor) -> float:
    return float((a - b)[there].abs().max()) if there.any() else 0.0


def _largest(x: Any) -> float:
    if not isinstance(x, Tensor) or not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return 0.0
    values = x.detach().abs()
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else 0.0


def _instead(got: Any, plain: Any) -> str:
    return f"is {_shown(got)}, the plain model's {_shown(plain)}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "none" if value is None else repr(value)


# Running --------------------------------------------------------------------------------------------------------------


@contextmanager
def preserved(model: nn.Module, loss_fn: Any) -> Iterator[None]:
    """A context that restores gradients, buffers, attributes and random states at its end. Raises FxpipeError if a
    parameter has a hook that may change something else."""
    modules = [part for root in roots(model, loss_fn).values() for part in root.modules()]
    held = list({id(x): x for part in modules for x in part.parameters(recurse=False)}.values())
    if any(map(has_late_hooks, held)):
        raise FxpipeError(
            "verify runs backward and puts all back, and a parameter has a hook that runs once its gradient is there, "
            "which may do anything, as step an optimizer; remove it for the time of verify"
        )
    grads = [(x, x.grad) for x in held]
    kept = [(buffer, buffer.detach().clone()) for part in modules for buffer in part.buffers(recurse=False)]
    snapshot = Snapshot(modules)
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with fork_rng():
            yield
    finally:
        snapshot.restore()
        for x, grad in grads:
            x.grad = grad
        with torch.no_grad():
            for buffer, before in kept:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])


@dataclass(frozen=True)
class Ran:
    """A call or step of the pipe: its graph, its inputs, the runs of its stages, and its outputs by name."""

    graph: Graph
    made: Build
    inputs: tuple[Any, ...]
    runs: list[Run]
    outputs: dict[str, Any]


def verify(
    cache: BuildCache, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, loss_fn: Callable[..., Any] | None
) -> Verified:
    """See `Pipe.verify`."""
    notes: list[str] = []
    compared: list[Compared] = []
    place: Place | None = None
    made: Build | None = None
    before = cache.last
    try:
        for way in ("call", "step"):
            with preserved(cache.model, loss_fn):
                case = Case(args, kwargs, target, loss_fn, way == "step").map(_leaf)
                if way == "step" and not _has_loss(cache, case):
                    notes.append("no step was compared: the model returns no loss, and there is no loss_fn")
                    continue
                with preserved(cache.model, loss_fn):
                    ran = _run(cache, case)
                    shown = results(ran.outputs, cache.model, case)
                made = ran.made
                found = _compare_way(cache, way, case, ran, shown, notes)
                compared += found
                if place is None and not all(one.ok for one in found):
                    place = _find(cache, ran, found)
    finally:
        cache.last = before
    assert made is not None
    facts = describe(cache.options, made, cache.backend)
    return Verified(type(cache.model).__name__, tuple(compared), place, tuple(dict.fromkeys(notes)), facts)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _has_loss(cache: BuildCache, case: Case) -> bool:
    if case.loss_fn is not None:
        return True

    def run(graph: Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return cache.live(cache.built(graph, inputs)).scheduler.run(inputs, cache.options.chunks)

    with torch.no_grad():
        output = own_loss(cache.call(case.args, case.kwargs, run))
    return isinstance(output, Tensor) and output.dim() < 2


def _run(cache: BuildCache, case: Case) -> Ran:
    """A call or a step of the pipe, with backward."""
    _clear(cache.model, case)
    ran: list[Ran] = []

    def run(graph: Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        made = cache.built(graph, inputs)
        scheduler = cache.live(made).scheduler
        torch.manual_seed(SEED)
        with watched(scheduler.stages) as runs:
            found: tuple[Any, ...] = scheduler.run(inputs, cache.options.chunks)
        outputs = {output.value: x for output, x in zip(graph.returned, found, strict=True)}
        ran.append(Ran(graph, made, inputs, runs, outputs))
        return found

    if case.step:
        cache.step_capture.step(case.args, case.kwargs, case.target, case.loss_fn, False, run)
    else:
        cache.call_capture(case.args, case.kwargs, run)
        backward_from(ran[0].outputs)
    return ran[0]


def _clear(model: nn.Module, case: Case) -> None:
    for x in parameters(model, case.loss_fn).values():
        x.grad = None


def _compare_way(cache: BuildCache, way: str, case: Case, ran: Ran, shown: Results, notes: list[str]) -> list[Compared]:
    """The pipe's results beside those of the plain model."""
    graph, parts = ran.graph, by_micro_batch(ran.graph)
    if parts and (why := _incomparable(cache, case, ran)):
        notes.append(f"no {way} was compared: statistics and random numbers are those of {why}")
        return []
    samples = batch_size(graph, ran.inputs)
    rows = tuple(split_sizes(samples, cache.options.chunks)) if parts else (samples,)
    if parts and len(rows) > 1:
        notes.append(f"a {way} is compared with the plain model on each of the {len(rows)} micro-batches")
    inputs = list(given(graph, ran.inputs))
    known = {id(value): item for item, value in inputs if isinstance(value, Tensor)}
    others = {item.name: value for item, value in inputs if not isinstance(value, Tensor)}
    tensors = case.tensors()
    dims = tuple(
        known[id(x)].batch_dim if id(x) in known else 0 if x.dim() and len(x) == samples else None for x in tensors
    )
    names = tuple(known[id(x)].name if id(x) in known else "" for x in tensors)
    cut = Cut(rows, names, dims, others, ran.made.plan.deferred_batch_norm)
    device = cache.live(ran.made).scheduler.stages[-1].device
    plain = _plain(cache, case, graph, cut, device, False)
    dtypes = {x.dtype for x in cache.model.parameters() if x.is_floating_point()} or {torch.get_default_dtype()}
    digits = max(torch.finfo(kind).eps for kind in {*dtypes, *_autocast()})
    exact = None
    if digits > torch.finfo(torch.float64).eps:
        try:
            _check_memory(cache.model, device)
            with without_autocast():
                exact = _plain(cache, case, graph, cut, device, True)
        except (RuntimeError, MemoryError, TypeError, ValueError, FxpipeError) as error:
            notes.append(f"the plain model does not run in float64, so the pipe is held against it as it is: {error}")
    return list(compare(way, shown, plain, exact, digits))


def _incomparable(cache: BuildCache, case: Case, ran: Ran) -> str:
    """Why the plain model cannot be run by micro-batches; "" if it can be."""
    if (any(stage.replicas for stage in ran.made.plan.stages) and case.step) or cache.options.place is not None:
        return "slices, with replicas or a strategy, which the plain model does not have"
    if cache.call_capture.arguments.counts:
        return "micro-batches, and the plain model cannot be given the rows of one that another input counts"
    return "micro-batches, and the end of the model needs the whole batch" if ran.graph.epilogue is not None else ""


def _plain(cache: BuildCache, case: Case, graph: Graph, cut: Cut, device: torch.device, exact: bool) -> Results:
    twin, own = copied(cache.model, case, device, exact)
    _clear(twin, own)
    return run_plain(twin, own, graph, cut)


def _autocast() -> list[torch.dtype]:
    return [torch.get_autocast_dtype(kind) for kind in kinds() if torch.is_autocast_enabled(kind)]


def _check_memory(model: nn.Module, device: torch.device) -> None:
    """Raise MemoryError if a copy in float64, with gradients, would not fit."""
    need = 16 * sum(x.numel() for x in model.parameters())
    if has_streams(device):
        free = torch.accelerator.get_memory_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > free:
        raise MemoryError(f"its parameters and gradients take {need:,} bytes, and {free:,} are free on {device}")


def _find(cache: BuildCache, ran: Ran, found: Sequence[Compared]) -> Place | None:
    """Where the pipe and the plain model first differ; None if it is not found."""
    stages = cache.live(ran.made).scheduler.stages
    place = find_forward(ran.made.program, stages, ran.runs)
    if place is None and all(one.ok for one in found if not one.what.startswith("gradient")):
        prefix = "gradient of "
        place = find_backward(ran.made.program, [one.what.removeprefix(prefix) for one in found if not one.ok])
    return place
