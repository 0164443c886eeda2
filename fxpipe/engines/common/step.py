"""One training step under way: what each action of a stage on a micro-batch takes, computes, keeps and sends.

Autograd's graph ends at the borders of a stage: what arrives is a leaf, and its gradient is sent back to where it came
from. So backward of each stage and micro-batch is a run of autograd of its own, on the worker of the stage, and its
order is the schedule's. Generated schedulers call the methods of `Step`; `step_engine.py` says when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fxpipe.engines.transports.mailbox import Transport
from fxpipe.ir.schedule.schedule import Action
from fxpipe.runtime import Stage
from fxpipe.runtime.autograd.is_recomputing import recomputing
from fxpipe.runtime.autograd.offload import Offload, offload
from fxpipe.runtime.autograd.saved_tensors import Saved
from fxpipe.runtime.autograd.split_backward import Weights, input_gradient, weight_gradient
from fxpipe.runtime.autograd.transfer import Transfer, pack, unpack
from fxpipe.runtime.autograd.unalias_gradients import unshare
from fxpipe.runtime.gradient_aliases import Pair, alias
from fxpipe.runtime.random import replica_seed
from fxpipe.runtime.written_buffers import instead, keep, scratch

from .replica_routing import Routes, cut, gradient_key, joined, piece_name
from .scheduler_base import Batches

Scale = Tensor | float | None  # what all gradients are multiplied with


class Kept:
    """What forward of one stage and micro-batch keeps: its arguments, its results with their graph (None: to be
    computed again), and what its buffers held."""

    __slots__ = ("args", "buffers", "results")

    def __init__(
        self, args: tuple[Any, ...], results: tuple[Any, ...] | None, buffers: dict[str, Tensor] | None = None
    ) -> None:
        self.args, self.results, self.buffers = args, results, buffers or {}

    def roots(
        self, grads: Sequence[Tensor | None], places: Iterable[int]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The results that have a gradient to pass on, and it."""
        results = self.results
        assert results is not None
        pairs = [
            (results[place], grad)
            for place, grad in zip(places, grads, strict=True)
            if grad is not None and results[place].requires_grad
        ]
        return tuple([y for y, _ in pairs]), tuple([grad for _, grad in pairs])


Method = Callable[[Any, "Step", int], None]  # of a generated scheduler: its step, the micro-batch
Row = tuple[tuple[Action, Method], ...]
Rows = Mapping[str, Row]  # what each worker does, by its label


class Gradients(NamedTuple):
    """What of a stage has a gradient: of its arguments and of its results, the names and places of these."""

    takes: Mapping[str, int]
    gives: Mapping[str, int]


class StepEngine(Protocol):
    """What a step asks of the scheduler whose rows it runs (`StepScheduler` says what each is).

    `at_once`: stages and micro-batches whose backward follows their forward at once; `splits`: whether any backward is
    in two halves.
    """

    devices: tuple[str, ...]
    feeds: tuple[tuple[str, int], ...]
    gradients: tuple[Gradients, ...]
    offloaded: tuple[int, ...]
    loss_reduce: str | None
    at_once: set[tuple[int, int]]
    splits: bool

    def lend(self, m: Any) -> None: ...


class Observer(Protocol):
    """What looks on while a step runs, and may `wrap` methods of it."""

    def begin(self, m: Step) -> None:
        """The step is ready; of one with replicas, the part of each worker is."""


class Step(Batches):
    """One step under way: the micro-batches, the messages, and what forward keeps for backward.

    - `mailboxes`: by stage, where what is sent to it goes, and what has come for it is found.
    - `kept`: by stage and micro-batch, the arguments and results of a forward run.
    - `weights`: what is left of a backward whose first half is done.
    - `pairs`: of each stage, what the model holds, and the aliases that collect its gradients; `fresh`: those aliases
      that have none yet.
    - `rows`: what each worker does; `done`: the workers at the end of their rows.
    - `failed`: the errors, in the order in which they happened.

    Where stages have replicas, each worker has a step of its own, of its slices of the micro-batches in which it has a
    part, which are the first ones:

    - `own`: the stages that it runs, and its number among their replicas, `replica`.
    - `routes`: how messages are cut between stages of different numbers of replicas; `rows_of`: the samples in each
      whole micro-batch.
    - `views`: by stage and replica, the steps of all workers; None where only this one is in this process.
    """

    own: Collection[int]
    replica = 0
    routes: Routes | None = None
    rows_of: tuple[int, ...] = ()
    views: Sequence[Sequence[Step]] | None = None

    def slice_of(self, whole: Batches, replica: int, routes: Routes) -> None:
        """Say of which batch it has slices."""
        self.rows_of, self.total = whole.sizes, whole.total
        self.replica, self.routes, self.seed = replica, routes, replica_seed(whole.seed, replica)

    def begin(
        self,
        engine: StepEngine,
        pairs: list[list[Pair]],
        scale: Scale,
        rows: Rows,
        mailboxes: Sequence[Transport],
        own: Collection[int],
        observer: Observer | None = None,
    ) -> None:
        """Make ready: put the pieces of the batch into the mailboxes of the stages that run here."""
        self.engine, self.pairs, self.scale = engine, pairs, scale
        self.rows, self.mailboxes, self.own = rows, mailboxes, own
        self.kept: dict[tuple[int, int], Kept] = {}
        self.weights: dict[tuple[int, int], Weights] = {}
        self.done: list[str] = []
        self.failed: list[BaseException] = []
        self.fresh: list[list[Tensor]] = [[] for _ in self.stages]
        self.leaves: dict[str, list[list[Tensor]]] = {}
        self.shares = tuple([size / self.total for size in self.sizes])
        self.hooks = self.make_hooks()
        for name, j in engine.feeds:
            if j in own:
                self.feed(name, j)
        engine.lend(self)
        for fresh, held in zip(self.fresh, pairs, strict=True):
            fresh += [stand_in for _, stand_in in held]
        if observer is not None:
            observer.begin(self)

    def make_hooks(self) -> list[Saved | Offload | None]:
        """What looks after the tensors that autograd keeps, for each stage: moves them to the host, or, where backward
        has two halves, lets go of those that the second has no use for."""

        def hooks(j: int, stage: Stage) -> Saved | Offload | None:
            held = [stand_in for _, stand_in in self.pairs[j]]
            if j in self.engine.offloaded:
                return offload(stage.device, held)
            return Saved(held) if self.engine.splits and not stage.compiled else None

        return [hooks(j, stage) for j, stage in enumerate(self.stages)]

    # Messages ---------------------------------------------------------------------------------------------------------

    def feed(self, name: str, j: int) -> None:
        """The pieces of an input, for stage j."""
        arrived = self.mailboxes[j].arrived
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
            arrived[j, i, name] = piece

    def receive(self, j: int, i: int, *names: str) -> Any:
        """What has been sent to stage j for micro-batch i under these names, one by itself, else a tuple."""
        mailbox, routes = self.mailboxes[j], self.routes
        arrived, values = mailbox.arrived, []
        for name in names:
            if routes is not None and (j, name) in routes.of:
                values.append(self._join(routes, j, i, name))
                continue
            key = (j, i, name)
            if key not in arrived:
                mailbox.wait(key)
            value = arrived.pop(key)
            values.append(self.open(value, j, i, name) if isinstance(value, Transfer) else value)
        return values[0] if len(values) == 1 else values

    def _join(self, routes: Routes, j: int, i: int, name: str) -> Any:
        """What has been sent under a name, by all who had a piece of it."""
        route = routes.of[j, name]
        mine = [(k, rows) for k, to, rows in routes.pieces(self.rows_of[i], j, route) if to == self.replica]
        found = [self.receive(j, i, piece_name(name, k, self.replica)) for k, _ in mine]
        if len(found) == 1:
            return found[0]
        # What is the same for all samples has the sum of the gradients that its users have for it.
        return self.add(*found) if route.dim is None else joined(found, [rows for _, rows in mine], route.dim)

    def open(self, parcel: Transfer, j: int, i: int, name: str) -> Tensor:
        """What comes from another device, for stage j."""
        return unpack(parcel, self.compute[j])

    def receive_gradient(self, j: int, i: int, name: str, source: int) -> Tensor | None:
        """The gradient of a value that stage j gave to stage `source`."""
        found: Tensor | None = self.receive(j, i, gradient_key(name, source))
        return found

    def send(self, j: int, i: int, name: str, value: Any, to: int) -> None:
        """A result of stage j, as a leaf of the stage that takes it."""
        grad = False
        if isinstance(value, Tensor):
            grad, value = value.requires_grad, value.detach()
        self._post(j, i, to, name, value, grad)

    def send_gradient(self, j: int, i: int, name: str, value: Any, to: int) -> None:
        """The gradient of a value, or None where there is none, back to the stage that sent the value."""
        self._post(j, i, to, gradient_key(name, j), value, False)

    def _post(self, j: int, i: int, target: int, name: str, value: Any, grad: bool, there: Step | None = None) -> None:
        """Put a message into the mailbox of the target, on the way to its device if that is another. `there` is the
        step of the replica that it goes to."""
        if there is None:
            if self.routes is not None:
                self._post_pieces(self.routes, j, i, target, name, value, grad)
                return
            there = self
        if isinstance(value, Tensor) and self.stages[j].device != there.stages[target].device:
            value = self.pack(value, j, i, target, name, grad, there)
        elif grad:
            value.requires_grad_()
        mailbox = there.mailboxes[target]
        if mailbox is self.mailboxes[j]:
            mailbox.arrived[target, i, name] = value
        else:
            mailbox.put(((target, i, name), value))

    def _post_pieces(self, routes: Routes, j: int, i: int, target: int, name: str, value: Any, grad: bool) -> None:
        """A message, to the replicas that need it: whole, or the piece of each."""
        views, route = self.views, routes.of.get((target, name))
        if route is None:
            self._post(j, i, target, name, value, grad, views[target][self.replica] if views else self)
            return
        mine = [(to, rows) for k, to, rows in routes.pieces(self.rows_of[i], target, route) if k == self.replica]
        values = cut(value, route.dim, [rows for _, rows in mine], self.sizes[i])
        for (to, _), piece in zip(mine, values, strict=True):
            there = views[target][to] if views else self
            self._post(j, i, target, piece_name(name, self.replica, to), piece, grad, there)

    def pack(self, value: Tensor, j: int, i: int, target: int, name: str, grad: bool, there: Step) -> Transfer:
        """A tensor of stage j on its way to the device of the target."""
        device, user = there.stages[target].device, there.compute[target]
        return pack(value, self.streams[j, i], there.streams[target, i], device, user, grad)

    def lend(self, j: int, tensor: Tensor) -> Tensor:
        """A tensor that another stage owns, for stage j, with a gradient of its own."""
        if j not in self.own or tensor.is_meta:  # others have it
            return tensor
        device = self.stages[j].device
        if not tensor.requires_grad:
            return tensor.to(device)
        lent = tensor.detach().to(device).requires_grad_()
        self.pairs[j].append((self.owner(tensor), lent))
        return lent

    def owner(self, tensor: Tensor) -> Tensor:
        """What the model holds where a stage holds this alias."""
        firsts = [self] if self.views is None else [replicas[0] for replicas in self.views]
        pairs = (pair for first in firsts for own in first.pairs for pair in own)
        return next((held for held, stand_in in pairs if stand_in is tensor), tensor)

    def add(self, *grads: Tensor | None) -> Tensor | None:
        """The sum of the gradients that are there, in this order, whichever came first."""
        found = [grad for grad in grads if grad is not None]
        return sum(found[1:], start=found[0]) if found else None

    def stop(self, error: BaseException) -> None:
        """Something failed: nobody starts anything more."""
        self.failed.append(error)
        steps = [self] if self.views is None else [step for replicas in self.views for step in replicas]
        for mailbox in {mailbox for step in steps for mailbox in step.mailboxes}:
            mailbox.put(None)

    # What an action computes ------------------------------------------------------------------------------------------

    def forward(self, j: int, i: int, *args: Any) -> Any:
        """Run stage j on micro-batch i; its graph is kept for backward."""
        results = self._with_graph(j, args)
        self.kept[j, i] = Kept(args, results if isinstance(results, tuple) else (results,))
        return results

    def _with_graph(self, j: int, args: tuple[Any, ...]) -> Any:
        """Run stage j, with whatever looks after what autograd keeps."""
        hooks = self.hooks[j]
        if hooks is None:
            return self.stages[j].forward(*args)
        with hooks:
            return self.stages[j].forward(*args)

    def forward_to_recompute(self, j: int, i: int, *args: Any) -> Any:
        """Run stage j on micro-batch i and keep what it takes alone; skipped when its backward runs next."""
        if (j, i) in self.engine.at_once:
            return Step.forward(self, j, i, *args)  # which an observer does not see a second time
        stage = self.stages[j]
        kept = Kept(args, None, keep(stage) if stage.rereads else {})
        with torch.no_grad():
            results = stage.forward(*args)
        self.kept[j, i] = kept
        gives = self.engine.gradients[j].gives.values()
        if not (any(isinstance(x, Tensor) and x.requires_grad for x in args) or stage.trainable()):
            return results
        several = results if isinstance(results, tuple) else (results,)
        marked = tuple([alias(y) if place in gives else y for place, y in enumerate(several)])
        return marked if isinstance(results, tuple) else marked[0]

    def recompute(self, j: int, i: int) -> None:
        """Run stage j on micro-batch i again, with its graph, and without counting twice in its buffers."""
        stage, kept = self.stages[j], self.kept[j, i]
        if kept.results is not None:
            return
        with recomputing(), instead(stage, scratch(stage, kept.buffers)) if stage.mutates else nullcontext():
            results = self._with_graph(j, kept.args)
        kept.results = results if isinstance(results, tuple) else (results,)

    def root(self, j: int, i: int, name: str) -> Tensor:
        """The gradient that backward begins with, for the loss, a result of stage j."""
        results = self.kept[j, i].results
        assert results is not None
        loss = results[self.engine.gradients[j].gives[name]].detach()
        share = 1.0 if self.engine.loss_reduce in ("sum", None) else self.shares[i]
        root = torch.full_like(loss, share)
        if self.scale is None:
            return root
        return root * (self.scale.to(root.device) if isinstance(self.scale, Tensor) else self.scale)

    def backward(self, j: int, i: int, *grads: Tensor | None) -> Any:
        """Backward of stage j and micro-batch i, given the gradients of its results: those of what it takes."""
        kept = self.kept.pop((j, i))
        roots, given = kept.roots(grads, self.engine.gradients[j].gives.values())
        if roots:
            # torch.autograd.backward without its checks, which take as long as the rest for a small stage.
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward(roots, given, False, False, (), allow_unreachable=True, accumulate_grad=True)
        if self.fresh[j]:
            self.settle(j)
        found = [kept.args[place].grad for place in self.engine.gradients[j].takes.values()]
        return found[0] if len(found) == 1 else found

    def input_gradient(self, j: int, i: int, *grads: Tensor | None) -> Any:
        """The half of backward that other stages wait for: the gradients of what stage j takes."""
        if self.stages[j].compiled:
            return Step.backward(self, j, i, *grads)  # likewise
        kept, (takes, gives) = self.kept.pop((j, i)), self.engine.gradients[j]
        assert kept.results is not None
        results = [kept.results[place] for place in gives.values()]
        leaves = [kept.args[place] for place in takes.values()]
        hooks = self.hooks[j]
        saved = hooks if isinstance(hooks, Saved) else None
        found, self.weights[j, i] = input_gradient(results, grads, leaves, saved)
        if self.leaves:  # inputs with a gradient
            for leaf, grad in zip(leaves, found, strict=True):
                leaf.grad = grad
        return found[0] if len(found) == 1 else found

    def weight_gradient(self, j: int, i: int) -> None:
        """The other half: the gradients of the parameters of stage j."""
        if self.stages[j].compiled:
            return
        weight_gradient(self.weights.pop((j, i)))
        if self.fresh[j]:
            self.settle(j)

    def settle(self, j: int) -> None:
        """The first gradients of parameters of stage j are there: more will be added to them in place."""
        unshare(self.fresh[j])
        self.fresh[j] = [stand_in for stand_in in self.fresh[j] if stand_in.grad is None]


def wrap(target: Any, wrappers: Mapping[str, Callable[..., Any]]) -> None:
    """From now on `target.name(...)` calls `wrappers[name](target, method, ...)`, where the method is the class's."""
    weak = weakref.proxy(target)  # a circle of references would keep what a step holds
    for name, wrapper in wrappers.items():
        setattr(target, name, partial(wrapper, weak, getattr(type(target), name)))
