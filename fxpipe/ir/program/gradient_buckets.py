"""How replicas of a stage add up their gradients: in buckets, each cut into one part per replica.

    replica 0   a a a │ b b b      part k is sent to replica k, which adds it up in the order of the replicas, and sends
    replica 1   a a a │ b b b      the sums to all others: so all have the same sums, to the last bit

A ring would move as many bytes in more rounds. Only the step shows which tensors have a gradient, so a bucket begins
with a mark for each tensor. Buckets are sent after the last backward of their stage, while other stages go on. Buckets
of lent tensors ("late") are sent at the end of the step, when the gradients of the borrowers are there.
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
    """One of the buckets of a stage.

    - `stage`: the stage; `number`: the number of the bucket in it.
    - `tensors`: the names and shapes of the tensors whose gradients are in the bucket, all of type `dtype`.
    - `late`: whether these tensors are lent.
    - `replicas`: the number of replicas, and so of parts.
    """

    stage: int
    number: int
    dtype: str
    late: bool
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    replicas: int

    @property
    def size(self) -> int:
        """The number of elements, the marks included."""
        return len(self.tensors) + sum(prod(shape) for _, shape in self.tensors)

    def ends(self, part: int) -> tuple[int, int]:
        """The first element of a part, and the one after its last."""
        return part * self.size // self.replicas, (part + 1) * self.size // self.replicas

    def name(self, part: int, summed: bool = False) -> str:
        """The name of a part in messages."""
        return f"weights {self.number} of stage {self.stage}, part {part}" + ", summed" * summed

    def message(self, sender: int, receiver: int, summed: bool = False) -> Message:
        """The message from one replica to another with the receiver's part, or, if `summed`, the sums of the sender's
        part."""
        name = self.name(sender if summed else receiver, summed)
        return Message(name, self.stage, self.stage, None, True, (sender, receiver))


def buckets(program: Program, stage: int) -> tuple[Bucket, ...]:
    """The buckets of a stage; none if it has no replicas. Gradients of sharded parameters are in none: each backward
    has scattered them."""
    own = program.stages[stage]
    if not own.replicas:
        return ()
    lent = {loan.state for loan in program.loans if loan.home == stage}
    states = [state for state in own.states if state not in program.sharded]
    kinds = [(state, kind) for state in states if isinstance(kind := program.types[state], TensorType)]
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
    """The steps once a replica has its own gradients: it sends each part to the replica that adds it up."""
    yield from (Step("receive", bucket.message(other, replica)) for other in _others(bucket, replica))
    yield from (Step("send", bucket.message(replica, other)) for other in _others(bucket, replica))


def added(bucket: Bucket, replica: int) -> Iterator[Step]:
    """The steps in which a replica adds up its part, and sends the sums to the others."""
    yield from (Step("reduce", bucket.message(other, replica)) for other in _others(bucket, replica))
    yield from (Step("receive", bucket.message(other, replica, True)) for other in _others(bucket, replica))
    yield from (Step("send", bucket.message(replica, other, True)) for other in _others(bucket, replica))


def gathered(bucket: Bucket, replica: int) -> Iterator[Step]:
    """The steps in which a replica replaces its own gradients by the sums."""
    yield from (Step("gather", bucket.message(other, replica, True)) for other in _others(bucket, replica))


def _others(bucket: Bucket, replica: int) -> Sequence[int]:
    return [other for other in range(bucket.replicas) if other != replica]
