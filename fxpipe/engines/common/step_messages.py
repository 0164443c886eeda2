"""What the workers of a step tell each other: the values that stages send, who is done, and what has failed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from fxpipe.engines.transports.mailbox import Transport
from fxpipe.runtime.autograd.transfer import Transfer, pack, unpack

from .generated_backward import GeneratedBackward
from .replica_routing import Routes, cut, gradient_key, joined, piece_name
from .scheduler_base import Batches
from .step_plan import StepPlan

ABSENT = object()  # in place of a message that is not there


class Progress:
    """How far the workers of a step are.

    - `done`: the workers at the end of their rows.
    - `failed`: the errors, in the order in which they happened.
    - `mailboxes`: those of all workers.
    """

    def __init__(self, mailboxes: Collection[Transport]) -> None:
        self.mailboxes = mailboxes
        self.done: list[str] = []
        self.failed: list[BaseException] = []

    def stop(self, error: BaseException) -> None:
        """Record an error, and stop all workers: none starts another action."""
        self.failed.append(error)
        for mailbox in self.mailboxes:
            mailbox.put(None)


class Messages(Batches):
    """The messages of one step, or with replicas of the step of one worker.

    - `plan`: what was decided before.
    - `views`: where stages have replicas, each worker has a step of its own: these, by stage and replica, all there
      before any begins; None if there are no others in this process.
    - `leaves`: of each input that gets a gradient, its pieces, by micro-batch and the stages that take it.
    - `generated`: by stage that runs here, its own backward; None where autograd computes gradients.
    - `taking`: the stages that take tensors as other stages have made them: such a backward asks no argument whether it
      needs a gradient.
    - `to`: for each stage the mailbox that messages from here to it go into as they are; empty if some are cut, are for
      another device, or are observed.
    """

    def __init__(self, plan: StepPlan, views: Sequence[Sequence[Messages]] | None) -> None:
        super().__init__(plan.batch, plan.place)
        self.plan, self.engine, self.mailboxes, self.routes = plan, plan.engine, plan.mailboxes, plan.routes
        self.views = views
        self.leaves: dict[str, list[list[Tensor]]] = {}
        outputs = [name for name, _, _ in self.engine.outputs]
        self.generated = {
            j: GeneratedBackward(self.stages[j], self.engine.gradients[j], outputs, self.context, self.leaves)
            if self.stages[j].graded is not None
            else None
            for j in plan.own
        }
        self.taking = frozenset[int]()
        self.to: Sequence[Transport] = ()

    def open_mailboxes(self, observed: bool) -> None:
        """Put the inputs into the mailboxes of the stages that run here, and find the short ways."""
        for name, j in self.engine.feeds:
            if j in self.plan.own:
                self.feed(name, j)
        cut_up = () if self.routes is None else [stage for stage, _ in self.routes.of]
        if not self.leaves:
            trained = [j for j, own in self.generated.items() if own is not None and own.trains]
            self.taking = frozenset(trained).difference(cut_up)
        if not (cut_up or observed or self.engine.apart):
            views, k = self.views, self.plan.replica
            self.to = self.mailboxes
            if views is not None:
                self.to = [steps[min(k, len(steps) - 1)].mailboxes[j] for j, steps in enumerate(views)]

    def feed(self, name: str, j: int) -> None:
        """Put the micro-batches' pieces of an input into the mailbox of stage j."""
        values = self.mailboxes[j].values
        for i, micro_batch in enumerate(self):
            piece = getattr(micro_batch, name)
            if isinstance(piece, Tensor):
                wanted, piece = piece.requires_grad, piece.detach()
                if piece.device != self.stages[j].device:
                    source, target = None, self.streams[j, i]
                    parcel = pack(piece, source, target, self.stages[j].device, self.compute[j], False)
                    piece = unpack(parcel, self.compute[j])
                if wanted:
                    piece = piece.requires_grad_()
                    self.leaves.setdefault(name, [[] for _ in self])[i].append(piece)
            values[j, i, name] = piece

    def receive(self, j: int, i: int, *names: str) -> Any:
        """The values sent to stage j for micro-batch i under these names: one value, or a list of several."""
        values, found = self.mailboxes[j].values, []
        for name in names:
            value = values.pop((j, i, name), ABSENT)
            if value is ABSENT or isinstance(value, Transfer):
                value = self._arriving(value, j, i, name)
            found.append(value)
        return found[0] if len(found) == 1 else found

    def receive_gradient(self, j: int, i: int, name: str, source: int) -> Tensor | None:
        """The gradient of a value that stage j gave to stage `source`."""
        key = gradient_key(name, source)
        found: Any = self.mailboxes[j].values.pop((j, i, key), ABSENT)
        if found is ABSENT or isinstance(found, Transfer):
            found = self._arriving(found, j, i, key)
        grad: Tensor | None = found
        return grad

    def _arriving(self, value: Any, j: int, i: int, name: str) -> Any:
        """The value of a message that is not there yet, or that comes from another device."""
        if value is ABSENT:
            if self.routes is not None and (j, name) in self.routes.of:
                return self._join(self.routes, j, i, name)
            mailbox, key = self.mailboxes[j], (j, i, name)
            mailbox.wait(key)
            value = mailbox.values.pop(key)
        return self.open(value, j, i, name) if isinstance(value, Transfer) else value

    def _join(self, routes: Routes, j: int, i: int, name: str) -> Any:
        """The value of this name, joined from the pieces that other replicas sent."""
        route = routes.of[j, name]
        mine = [(k, rows) for k, to, rows in routes.pieces(self.plan.rows_of[i], j, route) if to == self.plan.replica]
        found = [self.receive(j, i, piece_name(name, k, self.plan.replica)) for k, _ in mine]
        if len(found) == 1:
            return found[0]
        # For a value that is the same for all samples, the gradients of its users are added up.
        return self.add(*found) if route.dim is None else joined(found, [rows for _, rows in mine], route.dim)

    def open(self, parcel: Transfer, j: int, i: int, name: str) -> Tensor:
        """The tensor that came from another device, ready for stage j."""
        return unpack(parcel, self.compute[j])

    def send(self, j: int, i: int, name: str, value: Any, to: int) -> None:
        """Send a result of stage j to stage `to`, for which it is a leaf."""
        own, asked, grad = self.generated[j], to not in self.taking, False
        if (asked or own is None) and isinstance(value, Tensor):
            grad = asked and (value.requires_grad if own is None else own.flows and name in own.gradients.gives)
            value = value.detach()
        if self.to and not grad:
            mailbox, key = self.to[to], (to, i, name)
            if mailbox is self.mailboxes[j]:
                mailbox.values[key] = value
            else:
                mailbox.put((key, value))
        else:
            self._post(j, i, to, name, value, grad)

    def send_gradient(self, j: int, i: int, name: str, value: Any, to: int) -> None:
        """Send the gradient of a value, or None if there is none, back to the stage that sent the value."""
        if self.to:
            mailbox, key = self.to[to], (to, i, gradient_key(name, j))
            if mailbox is self.mailboxes[j]:
                mailbox.values[key] = value
            else:
                mailbox.put((key, value))
        else:
            self._post(j, i, to, gradient_key(name, j), value, False)

    def _post(
        self, j: int, i: int, target: int, name: str, value: Any, grad: bool, there: Messages | None = None
    ) -> None:
        """Put a message into the mailbox of the target, as a transfer if that is on another device. `there` is the step
        of the receiving replica."""
        if there is None:
            if self.routes is not None:
                self._post_pieces(self.routes, j, i, target, name, value, grad)
                return
            there = self
        apart = self.engine.apart and self.stages[j].device != there.stages[target].device
        if apart and isinstance(value, Tensor):
            value = self.pack(value, j, i, target, name, grad, there)
        elif grad:
            value.requires_grad_()
        mailbox = there.mailboxes[target]
        if mailbox is self.mailboxes[j]:
            mailbox.values[target, i, name] = value
        else:
            mailbox.put(((target, i, name), value))

    def _post_pieces(self, routes: Routes, j: int, i: int, target: int, name: str, value: Any, grad: bool) -> None:
        """Post a message to the replicas that need it: whole, or to each its piece."""
        views, route, own = self.views, routes.of.get((target, name)), self.plan.replica
        if route is None:
            self._post(j, i, target, name, value, grad, views[target][own] if views else self)
            return
        mine = [(to, rows) for k, to, rows in routes.pieces(self.plan.rows_of[i], target, route) if k == own]
        values = cut(value, route.dim, [rows for _, rows in mine], self.sizes[i])
        for (to, _), piece in zip(mine, values, strict=True):
            there = views[target][to] if views else self
            self._post(j, i, target, piece_name(name, own, to), piece, grad, there)

    def pack(self, value: Tensor, j: int, i: int, target: int, name: str, grad: bool, there: Messages) -> Transfer:
        """Start the transfer of a tensor of stage j to the device of the target."""
        device, user = there.stages[target].device, there.compute[target]
        return pack(value, self.streams[j, i], there.streams[target, i], device, user, grad)

    def add(self, *grads: Tensor | None) -> Tensor | None:
        """The sum of the gradients that are not None, in the order of the arguments; None if all are."""
        found = [grad for grad in grads if grad is not None]
        return sum(found[1:], start=found[0]) if found else None
