"""The entry point of capture for steps: a call of the model with its loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from torch import Tensor, nn

from fxpipe.batching.mixed_samples import Reduce
from fxpipe.capture.tracing.rewriting.graph_view import Transform
from fxpipe.errors import CaptureError, InputError
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.sample_lists import BatchDim

from .call_arguments import NO_TARGET, RequestedCall
from .call_kinds import Run, Sizes, Work
from .capture_call import CallCapture
from .capture_errors import OutsideOfModules, StaticSizesRequired
from .model_with_loss import LOSS_FN, KeptLoss, code_of, modules_in, objects_in
from .nested_values import change

R = TypeVar("R")
log = logging.getLogger("fxpipe")


def detached(path: str, tensor: Tensor) -> Tensor:
    """The tensor, detached if it needs a gradient."""
    return tensor.detach() if tensor.requires_grad else tensor


class StepCapture:
    """Captures steps of a model with its loss: `stepper.step(...)` returns the loss and, with `outputs`, the model's
    result, computed by `run(graph, inputs)`.

    `graph.loss` names the loss among `graph.outputs`. `run` gets the real values of those `graph.inputs` that have a
    path, and returns the values of `graph.outputs` for the whole batch. The loss function's own tensors are states too:
    `tensors` has them by path, and `version` changes when they are replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_dim: BatchDim = 0,
        *,
        reduce: Reduce = None,
        sizes: Sizes = lambda batch: (batch,),
        work: Work = lambda what: nullcontext(),
        transforms: Sequence[Transform] = (),
        dynamic: bool = False,
        uncut: bool = False,
    ) -> None:
        self.model = model
        self.loss_fn: Callable[..., Any] | None = None  # of the last step
        self.prefix = LOSS_FN
        while hasattr(model, self.prefix):  # the model's own paths cannot be changed
            self.prefix += "_"
        self._kept: dict[tuple[Any, ...], KeptLoss] = {}
        self.call_capture = CallCapture(
            model,
            batch_dim,
            reduce=reduce,
            sizes=sizes,
            loss=True,
            work=work,
            transforms=transforms,
            dynamic=dynamic,
            uncut=uncut,
        )

    def step(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_fn: Callable[..., Any] | None,
        outputs: bool,
        run: Run,
    ) -> tuple[Tensor, Any]:
        """The loss of the batch, and the model's result, or None. Both are detached, also tensors that the model only
        passes on. `run` may raise StaticSizesRequired while `dynamic`."""

        def do(request: RequestedCall) -> Any:
            try:
                return self.call_capture.run(request, run)
            except StaticSizesRequired as required:
                log.info("lengths are constants from now on: %s", required)
                self.call_capture.assumed = self.call_capture.assumed._replace(any_lengths=False)
                self.call_capture.reset()
                return self.call_capture.run(request, run)

        loss, output = self._captured(args, kwargs, target, loss_fn, outputs, do)
        return loss, change(output, detached) if outputs else None

    def capture(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any = NO_TARGET,
        loss_fn: Callable[..., Any] | None = None,
        outputs: bool = False,
    ) -> Graph:
        """The graph of this kind of step. The model does not change, and runs only if submodules are kept whole."""
        return self._captured(args, kwargs, target, loss_fn, outputs, self.call_capture.with_inputs)[0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers of the model and of the loss function of the last step, by path."""
        return self.call_capture.twins.tensors

    @property
    def dynamic(self) -> bool:
        """Whether lengths are symbols from the first capture on."""
        return self.call_capture.assumed.any_lengths

    @property
    def version(self) -> int:
        """A number that changes when tensors are replaced."""
        return self.call_capture.twins.version

    def _captured(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_fn: Any,
        outputs: bool,
        do: Callable[[RequestedCall], R],
    ) -> R:
        """Call `do` with the request of the step. If the refused line is in the loss function, or the code of the loss
        function shows how it combines the losses of samples, call `do` again with the loss function kept whole."""
        kept = self._kept.get(code_of(loss_fn)) if self._kept else None
        if kept is not None:
            kept.loss_fn = loss_fn
        try:
            return do(self._request(args, kwargs, target, kept or loss_fn, outputs))
        except CaptureError as error:
            if kept is not None or loss_fn is None or isinstance(loss_fn, nn.Module):
                raise
            kept, refused = KeptLoss(loss_fn, modules_in(loss_fn)), error
            outside = isinstance(refused, OutsideOfModules)
            if not outside and kept.how is None:
                raise
        try:
            found = do(self._request(args, kwargs, target, kept, outputs))
        except CaptureError:
            if outside:
                raise
            raise refused from None  # which is about the model
        self._kept[code_of(loss_fn)] = kept
        return found

    def _request(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, loss_fn: Any, outputs: bool
    ) -> RequestedCall:
        if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
            raise InputError(f"loss_fn is the class {loss_fn.__name__}; write loss_fn={loss_fn.__name__}()")
        if loss_fn is not None and not callable(loss_fn):
            raise InputError(f"loss_fn is {loss_fn!r}; pass a function of the output and the target, or a module")
        if loss_fn is None and target is not NO_TARGET:
            raise InputError(
                "there is a target, but no loss_fn that it goes to; pass loss_fn=, or pass the target to the model as "
                "an argument of its own, if it computes its loss itself"
            )
        targets = () if target is NO_TARGET else (target,)
        self.loss_fn = loss_fn
        self.call_capture.twins.watch({"": self.model, **modules_in(loss_fn, self.prefix)})
        own = loss_fn.loss_fn if isinstance(loss_fn, KeptLoss) else loss_fn
        return RequestedCall(args, kwargs, targets, (loss_fn, outputs), objects_in(own))
