"""Collectives of the process group in `rendezvous_group.py`: each is one entry of the queue, on all ranks.

They have both names where torch has renamed them: its own groups have public ones from torch 2.14 on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

REDUCE: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda all: all.sum(0),
    dist.ReduceOp.AVG: lambda all: all.mean(0),
    dist.ReduceOp.MIN: lambda all: all.amin(0),
    dist.ReduceOp.MAX: lambda all: all.amax(0),
}


class Part(NamedTuple):
    """What a collective does with a tensor: `give[r]` goes to rank r, what rank r gives is put into `take[r]`; `finish`
    follows. None: nothing goes that way."""

    give: Sequence[Tensor | None]
    take: Sequence[Tensor | None]
    finish: Callable[[], object] = lambda: None


class Collectives(dist.ProcessGroup):
    """A process group of `count` ranks, this one being `own`, that has `collective`."""

    own: int
    count: int

    def collective(self, what: str, parts: Sequence[Part], result: Sequence[Tensor] = ()) -> Any:
        """Put an entry into the queue: its work, whose future has the result."""
        raise NotImplementedError

    # The parts of each ------------------------------------------------------------------------------------------------

    def everywhere(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * self.count

    def of_root(self, root: int, tensor: Tensor | None) -> list[Tensor | None]:
        return [tensor if rank == root else None for rank in range(self.count)]

    def gathered(self, tensor: Tensor, into: Sequence[Tensor]) -> Part:
        return Part(self.everywhere(tensor), into)

    def reduced(self, tensors: Sequence[Tensor], into: Tensor, op: Any) -> Part:
        found = torch.empty((self.count, *into.shape), dtype=into.dtype)
        return Part(tensors, list(found), lambda: into.copy_(REDUCE[op.op](found)))

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.view(-1).chunk(self.count)

    # By the names of torch --------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        op = dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp
        return self.collective(
            f"allreduce {op.op.name}", [self.reduced(self.everywhere(x), x, op) for x in tensors], tensors
        )

    allreduce_coalesced = allreduce

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self.collective("allgather", [self.gathered(x, y) for y, x in zip(outputs, inputs, strict=True)])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self.allgather([list(self.split(output)) for output in outputs], [x.view(-1) for x in inputs])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        parts = [self.reduced(xs, y, opts.reduceOp) for y, xs in zip(outputs, inputs, strict=True)]
        return self.collective(f"reduce_scatter {opts.reduceOp.op.name}", parts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self.reduce_scatter([y.view(-1) for y in outputs], [list(self.split(x)) for x in inputs], opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        root = opts.rootRank
        nothing = self.of_root(root, None)
        parts = [
            Part(self.everywhere(x), self.of_root(root, x))
            if self.own == root
            else Part(nothing, self.of_root(root, x))
            for x in tensors
        ]
        return self.collective("broadcast", parts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        root = opts.rootRank
        given = inputs[0] if self.own == root else self.of_root(root, None)
        return self.collective("scatter", [Part(given, self.of_root(root, outputs[0]))])

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: list[int], splits: list[int], opts: Any = None
    ) -> Any:
        give, take = (
            x.split(sizes) if sizes else x.chunk(self.count) for x, sizes in ((given, splits), (output, output_splits))
        )
        return self.collective("all_to_all", [Part(give, take)])

    def barrier(self, opts: Any = None) -> Any:
        return self.allreduce([torch.zeros(1)])

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
