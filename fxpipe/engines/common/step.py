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
from operator import is_
from typing import Any, Protocol

from torch import Tensor

from fxpipe.runtime import Stage
from fxpipe.runtime.autograd.contiguous_layout import all_contiguous
from fxpipe.runtime.autograd.gradient_aliases import Pair, alias
from fxpipe.runtime.autograd.is_recomputing import recomputing
from fxpipe.runtime.autograd.offload import Offload, offload
from fxpipe.runtime.autograd.saved_tensors import Saved
from fxpipe.runtime.autograd.split_backward import Weights, input_gradient, weight_gradient
from fxpipe.runtime.autograd.unalias_gradients import unshare
from fxpipe.runtime.written_buffers import instead, keep, scratch
from fxpipe.torch_internals.autograd_engine import add_gradients

from .generated_backward import NONE_MISSING, DeferredWeightGrad, GeneratedBackward, full, without_data
from .gradient_scale import scaled
from .kept_values import NO_BUFFERS, Kept
from .run_epilogue import Epilogue, run_epilogue
from .step_messages import Messages, Progress
from .step_plan import StepPlan


class Observer(Protocol):
    """Observes a step, and may `wrap` its methods."""

    def begin(self, m: Step) -> None:
        """Called when the step is ready; with replicas, once for the step of each worker."""


class Step(Messages):
    """One step under way: the micro-batches, the messages, and what forward keeps for backward.

    - `progress`: how far all workers are.
    - `kept`: by stage and micro-batch, the arguments and results of a forward run.
    - `pending_by_autograd`, `pending_by_code`: what computes the gradients of parameters later, by stage and
      micro-batch, where only the first half of backward is done; of stages with and without autograd.
    - `loss_weights`: the share of the batch's samples in each micro-batch.
    - `by_code`: whether all stages that run here have a backward of their own.
    - `direct`: by stage, its own backward where nothing is to be done between messages and the stage's code, else None;
      `sums`: by stage, the gradients of its weights until now, once such a stage has one for each.
    - `pairs`: for each stage, the model's tensors, and the aliases that collect their gradients; `fresh`: the aliases
      that have no gradient yet.
    """

    views: Sequence[Sequence[Step]] | None

    def __init__(
        self,
        plan: StepPlan,
        pairs: list[list[Pair]],
        progress: Progress,
        views: Sequence[Sequence[Step]] | None = None,
    ) -> None:
        super().__init__(plan, views)
        self.pairs, self.progress = pairs, progress
        self.kept: dict[tuple[int, int], Kept] = {}
        self.pending_by_autograd: dict[tuple[int, int], Weights] = {}
        self.pending_by_code: dict[tuple[int, int], DeferredWeightGrad] = {}
        self.fresh: list[list[Tensor]] = [[stand_in for _, stand_in in held] for held in pairs]
        self.loss_weights = tuple([size / self.total for size in self.sizes])
        self.hooks = self.make_hooks()
        self.by_code = None not in self.generated.values()
        self.direct: list[GeneratedBackward | None] = [None] * len(self.stages)
        self.sums: list[list[Tensor | None] | None] = [None] * len(self.stages)

    def begin(self, observer: Observer | None) -> None:
        """Put the inputs into the mailboxes of the stages that run here, and lend these the tensors that they share."""
        self.open_mailboxes(observed=observer is not None)
        self.engine.lend(self)
        if observer is not None:
            observer.begin(self)

    def compute_directly(self) -> None:
        """Let actions call the stages' code without detours, where that computes the same. The rows of this step must
        run without gradients, and nobody may observe it."""
        if not self.leaves:
            for j, own in self.generated.items():
                if own is not None and own.plain and self.hooks[j] is None:
                    self.direct[j] = own

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

    # What an action computes ------------------------------------------------------------------------------------------

    def forward(self, j: int, i: int, *args: Any) -> Any:
        """Run stage j on micro-batch i, and keep its graph for backward."""
        own = self.direct[j]
        if own is None or not all_contiguous(args):
            kept = self.kept[j, i] = Kept(args)
            return self._run_kept(j, kept)
        *results, values = own.stage.forward(*args)
        self.kept[j, i] = Kept((), tuple(map(without_data, results)) if own.sized else (), NO_BUFFERS, values)
        return results[0] if len(results) == 1 else results

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
        self.kept[j, i] = Kept(args, buffers=keep(stage) if stage.rereads else NO_BUFFERS)
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
        kept, direct = self.kept.pop((j, i)), self.direct[j]
        if direct is not None and all_contiguous(grads):
            sums = self.sums[j] or direct.sums()
            found, weights = direct.stage.backward(kept.values or [], sums, *grads)
            self._add(j, direct, weights, sums)
            return found[0] if len(found) == 1 else found
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

    def _add(self, j: int, own: GeneratedBackward, weights: list[Tensor | None], sums: list[Tensor | None]) -> None:
        """Add what backward of a stage has returned to the gradients of its weights, unless it has added to these
        `sums` itself."""
        if self.fresh[j] or not all(map(is_, weights, sums)):
            own.add(weights, sums)
            if self.fresh[j]:
                self.unshare_gradients(j)
            self.sums[j] = None if self.fresh[j] else own.sums()

    def input_gradient(self, j: int, i: int, *grads: Tensor | None) -> Any:
        """The half of backward that other stages wait for: the gradients of stage j's arguments."""
        own = self.generated[j]
        if own is None and self.stages[j].compiled:
            return Step.backward(self, j, i, *grads)  # not self.backward, for the same reason
        kept, (takes, gives), direct = self.kept.pop((j, i)), self.engine.gradients[j], self.direct[j]
        if direct is not None and all_contiguous(grads):
            some, handed = direct.stage.input_gradient(kept.values or [], *grads)
            self.pending_by_code[j, i] = DeferredWeightGrad((), handed, NONE_MISSING)
            return some[0] if len(some) == 1 else some
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
        own, direct = self.generated[j], self.direct[j]
        if own is not None:
            deferred = self.pending_by_code.pop((j, i))
            if direct is not None and deferred.values is not None and not deferred.missing:
                sums = self.sums[j] or direct.sums()
                self._add(j, direct, direct.stage.weight_gradient(deferred.values, sums), sums)
                return
            own.weight_gradient(deferred, self.hooks[j])
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
