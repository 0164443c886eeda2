"""What runs where: the stages, each with what it takes and gives, and the moves of values between them.

    stage 0 on cuda:0
      takes  image: f32[b, 3, 64, 64]
      ...ops
      gives  x: f32[b, 16, 32, 32]
    moves
      x       0 -> 1
      skip    0 -> 2  portal

Source -1 is the caller's batch (the scatter), target `len(stages)` the caller's outputs (the gather). A move between
neighbours is a hand-over; any longer one is a portal. Where ops are placed one by one, a device has many stages. Stages
on devices that send values to each other both ways form one stage of the pipeline, and moves within it are hand-overs
too. A program says nothing about time: the schedule does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from fxpipe.ir.drawable import Drawable
from fxpipe.ir.graph.graph import Graph, Op, State, show_op
from fxpipe.ir.graph.value_types import TensorType, ValueType, may_cross
from fxpipe.ir.program import backward as backwards
from fxpipe.ir.program.backward import Backward
from fxpipe.ir.program.device_programs import ALL_REDUCE, REDUCE_SCATTER


@dataclass(frozen=True)
class OwnDevice:
    """Stands in an op's arguments for the device of the stage that the op runs in."""

    def __repr__(self) -> str:
        return "own device"


OWN_DEVICE = OwnDevice()


@dataclass(frozen=True)
class RuntimeCall:
    """The target of an op that a pass has inserted: the function `name` of fxpipe.runtime."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self.name} is a mark for generated code, which calls it in fxpipe.runtime")


@dataclass(frozen=True)
class Move:
    """`value` goes from stage `source` to stage `target`, once per micro-batch. If the stages have different numbers of
    replicas, the value is cut along `dim`; None: it is the same for all samples. If it is made on its way, in a
    collective, `part` is the value that the source gives."""

    value: str
    source: int
    target: int
    dim: int | None = None
    part: str = ""

    @property
    def given(self) -> str:
        """The value at the source."""
        return self.part or self.value

    @property
    def portal(self) -> bool:
        return self.target - self.source > 1

    def __str__(self) -> str:
        along = "" if self.dim is None else f"  along {self.dim}"
        way = f"{self.source} -> {self.target}" + ("  portal" if self.portal else "")
        return f"{self.given}  {way}{along}" + (f"  as {self.value}" if self.part else "")


Sent = TypeVar("Sent", "Move", "Loan")


@dataclass(frozen=True)
class Loan:
    """A tensor of the model that stage `home` owns and stage `user` also uses (tied weights). The tensor is sent once a
    step, and its gradient is sent back once, summed over the micro-batches."""

    state: str
    home: int
    user: int

    def __str__(self) -> str:
        return f"{self.state}  {self.home} -> {self.user}  once a step"


@dataclass(frozen=True)
class Collective:
    """Moves within devices, one on each device of a group, that are one call of all these devices: what each target
    takes is made of the parts that all sources give. Only over ranks.

    - `kind`: "all-reduce", "reduce-scatter" or "all-gather", as in `GroupCall`.
    - `moves`: in the order of the slices; `dim`: the dimension of slices.
    """

    kind: str
    moves: tuple[Move, ...]
    dim: int = 0

    def __str__(self) -> str:
        along = "" if self.kind == ALL_REDUCE else f" along {self.dim}"
        return f"{self.kind}{along} of {', '.join(map(str, self.moves))}"


@dataclass(frozen=True)
class Stage:
    """A run of ops on one device.

    - `takes`: the values that arrive, in order; `gives`: the values that leave, in order.
    - `states`: the names of the model's tensors that it owns; `borrows`: those that other stages lend it.
    - `mutates`: the buffers it writes; `rereads`: those of them whose old contents a recomputation needs.
    - `checkpoint`, `replicas`: as in `StagePlan`.
    - `backward`: how it computes gradients; None: autograd does.
    - `autograd_because`: why autograd does although code was asked for; `autograd_for_sizes`: whether that may be due
      to sizes that are symbols.
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
    backward: Backward | None = None
    autograd_because: str = ""
    autograd_for_sizes: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device, *self.replicas)


@dataclass(frozen=True)
class Program(Drawable):
    """The stages, and the moves and loans between them.

    - `graph`: the captured model, for its inputs, states and outputs.
    - `loans`: of tensors that the users read; `written_loans`: of tensors that the user's stage writes. It has them
      among its `states`: a copy during a call, which then goes back to the home.
    - `types`: the type of every value, also of values that passes have added.
    - `pipeline`: where ops are placed one by one, the stage of the pipeline that each stage is a piece of; else empty.
    - `collectives`: the moves whose values are made on their way.
    - `sharded`: the names of parameters of which each replica of their stage has a part (ZeRO-3), known over ranks.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    moves: tuple[Move, ...]
    loans: tuple[Loan, ...]
    types: Mapping[str, ValueType]
    pipeline: tuple[int, ...] = ()
    collectives: tuple[Collective, ...] = ()
    sharded: frozenset[str] = frozenset()
    written_loans: tuple[Loan, ...] = ()

    def __str__(self) -> str:
        return show(self)

    __repr__ = __str__  # what a notebook's cell or the interpreter shows

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(stage.device for stage in self.stages)

    @cached_property
    def epilogue_stage(self) -> int:
        """The stage that gives what the epilogue takes: all of it, as those ops are together."""
        found = (stage.index for stage in self.stages if not self.graph.taken.isdisjoint(stage.gives))
        return next(found, len(self.stages) - 1)

    def to_epilogue(self, move: Move) -> bool:
        """Whether a move brings the epilogue what it takes."""
        return move.target == len(self.stages) and move.value in self.graph.taken

    @cached_property
    def portals(self) -> tuple[Move, ...]:
        """The moves between stages that skip a stage of the pipeline."""
        return tuple(filter(self.is_portal, self.moves))

    def is_portal(self, move: Move) -> bool:
        """Whether a move is one of `portals`."""
        n = len(self.stages)
        at = self.pipeline or range(n)
        return move.source >= 0 and move.target < n and at[move.target] - at[move.source] > 1

    @cached_property
    def arriving(self) -> tuple[tuple[Move, ...], ...]:
        """For each stage, and last for the caller, the moves that bring it values."""
        return _by_stage(len(self.stages) + 1, self.moves, lambda move: move.target)

    @cached_property
    def leaving(self) -> tuple[tuple[Move, ...], ...]:
        """For each stage the moves of what it gives."""
        return _by_stage(len(self.stages), self.moves, lambda move: move.source)

    @cached_property
    def borrowing(self) -> tuple[tuple[Loan, ...], ...]:
        """For each stage the loans of what it borrows."""
        return _by_stage(len(self.stages), self.loans, lambda loan: loan.user)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the stages that it takes from. One that takes what a collective makes takes from all that
        give a part."""
        found: list[set[int]] = [set() for _ in self.stages]
        ends = [(move.source, move.target) for move in self.moves]
        ends += [(a.source, b.target) for one in self.collectives for a in one.moves for b in one.moves]
        for source, target in ends:
            if source >= 0 and target < len(found):
                found[target].add(source)
        return tuple(tuple(sorted(stages)) for stages in found)

    def collective_of(self, move: Move) -> Collective | None:
        """The collective that makes the value of a move; None if it takes what another stage gives."""
        return self._collective_of.get(move) if move.part else None

    @cached_property
    def _collective_of(self) -> dict[Move, Collective]:
        return {move: one for one in self.collectives for move in one.moves}

    def state(self, name: str) -> State:
        return self.graph.state(name)


def _by_stage(count: int, given: Iterable[Sent], stage_of: Callable[[Sent], int]) -> tuple[tuple[Sent, ...], ...]:
    """What is sent, for each of so many stages; -1 is none."""
    found: list[list[Sent]] = [[] for _ in range(count)]
    for one in given:
        if stage_of(one) >= 0:
            found[stage_of(one)].append(one)
    return tuple(map(tuple, found))


def recut(move: Move, program: Program) -> bool:
    """Whether the value goes between stages of different numbers of replicas."""
    ends = (move.source, move.target)
    if min(ends) < 0 or max(ends) == len(program.stages):
        return False
    here, there = (len(program.stages[s].devices) for s in ends)
    return here != there


def check(program: Program) -> None:
    """Raise ValueError if the program cannot run:

    - a stage uses a value that it does not take, own, borrow or compute;
    - a stage takes a value that no move brings, or is sent one that it does not take;
    - a stage borrows a tensor that no stage lends;
    - a move does not go forward, or carries a value that its source does not give or that cannot leave its stage;
    - the moves of a collective are not within different devices, or their types do not fit it;
    - an output of the model is not moved to the caller.
    """
    n = len(program.stages)
    arriving: dict[int, set[str]] = {index: set() for index in range(n + 1)}
    for move in program.moves:
        _check_move(program, move)
        arriving[move.target].add(move.value)
    for one in program.collectives:
        _check_collective(program, one)
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
    kind = program.types[move.value]
    if not (may_cross(kind) or (move.target == n and isinstance(kind, TensorType))):
        raise ValueError(f"the move {move} carries a {kind}, which cannot leave its stage")
    if move.source >= 0 and move.given not in program.stages[move.source].gives:
        raise ValueError(f"the move {move}: stage {move.source} does not give {move.given!r}")


def _check_collective(program: Program, one: Collective) -> None:
    ends = [(program.stages[move.source].devices, program.stages[move.target].devices) for move in one.moves]
    if any(here != there or len(here) > 1 for here, there in ends) or len(set(ends)) < len(ends):
        raise ValueError(f"the {one}: each move has to be within a device of its own, without replicas")
    if any(move not in program.arriving[move.target] for move in one.moves):
        raise ValueError(f"the {one}: these are not all moves of the program")
    parts, values = ({program.types[name] for name in names} for names in zip(*((m.given, m.value) for m in one.moves),
                                                                               strict=True))  # fmt: skip
    part, value = next(iter(parts)), next(iter(values))
    assert isinstance(part, TensorType)
    assert isinstance(value, TensorType)
    slice_, whole = (value, part) if one.kind == REDUCE_SCATTER else (part, value)
    count = 1 if one.kind == ALL_REDUCE else len(one.moves)
    fits = len(parts) == len(values) == 1 and part.dtype == value.dtype
    if not fits or [size * (count if at == one.dim else 1) for at, size in enumerate(slice_.shape)] != [*whole.shape]:
        raise ValueError(f"the {one}: the types of the values do not fit it")


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
    if stage.backward is not None:
        _check_backward(program, stage, stage.backward, known)


def _check_backward(program: Program, stage: Stage, backward: Backward, known: set[str]) -> None:
    for name in backward.keeps:
        if name not in known:
            raise _fault(program, stage, f"keeps {name!r} for backward, which it does not have")
    there = {*backward.keeps, *backward.arriving, *stage.states}
    for op in backward.ops:
        for name in (*op.reads, *op.writes):
            if name not in there:
                raise _fault(program, stage, f"op {op.name} of backward uses {name!r}, which is not there")
        there.add(op.name)
    for _, gradient in (*backward.takes, *backward.weights):
        if gradient and gradient not in there:
            raise _fault(program, stage, f"backward returns {gradient!r}, which it does not have")


def _fault(program: Program, stage: Stage, reason: str) -> ValueError:
    return ValueError(f"stage {stage.index} {reason}\n{show_stage(program, stage)}")


def show(program: Program) -> str:
    """The listing of all stages and moves."""
    blocks = [show_stage(program, stage) for stage in program.stages]
    moves = [f"  {move}" for move in (*program.moves, *program.loans, *program.collectives)]
    moves += [f"  {loan}, and back" for loan in program.written_loans]
    return "\n".join([*blocks, "moves", *moves])


def show_stage(program: Program, stage: Stage) -> str:
    """One stage: what it takes, its ops, what it gives."""
    lines = [f"stage {stage.index} on {', '.join(stage.devices)}, recompute {stage.checkpoint}"]
    lines += [f"  takes    {name}: {program.types[name]}" for name in stage.takes]
    lines += [f"  owns     {name}: {program.types[name]}  {program.state(name).held}" for name in stage.states]
    lines += [f"  borrows  {name}: {program.types[name]}  {program.state(name).held}" for name in stage.borrows]
    lines += [f"  mutates  {name}" + ("  (read again)" if name in stage.rereads else "") for name in stage.mutates]
    lines += [f"  {show_op(op)}" for op in stage.ops]
    lines += [f"  gives    {name}: {program.types[name]}" for name in stage.gives]
    lines += [f"  backward by autograd: {stage.autograd_because}"] if stage.autograd_because else []
    lines += (
        [] if stage.backward is None else ["  backward", *(f"    {line}" for line in backwards.show(stage.backward))]
    )
    return "\n".join(lines)
