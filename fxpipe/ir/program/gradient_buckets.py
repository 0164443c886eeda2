"""How replicas of a stage add up their gradients: in buckets, of which each replica adds up a part for all of them.

    replica 0   a a a │ b b b      part 0 goes to replica 0, part 1 to replica 1, and is added up there, in the order of
    replica 1   a a a │ b b b      the replicas; then everybody gets the sums, which so are the same to the last bit

A ring would move as many bytes, and take more turns. Which tensors have a gradient, a step alone knows, so a bucket
begins with a mark for each. Buckets go once their stage has done its last backward, so that other stages go on
meanwhile; those of tensors that are lent go late, with what the borrowers have for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.graph.value_types import TensorType

from .device_programs import Message, Step
from .program import Program

MOST = 25 << 20  # bytes in a bucket, unless one tensor has more


@dataclass(frozen=True)
class Bucket:
    """Number `number` of the buckets of a stage. `tensors`: the names and shapes of the model's tensors whose gradients
    are in it, all of type `dtype`; `late`: whether they are lent; `replicas`: how many parts it has."""

    stage: int
    number: int
    dtype: str
    late: bool
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    replicas: int

    @property
    def size(self) -> int:
        """Elements, the marks first."""
        return len(self.tensors) + sum(prod(shape) for _, shape in self.tensors)

    def ends(self, part: int) -> tuple[int, int]:
        """Where a part begins and ends."""
        return part * self.size // self.replicas, (part + 1) * self.size // self.replicas

    def name(self, part: int, summed: bool = False) -> str:
        """What messages call a part."""
        return f"weights {self.number} of stage {self.stage}, part {part}" + ", summed" * summed

    def message(self, sender: int, receiver: int, summed: bool = False) -> Message:
        """From one replica to another: the part of the receiver, or the sums of the sender's part."""
        name = self.name(sender if summed else receiver, summed)
        return Message(name, self.stage, self.stage, None, True, (sender, receiver))


def buckets(program: Program, stage: int) -> tuple[Bucket, ...]:
    """Those of a stage; none if it has no replicas."""
    own = program.stages[stage]
    if not own.replicas:
        return ()
    lent = {loan.state for loan in program.loans if loan.home == stage}
    kinds = [(state, kind) for state in own.states if isinstance(kind := program.types[state], TensorType)]
    rows = [(state in lent, kind.dtype, state, tuple(map(int, kind.shape))) for state, kind in kinds if kind.grad]
    found: list[tuple[str, bool, list[tuple[str, tuple[int, ...]]]]] = []
    for (late, dtype), group in groupby(sorted(rows, key=lambda row: row[:2]), key=lambda row: row[:2]):
        room = -1
        for _, _, state, shape in group:
            room -= DTYPES[dtype].size * prod(shape)
            if room < 0:
                found.append((dtype, late, []))
                room = MOST - DTYPES[dtype].size * prod(shape)
            found[-1][2].append((state, shape))
    count = len(own.devices)
    return tuple(Bucket(stage, at, dtype, late, tuple(some), count) for at, (dtype, late, some) in enumerate(found))


# What a replica does --------------------------------------------------------------------------------------------------


def begun(bucket: Bucket, replica: int) -> Iterator[Step]:
    """It has its own gradients: those of each part go to who adds it up."""
    yield from (Step("receive", bucket.message(other, replica)) for other in _others(bucket, replica))
    yield from (Step("send", bucket.message(replica, other)) for other in _others(bucket, replica))


def added(bucket: Bucket, replica: int) -> Iterator[Step]:
    """It adds up its part, and tells the others."""
    yield from (Step("reduce", bucket.message(other, replica)) for other in _others(bucket, replica))
    yield from (Step("receive", bucket.message(other, replica, True)) for other in _others(bucket, replica))
    yield from (Step("send", bucket.message(replica, other, True)) for other in _others(bucket, replica))


def gathered(bucket: Bucket, replica: int) -> Iterator[Step]:
    """It puts the sums in the place of its own gradients."""
    yield from (Step("gather", bucket.message(other, replica, True)) for other in _others(bucket, replica))


def _others(bucket: Bucket, replica: int) -> Sequence[int]:
    return [other for other in range(bucket.replicas) if other != replica]
