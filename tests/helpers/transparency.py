"""What a pipeline must equal: the model itself, run on the same micro-batches with the same random numbers.

Micro-batches are cut as evenly as possible, larger ones first. Random numbers are the one thing that a plain run and a
pipeline could never share by accident: the pipeline seeds each random op from (seed of the run, micro-batch, number of
the op), and `Seeded` does the same to the plain model, from below, by watching every op that moves the generator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.runtime.random import mix, new_seed
from tests.helpers.models import Case


@dataclass(frozen=True)
class Result:
    """All that a training step shows: what was returned, the gradients of parameters and inputs, the buffers."""

    output: Any
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def on_cpu(nest: Any) -> Any:
    """The nest with each tensor on the CPU."""
    return pytree.tree_map_only(Tensor, lambda x: x.cpu(), nest)


class Seeded(TorchDispatchMode):
    """Seeds each op that draws random numbers from (seed, micro-batch, its number among those that draw). The modules
    in `whole` are one op each, so all that they draw comes from one seed."""

    def __init__(self, seed: int, micro_batch: int, whole: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.seed, self.micro_batch, self.count = seed, micro_batch, 0
        self.whole, self.inside = whole, False

    def __enter__(self) -> Any:
        self.hooks = [module.register_forward_pre_hook(self._enter, prepend=True) for module in self.whole]
        self.hooks += [module.register_forward_hook(self._leave, always_call=True) for module in self.whole]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def _enter(self, *_: Any) -> None:
        self._seed()
        self.count, self.inside = self.count + 1, True

    def _leave(self, *_: Any) -> None:
        self.inside = False

    def _seed(self) -> None:
        torch.default_generator.manual_seed(mix(self.seed, self.micro_batch, self.count))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        self._seed()
        before = torch.default_generator.get_state()
        result = func(*args, **(kwargs or {}))
        # Attention without dropout has the tag, too, and draws nothing.
        self.count += not torch.equal(before, torch.default_generator.get_state())
        return result


def build(case: Case, *, training: bool = True) -> nn.Module:
    """The case's model in double precision, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return case.make().double().train(training)


def inputs(case: Case, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The case's inputs, the same at every call; gradients are wanted for all that can have them, unless the case makes
    its inputs as it wants them."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(batch)
        made = case.inputs(batch)
    if "own-gradients" in case.traits:
        return made
    return pytree.tree_map_only(Tensor, lambda x: x.requires_grad_(x.is_floating_point()), made)


def plain(case: Case, model: nn.Module, args: Any, kwargs: Any, chunks: int, *, deferred: bool = False) -> Result:
    """One training step of the model itself, micro-batch by micro-batch.

    `deferred` gives the batch norms the statistics of the whole batch at the end, as `deferred_batch_norm` does.
    """
    seed = new_seed() if case.random else 0
    parts = scatter((args, kwargs), chunks, case.input_dim)
    outputs = []
    with torch.random.fork_rng(devices=[]), deferred_batch_norm(model) if deferred else nullcontext():
        for micro_batch, (part_args, part_kwargs) in enumerate(parts):
            own_buffers(model)
            if "writes-parameters" in case.traits:
                own_parameters(model)
            with Seeded(seed, micro_batch):
                outputs.append(model(*part_args, **part_kwargs))
    output = gather(outputs, [size_of(part, case.input_dim) for part in parts], case)
    return finish(case, model, args, kwargs, output)


def own_buffers(model: nn.Module) -> None:
    """Gives the model copies of its buffers: what a micro-batch keeps of them for its backward stays unwritten."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.clone())


def own_parameters(model: nn.Module) -> None:
    """The same for parameters: gradients go on to those that were there first."""
    for module in model.modules():
        first = vars(module).setdefault("first_parameters", dict(module._parameters))
        for name, parameter in first.items():
            held = module._parameters[name].detach()
            module._parameters[name] = (
                parameter - parameter.detach() + held if parameter.requires_grad else held.clone()
            )


def first_parameters(model: nn.Module) -> None:
    """The model has its own parameters again, with what was written last."""
    for module in model.modules():
        for name, parameter in vars(module).pop("first_parameters", {}).items():
            parameter.data.copy_(module._parameters[name])
            module._parameters[name] = parameter


def step(case: Case, model: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Result:
    """One training step through `run`, which stands for the model: a pipeline of it."""
    return finish(case, model, args, kwargs, run(*args, **kwargs))


def finish(case: Case, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Result:
    """Backward, and all there is to compare."""
    first_parameters(model)
    model.zero_grad()
    case.loss(output).backward()
    return shown(model, args, kwargs, output)


def shown(model: nn.Module, args: Any, kwargs: Any, output: Any) -> Result:
    """All there is to compare after a step with these arguments."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients |= {f"value of {name}": parameter.detach() for name, parameter in model.named_parameters()}
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    gradients |= {f"input {index}": leaf.grad for index, leaf in enumerate(leaves)}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Result(output, copy.deepcopy(gradients), buffers)


def size_of(nest: Any, dim: int) -> int:
    """The batch size of a nest of inputs."""
    return next(leaf.shape[dim] for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor))


def scatter(nest: Any, chunks: int, dim: int) -> list[Any]:
    """The nest for each micro-batch, with memory of its own: a model may write into its inputs."""
    leaves, spec = pytree.tree_flatten(nest)
    count = min(chunks, size_of(nest, dim))
    pieces = [split(leaf, count, dim) if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves]
    return [pytree.tree_unflatten(list(row), spec) for row in zip(*pieces, strict=True)]


def split(x: Tensor, count: int, dim: int) -> list[Tensor]:
    return [piece.clone() for piece in x.tensor_split(count, dim)]


def gather(outputs: Sequence[Any], sizes: Sequence[int], case: Case) -> Any:
    """The output of the whole batch from those of its micro-batches of these sizes."""
    columns = zip(*(pytree.tree_leaves(output) for output in outputs), strict=True)
    leaves = [gather_leaf(column, sizes, case) for column in columns]
    return pytree.tree_unflatten(leaves, pytree.tree_structure(outputs[0]))


def gather_leaf(parts: Sequence[Any], sizes: Sequence[int], case: Case) -> Any:
    if not isinstance(parts[0], Tensor):
        assert all(part == parts[0] for part in parts)
        return parts[0]
    if parts[0].dim():
        return torch.cat(list(parts), case.output_dim)
    weights = [size / sum(sizes) if case.reduce == "mean" else 1 for size in sizes]
    return torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum()


@contextmanager
def deferred_batch_norm(model: nn.Module) -> Iterator[None]:
    """Inside, batch norms leave their running statistics alone; at the end they get those of all they have seen."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    old = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
    hooks = [norm.register_forward_pre_hook(lambda norm, args: seen[norm].append(args[0].detach())) for norm in norms]
    yield
    for norm, hook, before in zip(norms, hooks, old, strict=True):
        hook.remove()
        x = torch.cat(seen[norm]).transpose(0, 1).flatten(1)
        momentum = norm.momentum
        norm.running_mean = (1 - momentum) * before["running_mean"] + momentum * x.mean(dim=1)
        norm.running_var = (1 - momentum) * before["running_var"] + momentum * x.var(dim=1)
        norm.num_batches_tracked = before["num_batches_tracked"] + 1


def assert_same(got: Result, wanted: Result, tol: float = 1e-9) -> None:
    """Fail, naming the tensors and how far off they are, unless both results are equal within `tol`, relative."""
    faults = list(differences(got, wanted, tol))
    assert not faults, "not what the plain model gives:\n  " + "\n  ".join(faults)


def differences(got: Result, wanted: Result, tol: float, floor: float = 1e-5) -> Iterator[str]:
    """What differs by more than `tol` times the largest element of each tensor, or times `floor` if that is more: sums
    that cancel to zero are compared with what was summed, not with the rounding that is left of them."""
    spec, wanted_spec = pytree.tree_structure(got.output), pytree.tree_structure(wanted.output)
    if spec != wanted_spec:
        yield f"output is {spec}, not {wanted_spec}"
    else:
        yield from different("output", dict(leaves(got.output)), dict(leaves(wanted.output)), tol, floor)
    yield from different("gradient of ", got.gradients, wanted.gradients, tol, floor)
    yield from different("buffer ", got.buffers, wanted.buffers, tol, floor)


def leaves(nest: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in pytree.tree_flatten_with_path(nest)[0]:
        yield pytree.keystr(path), leaf


def different(kind: str, got: Mapping[str, Any], wanted: Mapping[str, Any], tol: float, floor: float) -> Iterator[str]:
    if got.keys() != wanted.keys():
        yield f"{kind}: there are {sorted(got)}, not {sorted(wanted)}"
        return
    for name, value in wanted.items():
        reason = difference(got[name], value, tol, floor)
        if reason:
            yield f"{kind}{name}: {reason}"


def difference(got: Any, wanted: Any, tol: float, floor: float = 1e-5) -> str | None:
    """What is wrong with `got`; None if nothing is."""
    if not isinstance(got, Tensor) or not isinstance(wanted, Tensor):
        return None if got is wanted or got == wanted else f"{describe(got)}, not {describe(wanted)}"
    if (got.dtype, got.shape, got.layout) != (wanted.dtype, wanted.shape, wanted.layout):
        return f"{describe(got)}, not {describe(wanted)}"
    if got.requires_grad != wanted.requires_grad:
        return f"requires_grad is {got.requires_grad}"
    if not got.is_floating_point() and not got.is_complex():
        wrong = int((got != wanted).sum())
        return f"{wrong} of {got.numel()} elements differ" if wrong else None
    got, wanted = got.to_dense(), wanted.to_dense()
    far = (got - wanted).abs().max().item() if got.numel() else 0.0
    if not got.dim() and got.dtype == torch.bfloat16:
        floor *= 20  # a number, such as a loss, is the sum of many, and rounded where the sums on the way were larger
    scale = max(wanted.abs().max().item() if got.numel() else 0.0, floor)
    return None if far <= tol * scale else f"{describe(got)}, off by {far / scale:.1e} (absolute {far:.1e})"


def describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    layout = "" if value.layout is torch.strided else f" {value.layout}".replace("torch.", "")
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{layout}"
