"""One step under way, as one rank sees it: what its actions send and take, and what its stages borrow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxpipe.errors import RankError
from fxpipe.ir.device_programs import Message
from fxpipe.ir.types import Dim
from fxpipe.ir.wires import Lent, Wires
from fxpipe.runtime.aliases import Pair, alias

from .box import Key
from .step import Step
from .stepper import Rows, Stepper
from .verdict import Numbers
from .wire import Size, blank, failure, nbytes, read, seal
from .world import Lost, World

if TYPE_CHECKING:
    from .distributed import Ranked

AHEAD = 32  # messages to one rank that may be on their way: what is sent is kept until it has been received
EARLY, SMALL = 16, 2**16  # messages from one rank that may be waited for before the program says so, and their bytes


@dataclass(frozen=True, slots=True)
class Wire:
    """A message, as it is sent in every step: what the generated code calls it, the rank at the other end, and its
    form; `number`: the type of a Python number."""

    message: Message
    key: Key
    peer: int
    dtype: torch.dtype
    shape: tuple[Dim, ...]
    number: str | None


class RankStep(Step):
    """One step under way, as one rank sees it. `outbox` has what its actions send, until its program says so; `posted`
    what it has begun to receive, `begun` how much of `coming` from each rank, and `reached` how much of it the program
    has asked for; `sent` what it has begun to send, by rank; `numbers`: the outputs that are one number;
    `broken`: whether it has failed, and `error` why, if it was not another rank that has failed before."""

    engine: Ranked

    def begin(self, engine: Stepper, pairs: list[list[Pair]], scale: Tensor | None, rows: Rows) -> None:
        self.known = [tuple([getattr(m, source).shape[dim] for _, source, dim in self.wires.sizes]) for m in self]
        super().begin(engine, pairs, scale, rows)
        self.coming = self.engine.coming(self.last)

    def place_in(self, world: World, wires: Wires, seed: int, error: BaseException | None) -> None:
        """Say on which rank of what it is, what random numbers begin with, and whether it has failed already."""
        self.world, self.wires, self.seed = world, wires, seed
        self.outbox: dict[Key, tuple[Any, bool]] = {}
        self.posted: dict[Key, tuple[Wire, Size, Tensor, Any]] = {}
        self.sent: dict[int, deque[tuple[Any, Tensor]]] = {rank: deque() for rank in world.others}
        self.early = EARLY if world.device.type == "cpu" else 0  # what NCCL begins to receive is in the way of others
        self.reached = dict.fromkeys(world.others, 0)
        self.begun = dict.fromkeys(world.others, 0)
        self.awaited: dict[int, list[Lent]] = {}
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

    def expect(self, wire: Wire) -> None:
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
            if begun >= reached and nbytes(size) > SMALL:
                break
            buffer = blank(size, self.world.device)
            try:
                work = self.world.start(False, peer, buffer)
            except Lost as error:
                self.fail(self.located(error, wire.message))
                begun = len(coming)
                break
            self.posted[wire.key] = wire, size, buffer, work
            begun += 1
        self.begun[peer] = begun

    def dispatch(self, wire: Wire) -> None:
        """Begin to send what an action has left in the outbox; or that this rank has failed."""
        size, message, peer = self.size(wire), wire.message, wire.peer
        buffer = blank(size, self.world.device)
        if message.gradient and message.micro_batch is None and not self.broken:
            self.outbox[wire.key] = self.gradient_of_loan(message), False
        found = self.outbox.pop(wire.key, None)
        if found is None or self.broken:
            failure(buffer)
        else:
            try:
                seal(*found, size, buffer)
            except ValueError as error:
                self.fail(located(error, self.wires, message))
                failure(buffer)
        try:
            self.sent[peer].append((self.world.start(True, peer, buffer), buffer))
            while len(self.sent[peer]) > AHEAD:
                self.world.finish(self.sent[peer].popleft()[0], peer)
        except Lost as error:
            self.fail(self.located(error, message))

    def open_message(self, key: Key) -> Any:
        """What a message brings, once it is there. Raises FailedElsewhere or Lost."""
        wire, size, buffer, work = self.posted.pop(key)
        try:
            for peer in self.coming if self.early else ():  # there is time, if this waits
                self.begin_to_receive(peer, self.early)
                self.world.listen(peer)  # for the verdict
            self.world.finish(work, wire.peer)
        except Lost as error:
            raise self.located(error, wire.message) from None
        return read(buffer, size, wire.number)

    def size(self, wire: Wire) -> Size:
        """The type and shape of what a message carries."""
        i = wire.message.micro_batch
        return self.engine.size(wire, () if i is None else self.known[i])

    def located(self, error: Lost, message: Message) -> RankError:
        """What was to come of a lost rank, or to go there."""
        found = RankError(str(error))
        located(found, self.wires, message)
        return found

    def receive(self, j: int, i: int, *names: str) -> Any:
        arrived = self.boxes[j].arrived
        values = [
            arrived.pop(key) if key in arrived else self.open_message(key) for key in [(j, i, name) for name in names]
        ]
        return values[0] if len(values) == 1 else values

    def _post(self, j: int, i: int, target: int, name: str, value: Any, grad: bool, there: Step | None = None) -> None:
        if self.engine.here(target):
            super()._post(j, i, target, name, value, grad)
        else:
            self.outbox[target, i, name] = value, grad

    # Tensors that stages lend -----------------------------------------------------------------------------------------

    def lend_all(self) -> None:
        """Borrow from stages of this rank, get ready what others borrow from it, and note what comes from others."""
        for loan in self.wires.lent:
            home, user = self.engine.here(loan.home), self.engine.here(loan.user)
            if home and user:
                setattr(self.lent, loan.borrowed, self.lend(loan.user, self.owned(loan)))
            elif home:
                tensor = self.owned(loan)
                self.outbox[key_of(Message(loan.state, loan.home, loan.user), self.wires)] = (
                    tensor.detach(),
                    tensor.requires_grad,
                )
            elif user:
                self.awaited.setdefault(loan.user, []).append(loan)

    def owned(self, loan: Lent) -> Tensor:
        """What is lent, as its stage holds it now."""
        stage = self.stages[loan.home]
        found: Tensor = getattr(stage, loan.path) if loan.constant else stage.tensor(loan.path)
        return found

    def borrow(self, j: int) -> None:
        """Take what other ranks lend to stage j, before its first action."""
        for loan in self.awaited.pop(j, ()):
            found = self.open_message(key_of(Message(loan.state, loan.home, j), self.wires))
            setattr(self.lent, loan.borrowed, found)
            if found.requires_grad:
                self.fresh[j].append(found)

    def gradient_of_loan(self, message: Message) -> Tensor | None:
        """The gradient of what was borrowed, all of it."""
        found: Tensor = getattr(self.lent, self.loan(message.value, message.source).borrowed)
        return found.grad

    def loan(self, state: str, user: int) -> Lent:
        return next(loan for loan in self.wires.lent if (loan.state, loan.user) == (state, user))

    def reduce(self, message: Message) -> None:
        """Add the gradient of what was lent to what its owner has."""
        if self.engine.here(message.source):  # it is among the pairs of the borrower
            return
        loan, grad = self.loan(message.value, message.source), self.open_message(key_of(message, self.wires))
        if grad is not None:
            stand_in = alias(self.owned(loan))
            stand_in.grad = grad
            self.pairs[loan.home].append((self.owner(self.owned(loan)), stand_in))

    # What an action computes ------------------------------------------------------------------------------------------

    def forward(self, j: int, i: int, *args: Any) -> Any:
        return super().forward(j, i, *args) if self.grad else self.stages[j].forward(*args)

    def forward_to_recompute(self, j: int, i: int, *args: Any) -> Any:
        return super().forward_to_recompute(j, i, *args) if self.grad else self.stages[j].forward(*args)


def key_of(message: Message, wires: Wires) -> Key:
    """What the generated code calls a message: where it goes, and under which name."""
    name = wires.names.get(message.value, message.value)
    if message.gradient:
        name = f"gradient of {name} from stage {message.source}"
    return message.target, -1 if message.micro_batch is None else message.micro_batch, name


def located(error: Exception, wires: Wires, message: Message) -> Exception:
    """The error, with a note of the message that it is about."""
    at = wires.origins.get(message.value)
    what = f"stage {message.source}, " + (
        "which lends" if message.micro_batch is None else f"micro-batch {message.micro_batch},"
    )
    error.add_note(f"{what} {'the gradient of ' * message.gradient}{message.value}" + (f", at {at}" if at else ""))
    return error
