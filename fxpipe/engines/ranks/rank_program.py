"""The program of one rank: the row of its device, with all details of messages that are known before a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from fxpipe.engines.common.replica_routing import Cut, Route, Routes, gradient_key, piece_name
from fxpipe.engines.transports.mailbox import Key
from fxpipe.engines.transports.message_format import Size
from fxpipe.ir.graph.value_types import Dim, dim_size
from fxpipe.ir.program.device_programs import (
    ALL_GATHER,
    REDUCE_SCATTER,
    GroupCall,
    Message,
    Step,
    batches,
)
from fxpipe.ir.program.messages import MessageTable
from fxpipe.ir.schedule.schedule import Action

from .rank_group import World


@dataclass(frozen=True, slots=True)
class RankMessage:
    """A message, as it is sent in every step.

    - `key`: its target stage, micro-batch, and name in the generated code.
    - `peer`: the rank at the other end.
    - `dtype`, `shape`: those of the whole value; `scalar_type`: the type of a Python number, None for a tensor.
    - `route`: how the value is cut, if the message is a piece.
    """

    message: Message
    key: Key
    peer: int
    dtype: torch.dtype
    shape: tuple[Dim, ...]
    scalar_type: str | None
    route: Route | None


@dataclass(frozen=True, slots=True)
class RankCollective:
    """A collective of several ranks.

    - `kind`, `dim`: as in `GroupCall`; `ranks`: those that take part, in the order of the slices.
    - `own`: the message of this rank; its form is that of a slice if `sliced`, else that of the whole.
    """

    kind: str
    dim: int
    ranks: tuple[int, ...]
    own: RankMessage
    sliced: bool

    @property
    def micro_batch(self) -> int:
        return self.own.message.micro_batch or 0


Batch = tuple[tuple[bool, RankMessage], ...]  # messages that begin in one call, each as (whether it is sent, message)
# What a rank does, and with what: ("run", Action), ("reduce" or "gather", Message), ("batch", Batch), or ("collective",
# RankCollective).
Line = tuple[str, Any]


class RankProgram:
    """The program of one rank of `world`.

    - `ranks`: for each stage, the ranks of its replicas; `own`: the stages on this rank.
    - `replica_group`: the ranks that have the same stages as this one; `replica`: its number among them.
    - `routes`: how messages are cut between stages of different numbers of replicas.
    - `lines`: what it does, in order: each an action or reduction, or a batch of sends and receives.
    """

    def __init__(self, world: World, table: MessageTable, cuts: Iterable[Cut]) -> None:
        self.world, self.table = world, table
        self.ranks = tuple(tuple(map(world.labels.index, labels)) for labels in table.replica_groups)
        self.own = [j for j in range(len(self.ranks)) if self.here(j)]
        self.replica_group = self.ranks[self.own[0]] if self.own else (world.rank,)
        self.replica = self.replica_group.index(world.rank)
        self.routes = Routes(map(len, self.ranks), cuts)
        programs = table.programs
        rows = dict(zip(programs.devices, programs.rows, strict=True))
        self.lines = [self._line([step for _, step in batch]) for batch in batches(rows.get(world.label, ()))]
        self._sizes: dict[tuple[str, tuple[int, ...]], Size] = {}

    def here(self, j: int) -> bool:
        """Whether stage j is on this rank."""
        return self.world.rank in self.ranks[j]

    def _line(self, steps: Sequence[Step]) -> Line:
        do, what, _ = steps[0]
        if isinstance(what, GroupCall):
            own = next(message for message in what.messages if self.here(message.source))
            # A message has the shape of what its later stage takes: in forward that is the result of the collective, in
            # backward the part that this stage gives.
            sliced = what.kind == (ALL_GATHER if own.gradient else REDUCE_SCATTER)
            entry = self._message("send", own)
            return "collective", RankCollective(what.kind, what.dim, self._group(what), entry, sliced)
        if isinstance(what, Action) or do in ("reduce", "gather"):
            return do, what
        return "batch", tuple(
            [(do == "send", self._message(do, what)) for do, what, _ in steps if isinstance(what, Message)]
        )

    def _group(self, call: GroupCall) -> tuple[int, ...]:
        """The ranks that take part in a collective, in the order of the slices."""
        return tuple(self.ranks[message.source][0] for message in call.messages)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that have collectives, in the same order on all ranks."""
        steps = chain.from_iterable(self.table.programs.rows)
        return tuple(sorted({self._group(step.what) for step in steps if isinstance(step.what, GroupCall)}))

    def _message(self, do: str, what: Message) -> RankMessage:
        form, end = self.table.forms[what.value], what.target if do == "send" else what.source
        dtype: torch.dtype = getattr(torch, form.dtype)
        peer = self.ranks[end][what.replicas[do == "send"]]
        route = self.routes.of.get((what.target, self.name(what)))
        return RankMessage(what, self.key(what), peer, dtype, form.shape, form.number, route)

    def name(self, message: Message) -> str:
        """The name of a message in the generated code."""
        name = self.table.names.get(message.value, message.value)
        return gradient_key(name, message.source) if message.gradient else name

    def key(self, message: Message) -> Key:
        """The mailbox key of a message: target stage, micro-batch (-1: once a step), name."""
        name, i = self.name(message), message.micro_batch
        if i is None or len(self.ranks[message.source]) != len(self.ranks[message.target]):
            name = piece_name(name, *message.replicas)
        return message.target, -1 if i is None else i, name

    def size(self, entry: RankMessage, known: tuple[int, ...]) -> Size:
        """The type and shape of a message's value, for the sizes `known` of its micro-batch."""
        key = entry.message.value, known
        if key not in self._sizes:
            if len(self._sizes) > 10_000:
                self._sizes.clear()  # bounds the memory of a program whose shapes never repeat
            sizes = dict(zip((name for name, _, _ in self.table.sizes), known, strict=False))
            self._sizes[key] = entry.dtype, tuple([dim_size(dim, sizes) for dim in entry.shape])
        return self._sizes[key]

    def located(self, error: Exception, message: Message) -> Exception:
        """The error, with a note that describes the message."""
        at, (stage, replica) = self.table.origins.get(message.value), message.sender
        what = "which lends" if message.micro_batch is None else f"micro-batch {message.micro_batch},"
        if message.source == message.target:
            what = "whose replicas add up"
        place = f"stage {stage}, " + f"replica {replica}, " * (replica > 0)
        value = f"{'the gradient of ' * message.gradient}{message.value}"
        error.add_note(f"{place}{what} {value}" + (f", at {at}" if at else ""))
        return error
