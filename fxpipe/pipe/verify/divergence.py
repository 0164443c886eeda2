"""Where a pipe and the plain model first differ: the first stage whose results are not those of its ops, and the op.

    x ──▶ stage 0 ──▶ y ──▶ stage 1 ──▶ z      the inputs and results of each stage and micro-batch are recorded, and
          as its ops         differs           compared with the results of the ops of the captured graph

The stage runs again on its recorded inputs, beside its ops, one by one: the first call of torch with another result is
the place.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fxpipe.runtime
from fxpipe.ir.graph.evaluate_graph import within
from fxpipe.ir.graph.graph import Op, map_leaves
from fxpipe.ir.program.program import OWN_DEVICE, Program, RuntimeCall
from fxpipe.runtime import Draws, Stage
from fxpipe.runtime.deferred_norms import discard
from fxpipe.runtime.written_buffers import instead


@dataclass(frozen=True)
class Place:
    """Where two runs first differ: stage, micro-batch, op of the graph with the user's line, and line of the stage's
    file. `op` and `line` are "" if not known."""

    stage: int
    micro_batch: int
    op: str = ""
    line: str = ""
    backward: bool = False

    def __str__(self) -> str:
        way = "in backward of" if self.backward else "in"
        lines = [f"{way} stage {self.stage}, micro-batch {self.micro_batch}"]
        lines += [f"op {self.op}"] if self.op else []
        lines += [f"which runs as {self.line}"] if self.line else []
        return ", ".join(lines)


@dataclass(frozen=True)
class Run:
    """One forward of a stage: what it was given and what it returned."""

    stage: int
    args: tuple[Any, ...]
    results: tuple[Any, ...]


@contextmanager
def watched(stages: Sequence[Stage]) -> Iterator[list[Run]]:
    """A context that records each forward of a stage, recomputations included."""
    runs: list[Run] = []

    def watch(j: int, stage: Stage) -> Any:
        forward = stage.forward

        def watching(*args: Any) -> Any:
            results = forward(*args)
            several = results if isinstance(results, tuple) else (results,)
            kept = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
            runs.append(Run(j, kept, tuple(x.detach() if isinstance(x, Tensor) else x for x in several)))
            return results

        return watching

    try:
        for j, stage in enumerate(stages):
            object.__setattr__(stage, "forward", watch(j, stage))
        yield runs
    finally:
        for stage in stages:
            vars(stage).pop("forward", None)


def find_forward(program: Program, stages: Sequence[Stage], runs: Sequence[Run]) -> Place | None:
    """The first stage, and micro-batch in it, whose results are not those of its ops; None if there is none."""
    for j, stage in enumerate(stages):
        for i, run in enumerate(run for run in runs if run.stage == j):
            place = _compare(program, j, i, stage, run)
            if place is not None:
                return place
    return None


def find_backward(program: Program, wrong: Sequence[str]) -> Place | None:
    """The last op that uses a parameter with a wrong gradient, since backward runs from the end; None if there is none.
    `wrong`: the paths of these parameters."""
    names = {state.name for state in program.graph.states if {state.path, *state.aliases} & set(wrong)}
    for stage in reversed(program.stages):
        for op in reversed(stage.ops):
            if names & set(op.reads):
                return Place(stage.index, 0, f"{op.name}, at {op.origin}", backward=True)
    return None


def _compare(program: Program, j: int, i: int, stage: Stage, run: Run) -> Place | None:
    """Where the results of the stage differ from those of its ops; None if they do not."""
    part = program.stages[j]
    names, draw = (*part.takes, *part.borrows), next((x for x in run.args if isinstance(x, Draws)), None)
    values: dict[str, Any] = {
        state.name: state.value.to(stage.device) if isinstance(state.value, Tensor) else state.value
        for state in program.graph.states
        if state.kind == "constant"
    }
    values |= dict(zip(names, run.args, strict=False))
    ours, theirs = Calls(""), Calls(inspect.getfile(type(stage)))
    args = [x.clone() if isinstance(x, Tensor) else x for x in run.args]
    linecache.checkcache(theirs.file)
    with torch.set_grad_enabled(stage.derives), _copies(stage), theirs:
        results = stage.forward(*args)
    with torch.set_grad_enabled(stage.derives), _copies(stage):
        held = (name for name in part.states if program.state(name).kind != "constant")
        values |= {name: stage.tensor(program.state(name).held) for name in held}
        for op in part.ops:
            ours.op = op
            with ours:
                values[op.name] = within(concrete(op, stage.device), values, draw or nullcontext)
    if all(map(same, (values.get(name) for name in part.gives), results if isinstance(results, tuple) else (results,))):
        return None
    for one, other in zip(ours.found, theirs.found, strict=False):
        if not same(one.result, other.result):
            return Place(j, i, _where(one.op), other.line)
    return Place(j, i)


@contextmanager
def _copies(stage: Stage) -> Iterator[None]:
    """A context in which the stage writes copies of its buffers."""
    with instead(stage, {path: stage.tensor(path).detach().clone() for path in stage.mutates}):
        try:
            yield
        finally:
            discard([stage])


def _where(op: Op | None) -> str:
    return "" if op is None else f"{op.name}, at {op.origin}" if op.origin.line else op.name


def concrete(op: Op, device: torch.device) -> Op:
    """The op as it runs on a device."""
    target = getattr(fxpipe.runtime, op.target.name) if isinstance(op.target, RuntimeCall) else op.target

    def place(leaf: Any) -> Any:
        return device if leaf is OWN_DEVICE else leaf

    return replace(op, target=target, args=map_leaves(op.args, place), kwargs=map_leaves(dict(op.kwargs), place))


@dataclass(frozen=True)
class Called:
    """A call of torch: what it returned, for which op, in which line."""

    result: Any
    op: Op | None
    line: str


class Calls(TorchFunctionMode):
    """Records the results of calls of torch, with the line of `file` that made each call."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file, self.found = file, list[Called]()
        self.op: Op | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) for x in _several(result)):
            kept = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in _several(result))
            self.found.append(Called(kept, self.op, self._line()))
        return result

    def _line(self) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        if frame is None or not self.file:
            return ""
        text = linecache.getline(self.file, frame.f_lineno).strip()
        return f"{self.file.rpartition('/')[2]}:{frame.f_lineno}  {text}"


def _several(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def same(one: Any, other: Any) -> bool:
    """Whether two results of one op on the same inputs are equal, up to the last digits."""
    if isinstance(one, tuple) or isinstance(other, tuple):
        pair = _several(one), _several(other)
        return len(pair[0]) == len(pair[1]) and all(map(same, *pair))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return not isinstance(one, Tensor) and not isinstance(other, Tensor)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    digits = torch.finfo(one.dtype).eps if one.is_floating_point() or one.is_complex() else 0.0
    return torch.allclose(one, other.to(one.device), rtol=100 * digits, atol=100 * digits, equal_nan=True)
