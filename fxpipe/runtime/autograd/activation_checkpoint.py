"""Recompute a task's activations in backward instead of keeping them, and start before the gradient arrives.

torch.utils.checkpoint recomputes when the gradient reaches the task; in a pipeline the device should already run the
task's backward then. So recomputation is a separate autograd function, on an edge without gradient that autograd walks
as soon as the device's previous backward is done. The two functions share a `Task`:

    tokens    after(i - 1) ──▶ Checkpoint(i) ──▶ Recompute(i) ──▶ after(i) ──▶ Checkpoint(i + 1)
    values               x ──▶       │       ──▶ y ──▶ next stage

    backward  B(i + 1) is done ──▶ Recompute(i): runs F(i) again, stores its graph in the task
              gradient of y    ──▶ Checkpoint(i): B(i), through the graph in the task

If nothing waits for the token, Checkpoint recomputes by itself. The stage's parameters are inputs of Checkpoint, and
its backward returns their gradients, so `torch.autograd.grad` sees them and nothing is accumulated without autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fxpipe.runtime.accelerator import kinds
from fxpipe.runtime.caller_context import Context
from fxpipe.runtime.error_notes import add_note
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.written_buffers import instead, keep, scratch
from fxpipe.torch_internals.autograd_engine import gradients
from fxpipe.torch_internals.grad_mode import forward_mode
from fxpipe.torch_internals.tensor_memory import has_hooks, version_of

from .is_recomputing import recomputing

# The results of a recomputation: the outputs with their graph, and the graph's leaves: takes, then parameters.
Recomputed = tuple[tuple[Any, ...], tuple[Tensor, ...]]


class Task:
    """One forward run of a stage on one micro-batch, and how to run it again."""

    def __init__(self, stage: Stage, where: tuple[int, int], context: Context, args: tuple[Any, ...]) -> None:
        self.stage, self.where, self.context = stage, where, context
        self.takes = tuple([arg for arg in args if isinstance(arg, Tensor)])
        self.places = tuple([place for place, arg in enumerate(args) if isinstance(arg, Tensor)])
        self.others = [None if isinstance(arg, Tensor) else arg for arg in args]
        self.wanted = tuple([x.requires_grad for x in self.takes])
        self.parameters = stage.trainable()
        self.unwritten = unwritten(stage, self.parameters)
        self.versions = [version_of(x) for x in self.unwritten]
        self.kept = keep(stage) if stage.rereads else {}
        self.recomputed: Recomputed | None = None

    def run(self, takes: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """The stage's outputs, with `takes` in place of the tensors of the first call."""
        args = self.others.copy()
        for place, tensor in zip(self.places, takes, strict=True):
            args[place] = tensor
        if self.context.autocasts or any(map(torch.is_autocast_enabled, kinds())):
            with self.context.enter_autocast():
                outputs = self.stage.forward(*args)
        else:
            outputs = self.stage.forward(*args)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def recompute(self, saved: tuple[Tensor, ...]) -> Recomputed:
        """Run again, with gradients, on new leaves made of the saved tensors; under `create_graph=True` on views of
        these, so that the gradients have derivatives too. Raises RuntimeError if a parameter has changed since
        forward."""
        if self.versions != [version_of(x) for x in self.unwritten]:
            raise RuntimeError(self.changed())
        leaf = _own_view if torch.is_grad_enabled() else _new_leaf
        takes = tuple([leaf(x) if want else x.detach() for x, want in zip(saved, self.wanted, strict=True)])
        parameters, aliases = self.parameters, {}
        if torch.is_grad_enabled() or self.stage.regions or any(map(has_hooks, parameters)):
            aliases = self.aliases()
            parameters = tuple([aliases.get(id(x), x) for x in parameters])
        try:
            with torch.enable_grad(), self.standing_in(aliases), recomputing():
                outputs = self.run(takes)
        except Exception as error:
            add_note(error, self.stage, *self.where)
            raise
        return outputs, (*[x for x, want in zip(takes, self.wanted, strict=True) if want], *parameters)

    def standing_in(self, aliases: Mapping[int, Tensor]) -> AbstractContextManager[None]:
        """A context in which tensors that a recomputation must not touch are replaced in the stage."""
        if not self.stage.mutates and not aliases:
            return nullcontext()
        tensors = {path: aliases[id(x)] for path in self.stage.states if id(x := self.stage.tensor(path)) in aliases}
        return instead(self.stage, tensors | scratch(self.stage, self.kept, aliases))

    def aliases(self) -> dict[int, Tensor]:
        """By the id of each parameter, an alias with the same memory and no hooks: hooks must see the whole gradient,
        once. Parts of parameters get one too: else the gradient of a part would also flow on to the whole here. Under
        `create_graph=True` all do: a parameter may be before this stage, too, and count here for this stage alone."""
        if torch.is_grad_enabled():
            return {id(x): _own_view(x) for x in self.parameters}
        parts = {id(self.stage.tensor(path)) for path in self.stage.regions}
        return {
            id(x): nn.Parameter(x.detach()) for x in self.parameters if isinstance(x, nn.Parameter) or id(x) in parts
        }

    def changed(self) -> str:
        """The error message for parameters that changed between forward and backward."""
        own = {id(self.stage.tensor(path)): path for path in self.stage.states}
        pairs = zip(self.unwritten, self.versions, strict=True)
        paths = [own.get(id(x), "a constant") for x, version in pairs if version_of(x) != version]
        return (
            f"{', '.join(paths)} changed in place between forward and backward, and stage {self.where[0]} recomputes "
            "in backward what it did with the old values; call backward before the optimizer's step"
        )


def _new_leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _own_view(x: Tensor) -> Tensor:
    """A tensor in which a gradient ends that goes through it, and not one that goes around it; it has derivatives."""
    return x.view_as(x)


def unwritten(stage: Stage, parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The parameters that forward does not write itself."""
    if not stage.mutates:
        return parameters
    written = {id(stage.tensor(path)) for path in stage.mutates}
    return tuple([x for x in parameters if id(x) not in written])


class Checkpoint(Function):
    """F(i) without a graph; backward is B(i). Outputs: those of the stage, then a token for Recompute."""

    @staticmethod
    def forward(ctx: Any, task: Task, after: Tensor | None, *tensors: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.task = task
        takes = tensors[: len(task.places)]
        ctx.save_for_backward(*takes)
        if task.stage.unsure or task.stage.derives:
            with torch.enable_grad(), forward_mode():
                found = task.run(tuple([x.detach().requires_grad_(x.requires_grad) for x in takes]))
        else:
            found = task.run(takes)
        # Detached: a stage may return a buffer that it holds, which must not become this function's output.
        outputs = [x.detach() if isinstance(x, Tensor) else x for x in found]
        if task.stage.unsure:
            without = [y for x, y in zip(found, outputs, strict=True) if isinstance(x, Tensor) and not x.requires_grad]
            ctx.mark_non_differentiable(*without)
        return (*outputs, torch.empty(0, device=task.stage.device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        task: Task = ctx.task
        outputs, leaves = task.recomputed or task.recompute(ctx.saved_tensors)
        task.recomputed = None
        try:
            found = _backward(outputs, grads, leaves)
        except Exception as error:
            add_note(error, task.stage, *task.where, backward=True)
            raise
        wanted = iter(found)
        takes = [next(wanted) if want else None for want in task.wanted]
        return (None, None, *takes, *wanted)


class Recompute(Function):
    """The token's backward runs F(i) again and stores the graph for Checkpoint."""

    @staticmethod
    def forward(ctx: Any, task: Task, token: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.task = task
        ctx.save_for_backward(*task.takes)
        task.takes = ()  # both functions have saved them, so the graph decides how long they live
        return token.detach()

    @staticmethod
    def backward(ctx: Any, grad: None) -> tuple[None, None]:
        ctx.task.recomputed = ctx.task.recompute(ctx.saved_tensors)
        return None, None


def checkpoint(
    stage: Stage, where: tuple[int, int], context: Context, after: Tensor | None, *args: Any
) -> tuple[Any, ...]:
    """`stage.forward(*args)`, recomputed in backward: `y, after = checkpoint(stage, (1, i), context, after, x)`.

    `where`: (stage, micro-batch). `after`: the token of the previous task on this device, or None. Returns the outputs
    of the stage, then the token for the next task on this device."""
    task = Task(stage, where, context, args)
    *outputs, token = Checkpoint.apply(task, after, *task.takes, *task.parameters)  # type: ignore[no-untyped-call]
    return (*outputs, Recompute.apply(task, token))  # type: ignore[no-untyped-call]


def _backward(
    outputs: tuple[Any, ...], grads: tuple[Tensor | None, ...], inputs: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs, None for an input without one."""
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=False)  # the last grad is the token's
        if grad is not None and output.requires_grad
    ]
    if not pairs or not inputs:
        return (None,) * len(inputs)
    roots, given = zip(*pairs, strict=True)
    return gradients(roots, given, inputs, with_graph=torch.is_grad_enabled())  # under create_graph=True
