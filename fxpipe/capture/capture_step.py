"""The entry point of capture for steps: a call of the model with its loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fxpipe.capture.batch.mixed_samples import Reduce
from fxpipe.capture.tracing.effects.python_effects import KNOWN
from fxpipe.capture.tracing.rewriting.graph_view import Transform
from fxpipe.capture.tracing.storageless_tensors import dense, hollow
from fxpipe.errors import InputError
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.value_types import TensorType

from .call_arguments import NO_TARGET, BatchDim, Call, RequestedCall, Want, form
from .call_kinds import Kind, Run, Sizes, Work
from .capture_call import CallCapture
from .capture_errors import NumbersWanted, OutsideOfModules
from .model_with_loss import LOSS_FN, KeptLoss, code_of, model_and_loss, modules_in, objects_in
from .nested_values import change

R = TypeVar("R")
log = logging.getLogger("fxpipe")


def detached(path: str, tensor: Tensor) -> Tensor:
    """The tensor, detached if it needs a gradient."""
    return tensor.detach() if tensor.requires_grad else tensor


@dataclass(frozen=True)
class LastStep:
    """What a call must know of the last step to be of its kind: a target like that one. Its values do not matter.

    - `target`: the last target, without memory, or NO_TARGET.
    - `same`: by the path of a tensor of the target that is an argument too, the path of that.
    - `odd`: the paths of the tensors for which there is no stand-in.
    - `sizes`: the named sizes of the arguments.
    """

    kind: Kind
    target: Any
    same: Mapping[str, str]
    odd: tuple[str, ...]
    sizes: Mapping[str, int]

    def target_of(self, call: Call, name: str) -> Any:
        """A target of this `name` without memory for a call, of its batch size and lengths. Raises LookupError if
        there is none."""
        if self.odd or call.batch is None:
            raise LookupError
        given = {leaf.path: leaf.real for leaf in call.leaves.values()}
        graph = graph_of(self.kind)
        types = {item.path: item.type for item in graph.inputs}
        sizes = sizes_of(graph, call)
        # Two lengths without a guard that they are equal, as their products with the batch size are.
        equal = {size: sizes[known] for known, size in self.sizes.items() if known in sizes}

        def now(path: str, old: Tensor) -> Tensor:
            if path in self.same:
                return given[self.same[path]]
            kind = types[path]
            assert isinstance(kind, TensorType)
            dims = zip(kind.shape, old.shape, strict=True)
            shape = [sizes.get(said, equal.get(size, size)) if isinstance(said, str) else size for said, size in dims]
            if shape == list(old.shape):
                return old
            return hollow(torch.empty(shape, dtype=old.dtype, device="meta"), old.device)

        return change(self.target, now, name)


def graph_of(kind: Kind) -> Graph:
    """The graph of a kind of step, with its loss."""
    return next(done.graph for (want, _), done in kind.finished.items() if want != "outputs")


def sizes_of(graph: Graph, call: Call) -> dict[str, int]:
    """The graph's named sizes that a call of the model tells."""
    shapes = {leaf.path: leaf.real.shape for leaf in call.leaves.values()}
    paths = {item.name: item.path for item in graph.inputs}
    return {size.name: shapes[paths[size.input]][size.dim] for size in graph.sizes if paths[size.input] in shapes}


class StepCapture:
    """Captures steps of a model with its loss: `stepper.step(...)` returns the loss and, with `outputs`, the model's
    result, computed by `run(graph, inputs)`.

    `graph.loss` names the loss among `graph.outputs`. `run` gets the real values of those `graph.inputs` that have a
    path, and returns the values of `graph.outputs` for the whole batch. The loss function's own tensors are states too:
    `tensors` has them by path, and `version` changes when they are replaced. With `one_mode`, `graph` is for the mode
    of the model, though one trace may serve both.
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
        both_modes: bool = False,
        whole: bool = False,
        one_mode: bool = False,
    ) -> None:
        self.model, self.one_mode = model, one_mode
        self.whole = whole and KNOWN
        self._last: LastStep | None = None
        self._target: tuple[Any, tuple[Any, ...]] = None, ()  # that of the last call, with the form of this
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
            function=model_and_loss,
            loss=True,
            work=work,
            transforms=transforms,
            dynamic=dynamic,
            both_modes=both_modes,
            whole=self.whole,
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
        passes on. `run` may raise NumbersWanted while `dynamic`."""

        def do(request: RequestedCall) -> Any:
            try:
                return self.call_capture.run(request, run)
            except NumbersWanted as wanted:
                log.info("lengths are numbers from now on: %s", wanted)
                self.call_capture.arguments.dynamic = False
                self.call_capture.anew()
                return self.call_capture.run(request, run)

        loss, output = self._captured(args, kwargs, target, loss_fn, outputs, do)
        if self.whole and (self._last is None or self._last.kind is not self.call_capture.kind):
            self._last, self._target = self._seen(args, kwargs, target), (None, ())
        return loss, change(output, detached) if outputs else None

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run) -> tuple[Any] | None:
        """The model's result, computed by `run`, in a tuple, if what was traced for a step holds for this call; else
        None."""
        if self._last is None:
            return None
        plain = RequestedCall(args, kwargs)
        key = form(plain)
        if key is None or key != self._target[0]:
            arguments, device = self.call_capture.arguments, self.call_capture.twins.device
            try:
                target = self._last.target_of(arguments.call(plain, device), arguments.target)
            except (LookupError, InputError, TypeError):  # the call's own capture says what is wrong with it
                return None
            self._target = key, () if target is NO_TARGET else (target,)
        return self.call_capture.run_known(
            plain._replace(targets=self._target[1], rest=(self.loss_fn, True), want="outputs"), run
        )

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
        return self.call_capture.arguments.dynamic

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
        """Call `do` with the request of the step. If the loss function cannot be traced, keep it whole and do so
        again."""
        kept = self._kept.get(code_of(loss_fn)) if self._kept else None
        if kept is not None:
            kept.loss_fn = loss_fn
        try:
            return do(self._request(args, kwargs, target, kept or loss_fn, outputs))
        except OutsideOfModules:
            if loss_fn is None or isinstance(loss_fn, nn.Module):
                raise
        kept = self._kept[code_of(loss_fn)] = KeptLoss(loss_fn, modules_in(loss_fn))
        return do(self._request(args, kwargs, target, kept, outputs))

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
        want: Want = "both" if outputs else "loss"
        self.loss_fn = loss_fn
        self.call_capture.twins.watch({"": self.model, **modules_in(loss_fn, self.prefix)})
        own = loss_fn.loss_fn if isinstance(loss_fn, KeptLoss) else loss_fn
        mode = bool(self.model.training) if self.one_mode else None
        return RequestedCall(args, kwargs, targets, (loss_fn, True), objects_in(own), want, mode)

    def _seen(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> LastStep:
        """What a call must know of a step that has just run."""
        call = self.call_capture.arguments.call(RequestedCall(args, kwargs), self.call_capture.twins.device)
        paths = {id(leaf.real): leaf.path for leaf in call.leaves.values()}
        same: dict[str, str] = {}
        odd: list[str] = []

        def without_values(path: str, tensor: Tensor) -> Tensor:
            if id(tensor) in paths:
                same[path] = paths[id(tensor)]
            elif type(tensor) is not Tensor or tensor.layout is not torch.strided:
                odd.append(path)
                return torch.empty(0)
            return hollow(dense(tensor))

        kind = self.call_capture.kind
        assert kind is not None
        target = change(target, without_values, self.call_capture.arguments.target)
        return LastStep(kind, target, same, tuple(odd), sizes_of(graph_of(kind), call))
