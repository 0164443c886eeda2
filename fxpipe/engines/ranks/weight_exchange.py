"""Messages that ranks send once a step: lent tensors, such as tied weights, and gradients of the model's tensors.

A tensor that a call writes on another rank than its home, such as the statistics of a norm that a later kind of call
computes elsewhere, goes there before the call, and back after it, if no rank has failed:

    home ── the tensor as it is ──▶ user: a copy, which the stage writes
    home ◀── the copy, and its gradient ── user

Such tensors are few and small, and go from host to host.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from fxpipe.engines.common.step import Step
from fxpipe.engines.transports.mailbox import Key
from fxpipe.ir.program.device_programs import Message
from fxpipe.ir.program.gradient_buckets import Bucket
from fxpipe.ir.program.messages import LentTensor
from fxpipe.runtime.autograd.gradient_aliases import alias

from .rank_group import World
from .rank_transport import RankTransport
from .replicas.replica_reduce import BucketReduce


class WholeLoans:
    """The tensors of which this rank has a part only, whole, for the stages that borrow them in a step.

    - `values`: by their paths.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.values = values
        self._aliases: dict[str, list[Tensor]] = {path: [] for path in values}

    def alias(self, path: str) -> Tensor:
        """A tensor for one borrower, which collects its gradient."""
        found = alias(self.values[path])
        self._aliases[path].append(found)
        return found

    def gradients(self) -> dict[str, Tensor | None]:
        """The sum of the gradients of all borrowers, by path; None if there are none."""
        known = {path: [one.grad for one in lent if one.grad is not None] for path, lent in self._aliases.items()}
        return {path: sum(grads[1:], start=grads[0]) if grads else None for path, grads in known.items()}


class WeightExchange:
    """Lent tensors and gradients of one rank in one step.

    - `whole`: the lent tensors of which this rank has a part.
    - `awaited`: for each stage of this rank, the loans from other ranks that it has not received yet.
    - `exchanges`: by the name of a message for a part of a bucket, the bucket and the part's number.
    """

    def __init__(self, m: Step, transport: RankTransport, whole: WholeLoans) -> None:
        self.m, self.transport, self.program, self.whole = m, transport, transport.program, whole
        self.table = self.program.table
        self.awaited: dict[int, list[LentTensor]] = {}
        self.exchanges: dict[str, tuple[BucketReduce, int]] = {}
        for bucket in self.table.buckets:
            dtype, device = getattr(torch, self.table.forms[bucket.name(0)].dtype), transport.world.device
            exchange = BucketReduce(bucket, m.plan.replica, dtype, device, partial(self.stand_ins, bucket))
            for part in range(bucket.replicas):
                self.exchanges |= {bucket.name(part, summed): (exchange, part) for summed in (False, True)}

    # Tensors that stages lend -----------------------------------------------------------------------------------------

    def lend(self) -> None:
        """Prepare the messages with tensors that other ranks borrow, and note the tensors that they lend. Loans between
        stages of this rank are done by the scheduler, but for tensors of which this rank has a part."""
        for loan in self.table.lent:
            home, user = self.program.here(loan.home), self.program.here(loan.user)
            whole = self.whole.values.get(loan.path) if home and not loan.constant else None
            if home and user and whole is not None:
                lent = self.whole.alias(loan.path)
                setattr(self.m.lent, loan.borrowed, lent)
                if lent.requires_grad:
                    self.m.fresh[loan.user].append(lent)
            elif home and not user and self.m.plan.replica == 0:
                tensor = self._held(loan.home, loan.path, loan.constant) if whole is None else whole
                for k in range(len(self.table.replica_groups[loan.user])):
                    lent = tensor.detach().requires_grad_(tensor.requires_grad)
                    self.transport.values[self._key(loan, k)] = lent
            elif user and not home:
                self.awaited.setdefault(loan.user, []).append(loan)

    def _key(self, loan: LentTensor, replica: int) -> Key:
        return self.program.key(Message(loan.state, loan.home, loan.user, replicas=(0, replica)))

    def _held(self, j: int, path: str, constant: bool) -> Tensor:
        """A tensor as its stage holds it now."""
        stage = self.m.stages[j]
        found: Tensor = getattr(stage, path) if constant else stage.tensor(path)
        return found

    def borrow(self, j: int) -> None:
        """Receive the tensors that other ranks lend to stage j, before its first action."""
        for loan in self.awaited.pop(j, ()):
            found = self.transport.open_message(self._key(loan, self.m.plan.replica))
            setattr(self.m.lent, loan.borrowed, found)
            if found.requires_grad:
                self.m.fresh[j].append(found)

    def _loan(self, state: str, user: int) -> LentTensor:
        return next(loan for loan in self.table.lent if (loan.state, loan.user) == (state, user))

    # Gradients --------------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Prepare a message with the gradient of a borrowed tensor, or with a part of a bucket."""
        if message.value in self.exchanges:
            exchange, part = self.exchanges[message.value]
            grad: Tensor | None = exchange.part(part)
        else:  # None for a replica without work
            grad = getattr(self.m.lent, self._loan(message.value, message.source).borrowed).grad
        self.transport.values[self.program.key(message)] = grad

    def reduce(self, do: str, message: Message) -> None:
        """Receive the gradient of a lent tensor and add it to its owner's, or receive a part of a bucket."""
        if message.value in self.exchanges:
            exchange, _ = self.exchanges[message.value]
            part = self.transport.open_message(self.program.key(message))
            (exchange.reduce if do == "reduce" else exchange.gather)(message.replicas[0], part)
            return
        if self.program.here(message.source):  # the gradient is among the pairs of the borrower
            return
        loan = self._loan(message.value, message.source)
        grad = self.transport.open_message(self.program.key(message))
        if grad is not None and loan.path in self.whole.values and not loan.constant:
            self.whole.alias(loan.path).grad = grad
        elif grad is not None:
            owned = self._held(loan.home, loan.path, loan.constant)
            stand_in = alias(owned)
            stand_in.grad = grad
            self.m.pairs[loan.home].append((self.m.owner(owned), stand_in))

    def stand_ins(self, bucket: Bucket) -> list[list[Tensor]]:
        """For each tensor of a bucket, its aliases on this rank, which collect its gradient."""
        owners: dict[int, int] = {}
        found: dict[int, list[Tensor]] = {}
        for tensor, stand_in in chain(*self.m.pairs):
            owners[id(stand_in)] = id(tensor)
            found.setdefault(id(tensor), []).append(stand_in)
        held = [self._held(bucket.stage, *self.table.paths[name]) for name, _ in bucket.tensors]
        return [found.get(owners.get(id(stand_in), 0), []) for stand_in in held]


@dataclass(frozen=True)
class WrittenLoan:
    """One tensor: the ranks that are its home and those that write it (replicas; the first ones act), and the tensor or
    the copy, on a rank that is one of them."""

    path: str
    homes: tuple[int, ...]
    users: tuple[int, ...]
    here: Tensor | None


class WrittenLoans:
    """The written loans of a call, in the same order on all ranks."""

    def __init__(self, world: World, loans: Sequence[WrittenLoan]) -> None:
        self.world, self.loans = world, loans

    def fetch(self) -> None:
        """Give the users the tensors as they are now. Raises Lost."""
        for loan in self.loans:
            here = loan.here
            if self.world.rank == loan.homes[0]:
                assert here is not None
                self.world.tell(*loan.users, data=pickle.dumps((here.detach().cpu(), here.requires_grad)))
            elif self.world.rank in loan.users:
                assert here is not None
                value, graded = pickle.loads(self.world.hear(loan.homes[0]))
                with torch.no_grad():
                    here.copy_(value)
                here.grad = None
                here.requires_grad_(graded)

    def give_back(self) -> None:
        """Give the homes what the first user has made of the tensors, and add the gradients. Raises Lost."""
        for loan in self.loans:
            here = loan.here
            if self.world.rank == loan.users[0]:
                assert here is not None
                grad = None if here.grad is None else here.grad.cpu()
                self.world.tell(*loan.homes, data=pickle.dumps((here.detach().cpu(), grad)))
            elif self.world.rank in loan.homes:
                assert here is not None
                value, grad = pickle.loads(self.world.hear(loan.users[0]))
                with torch.no_grad():
                    here.copy_(value)
                if grad is not None:
                    grad = grad.to(here.device)
                    here.grad = grad if here.grad is None else here.grad + grad
