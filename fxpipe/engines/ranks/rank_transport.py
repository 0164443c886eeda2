"""The messages of a step between ranks: sent and received when the program says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fxpipe.engines.common.step import Step
from fxpipe.engines.transports.mailbox import Key
from fxpipe.engines.transports.message_format import Size, blank, failure, nbytes, read, seal
from fxpipe.errors import RankError
from fxpipe.ir.program.device_programs import Message

from .rank_group import Lost
from .rank_program import RankMessage, RankProgram

AHEAD = 32  # the most unfinished sends to one rank; each keeps its buffer
EARLY, SMALL = 16, 2**16  # how many receives from one rank may be posted early, and the most bytes of each


class RankTransport:
    """The messages of one step, as one rank sees them: the mailbox of all stages.

    - `arrived`: the values received for stages of this rank, and the values that these have sent to others.
    - `posted`: the posted receives; `sent`: the unfinished sends, by rank.
    - `coming`: the messages from each rank, in order; `begun`: how many of them have a posted receive; `reached`: how
      many receives the program has reached.
    - `far`: the ranks from which receives are posted early.
    - `broken`: whether this rank has failed; `error`: why, or None if another rank failed first.
    """

    def __init__(self, program: RankProgram, m: Step, error: BaseException | None) -> None:
        self.program, self.world = program, program.world
        self.rows_of, self.sizes = m.rows_of, m.sizes
        self.known = [tuple([getattr(one, source).shape[dim] for _, source, dim in program.table.sizes]) for one in m]
        self.coming = program.coming(m.last)
        self.arrived: dict[Key, Any] = {}
        self.posted: dict[Key, tuple[RankMessage, Size, Callable[[], Tensor]]] = {}
        others = self.world.others
        self.sent: dict[int, deque[tuple[Any, Tensor]]] = {rank: deque() for rank in others}
        # On GPUs nothing is received early: a posted NCCL receive delays the operations after it.
        self.far = [peer for peer in others if peer not in self.world.local_peers] * (self.world.device.type == "cpu")
        self.reached, self.begun = dict.fromkeys(others, 0), dict.fromkeys(others, 0)
        self.broken, self.error = error is not None, error

    def fail(self, error: BaseException | None) -> None:
        """Mark this rank as failed: it computes nothing more. Only the first error is kept."""
        self.error = self.error if self.broken else error
        self.broken = True

    def put(self, message: tuple[Key, Any] | None) -> None:
        if message is not None:
            self.arrived[message[0]] = message[1]

    def wait(self, key: Key) -> None:
        self.arrived[key] = self.open_message(key)

    def expect(self, entry: RankMessage) -> None:
        """Post the receive of a message, unless it is posted already."""
        self.reached[entry.peer] += 1
        if self.begun[entry.peer] < self.reached[entry.peer]:
            self.begin_to_receive(entry.peer, 0)

    def begin_to_receive(self, peer: int, early: int) -> None:
        """Post the receives that the program has reached, and up to `early` small ones after them. In gloo the receiver
        tells the sender that it is ready; if it does so early, the sender need not wait."""
        coming, begun, reached = self.coming[peer], self.begun[peer], self.reached[peer]
        while begun < min(len(coming), reached + early):
            entry, size = coming[begun], self.size(coming[begun])
            if size is None:
                begun += 1
                continue
            if begun >= reached and nbytes(size) > SMALL:
                break
            try:
                self.posted[entry.key] = entry, size, self.world.receive(peer, size)
            except Lost as error:
                self.fail(self.located(error, entry.message))
                begun = len(coming)
                break
            begun += 1
        self.begun[peer] = begun

    def dispatch(self, entry: RankMessage) -> None:
        """Begin to send the value of a message, or, if this rank has failed, the message that says so."""
        size, message, peer = self.size(entry), entry.message, entry.peer
        if size is None:
            return
        slot = self.world.slot(True, peer, size)
        buffer = blank(size, self.world.device) if slot is None else slot.tensor(size)
        if self.broken or entry.key not in self.arrived:
            failure(buffer)
        else:
            value = self.arrived.pop(entry.key)
            grad = isinstance(value, Tensor) and value.requires_grad
            try:
                seal(value.detach() if grad else value, grad, size, buffer)
            except ValueError as error:
                self.fail(self.program.located(error, message))
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
        """Wait for a message: its value. Raises FailedElsewhere if its sender has failed, RankError if a rank is
        lost."""
        entry, size, receive = self.posted.pop(key)
        try:
            for peer in self.far:  # this rank is about to wait, so there is time
                self.begin_to_receive(peer, EARLY)
                self.world.listen(peer)  # for the verdict
            message = receive()
        except Lost as error:
            raise self.located(error, entry.message) from None
        return read(message, size, entry.number)

    def size(self, entry: RankMessage) -> Size | None:
        """The type and shape of a message's value; None if the two replicas have no samples in common."""
        i, route = entry.message.micro_batch, entry.route
        size = self.program.size(entry, () if i is None else self.known[i])
        if i is None or route is None:
            return size
        shares = self.program.routes.pieces(self.rows_of[i], entry.message.target, route)
        rows = next((rows for source, target, rows in shares if (source, target) == entry.message.replicas), None)
        if rows is None:
            return None
        dim, own = route.dim, self.sizes[i]
        if dim is None or rows == own:
            return size
        dtype, shape = size
        return dtype, (*shape[:dim], shape[dim] // own * rows, *shape[dim + 1 :])

    def located(self, error: Lost, message: Message) -> Exception:
        """A RankError with a note of the message to or from the lost rank."""
        return self.program.located(RankError(str(error)), message)
