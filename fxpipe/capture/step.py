"""The door of capture for steps: a call of the model with its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.ir.graph import Graph

from .arguments import Asked, BatchDim
from .front import Front, Run, Sizes
from .loss import LOSS_FN, model_and_loss, modules_in, objects_in
from .mixing import Reduce
from .nest import change


def detached(path: str, tensor: Tensor) -> Tensor:
    """The tensor itself, where it needs no gradient."""
    return tensor.detach() if tensor.requires_grad else tensor


class NoTarget:
    """What a target is that was not given; None is one."""

    def __repr__(self) -> str:
        return "no target"

    def __reduce__(self) -> str:
        return "NO_TARGET"  # there is one, in every process


NO_TARGET = NoTarget()


class Stepper:
    """Stands in front of a model and its loss: `stepper.step(...)` returns the loss and, if asked for, what the model
    returns, with their arithmetic done by `run(graph, inputs)`.

    `graph.loss` names the loss among `graph.outputs`. `run` gets the real values of those of `graph.inputs` that have a
    path, and returns the values of `graph.outputs` for the whole batch. The loss function's own tensors are states
    too: `tensors` has the real ones by path, `version` changes when it does.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_dim: BatchDim = 0,
        *,
        reduce: Reduce = None,
        sizes: Sizes = lambda batch: (batch,),
    ) -> None:
        self.model = model
        self.prefix = LOSS_FN
        while hasattr(model, self.prefix):  # the model's own paths are what they are
            self.prefix += "_"
        self.front = Front(model, batch_dim, reduce=reduce, sizes=sizes, function=model_and_loss, loss=True)

    def step(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_fn: Callable[..., Any] | None,
        outputs: bool,
        run: Run,
    ) -> tuple[Tensor, Any]:
        """The loss of the batch, and what the model returns for it, or None. Both are detached, also what the model
        only passes on."""
        asked = self._asked(args, kwargs, target, loss_fn, outputs)
        loss, output = self.front.run(asked, run)
        return loss, change(output, detached) if outputs else None

    def capture(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any = NO_TARGET,
        loss_fn: Callable[..., Any] | None = None,
        outputs: bool = False,
    ) -> Graph:
        """The graph of this kind of step. Nothing is run, nothing changes."""
        return self.front.graph(self._asked(args, kwargs, target, loss_fn, outputs))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers of the model and of the loss function of the last step, by path."""
        return self.front.twins.tensors

    @property
    def version(self) -> int:
        """Another number once there are other tensors than before."""
        return self.front.twins.version

    def _asked(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, loss_fn: Any, outputs: bool
    ) -> Asked:
        if loss_fn is not None and not callable(loss_fn):
            raise InputError(f"loss_fn is {loss_fn!r}; pass a function of the output and the target, or a module")
        if loss_fn is None and target is not NO_TARGET:
            raise InputError(
                "there is a target, but no loss_fn that it goes to; pass loss_fn=, or pass the target to the model as "
                "an argument of its own, if it computes its loss itself"
            )
        targets = () if target is NO_TARGET else (target,)
        self.front.twins.watch({"": self.model, **modules_in(loss_fn, self.prefix)})
        return Asked(args, kwargs, targets, (loss_fn, outputs), objects_in(loss_fn))
