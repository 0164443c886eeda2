"""The memory that a stage keeps of a micro-batch, where its backward is code: exact, as what it keeps has names.

Each piece of memory counts once, and whole: a view keeps all of what it is a view of. Memory of the model's own tensors
never counts. A value that came from another stage in the same process is the memory that the other stage has made; so
stages that share a device may keep the same piece, which then counts once, from when the first of them keeps it until
the last lets go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fxpipe.ir.graph.value_types import TensorType, dim_size
from fxpipe.ir.program.backward import GRAPH, halves
from fxpipe.ir.program.messages import HEAD
from fxpipe.ir.program.program import Program, Stage

Piece = tuple[int, str]  # a piece of memory: the stage that has made it, and the value that first had it
Memory = Mapping[Piece, int]  # the bytes of pieces
FROM_OUTSIDE = -1  # in place of the stage that has made a piece: it came from the caller, or from another process
WHOLE_INPUT = -2  # in place of the stage: an input that all micro-batches share


@dataclass(frozen=True)
class KeptBytes:
    """What a stage keeps of a micro-batch.

    - `saved`: from forward to backward.
    - `taken`: from forward to the recomputation of forward.
    - `handed`: from the first half of backward to the second.
    """

    saved: Memory
    taken: Memory
    handed: Memory

    def renamed(self, new: Mapping[Piece, Piece]) -> KeptBytes:
        """The same with other names for some pieces that are saved."""
        saved, handed = (
            {new.get(piece, piece): count for piece, count in memory.items()} for memory in (self.saved, self.handed)
        )
        return replace(self, saved=saved, handed=handed) if new else self


def size(memory: Memory) -> int:
    """The bytes of all pieces."""
    return sum(memory.values())


def kept_bytes(program: Program, sizes: Mapping[str, int], same_process: bool = True) -> tuple[KeptBytes | None, ...]:
    """For each stage what it keeps; None where autograd computes gradients, if only those of some ops. `sizes` has a
    number for each symbolic size of a micro-batch; `same_process`: whether all stages share their memory, as CPU
    workers do; else each device is a process, and what comes from another one is a message."""

    def of(stage: Stage) -> KeptBytes | None:
        if stage.backward is None or any(program.types.get(name) == GRAPH for name in stage.backward.keeps):
            return None

        def found(names: Iterable[str], copied: bool = True) -> Memory:
            return _memory(program, stage, names, sizes, same_process, copied)

        hands = halves(stage.backward, program.types).hands
        # Forward copies what is not dense in memory. Until it is recomputed, the stage holds what it was given.
        return KeptBytes(found(stage.backward.keeps), found(stage.takes, copied=False), found(hands))

    return tuple(map(of, program.stages))


def _memory(
    program: Program, stage: Stage, names: Iterable[str], sizes: Mapping[str, int], same_process: bool, copied: bool
) -> dict[Piece, int]:
    """The memory of these values of a stage; `copied`: whether those of other stages that are not dense in memory are
    copies."""
    found: dict[Piece, int] = {}
    held = {*stage.states, *stage.borrows}
    whole = {item.name for item in program.graph.inputs if item.batch_dim is None}
    known = stage.backward.memory if stage.backward is not None else {}
    for name in names:
        kind = program.types.get(name)
        if not isinstance(kind, TensorType):
            continue
        owner, count = known.get(name, (name, kind.nbytes(sizes)))
        if owner in held:
            continue
        source = _source(program, stage, owner, same_process, copied)
        if source is not None:
            found |= _memory(program, source[0], [source[1]], sizes, same_process, copied)
        else:
            maker = stage.index if owner not in stage.takes else WHOLE_INPUT if owner in whole else FROM_OUTSIDE
            found[maker, owner] = dim_size(count, sizes)
            if not same_process and _from_other_device(program, stage, owner):
                found[maker, owner] += HEAD
    return found


def _from_other_device(program: Program, stage: Stage, name: str) -> bool:
    """Whether a stage on a CPU gets the value or gradient from another device: over ranks, in a message."""
    roots = {gradient: value for value, gradient in stage.backward.roots} if stage.backward is not None else {}
    ends = {move.source for move in program.moves if move.value == name and move.target == stage.index}
    if name in roots:
        ends = {move.target for move in program.moves if move.given == roots[name] and move.source == stage.index}
    others = [program.stages[end] for end in ends if 0 <= end < len(program.stages)]
    return len(others) == 1 and others[0].device != stage.device and stage.device.startswith("cpu")


def _source(program: Program, stage: Stage, name: str, same_process: bool, copied: bool) -> tuple[Stage, str] | None:
    """The stage that a value or gradient comes from, and its name there, if its memory stays the same on the way. The
    gradients of several users are added up, which makes new memory."""
    roots = {gradient: value for value, gradient in stage.backward.roots} if stage.backward is not None else {}
    if name in stage.takes:
        ends = [(move.source, name) for move in program.moves if move.value == name and move.target == stage.index]
    elif name in roots:
        moves = [move for move in program.moves if move.given == roots[name] and move.source == stage.index]
        users = [program.stages[move.target] for move in moves if move.target < len(program.stages)]
        ends = [
            (user.index, dict(user.backward.takes).get(roots[name], "") if user.backward else "?") for user in users
        ]
        ends = [(user, gradient) for user, gradient in ends if gradient]
    else:
        return None
    if len(ends) != 1 or ends[0][0] < 0:
        return None
    other = program.stages[ends[0][0]]
    if copied and other.backward is not None and name in other.backward.scattered:
        return None
    on_cpu = other.device.startswith("cpu") and stage.device.startswith("cpu")
    on_cpu = on_cpu and (same_process or other.device == stage.device)
    known = other.backward is not None or name in stage.takes
    return (other, ends[0][1]) if on_cpu and known and not other.replicas and not stage.replicas else None
