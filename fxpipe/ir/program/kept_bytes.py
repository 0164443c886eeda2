"""The bytes that a stage keeps of a micro-batch, where its backward is code: exact, as what it keeps has names.

Each piece of memory counts once, and whole: a view keeps all of what it is a view of. Memory of the model's own tensors
never counts. A value that came from another stage in the same process is the memory that the other stage has made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fxpipe.ir.graph.value_types import TensorType, dim_size
from fxpipe.ir.program.backward import halves
from fxpipe.ir.program.program import Program, Stage

Memory = dict[tuple[int, str], int]  # bytes, by the stage that has made the memory and the value that first had it


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of a stage and micro-batch.

    - `saved`: from forward to backward.
    - `taken`: from forward to the recomputation of forward.
    - `handed`: from the first half of backward to the second; None if that is not known.
    - `both`: while forward runs again, what it took and what it saves; None if that is not known.
    """

    saved: int
    taken: int
    handed: int | None = None
    both: int | None = None


def kept_bytes(program: Program, sizes: Mapping[str, int], same_process: bool = True) -> tuple[KeptBytes | None, ...]:
    """For each stage what it keeps; None where autograd computes gradients. `sizes` has a number for each symbolic size
    of a micro-batch; `same_process`: whether all stages share their memory, as CPU workers do."""

    def of(stage: Stage) -> KeptBytes | None:
        if stage.backward is None:
            return None

        def found(names: Iterable[str]) -> Memory:
            return _memory(program, stage, names, sizes, same_process)

        saved, taken = found(stage.backward.keeps), found(stage.takes)
        handed = found(halves(stage.backward, program.types).hands)
        return KeptBytes(*(sum(memory.values()) for memory in (saved, taken, handed, saved | taken)))

    return tuple(map(of, program.stages))


def _memory(
    program: Program, stage: Stage, names: Iterable[str], sizes: Mapping[str, int], same_process: bool
) -> Memory:
    """The memory of these values of a stage."""
    found: Memory = {}
    held = {*stage.states, *stage.borrows}
    known = stage.backward.memory if stage.backward is not None else {}
    for name in names:
        kind = program.types.get(name)
        if not isinstance(kind, TensorType):
            continue
        owner, size = known.get(name, (name, kind.nbytes(sizes)))
        if owner in held:
            continue
        source = _source(program, stage, owner) if same_process else None
        if source is not None:
            found |= _memory(program, source[0], [source[1]], sizes, same_process)
        else:
            found[-1 if owner in stage.takes else stage.index, owner] = dim_size(size, sizes)
    return found


def _source(program: Program, stage: Stage, name: str) -> tuple[Stage, str] | None:
    """The stage that a value or gradient comes from, and its name there, if its memory stays the same on the way. The
    gradients of several users are added up, which makes new memory."""
    roots = {gradient: value for value, gradient in stage.backward.roots} if stage.backward is not None else {}
    if name in stage.takes:
        ends = [(move.source, name) for move in program.moves if move.value == name and move.target == stage.index]
    elif name in roots:
        moves = [move for move in program.moves if move.value == roots[name] and move.source == stage.index]
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
    on_cpu = other.device.startswith("cpu") and stage.device.startswith("cpu")
    known = other.backward is not None or name in stage.takes
    return (other, ends[0][1]) if on_cpu and known and not other.replicas and not stage.replicas else None
