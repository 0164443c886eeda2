"""One step under way, as one rank sees it: what its actions send and take, and what its stages borrow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from fxpipe.engines.common.replica_routing import Route, RoutedStep, piece_name
from fxpipe.engines.common.scheduler_base import Batches
from fxpipe.engines.common.step import Rows, Scale, Step, StepEngine, gradient_key
from fxpipe.engines.transports.mailbox import Key
from fxpipe.engines.transports.message_format import Size, blank, failure, nbytes, read, seal
from fxpipe.errors import RankError
from fxpipe.ir.graph.value_types import Dim
from fxpipe.ir.program.device_programs import Message
from fxpipe.ir.program.gradient_buckets import Bucket
from fxpipe.ir.program.messages import LentTensor, Wires
from fxpipe.runtime.step_leaves import Pair, alias

from .rank_group import Lost, World
from .replica_reduce import BucketReduce
from .step_consensus import Numbers

AHEAD = 32  # messages to one rank that may be on their way: what is sent is kept until it has been received
EARLY, SMALL = 16, 2**16  # messages from one rank that may be waited for before the program says so, and their bytes


@dataclass(frozen=True, slots=True)
class RankMessage:
    """A message, as it is sent in every step: what the generated code calls it, the rank at the other end, and its
    form; `number`: the type of a Python number; `route`: how it is cut, if it is a piece."""

    message: Message
    key: Key
    peer: int
    dtype: torch.dtype
    shape: tuple[Dim, ...]
    number: str | None
    route: Route | None


class RankEngine(StepEngine, Protocol):
    """What a step of one rank asks of its scheduler (`RankScheduler`)."""

    def here(self, j: int) -> bool: ...

    def coming(self, last: int) -> dict[int, list[RankMessage]]: ...

    def size(self, wire: RankMessage, known: tuple[int, ...]) -> Size: ...


class RankStep(RoutedStep):
    """One step under way, as one rank sees it. `outbox` has what its actions send, until its program says so; `posted`
    what it has begun to receive, `begun` how much of `coming` from each rank, and `reached` how much of it the program
    has asked for; `far`: the ranks whose messages are waited for early; `sent` what it has begun to send, by rank;
    `numbers`: the outputs that are one number; `broken`: whether it has failed, and `error` why, if it was not another
    rank that has failed before; `whole`: the batch, where this is slices of it; `exchanges`: the buckets of gradients,
    by the names of their parts, and which part that is."""

    engine: RankEngine

    def begin(self, engine: StepEngine, pairs: list[list[Pair]], scale: Scale, rows: Rows) -> None:
        self.known = [tuple([getattr(m, source).shape[dim] for _, source, dim in self.wires.sizes]) for m in self]
        self.exchanges: dict[str, tuple[BucketReduce, int]] = {}
        for bucket in self.wires.buckets:
            dtype = getattr(torch, self.wires.forms[bucket.name(0)].dtype)
            exchange = BucketReduce(bucket, self.replica, dtype, self.world.device, partial(self.stand_ins, bucket))
            for part in range(bucket.replicas):
                self.exchanges |= {bucket.name(part, summed): (exchange, part) for summed in (False, True)}
        super().begin(engine, pairs, scale, rows)
        self.coming = self.engine.coming(self.last)

    def place_in(self, world: World, wires: Wires, seed: int, error: BaseException | None) -> None:
        """Say on which rank of what it is, what random numbers begin with, and whether it has failed already."""
        self.world, self.wires, self.seed = world, wires, seed
        self.whole: Batches | None = None
        self.outbox: dict[Key, tuple[Any, bool]] = {}
        self.posted: dict[Key, tuple[RankMessage, Size, Callable[[], Tensor]]] = {}
        self.sent: dict[int, deque[tuple[Any, Tensor]]] = {rank: deque() for rank in world.others}
        # What NCCL begins to receive is in the way of others.
        self.far = (
            [peer for peer in world.others if peer not in world.local_peers] if world.device.type == "cpu" else []
        )
        self.reached = dict.fromkeys(world.others, 0)
        self.begun = dict.fromkeys(world.others, 0)
        self.awaited: dict[int, list[LentTensor]] = {}
        self.numbers: Numbers = {}
        self.broken, self.error = error is not None, error

    def fail(self, error: BaseException | None) -> None:
        """Nothing more is computed here. The first error is the one to tell of."""
        self.error = self.error if self.broken else error
        self.broken = True

    def report(self) -> None:
        """What ranks tell each other of a step that went well, before it counts: nothing, unless it is timed."""

    def feed(self, name: str, j: int) -> None:
        if self.engine.here(j) and not self.broken:
            super().feed(name, j)

    # Messages ---------------------------------------------------------------------------------------------------------

    def expect(self, wire: RankMessage) -> None:
        """Begin to receive, if that has not begun yet."""
        self.reached[wire.peer] += 1
        if self.begun[wire.peer] < self.reached[wire.peer]:
            self.begin_to_receive(wire.peer, 0)

    def begin_to_receive(self, peer: int, early: int) -> None:
        """Begin to receive what the program has reached, and so many small messages that come after it. With gloo the
        receiver has to tell the sender that it is ready, and if that is said in time nobody waits for it."""
        coming, begun, reached = self.coming[peer], self.begun[peer], self.reached[peer]
        while begun < min(len(coming), reached + early):
            wire, size = coming[begun], self.size(coming[begun])
            if size is None:
                begun += 1
                continue
            if begun >= reached and nbytes(size) > SMALL:
                break
            try:
                self.posted[wire.key] = wire, size, self.world.receive(peer, size)
            except Lost as error:
                self.fail(self.located(error, wire.message))
                begun = len(coming)
                break
            begun += 1
        self.begun[peer] = begun

    def dispatch(self, wire: RankMessage) -> None:
        """Begin to send what an action has left in the outbox; or that this rank has failed."""
        size, message, peer = self.size(wire), wire.message, wire.peer
        if size is None:
            return
        slot = self.world.slot(True, peer, size)
        buffer = blank(size, self.world.device) if slot is None else slot.tensor(size)
        if message.gradient and message.micro_batch is None and not self.broken:
            try:
                self.outbox[wire.key] = self.gradient_of_weights(message), False
            except Exception as error:
                self.fail(error)
        found = self.outbox.pop(wire.key, None)
        if found is None or self.broken:
            failure(buffer)
        else:
            try:
                seal(*found, size, buffer)
            except ValueError as error:
                self.fail(located(error, self.wires, message))
                failure(buffer)
        if slot is not None:
            self.world.put(slot, peer)
            return
        try:
            self.sent[peer].append((self.world.start(True, peer, buffer), buffer))
            while len(self.sent[peer]) > AHEAD:
                self.world.finish(self.sent[peer].popleft()[0], peer)
        except Lost as error:
            self.fail(self.located(error, message))

    def open_message(self, key: Key) -> Any:
        """What a message brings, once it is there. Raises FailedElsewhere or Lost."""
        wire, size, receive = self.posted.pop(key)
        try:
            for peer in self.far:  # there is time, if this waits
                self.begin_to_receive(peer, EARLY)
                self.world.listen(peer)  # for the verdict
            message = receive()
        except Lost as error:
            raise self.located(error, wire.message) from None
        return read(message, size, wire.number)

    def size(self, wire: RankMessage) -> Size | None:
        """The type and shape of what a message carries; None if the two replicas have no samples in common."""
        i, route = wire.message.micro_batch, wire.route
        size = self.engine.size(wire, () if i is None else self.known[i])
        if i is None or route is None:
            return size
        shares = self.routes.pieces(self.rows_of[i], wire.message.target, route)
        rows = next((rows for source, target, rows in shares if (source, target) == wire.message.replicas), None)
        if rows is None:
            return None
        dim, own = route.dim, self.sizes[i]
        if dim is None or rows == own:
            return size
        dtype, shape = size
        return dtype, (*shape[:dim], shape[dim] // own * rows, *shape[dim + 1 :])

    def located(self, error: Lost, message: Message) -> RankError:
        """What was to come of a lost rank, or to go there."""
        found = RankError(str(error))
        located(found, self.wires, message)
        return found

    def _take(self, j: int, i: int, name: str) -> Any:
        key, arrived = (j, i, name), self.mailboxes[j].arrived
        return arrived.pop(key) if key in arrived else self.open_message(key)

    def _put(
        self, j: int, i: int, target: int, to: int, name: str, value: Any, grad: bool, there: Step | None = None
    ) -> None:
        if self.engine.here(target):
            super()._put(j, i, target, to, name, value, grad)
        else:
            self.outbox[target, i, name] = value, grad

    # Tensors that stages lend -----------------------------------------------------------------------------------------

    def lend_all(self) -> None:
        """Borrow from stages of this rank, get ready what others borrow from it, and note what comes from others."""
        for loan in self.wires.lent:
            home, user = self.engine.here(loan.home), self.engine.here(loan.user)
            if home and user:
                setattr(self.lent, loan.borrowed, self.lend(loan.user, self.owned(loan)))
            elif home and self.replica == 0:
                tensor = self.owned(loan)
                for k in range(len(self.wires.replica_groups[loan.user])):
                    self.outbox[self._key(loan, k)] = tensor.detach(), tensor.requires_grad
            elif user:
                self.awaited.setdefault(loan.user, []).append(loan)

    def _key(self, loan: LentTensor, replica: int) -> Key:
        return key_of(Message(loan.state, loan.home, loan.user, replicas=(0, replica)), self.wires)

    def owned(self, loan: LentTensor) -> Tensor:
        """What is lent, as its stage holds it now."""
        return self._held(loan.home, loan.path, loan.constant)

    def _held(self, j: int, path: str, constant: bool) -> Tensor:
        found: Tensor = getattr(self.stages[j], path) if constant else self.stages[j].tensor(path)
        return found

    def borrow(self, j: int) -> None:
        """Take what other ranks lend to stage j, before its first action."""
        for loan in self.awaited.pop(j, ()):
            found = self.open_message(self._key(loan, self.replica))
            setattr(self.lent, loan.borrowed, found)
            if found.requires_grad:
                self.fresh[j].append(found)

    def loan(self, state: str, user: int) -> LentTensor:
        return next(loan for loan in self.wires.lent if (loan.state, loan.user) == (state, user))

    # Gradients of what the model holds --------------------------------------------------------------------------------

    def gradient_of_weights(self, message: Message) -> Tensor | None:
        """What goes once a step: the gradient of what was borrowed, or a part of those that replicas add up."""
        if message.value in self.exchanges:
            exchange, part = self.exchanges[message.value]
            return exchange.part(part)
        found = getattr(self.lent, self.loan(message.value, message.source).borrowed, None)
        return None if found is None else found.grad  # a replica without work has not taken it

    def reduce(self, do: str, message: Message) -> None:
        """Add the gradient of what was lent to what its owner has, or take part in adding up those of replicas."""
        if message.value in self.exchanges:
            exchange, _ = self.exchanges[message.value]
            part = self.open_message(key_of(message, self.wires))
            (exchange.reduce if do == "reduce" else exchange.gather)(message.replicas[0], part)
            return
        if self.engine.here(message.source):  # it is among the pairs of the borrower
            return
        loan, grad = self.loan(message.value, message.source), self.open_message(key_of(message, self.wires))
        if grad is not None:
            stand_in = alias(self.owned(loan))
            stand_in.grad = grad
            self.pairs[loan.home].append((self.owner(self.owned(loan)), stand_in))

    def stand_ins(self, bucket: Bucket) -> list[list[Tensor]]:
        """What has gradients here, for each tensor in a bucket."""
        owners: dict[int, int] = {}
        found: dict[int, list[Tensor]] = {}
        for tensor, stand_in in chain(*self.pairs):
            owners[id(stand_in)] = id(tensor)
            found.setdefault(id(tensor), []).append(stand_in)
        held = [self._held(bucket.stage, *self.wires.paths[name]) for name, _ in bucket.tensors]
        return [found.get(owners.get(id(stand_in), 0), []) for stand_in in held]

    # What an action computes ------------------------------------------------------------------------------------------

    def forward(self, j: int, i: int, *args: Any) -> Any:
        return super().forward(j, i, *args) if self.grad else self.stages[j].forward(*args)

    def forward_to_recompute(self, j: int, i: int, *args: Any) -> Any:
        return super().forward_to_recompute(j, i, *args) if self.grad else self.stages[j].forward(*args)


def name_of(message: Message, wires: Wires) -> str:
    """What the generated code calls a message."""
    name = wires.names.get(message.value, message.value)
    return gradient_key(name, message.source) if message.gradient else name


def key_of(message: Message, wires: Wires) -> Key:
    """Where a message goes, and under which name."""
    name, i = name_of(message, wires), message.micro_batch
    if i is None or len(wires.replica_groups[message.source]) != len(wires.replica_groups[message.target]):
        name = piece_name(name, *message.replicas)
    return message.target, -1 if i is None else i, name


def located(error: Exception, wires: Wires, message: Message) -> Exception:
    """The error, with a note of the message that it is about."""
    at, (stage, replica) = wires.origins.get(message.value), message.sender
    what = "which lends" if message.micro_batch is None else f"micro-batch {message.micro_batch},"
    if message.source == message.target:
        what = "whose replicas add up"
    place = f"stage {stage}, " + f"replica {replica}, " * (replica > 0)
    value = f"{'the gradient of ' * message.gradient}{message.value}"
    error.add_note(f"{place}{what} {value}" + (f", at {at}" if at else ""))
    return error
