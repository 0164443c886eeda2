"""One training step under way: what each action of a stage on a micro-batch takes, computes, keeps and sends.

Autograd's graph ends at the borders of a stage: a received value is a leaf, and its gradient is sent back to the stage
that sent the value. So backward of each stage and micro-batch is a separate run of autograd, on the stage's worker, in
the schedule's order. Generated schedulers call the methods of `Step`; `step_engine.py` says when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, Protocol

from torch import Tensor

from fxpipe.runtime import Stage
from fxpipe.runtime.autograd.gradient_aliases import Pair, alias
from fxpipe.runtime.autograd.is_recomputing import recomputing
from fxpipe.runtime.autograd.offload import Offload, offload
from fxpipe.runtime.autograd.saved_tensors import Saved
from fxpipe.runtime.autograd.split_backward import Weights, input_gradient, weight_gradient
from fxpipe.runtime.autograd.transfer import Transfer, pack, unpack
from fxpipe.runtime.autograd.unalias_gradients import unshare
from fxpipe.runtime.written_buffers import instead, keep, scratch
from fxpipe.torch_internals.autograd_engine import add_gradients

from .generated_backward import DeferredWeightGrad, GeneratedBackward, full
from .gradient_scale import scaled
from .kept_values import Kept
from .replica_routing import Routes, cut, gradient_key, joined, piece_name
from .run_epilogue import Epilogue, run_epilogue
from .scheduler_base import Batches
from .step_plan import StepPlan
from .step_progress import Progress

ABSENT = object()  # in place of a message that is not there


class Observer(Protocol):
    """Observes a step, and may `wrap` its methods."""

    def begin(self, m: Step) -> None:
        """Called when the step is ready; with replicas, once for the step of each worker."""


class Step(Batches):
    """One step under way: the micro-batches, the messages, and what forward keeps for backward.

    - `plan`: what was decided before; `progress`: how far all workers are.
    - `kept`: by stage and micro-batch, the arguments and results of a forward run.
    - `pending_by_autograd`, `pending_by_code`: what computes the gradients of parameters later, by stage and
      micro-batch, where only the first half of backward is done; of stages with and without autograd.
    - `loss_weights`: the share of the batch's samples in each micro-batch.
    - `generated`: by stage that runs here, its own backward; None where autograd computes gradients.
    - `by_code`: whether all stages that run here have a backward of their own.
    - `taking`: the stages that take tensors as other stages have made them: such a backward asks no argument whether it
      needs a gradient.
    - `pairs`: for each stage, the model's tensors, and the aliases that collect their gradients; `fresh`: the aliases
      that have no gradient yet.
    - `views`: where stages have replicas, each worker has a step of its own: these, by stage and replica, all there
      before any begins; None if there are no others in this process.
    """

    def __init__(
        self,
        plan: StepPlan,
        pairs: list[list[Pair]],
        progress: Progress,
        views: Sequence[Sequence[Step]] | None = None,
    ) -> None:
        super().__init__(plan.batch, plan.place)
        self.plan, self.engine, self.mailboxes, self.routes = plan, plan.engine, plan.mailboxes, plan.routes
        self.apart = plan.engine.apart
        self.pairs, self.progress, self.views = pairs, progress, views
        self.kept: dict[tuple[int, int], Kept] = {}
        self.pending_by_autograd: dict[tuple[int, int], Weights] = {}
        self.pending_by_code: dict[tuple[int, int], DeferredWeightGrad] = {}
        self.fresh: list[list[Tensor]] = [[stand_in for _, stand_in in held] for held in pairs]
        self.leaves: dict[str, list[list[Tensor]]] = {}
        self.loss_weights = tuple([size / self.total for size in self.sizes])
        self.hooks = self.make_hooks()
        outputs = [name for name, _, _ in self.engine.outputs]
        self.generated = {
            j: GeneratedBackward(self.stages[j], self.engine.gradients[j], outputs, self.context, self.leaves)
            if self.stages[j].graded is not None
            else None
            for j in plan.own
        }
        self.by_code = None not in self.generated.values()
        self.taking = frozenset[int]()

    def begin(self, observer: Observer | None) -> None:
        """Put the inputs into the mailboxes of the stages that run here, and lend these the tensors that they share."""
        for name, j in self.engine.feeds:
            if j in self.plan.own:
                self.feed(name, j)
        if not self.leaves and self.routes is None:
            self.taking = frozenset([j for j, own in self.generated.items() if own is not None and own.trains])
        self.engine.lend(self)
        if observer is not None:
            observer.begin(self)

    def make_hooks(self) -> list[Saved | Offload | None]:
        """For each stage, the hooks for the tensors that autograd saves: they move these to the host, or, if backward
        is in two halves, free those that the second half does not need."""
        if not self.engine.offloaded and not self.engine.splits:
            return [None] * len(self.stages)

        def hooks(j: int, stage: Stage) -> Saved | Offload | None:
            held = [stand_in for _, stand_in in self.pairs[j]]
            if j in self.engine.offloaded:
                return offload(stage.device, held)
            split = self.engine.splits and not stage.compiled and stage.graded is None
            return Saved(held) if split else None

        return [hooks(j, stage) for j, stage in enumerate(self.stages)]

    # Messages ---------------------------------------------------------------------------------------------------------

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
        return self._received(j, i, names[0]) if len(names) == 1 else [self._received(j, i, name) for name in names]

    def _received(self, j: int, i: int, name: str) -> Any:
        mailbox, key = self.mailboxes[j], (j, i, name)
        value = mailbox.values.pop(key, ABSENT)
        if value is ABSENT:
            if self.routes is not None and (j, name) in self.routes.of:
                return self._join(self.routes, j, i, name)
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

    def receive_gradient(self, j: int, i: int, name: str, source: int) -> Tensor | None:
        """The gradient of a value that stage j gave to stage `source`."""
        found: Tensor | None = self._received(j, i, gradient_key(name, source))
        return found

    def send(self, j: int, i: int, name: str, value: Any, to: int) -> None:
        """Send a result of stage j to stage `to`, for which it is a leaf."""
        own, asked, grad = self.generated[j], to not in self.taking, False
        if (asked or own is None) and isinstance(value, Tensor):
            grad = asked and (value.requires_grad if own is None else own.flows and name in own.gradients.gives)
            value = value.detach()
        self._post(j, i, to, name, value, grad)

    def send_gradient(self, j: int, i: int, name: str, value: Any, to: int) -> None:
        """Send the gradient of a value, or None if there is none, back to the stage that sent the value."""
        self._post(j, i, to, gradient_key(name, j), value, False)

    def _post(self, j: int, i: int, target: int, name: str, value: Any, grad: bool, there: Step | None = None) -> None:
        """Put a message into the mailbox of the target, as a transfer if that is on another device. `there` is the step
        of the receiving replica."""
        if there is None:
            if self.routes is not None:
                self._post_pieces(self.routes, j, i, target, name, value, grad)
                return
            there = self
        apart = self.apart and self.stages[j].device != there.stages[target].device
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

    def pack(self, value: Tensor, j: int, i: int, target: int, name: str, grad: bool, there: Step) -> Transfer:
        """Start the transfer of a tensor of stage j to the device of the target."""
        device, user = there.stages[target].device, there.compute[target]
        return pack(value, self.streams[j, i], there.streams[target, i], device, user, grad)

    def lend(self, j: int, tensor: Tensor) -> Tensor:
        """A tensor that another stage owns, for stage j, with a gradient of its own."""
        if j not in self.plan.own or tensor.is_meta:  # others have it
            return tensor
        device = self.stages[j].device
        if not tensor.requires_grad:
            return tensor.to(device)
        lent = tensor.detach().to(device).requires_grad_()
        self.pairs[j].append((self.owner(tensor), lent))
        self.fresh[j].append(lent)
        return lent

    def owner(self, tensor: Tensor) -> Tensor:
        """The model's tensor that this is an alias of; the tensor itself if it is none."""
        firsts = [self] if self.views is None else [replicas[0] for replicas in self.views]
        pairs = (pair for first in firsts for own in first.pairs for pair in own)
        return next((held for held, stand_in in pairs if stand_in is tensor), tensor)

    def add(self, *grads: Tensor | None) -> Tensor | None:
        """The sum of the gradients that are not None, in the order of the arguments; None if all are."""
        found = [grad for grad in grads if grad is not None]
        return sum(found[1:], start=found[0]) if found else None

    # What an action computes ------------------------------------------------------------------------------------------

    def forward(self, j: int, i: int, *args: Any) -> Any:
        """Run stage j on micro-batch i, and keep its graph for backward."""
        kept = self.kept[j, i] = Kept(args, None)
        return self._run_kept(j, kept)

    def _run_kept(self, j: int, kept: Kept) -> Any:
        """Run stage j on the arguments that are kept, and keep its results too."""
        own, hooks = self.generated[j], self.hooks[j]
        if own is not None:
            return own.forward(kept.args, kept, hooks)
        with hooks or nullcontext():  # under its hooks for saved tensors, if it has any
            results = self.stages[j].forward(*kept.args)
        kept.results = results if isinstance(results, tuple) else (results,)
        return results

    def forward_to_recompute(self, j: int, i: int, *args: Any) -> Any:
        """Run stage j on micro-batch i and keep only its arguments. If its backward runs next, keep its graph too."""
        if (j, i) in self.engine.at_once:
            return Step.forward(self, j, i, *args)  # not self.forward: an observer must not see the action twice
        stage, own = self.stages[j], self.generated[j]
        kept = Kept(args, None, keep(stage) if stage.rereads else {})
        self.kept[j, i] = kept
        if own is not None:
            return own.forward(args, None, None)
        return self.marked(j, args, stage.without_graph(*args))

    def marked(self, j: int, args: Sequence[Any], results: Any) -> Any:
        """The results of stage j, as values that need a gradient, if any of what it computes with does."""
        if not (self.stages[j].trainable() or any(isinstance(x, Tensor) and x.requires_grad for x in args)):
            return results
        gives = self.engine.gradients[j].gives.values()
        several = results if isinstance(results, tuple) else (results,)
        marked = tuple([alias(y) if place in gives else y for place, y in enumerate(several)])
        return marked if isinstance(results, tuple) else marked[0]

    def recompute(self, j: int, i: int) -> None:
        """Run stage j on micro-batch i again, with its graph, and without updating its buffers twice."""
        stage, kept = self.stages[j], self.kept[j, i]
        if kept.results is not None:
            return
        with recomputing(), instead(stage, scratch(stage, kept.buffers)) if stage.mutates else nullcontext():
            self._run_kept(j, kept)

    def root(self, j: int, i: int, name: str) -> Tensor:
        """The gradient of the loss, a result of stage j, with which backward begins: its share of the batch, scaled."""
        results = self.kept[j, i].results
        assert results is not None
        share = 1.0 if self.engine.loss_reduce in ("sum", None) else self.loss_weights[i]
        loss = results[self.engine.gradients[j].gives[name]]
        scale = self.plan.scale
        return full(loss, share) if scale is None else scaled(full(loss, share / scale.accumulate), scale)

    @cached_property
    def epilogue(self) -> Epilogue:
        """What the epilogue has computed. It runs when this is first asked, by the worker of its stage."""
        return run_epilogue(self, self.engine, self.plan.scale)

    def epilogue_gradient(self, j: int, i: int, name: str) -> Tensor | None:
        """The gradient of a result of stage j that the epilogue takes."""
        return self.epilogue.gradients[name][i]

    def backward(self, j: int, i: int, *grads: Tensor | None) -> Any:
        """Backward of stage j and micro-batch i: from the gradients of its results to those of its arguments."""
        kept = self.kept.pop((j, i))
        own = self.generated[j]
        if own is not None:
            return self.finish_backward(j, kept, own.backward(kept, grads, self.hooks[j]))
        roots, given = kept.roots(grads, self.engine.gradients[j].gives.values())
        if roots:
            add_gradients(roots, given)
        if self.fresh[j]:
            self.unshare_gradients(j)
        found = [kept.args[place].grad for place in self.engine.gradients[j].takes.values()]
        return found[0] if len(found) == 1 else found

    def finish_backward(self, j: int, kept: Kept, found: list[Any]) -> Any:
        """The gradients of stage j's arguments, in the form that `backward` returns: one, or a list. Those of the
        caller's inputs are also set on their pieces in `leaves`, from which they are collected after the step."""
        if self.fresh[j]:
            self.unshare_gradients(j)
        if self.leaves:
            for place, grad in zip(self.engine.gradients[j].takes.values(), found, strict=True):
                arg = kept.args[place] if kept.args else None
                if arg is not None and arg.requires_grad:
                    arg.grad = grad
        return found[0] if len(found) == 1 else found

    def input_gradient(self, j: int, i: int, *grads: Tensor | None) -> Any:
        """The half of backward that other stages wait for: the gradients of stage j's arguments."""
        own = self.generated[j]
        if own is None and self.stages[j].compiled:
            return Step.backward(self, j, i, *grads)  # not self.backward, for the same reason
        kept, (takes, gives) = self.kept.pop((j, i)), self.engine.gradients[j]
        if own is not None:
            some, self.pending_by_code[j, i] = own.input_gradient(kept, grads, self.hooks[j])
            return self.finish_backward(j, kept, some)
        assert kept.results is not None
        results = [kept.results[place] for place in gives.values()]
        leaves = [kept.args[place] for place in takes.values()]
        hooks = self.hooks[j]
        saved = hooks if isinstance(hooks, Saved) else None
        found, self.pending_by_autograd[j, i] = input_gradient(results, grads, leaves, saved)
        if self.leaves:  # inputs with a gradient
            for leaf, grad in zip(leaves, found, strict=True):
                leaf.grad = grad
        return found[0] if len(found) == 1 else found

    def weight_gradient(self, j: int, i: int) -> None:
        """The other half of backward: the gradients of the parameters of stage j."""
        own = self.generated[j]
        if own is not None:
            own.weight_gradient(self.pending_by_code.pop((j, i)), self.hooks[j])
        elif self.stages[j].compiled:
            return
        else:
            weight_gradient(self.pending_by_autograd.pop((j, i)))
        if self.fresh[j]:
            self.unshare_gradients(j)

    def unshare_gradients(self, j: int) -> None:
        """Give the first gradients of stage j's parameters memory of their own: later ones are added in place."""
        unshare(self.fresh[j])
        self.fresh[j] = [stand_in for stand_in in self.fresh[j] if stand_in.grad is None]


def wrap(target: Any, wrappers: Mapping[str, Callable[..., Any]]) -> None:
    """Make `target.name(...)` call `wrappers[name](target, method, ...)`: the class's method, or what wraps it now."""
    weak = weakref.proxy(target)  # a reference cycle would keep the step's tensors alive
    for name, wrapper in wrappers.items():
        method: Callable[..., Any] = getattr(type(target), name)
        if (inner := vars(target).get(name)) is not None:
            method = lambda _, *args, inner=inner, **kwargs: inner(*args, **kwargs)  # noqa: E731
        setattr(target, name, partial(wrapper, weak, method))
