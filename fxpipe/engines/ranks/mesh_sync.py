"""A pipe beside others like it: the rows of a mesh, of which each is a pipe of its own.

          pp ──▶                       what goes on in a row is a step of its pipe. What goes on in a column, by
dp   rank 0 ──▶ rank 1                 DistributedDataParallel, FSDP2 or DTensor, are collectives, in which a rank
 │     ┆          ┆                    waits for ever for one that is not there. So before those the column agrees,
 ▼   rank 2 ──▶ rank 3                 by messages, that all are there, and that nothing has failed in any row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fxpipe.errors import RankError

from .rank_group import Lost, World
from .step_consensus import Failure, consensus, describe


class MeshSync:
    """What a rank and those in its column agree on in each call. `worlds`: the columns, one for each dimension of the
    mesh beside that of the pipe; `due`: how often they are to agree before this call ends."""

    def __init__(self, worlds: Sequence[World]) -> None:
        self.worlds, self.due = tuple(worlds), 0

    @property
    def name(self) -> str:
        """This rank's row."""
        return f"pipe {', '.join(str(world.rank) for world in self.worlds)}"

    @property
    def leads(self) -> bool:
        """Whether this is the first row."""
        return all(world.leads for world in self.worlds)

    @contextmanager
    def call(self, due: int) -> Iterator[None]:
        """In this context a call is made. If it fails early, the others hear of it when they are to agree."""
        self.due = due
        try:
            yield
        except BaseException as error:
            while self.due:
                self.agree(error)
            raise

    def agree(self, error: BaseException | None) -> BaseException | None:
        """The error of this rank, or else that of another row; None if there is none at all."""
        self.due -= 1
        for world in self.worlds:
            try:
                told = consensus(world, {} if error is None else Failure(f"{self.name}: {describe(error)}", False))
            except Lost as lost:
                told = str(lost)
            if error is None and isinstance(told, str):
                error = RankError(f"beside this rank: {told}")
        return error

    def collect(self, values: list[Any]) -> list[Any]:
        """What the ranks of all rows have, given what those of this row have. Raises Lost."""
        for world in self.worlds:
            values = [value for row in world.collect(values) for value in row]
        return values

    def place(self, rank: int, size: int) -> int:
        """Where in that is what this rank has, number `rank` of so many in its row."""
        for world in self.worlds:
            rank, size = world.rank * size + rank, len(world.labels) * size
        return rank
