"""What runs where: the stages, each with what it takes and gives, and the moves of values between them.

    stage 0 on cuda:0
      takes  image: f32[b, 3, 64, 64]
      ...ops
      gives  x: f32[b, 16, 32, 32]
    moves
      x       0 -> 1
      skip    0 -> 2  portal

Source -1 is the caller's batch (the scatter), target `len(stages)` the caller's outputs (the gather). A move between
neighbours is a hand-over; any longer one is a portal. Where ops are placed one by one, a device has many stages, and
those of devices that send to and fro are one stage of the pipeline: what moves among them is a hand-over too. A program
says nothing about time: that is the schedule's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxpipe.ir.graph.graph import Graph, Op, State, may_cross, show_op
from fxpipe.ir.graph.value_types import ValueType


@dataclass(frozen=True)
class OwnDevice:
    """Stands in an op's arguments for the device of the stage that the op runs in."""

    def __repr__(self) -> str:
        return "own device"


OWN_DEVICE = OwnDevice()


@dataclass(frozen=True)
class RuntimeCall:
    """An op's target that passes have put in: the function `name` of fxpipe.runtime."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self.name} is a mark for generated code, which calls it in fxpipe.runtime")


@dataclass(frozen=True)
class Move:
    """`value` goes from stage `source` to stage `target`, once per micro-batch. Where the two have different numbers of
    replicas, it is cut along `dim`, or, if that is None, is the same for all samples."""

    value: str
    source: int
    target: int
    dim: int | None = None

    @property
    def portal(self) -> bool:
        return self.target - self.source > 1

    def __str__(self) -> str:
        along = "" if self.dim is None else f"  along {self.dim}"
        return f"{self.value}  {self.source} -> {self.target}" + ("  portal" if self.portal else "") + along


@dataclass(frozen=True)
class Loan:
    """A tensor of the model that stage `home` owns and stage `user` also uses (tied weights): it goes over once a step,
    and its gradient comes back once, summed over the micro-batches."""

    state: str
    home: int
    user: int

    def __str__(self) -> str:
        return f"{self.state}  {self.home} -> {self.user}  once a step"


@dataclass(frozen=True)
class Stage:
    """A run of ops on one device.

    `takes`: values that arrive, in order; `gives`: values that leave, in order; `states`: the names of the tensors it
    owns; `borrows`: those it gets from their home stage; `mutates`: the buffers it writes, and of these `rereads`
    are the ones whose old contents a recomputation needs again. `checkpoint` and `replicas` as in `StagePlan`.
    """

    index: int
    device: str
    ops: tuple[Op, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    states: tuple[str, ...]
    borrows: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    rereads: tuple[str, ...] = ()
    checkpoint: str = "never"
    replicas: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device, *self.replicas)


@dataclass(frozen=True)
class Program:
    """The stages and the moves between them; `graph` is the model they came from, for inputs, states and outputs.

    `types` has the type of every value, those that passes have added included. `pipeline`: where ops are placed one by
    one, the stage of the pipeline that each stage is a piece of.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    moves: tuple[Move, ...]
    loans: tuple[Loan, ...]
    types: dict[str, ValueType]
    pipeline: tuple[int, ...] = ()

    def __str__(self) -> str:
        return show(self)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(stage.device for stage in self.stages)

    @property
    def portals(self) -> tuple[Move, ...]:
        """The moves between stages that go past a stage of the pipeline."""
        n = len(self.stages)
        at = self.pipeline or range(n)
        return tuple(m for m in self.moves if m.source >= 0 and m.target < n and at[m.target] - at[m.source] > 1)

    def state(self, name: str) -> State:
        return self.graph.state(name)


def recut(move: Move, program: Program) -> bool:
    """Whether the value goes between stages of different numbers of replicas."""
    ends = (move.source, move.target)
    if min(ends) < 0 or max(ends) == len(program.stages):
        return False
    here, there = (len(program.stages[s].devices) for s in ends)
    return here != there


def check(program: Program) -> None:
    """Raise ValueError where the program could not run: a value used that is neither taken, owned nor computed, a move
    from a stage that does not have the value, a take that no move brings, a value that cannot cross."""
    n = len(program.stages)
    arriving: dict[int, set[str]] = {index: set() for index in range(n + 1)}
    for move in program.moves:
        _check_move(program, move)
        arriving[move.target].add(move.value)
    lent = {(loan.user, loan.state) for loan in program.loans}
    for stage in program.stages:
        missing = set(stage.takes) - arriving[stage.index] - _sizes(program)
        if missing:
            raise _fault(program, stage, f"takes {sorted(missing)}, which no move brings")
        idle = arriving[stage.index] - set(stage.takes)
        if idle:
            raise _fault(program, stage, f"is sent {sorted(idle)}, which it does not take")
        for state in stage.borrows:
            if (stage.index, state) not in lent:
                raise _fault(program, stage, f"borrows {state!r}, which no stage lends")
        _check_stage(program, stage)
    for output in program.graph.outputs:
        if output.value not in arriving[n]:
            raise ValueError(f"the output {output.value!r} is not moved to the caller")


def _sizes(program: Program) -> set[str]:
    return {size.name for size in program.graph.sizes}


def _check_move(program: Program, move: Move) -> None:
    n = len(program.stages)
    if not -1 <= move.source < move.target <= n:
        raise ValueError(f"the move {move} does not go forward within {n} stages")
    if not may_cross(program.types[move.value]):
        raise ValueError(f"the move {move} carries a {program.types[move.value]}, which cannot leave its stage")
    if move.source >= 0 and move.value not in program.stages[move.source].gives:
        raise ValueError(f"the move {move}: stage {move.source} does not give {move.value!r}")


def _check_stage(program: Program, stage: Stage) -> None:
    known = {*stage.takes, *stage.states, *stage.borrows, *_sizes(program)}
    for op in stage.ops:
        for name in (*op.reads, *op.writes):
            if name not in known:
                raise _fault(program, stage, f"op {op.name} uses {name!r}, which is not there, at {op.origin}")
        known.add(op.name)
    for name in stage.gives:
        if name not in known:
            raise _fault(program, stage, f"gives {name!r}, which it does not have")


def _fault(program: Program, stage: Stage, reason: str) -> ValueError:
    return ValueError(f"stage {stage.index} {reason}\n{show_stage(program, stage)}")


def show(program: Program) -> str:
    """The listing of all stages and moves."""
    blocks = [show_stage(program, stage) for stage in program.stages]
    moves = [f"  {move}" for move in (*program.moves, *program.loans)]
    return "\n".join([*blocks, "moves", *moves])


def show_stage(program: Program, stage: Stage) -> str:
    """One stage: what it takes, its ops, what it gives."""
    states = {state.name: state for state in program.graph.states}
    lines = [f"stage {stage.index} on {', '.join(stage.devices)}, recompute {stage.checkpoint}"]
    lines += [f"  takes    {name}: {program.types[name]}" for name in stage.takes]
    lines += [f"  owns     {name}: {program.types[name]}  {states[name].held}" for name in stage.states]
    lines += [f"  borrows  {name}: {program.types[name]}  {states[name].held}" for name in stage.borrows]
    lines += [f"  mutates  {name}" + ("  (read again)" if name in stage.rereads else "") for name in stage.mutates]
    lines += [f"  {show_op(op)}" for op in stage.ops]
    lines += [f"  gives    {name}: {program.types[name]}" for name in stage.gives]
    return "\n".join(lines)
