"""The plain model, to compare a pipe with: the same calls and steps, on a copy, on one device, in a given dtype.

A copy has its own parameters, buffers and attributes, so the user's model does not change. If results depend on the
micro-batch (statistics, random numbers, counters, branches on data), the copy runs one micro-batch after the other,
with the random numbers that the pipe draws; otherwise it runs the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture import NO_TARGET
from fxpipe.capture.model_with_loss import model_and_loss, modules_in
from fxpipe.capture.nested_values import change
from fxpipe.errors import FxpipeError
from fxpipe.ir.graph.evaluate_graph import evaluate, with_totals
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.opaque_call import opaques
from fxpipe.pipe.build.batch_statistics import batch_norms
from fxpipe.pipe.build.call_binding import match
from fxpipe.runtime.accelerator import kinds
from fxpipe.runtime.deferred_norms import deferring
from fxpipe.runtime.microbatch import gather, scatter
from fxpipe.runtime.random import Draws, generator_of, mix, new_seed
from fxpipe.torch_internals.op_modes import TorchDispatchMode

SEED = 0  # of all runs that are compared


@dataclass(frozen=True)
class Case:
    """The arguments of a step or a call; `step`: whether there is a loss."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    loss_fn: Callable[..., Any] | None
    step: bool

    def map(self, swap: Callable[[Tensor], Tensor]) -> Case:
        """The case with `swap(tensor)` in place of each tensor; `swap` is called once for each."""
        made: dict[int, tuple[Tensor, Tensor]] = {}

        def once(_: str, tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = tensor, swap(tensor)  # the tensor is kept, so that its id is not reused
            return made[id(tensor)][1]

        args, kwargs, target = change((self.args, dict(self.kwargs), self.target), once)
        return Case(args, kwargs, target, self.loss_fn, self.step)

    def tensors(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        self.map(lambda tensor: found.setdefault(id(tensor), tensor))
        return list(found.values())


@dataclass(frozen=True)
class Results:
    """All results of a call or step, by name: outputs or loss, gradients, buffers."""

    outputs: Mapping[str, Any]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def roots(model: nn.Module, loss_fn: Any) -> dict[str, nn.Module]:
    """The model and the modules of the loss function, by the prefix of their tensors' names."""
    return {"": model, **{f"{path}.": module for path, module in modules_in(loss_fn).items()}}


def parameters(model: nn.Module, loss_fn: Any) -> dict[str, Tensor]:
    found = roots(model, loss_fn)
    return {f"{root}{name}": x for root, module in found.items() for name, x in module.named_parameters()}


def buffers(model: nn.Module, loss_fn: Any) -> dict[str, Tensor]:
    found = roots(model, loss_fn)
    return {f"{root}{name}": x for root, module in found.items() for name, x in module.named_buffers()}


def results(outputs: Mapping[str, Any], model: nn.Module, case: Case) -> Results:
    """All results after backward."""
    gradients = {f"gradient of {name}": x.grad for name, x in parameters(model, case.loss_fn).items()}
    leaves = [x for x in case.tensors() if x.requires_grad]
    gradients |= {f"gradient of input {number}": x.grad for number, x in enumerate(leaves)}
    held = {f"buffer {name}": x.detach().clone() for name, x in buffers(model, case.loss_fn).items()}
    return Results(
        {name: x.detach() if isinstance(x, Tensor) else x for name, x in outputs.items()},
        {name: None if grad is None else grad.detach().clone() for name, grad in gradients.items()},
        held,
    )


def backward_from(outputs: Mapping[str, Any]) -> None:
    """Backward of outputs without a loss, from fixed random gradients: the same at each call."""
    generator = torch.Generator().manual_seed(SEED)
    pairs = []
    for value in outputs.values():
        if isinstance(value, Tensor) and value.requires_grad:
            grad = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            pairs.append((value, grad.to(value.device, value.dtype)))
    if pairs:
        torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])


# The copy -------------------------------------------------------------------------------------------------------------


def copied(model: nn.Module, case: Case, device: torch.device, exact: bool) -> tuple[nn.Module, Case]:
    """A copy of the model, the loss and the inputs on one device; `exact`: in float64. Raises FxpipeError if the model
    cannot be copied."""

    def moved(tensor: Tensor) -> Tensor:
        made = tensor.detach().to(device, wide(tensor.dtype) if exact else tensor.dtype, copy=True)
        return made.requires_grad_(tensor.requires_grad)

    memo: dict[int, Any] = {}
    for module in roots(model, case.loss_fn).values():
        for tensor in (*module.parameters(), *module.buffers()):
            made = moved(tensor)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made.detach(), requires_grad=tensor.requires_grad)
            memo.setdefault(id(tensor), made)
    try:
        twin, loss_fn = copy.deepcopy((model, case.loss_fn), memo)
    except Exception as error:
        raise FxpipeError(
            f"verify compares with a copy of the model, and {type(model).__name__} cannot be copied: {error}; give "
            "it a __deepcopy__"
        ) from error
    put_into_scripts(model, twin, memo)
    for module in twin.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                vars(module)[name] = moved(value)
    inputs = case.map(moved)
    return twin, Case(inputs.args, inputs.kwargs, inputs.target, loss_fn, case.step)


def put_into_scripts(model: nn.Module, twin: nn.Module, memo: Mapping[int, Any]) -> None:
    """Let the copies of script modules, whose tensors are not copied by Python, have those in `memo`."""
    for module, copied_one in zip(model.modules(), twin.modules(), strict=False):
        if isinstance(copied_one, torch.jit.ScriptModule):
            for mine, own in zip(held(module), held(copied_one), strict=True):
                for name, tensor in mine.items():
                    own[name] = memo[id(tensor)]


def held(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dicts of a module's own tensors."""
    return module._parameters, module._buffers


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the same kind with the most digits."""
    return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


@contextmanager
def without_autocast() -> Iterator[None]:
    with ExitStack() as contexts:
        for kind in kinds():
            if torch.is_autocast_enabled(kind):
                contexts.enter_context(torch.autocast(kind, enabled=False))
        yield


# Its runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """How a batch is cut.

    - `rows`: the samples of each micro-batch; one micro-batch of all samples is not cut.
    - `names`, `dims`: for each tensor of the case its name in the graph, and its batch dimension; None if all
      micro-batches get it whole.
    - `others`: the inputs of the graph that are not tensors.
    - `deferred`: whether running statistics are those of the batch.
    """

    rows: tuple[int, ...]
    names: tuple[str, ...]
    dims: tuple[int | None, ...]
    others: Mapping[str, Any]
    deferred: bool = False

    def inputs(self, case: Case) -> dict[str, Any]:
        """The inputs of the graph."""
        return {**self.others, **dict(zip(self.names, case.tensors(), strict=True))}

    def pieces(self, case: Case) -> list[Case]:
        tensors = case.tensors()
        parts = {
            id(x): scatter(x, dim, self.rows) if x.dim() else [x] * len(self.rows)
            for x, dim in zip(tensors, self.dims, strict=True)
        }
        return [case.map(lambda x, i=i: parts[id(x)][i]) for i in range(len(self.rows))]  # type: ignore[misc]


def by_micro_batch(graph: Graph) -> bool:
    """Whether results depend on the micro-batch, so that a run of the whole batch is no reference."""
    states = {state.name for state in graph.states}
    writes = any(name in states for op in graph.ops for name in op.writes)
    return bool(graph.mixed or batch_norms(graph) or opaques(graph) or writes or any(op.random for op in graph.ops))


def run_plain(model: nn.Module, case: Case, graph: Graph, cut: Cut) -> Results:
    """A call or a step of this copy of the model, with backward."""
    torch.manual_seed(SEED)
    seed = new_seed()
    held = buffers(model, case.loss_fn)
    whole, at = None, next((x.device for x in case.tensors()), torch.device("cpu"))
    if graph.totals is not None and len(cut.rows) > 1 and case.loss_fn is None:
        whole = with_totals(graph, cut.inputs(case), states_of(graph.totals, model, case, at))
    found: list[dict[str, Any]] = []
    with deferring(held) if cut.deferred else nullcontext(nullcontext) as each:
        for number, piece in enumerate(cut.pieces(case)):
            with each(), SameDraws(seed, number) if by_micro_batch(graph) else nullcontext():
                found.append(outputs_of(model, piece, graph))
            if whole is not None:
                found[-1] |= _shares(model, piece, graph, cut, whole, Draws(seed, number, at))
        joined = {
            output.value: gather([one[output.value] for one in found], output.batch_dim, output.reduce, cut.rows)
            for output in graph.returned
            if output.value in found[0]
        }
        if case.step and len(cut.rows) > 1 and case.loss_fn is not None and not graph.mixed:
            joined[graph.loss or ""] = _loss_of_all(case, [one[OUTPUT] for one in found], cut.rows)
    if case.step:
        joined[graph.loss or ""].sum().backward()
    else:
        backward_from(joined)
    return results(joined, model, case)


OUTPUT = "what the model returns"


def states_of(graph: Graph, model: nn.Module, case: Case, device: torch.device) -> dict[str, Any]:
    """The states of a graph from a copy of the model: its parameters, copies of its buffers, and constants on the same
    device and in the same precision."""
    held = parameters(model, case.loss_fn)
    exact = all(x.dtype == wide(x.dtype) for x in held.values())
    held |= {name: x.detach().clone() for name, x in buffers(model, case.loss_fn).items()}

    def state(path: str, value: Any) -> Any:
        if path in held or not isinstance(value, Tensor):
            return held.get(path, value)
        return value.to(device, wide(value.dtype) if exact else value.dtype)

    return {one.name: state("" if one.kind == "constant" else one.path, one.value) for one in graph.states}


def _shares(
    model: nn.Module, piece: Case, graph: Graph, cut: Cut, whole: Mapping[str, Any], draw: Draws
) -> dict[str, Any]:
    """The micro-batch's part of numbers that the model computes and that are no plain mean or sum over samples, such as
    a loss that ignores some labels: computed by the ops of the graph, which use the totals."""
    values = evaluate(graph, {**whole, **cut.inputs(piece)}, states_of(graph, model, piece, draw.device), draw)
    return {output.value: values[output.value] for output in graph.outputs if output.batch_dim is None}


def outputs_of(model: nn.Module, case: Case, graph: Graph) -> dict[str, Any]:
    """The outputs of one run, by the names of the graph."""
    if not case.step:
        found: dict[str, Any] = {}
        match(graph.result, model(*case.args, **case.kwargs), found)
        return found
    targets = () if case.target is NO_TARGET else (case.target,)
    loss, output = model_and_loss(model, case.args, dict(case.kwargs), targets, case.loss_fn, True)
    return {graph.loss or "": loss, OUTPUT: output}


def _loss_of_all(case: Case, outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    """The loss of the joined outputs of all micro-batches."""
    parts: list[list[Tensor]] = []
    for output in outputs:
        leaves: list[Tensor] = []
        change(output, lambda _, x, leaves=leaves: leaves.append(x) or x)  # type: ignore[misc]
        parts.append(leaves)
    joined = iter([_join(leaves, rows) for leaves in zip(*parts, strict=True)])
    whole = change(outputs[0], lambda _, x: next(joined))
    assert case.loss_fn is not None
    return case.loss_fn(whole) if case.target is NO_TARGET else case.loss_fn(whole, case.target)


def _join(parts: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """The tensors, joined along the first dimension whose size is a multiple of the samples; their mean if none is."""
    for dim in range(parts[0].dim()):
        if all(x.shape[dim] * rows[0] == parts[0].shape[dim] * n for x, n in zip(parts, rows, strict=True)):
            return torch.cat(list(parts), dim)
    joined: Tensor = gather(parts, None, "mean", rows)
    return joined


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of torch that seeds each random op as stages do: from the seed of the run, the micro-batch, and the number
    of the op among the random ops."""

    def __init__(self, seed: int, micro_batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.micro_batch, self.count = seed, micro_batch, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        on = next((x.device for x in args if isinstance(x, Tensor)), (kwargs or {}).get("device"))
        generator = generator_of(torch.device("cpu" if on is None else on))
        generator.manual_seed(mix(self.seed, self.micro_batch, self.count))
        before = generator.get_state()
        result = func(*args, **(kwargs or {}))
        # Attention without dropout has the tag, too, and draws nothing.
        self.count += not torch.equal(before, generator.get_state())
        return result
