"""Ranks that are replicas of one stage add up their gradients, and keep the same values.

torch.distributed's all_reduce could add; but a collective cannot say that a rank has failed (it must take part all the
same), and if a rank is lost, only some of the others see it at once. So the parts of a bucket are ordinary messages:
they stand in the checked programs, they say if their sender has failed, and a wait for a lost rank ends with an error
that names it. `ir/program/gradient_buckets.py` defines these messages.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from fxpipe.engines.ranks.rank_group import World
from fxpipe.engines.transports.communicators import Call as Sent
from fxpipe.engines.transports.message_format import as_bytes
from fxpipe.ir.program.gradient_buckets import Bucket
from fxpipe.runtime import Stage
from fxpipe.runtime.deferred_norms import Call, Pending, Seen, Sums, absorb, commit, discard, sums_of

# Gradients ------------------------------------------------------------------------------------------------------------


class BucketReduce:
    """A bucket in one step, on replica number `replica`.

    - `held()`: for each tensor of the bucket, the aliases on this rank that collect its gradient.
    - `flat`: this replica's gradients, replaced part by part by the sums.
    - `came`: the others' gradients for the part that is added up here; later the sums received, by part.
    """

    def __init__(
        self,
        bucket: Bucket,
        replica: int,
        dtype: torch.dtype,
        device: torch.device,
        held: Callable[[], list[list[Tensor]]],
    ) -> None:
        self.bucket, self.replica, self.held = bucket, replica, held
        self.dtype, self.device = dtype, device
        self.flat: Tensor | None = None
        self.came: dict[int, Tensor] = {}

    def part(self, k: int) -> Tensor:
        """A part: this replica's gradients, or the sums once they are there. A view of `flat`."""
        if self.flat is None:
            self.flat = self._filled()
        start, end = self.bucket.ends(k)
        return self.flat[start:end]

    def reduce(self, sender: int, part: Tensor) -> None:
        """Receive another replica's gradients for the part of this one. Once all are there they are added up, in the
        same order as in one process."""
        self.came[sender] = part
        if len(self.came) == self.bucket.replicas - 1:
            own = self.part(self.replica)
            found = {**self.came, self.replica: own.clone()}
            own.copy_(sum((found[k] for k in range(1, len(found))), start=found[0]))
            self.came.clear()

    def gather(self, sender: int, part: Tensor) -> None:
        """Receive the sums of the part of replica `sender`. Once all are there, they become the gradients."""
        self.part(sender).copy_(part)
        self.came[sender] = part
        if len(self.came) == self.bucket.replicas - 1:
            self._put_back()

    def _filled(self) -> Tensor:
        """A flat tensor: for each tensor of the bucket 1 if it has a gradient, else 0; then the gradients, or zeros."""
        flat = torch.zeros(self.bucket.size, dtype=self.dtype, device=self.device)
        for at, (place, held) in enumerate(zip(self._places(flat), self.held(), strict=True)):
            for grad in [stand_in.grad for stand_in in held if stand_in.grad is not None]:
                flat[at] = 1
                place += grad
        return flat

    def _put_back(self) -> None:
        """Replace the gradients by the sums. If a tensor has several aliases, the first gets the sum, the others
        None."""
        assert self.flat is not None
        marks = self.flat[: len(self.bucket.tensors)].tolist()
        for mark, place, held in zip(marks, self._places(self.flat), self.held(), strict=True):
            for stand_in in held:
                stand_in.grad = None
            if held and mark:
                held[0].grad = torch.empty_like(held[0]).copy_(place)

    def _places(self, flat: Tensor) -> list[Tensor]:
        """The gradient of each tensor, as a view of `flat` in the tensor's shape."""
        shapes = [shape for _, shape in self.bucket.tensors]
        _, *found = torch.split(flat, [len(shapes), *map(prod, shapes)])
        return [part.view(shape) for part, shape in zip(found, shapes, strict=True)]


# Values ---------------------------------------------------------------------------------------------------------------


def broadcast_values(world: World, replica_group: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Give these tensors the values that they have on the first rank of a group of replicas. Raises Lost."""
    first, *others = replica_group
    for tensor in tensors:
        send = world.rank == first
        data = as_bytes(tensor) if send else torch.empty(tensor.nbytes, dtype=torch.uint8, device=world.device)
        calls = [Sent(send, peer, data) for peer in (others if send else [first])]
        if data.numel():
            world.exchange(calls)
            for call in calls:
                world.settle(call)
        if not send:
            with torch.no_grad():
                tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def commit_statistics(world: World, replica_group: Sequence[int], stages: Sequence[Stage]) -> None:
    """At the end of the mini-batch, the first rank updates the running statistics of the stages from the sums of all
    ranks of its group; then its buffers are copied to the others. Raises Lost."""
    first, *others = replica_group
    if world.rank == first:
        for peer in others:
            for stage, sums in zip(stages, pickle.loads(world.hear(peer)), strict=True):
                absorb(stage, sums)
        commit(stages)
    else:
        world.tell(first, data=pickle.dumps([on_cpu(sums_of(stage)) for stage in stages]))
        discard(stages)
    broadcast_values(world, replica_group, written(stages))


def on_cpu(seen: Seen) -> Seen:
    """The sums with their tensors on the CPU, to be sent to another process."""
    norms = {path: replace(one, calls=_calls_on_cpu(one)) for path, one in seen.norms.items()}
    return Seen(
        norms, {path: {call: count.cpu() for call, count in counted.items()} for path, counted in seen.counts.items()}
    )


def _calls_on_cpu(pending: Pending) -> dict[Call, Sums]:
    return {
        call: replace(sums, total=sums.total.cpu(), squares=sums.squares.cpu()) for call, sums in pending.calls.items()
    }


def written(stages: Sequence[Stage]) -> list[Tensor]:
    """The buffers that forward writes."""
    return [stage.tensor(path) for stage in stages for path in stage.mutates]
