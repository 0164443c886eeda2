"""Run one rank's part of a pipe: the same generated scheduler, of which each process runs the row of its own device.

    rank 0  run 0F0  send x[0]  run 0F1  send x[1]  receive dx[0] ...       every rank goes through its program, which
    rank 1  receive x[0]  run 1F0  receive x[1]  run 1B0  send dx[0] ...    `add_transfers` has made and checked

To receive is to begin to: nobody waits until an action takes what was to come. To send never waits. All forms are
known, so a step has two small exchanges with the leader beside the values: the header before it, and the verdict after.

A rank that fails goes on to the end of its program without computing: what it sends says that it has failed, and who
takes that fails in turn. So nothing hangs and nothing is left over, and the verdict tells everyone what happened where.
If a rank is lost, those who were to hear from it fail in the same way, and no step can be any more.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import FxpipeError, InputError, RankError
from fxpipe.ir.device_programs import Message
from fxpipe.ir.schedule import Action
from fxpipe.ir.types import Dim, dim_size
from fxpipe.ir.wires import Lent, Wires
from fxpipe.runtime import Stage
from fxpipe.runtime.aliases import Pair, alias, commit_gradients
from fxpipe.runtime.batchnorm import commit
from fxpipe.runtime.microbatch import gather
from fxpipe.runtime.note import add_note
from fxpipe.runtime.stream import use_stream

from .box import Key
from .engine import Batches
from .step import Step
from .stepper import Leaves, Rows, Stepper
from .wire import FailedElsewhere, Size, blank, failure, read, seal
from .world import LEADER, Lost, World

Numbers = dict[int, tuple[Any, torch.dtype]]  # outputs that are one number, by their places
AHEAD = 32  # messages to one rank that may be on their way: what is sent is kept until it has been received


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
    what it has begun to receive; `sent` what it has begun to send, by rank; `numbers`: the outputs that are one number;
    `broken`: whether it has failed, and `error` why, if it was not another rank that has failed before."""

    engine: Ranked

    def begin(self, engine: Stepper, pairs: list[list[Pair]], scale: Tensor | None, rows: Rows) -> None:
        self.known = [tuple([getattr(m, source).shape[dim] for _, source, dim in self.wires.sizes]) for m in self]
        super().begin(engine, pairs, scale, rows)

    def place_in(self, world: World, wires: Wires, seed: int, error: BaseException | None) -> None:
        """Say on which rank of what it is, what random numbers begin with, and whether it has failed already."""
        self.world, self.wires, self.seed = world, wires, seed
        self.outbox: dict[Key, tuple[Any, bool]] = {}
        self.posted: dict[Key, tuple[Wire, Size, Tensor, Any]] = {}
        self.sent: dict[int, deque[tuple[Any, Tensor]]] = {rank: deque() for rank in world.others}
        self.awaited: dict[int, list[Lent]] = {}
        self.numbers: Numbers = {}
        self.broken, self.error = error is not None, error

    def fail(self, error: BaseException | None) -> None:
        """Nothing more is computed here. The first error is the one to tell of."""
        self.error = self.error if self.broken else error
        self.broken = True

    def feed(self, name: str, j: int) -> None:
        if self.engine.here(j) and not self.broken:
            super().feed(name, j)

    # Messages ---------------------------------------------------------------------------------------------------------

    def expect(self, wire: Wire) -> None:
        """Begin to receive."""
        size = self.size(wire)
        buffer = blank(size, self.world.device)
        try:
            work = self.world.start(False, wire.peer, buffer)
        except Lost as error:
            self.fail(self.located(error, wire.message))
        else:
            self.posted[wire.key] = wire, size, buffer, work

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


class Ranked(Stepper):
    """What a generated scheduler becomes on a rank, see `on_rank`: `world` and `wires` say where it is and what goes
    between; the stages of other ranks are empty."""

    def __init__(self, stages: Sequence[Stage], whole: Stage | None, world: World, wires: Wires) -> None:
        self.world, self.wires = world, wires
        self._ranks = tuple(world.labels.index(label) for label in wires.devices)
        super().__init__(stages, whole)
        programs = wires.programs
        rows = dict(zip(programs.devices, programs.rows, strict=True))
        self.program = [(do, self._wire(do, what)) for do, what in rows.get(world.label, ())]
        self._sizes: dict[tuple[str, tuple[int, ...]], Size] = {}
        used = {name for name, j in self.feeds if self.here(j)}
        gives, takes = self.totals
        self._summing = not used.isdisjoint(gives)
        used |= set(takes) if self._summing else set()
        used |= {
            name for (name, _, _), maker in zip(self.outputs, wires.makers, strict=True) if maker < 0 and world.leads
        }
        self._used = used
        self._on_cpu = False  # inputs move to their stages alone

    def _wire(self, do: str, what: Action | Message) -> Action | Message | Wire:
        """A line of the program, with all that can be known before a step."""
        if isinstance(what, Action) or do == "reduce":
            return what
        form, end = self.wires.forms[what.value], what.target if do == "send" else what.source
        dtype: torch.dtype = getattr(torch, form.dtype)
        return Wire(what, key_of(what, self.wires), self._ranks[end], dtype, form.shape, form.number)

    def size(self, wire: Wire, known: tuple[int, ...]) -> Size:
        """The type and shape of what a message carries, for these sizes of its micro-batch."""
        key = wire.message.value, known
        if key not in self._sizes:
            if len(self._sizes) > 10_000:
                self._sizes.clear()  # a program whose shapes never repeat
            sizes = dict(zip((name for name, _, _ in self.wires.sizes), known, strict=False))
            self._sizes[key] = wire.dtype, tuple([dim_size(dim, sizes) for dim in wire.shape])
        return self._sizes[key]

    def here(self, j: int) -> bool:
        """Whether stage j is on this rank."""
        return self._ranks[j] == self.world.rank

    def workers(self) -> set[str]:
        return set()  # beside the calling thread

    def lend(self, m: Batches) -> None:
        assert isinstance(m, RankStep)
        if not m.broken:
            m.lend_all()

    def run(
        self,
        batch: Sequence[Any],
        chunks: int,
        scale: Tensor | None = None,
        seed: int = 0,
        error: BaseException | None = None,
    ) -> tuple[Any, ...]:
        """The outputs, on every rank, for the inputs, of which those must be here that stages of this rank use; each
        rank gets the gradients of its own stages, and those of the inputs that it has. `seed` is what random numbers
        begin with. With an `error`, this rank only takes part, and fails by it."""

        def kind(sizes: tuple[int, ...], place: Any, draws: bool) -> RankStep:
            m = RankStep(sizes, place, False)
            m.place_in(self.world, self.wires, seed, error or self._check(batch))
            return m

        seen = [self._seen(name, value) for (name, _), value in zip(self.inputs, batch, strict=True)]
        m = self.attempt(seen, chunks, scale, kind, {self.devices[-1]: ()})  # one thread has the only box
        commit(self._mutating)
        outputs, pairs = self.outcome(m, batch)
        commit_gradients(pairs)
        return outputs

    def _check(self, batch: Sequence[Any]) -> InputError | None:
        """What is wrong with the inputs, as far as they are used here."""
        missing = [n for (n, _), x in zip(self.inputs, batch, strict=True) if n in self._used and is_meta(x)]
        if not missing:
            return None
        return InputError(
            f"{', '.join(missing)}: not given on rank {self.world.rank}, whose stages use it; pass it there, too"
        )

    def _seen(self, name: str, value: Any) -> Any:
        """An input as this rank needs it: only its shape, where none of its stages takes it."""
        if not isinstance(value, Tensor):
            return value
        if name not in self._used:
            return torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
        return value.cpu() if self.world.device.type == "cpu" and not value.is_meta else value

    def compute_totals(self, batch: Sequence[Any]) -> dict[str, Any]:
        taken = (value for (name, _), value in zip(self.inputs, batch, strict=True) if name in self.totals[1])
        return super().compute_totals(batch) if self._summing and not any(map(is_meta, taken)) else {}

    # The program ------------------------------------------------------------------------------------------------------

    def _run(self, m: Step) -> None:
        """All of this rank's program; back when everyone is done and the verdict is known."""
        assert isinstance(m, RankStep)
        for do, what in self.program:
            i = what.message.micro_batch if isinstance(what, Wire) else what.micro_batch
            if i is not None and i > m.last:
                continue
            if isinstance(what, Action):
                self._act(m, what)
            elif isinstance(what, Wire):
                m.expect(what) if do == "receive" else m.dispatch(what)
            elif not m.broken:
                self._guarded(m, None, m.reduce, what)
        for key in list(m.posted):  # a rank that has failed takes what comes, all the same
            self._guarded(m, None, m.open_message, key)
        self._conclude(m)

    def _act(self, m: RankStep, action: Action) -> None:
        """One action, if nothing has failed yet. What is computed again is so by the backward that needs it."""
        if action.kind == "R" or m.broken:
            return
        method, j = self.methods[action], action.stage

        def act() -> None:
            with use_stream(m.compute[j]):
                m.borrow(j)
                method(self, m, action.micro_batch)

        self._guarded(m, action, act)

    def _guarded(self, m: RankStep, action: Action | None, do: Any, *args: Any) -> None:
        """Do something, and fail with what it raises."""
        try:
            do(*args)
        except FailedElsewhere:
            m.fail(None)
        except Lost as error:
            m.fail(RankError(str(error)))
        except BaseException as error:
            if action is not None and not isinstance(error, RankError):
                add_note(error, self.stages[action.stage], action.stage, action.micro_batch)
            m.fail(error)

    def _conclude(self, m: RankStep) -> None:
        """Wait for what was sent, and hear from the leader how it went. What this rank raises goes to `failed`."""
        for peer, works in m.sent.items():
            for work, _ in works:
                self._guarded(m, None, self.world.finish, work, peer)
        if not m.broken:
            self._guarded(m, None, self._settle, m)
        try:
            found = verdict(self.world, Failure.of(m.error) if m.broken else m.numbers)
        except Lost as error:
            found = str(error)
        if isinstance(found, str):
            m.fail(None)
            m.failed.append(m.error or RankError(found))
        else:
            m.numbers = found

    # Results ----------------------------------------------------------------------------------------------------------

    def gather(self, m: Batches) -> tuple[Any, ...]:
        """The outputs, from who makes them, on all ranks."""
        assert isinstance(m, RankStep)
        whole = []
        for at in range(len(self.outputs)):
            if at in m.numbers:
                number, dtype = m.numbers[at]
                whole.append(torch.tensor(number, dtype=dtype, device=self.world.device))
            else:
                home = self._home(at)
                found = self._gathered(m, at) if home == self.world.rank else None
                whole.append(share_value(self.world, found, home))
        return tuple(whole)

    def _home(self, at: int) -> int:
        """The rank that has output number `at`."""
        maker = self.wires.makers[at]
        return LEADER if maker < 0 else self._ranks[maker]

    def _gathered(self, m: Batches, at: int) -> Any:
        name, dim, reduce = self.outputs[at]
        return gather([getattr(micro_batch, name) for micro_batch in m], dim, reduce, m.sizes)

    def _settle(self, m: RankStep) -> None:
        """Find the outputs of this rank that are tensors of one number, as the loss is."""
        here = [at for at in range(len(self.outputs)) if self._home(at) == self.world.rank]
        for at, value in [(at, self._gathered(m, at)) for at in here if self.outputs[at][1] is None]:
            if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
                m.numbers[at] = value.item(), value.dtype

    def outcome(self, m: Step, batch: Sequence[Any]) -> tuple[tuple[Any, ...], list[Pair]]:
        try:
            outputs, pairs = super().outcome(m, batch)
        except Lost as error:
            raise RankError(str(error)) from None
        return outputs, pairs if m.grad else []

    def _inputs(self, leaves: Leaves, batch: Sequence[Any]) -> list[Pair]:
        """The inputs that need a gradient, with the sum of what the stages of all ranks have for them."""
        named = {name: value for (name, _), value in zip(self.inputs, batch, strict=True) if isinstance(value, Tensor)}
        wanted = {name: value for name, value in named.items() if value.requires_grad and name not in self.detached}
        if not wanted or not torch.is_grad_enabled():
            return []
        ours = {id(value): whole.grad for value, whole in super()._inputs(leaves, batch)}
        mine = {name: ours[id(value)] for name, value in wanted.items() if id(value) in ours}
        parts = self.world.collect({name: None if grad is None else grad.cpu() for name, grad in mine.items()})
        pairs = []
        for name, value in wanted.items():
            grads = [part[name] for part in parts if part.get(name) is not None]
            if grads and not value.is_meta:
                whole = alias(value)
                whole.grad = torch.stack(grads).sum(0).to(value.device)
                pairs.append((value, whole))
        return pairs


def on_rank(
    kind: type[Stepper], stages: Sequence[Stage | None], whole: Stage | None, world: World, wires: Wires
) -> Ranked:
    """The scheduler of a generated package, for one rank of a world. Stages that are not here are None."""
    made: Any = type("Scheduler", (Ranked, kind), {"__module__": kind.__module__})
    empty = Stage({}, {}, world.device)
    scheduler: Ranked = made([stage or empty for stage in stages], whole, world, wires)
    return scheduler


def key_of(message: Message, wires: Wires) -> Key:
    """What the generated code calls a message: where it goes, and under which name."""
    name = wires.names.get(message.value, message.value)
    if message.gradient:
        name = f"gradient of {name} from stage {message.source}"
    return message.target, -1 if message.micro_batch is None else message.micro_batch, name


def is_meta(value: Any) -> bool:
    """Whether it stands for a tensor that other ranks have, and only has its shape."""
    return isinstance(value, Tensor) and value.is_meta


def located(error: Exception, wires: Wires, message: Message) -> Exception:
    """The error, with a note of the message that it is about."""
    at = wires.origins.get(message.value)
    what = f"stage {message.source}, " + (
        "which lends" if message.micro_batch is None else f"micro-batch {message.micro_batch},"
    )
    error.add_note(f"{what} {'the gradient of ' * message.gradient}{message.value}" + (f", at {at}" if at else ""))
    return error


# The verdict ----------------------------------------------------------------------------------------------------------


def describe(error: BaseException | None) -> str:
    """What others are told of an error; nothing, if another rank has failed before."""
    if error is None:
        return ""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    name = "" if isinstance(error, FxpipeError) else f"{type(error).__name__}: "
    return f"{name}{error}{notes}"


@dataclass(frozen=True)
class Failure:
    """What a rank says of its failure; `own` if it is its own, and not that another one is lost, or has failed before:
    then there is no text."""

    text: str
    own: bool

    @staticmethod
    def of(error: BaseException | None) -> Failure:
        return Failure(describe(error), error is not None and not isinstance(error, RankError))


def verdict(world: World, found: Failure | Numbers) -> str | Numbers:
    """What has failed on any rank, or, if nothing has, the numbers of all. `found` is what there is of this rank.
    Raises Lost."""
    if not world.leads:
        world.tell(LEADER, pickle.dumps(found))
        told: str | Numbers = pickle.loads(world.hear(LEADER))
        return told
    heard: list[tuple[int, Failure | Numbers]] = [(LEADER, found)]
    for peer in world.others:
        try:
            heard.append((peer, pickle.loads(world.hear(peer))))
        except Lost as error:
            heard.append((peer, Failure(str(error), False)))
    failures = [(rank, failure) for rank, failure in heard if isinstance(failure, Failure)]
    causes = [f"rank {rank}: {failure.text}" for rank, failure in failures if failure.own]
    causes += [failure.text for _, failure in failures if failure.text and not failure.own]
    if failures:
        told = next(iter(causes), "a rank has failed")
    else:
        told = {at: number for _, numbers in heard if isinstance(numbers, dict) for at, number in numbers.items()}
    for peer in world.others:
        try:
            world.tell(peer, pickle.dumps(told))
        except Lost:
            continue
    return told


def share_value(world: World, value: Any, home: int) -> Any:
    """A tensor, or a number, that one rank has, on all of them. Raises Lost."""
    if world.rank != home:
        found = world.share(None, home)
        return found.to(world.device) if isinstance(found, Tensor) else found
    world.share(value.detach().cpu() if isinstance(value, Tensor) else value, home)
    return value
