"""Pipes in a mesh: each row of ranks is a pipe.

          pp ──▶                       The ranks of a row run a step of their pipe. The ranks of a column run
dp   rank 0 ──▶ rank 1                 collectives (DistributedDataParallel, FSDP2 or DTensor), in which a rank waits
 │     ┆          ┆                    for ever for one that is missing. So before these the column agrees, by
 ▼   rank 2 ──▶ rank 3                 messages, that all its ranks are present, and that no row has failed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fxpipe.errors import RankError

from .failure_attribution import Lost
from .rank_group import World
from .step_consensus import Failure, consensus, describe


class MeshSync:
    """The agreement of a rank with its columns in each call. `worlds`: the columns, one for each dimension of the mesh
    except the pipe's; `due`: how many agreements are left in this call."""

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
        """A context for one call with `due` agreements. If it fails early, it tells the others at those left."""
        self.due = due
        try:
            yield
        except BaseException as error:
            while self.due:
                self.agree(error)
            raise

    def agree(self, error: BaseException | None) -> BaseException | None:
        """Agree with the columns: the error of this rank, or else of another row; None if no row has failed."""
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
        """The values of the ranks of all rows, given those of this row. Raises Lost."""
        for world in self.worlds:
            values = [value for row in world.all_gather_object(values) for value in row]
        return values

    def place(self, rank: int, size: int) -> int:
        """The index in the result of `collect` of rank number `rank` of `size` in this row."""
        for world in self.worlds:
            rank, size = world.rank * size + rank, len(world.labels) * size
        return rank
