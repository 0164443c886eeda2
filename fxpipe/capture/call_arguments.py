"""The arguments of a call: their names, the batch size, and their stand-ins without memory ("hollow").

Every tensor with a dimension is cut along its first one, unless `batch_dim` says otherwise: another dimension for all,
or a mapping from the name of an argument (`"mask"`, `"batch['ids']"`) to its dimension, or to None if every micro-batch
gets it whole. The name of a nest stands for all tensors in it. `"items"`: it is a list, and its items are the samples
(`untraced_lists.py`). `rows("counts")`: another input says how many of its rows are a sample's (`sample_lists.py`).
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.capture.tracing.storageless_tensors import dense, hollow
from fxpipe.capture.twins.argument_objects import ArgumentObjects
from fxpipe.capture.twins.script_twin import forward_signature
from fxpipe.capture.twins.untraced_lists import counts_of_others, rows_by_counts, untraced_lists, within
from fxpipe.errors import InputError, did_you_mean, nearest
from fxpipe.ir.sample_lists import BatchDim, RowCounts
from fxpipe.torch_internals.tracing.tensors_without_memory import let_vary

from .nested_values import change

STEP = ("target", "loss_fn", "outputs", "scaler", "accumulate", "timeline")  # a step's options besides the model's own
NO_OBJECTS = ArgumentObjects()
log = logging.getLogger("fxpipe")


class NoTarget:
    """The type of NO_TARGET, the target that was not given; None would be a target."""

    def __repr__(self) -> str:
        return "no target"

    def __reduce__(self) -> str:
        return "NO_TARGET"  # there is one, in every process


NO_TARGET = NoTarget()


# Tuples, and no data classes, as they are made for each call.


class Assumed(NamedTuple):
    """What a capture assumes of the calls of a kind.

    - `any_lengths`: all sizes of integer tensors, such as the length of tokens and masks, are symbols from the first
      capture on; constants if that fails. Sizes of other tensors, mostly features and channels, which the parameters
      decide, become symbols once a second value was seen. Dynamo specializes a symbol that must be a number.
    - `any_rows`: the batch size is a symbol, too; else it is a constant, and inputs need no common one.
    """

    any_lengths: bool
    any_rows: bool = True


class Leaf(NamedTuple):
    """A tensor among the arguments: its path as the user writes it, the tensor, its stand-in, its batch dimension."""

    path: str
    real: Tensor
    twin: Tensor
    batch_dim: int | None


class RequestedCall(NamedTuple):
    """A call as the user makes it.

    - `targets`: for a step, a tuple of the target, or an empty one; None for a call.
    - `rest`: further arguments of the captured function of a step.
    - `holders`: objects besides the model that a step may change.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...] | None = None
    rest: tuple[Any, ...] = ()
    holders: tuple[Any, ...] = ()


class Call(NamedTuple):
    """A call with hollow arguments.

    - `args`, `kwargs`: the model's arguments.
    - `given`, `rest`: all arguments of the captured function after the model, in this order.
    - `leaves`: the tensors by the `id` of the stand-in, in the order of the arguments.
    - `batch`: the batch size; `rows`: that of the stand-ins; None if nothing is cut.
    - `names`: the name of each argument.
    - `target`: the target by its name, if there is one.
    - `objects`: the user's own objects among them; `lists`: the paths of lists whose items are the samples;
      `supposed`: of those lists that only seem to be some.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: tuple[Any, ...]
    leaves: dict[int, Leaf]
    batch: int | None
    rows: int | None
    names: tuple[str, ...]
    target: Mapping[str, Any]
    rest: tuple[Any, ...] = ()
    objects: ArgumentObjects = NO_OBJECTS
    lists: tuple[str, ...] = ()
    supposed: tuple[str, ...] = ()


class Arguments:
    """Makes a `Call` from the arguments of each call. Stand-ins are cached, so that a call like an earlier one is cheap
    and gives the guards the same tensors.

    - `uncut`: whether no call is cut, so that no input needs a batch size.
    - `suppose`: whether lists may be taken for those of the samples by their length, since what reads them is tested.
    """

    def __init__(
        self, model: nn.Module, batch_dim: BatchDim, sizes: Callable[[int], Sequence[int]],
        uncut: bool = False, suppose: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.signature = model, forward_signature(model)
        # Of a call that is not cut, all items of a list, and all rows, are those of its one micro-batch.
        if uncut and not isinstance(batch_dim, int):
            batch_dim = {name: dim if isinstance(dim, int) else None for name, dim in batch_dim.items()}
        self.batch_dim: BatchDim = batch_dim
        # Whether inputs count the rows of others: then tensors are padded by what these counts are in a call.
        self.counts = not isinstance(batch_dim, int) and any(isinstance(dim, RowCounts) for dim in batch_dim.values())
        self.sizes, self.uncut, self.suppose = sizes, uncut, suppose
        self.told: set[str] = set()  # the lists whose items are taken for the samples
        self.twins: dict[Any, Tensor] = {}
        self.known: dict[Any, Call] = {}
        self.named: dict[Any, tuple[str, ...]] = {}
        self.open = any(p.kind is p.VAR_KEYWORD for p in self.signature.parameters.values())
        self.target = "loss_target" if "target" in self.signature.parameters else "target"

    def call(
        self, request: RequestedCall, assumed: Assumed, device: torch.device | None, rows: int | None = None
    ) -> Call:
        """The call with every tensor hollow, on `device`, and `rows` samples in the batch; if None, as many as in the
        largest micro-batch, but at least 2."""
        key = form(request)
        if key is None or self.counts:
            return self._call(request, assumed, device, rows)
        key = (key, assumed, device, rows)
        known = self.known.get(key)
        if known is None:
            made = self._call(request, assumed, device, rows)
            if len(self.known) > 100:
                self.known.clear()
            # Without the user's tensors, which would be kept alive.
            self.known[key] = with_reals(made, (leaf.twin for leaf in made.leaves.values()), ())
            return made
        return with_reals(known, (*request.args, *request.kwargs.values(), *(request.targets or ())), request.rest)

    def _call(self, request: RequestedCall, assumed: Assumed, device: torch.device | None, rows: int | None) -> Call:
        if assumed.any_rows:
            try:
                return self._hollow(request, assumed, device, rows)
            except InputError:
                if not self.uncut:
                    raise
        return self._hollow(request, assumed._replace(any_rows=False), device, rows)

    def _hollow(self, request: RequestedCall, assumed: Assumed, device: torch.device | None, rows: int | None) -> Call:
        args, kwargs, targets = request.args, request.kwargs, request.targets or ()
        names = self.names(args, kwargs, request.targets is not None)
        reals: list[tuple[str, Tensor, int | None]] = []
        padded: dict[int, int] = {}  # to the largest of these samples, in so many dimensions
        named = list(zip((*names, *(self.target for _ in targets)), (*args, *kwargs.values(), *targets), strict=True))
        lists = {} if self.uncut or not assumed.any_rows else untraced_lists(named, self.batch_dim, self.suppose)
        counted = rows_by_counts(named, self.batch_dim) if assumed.any_rows else {}

        def note(path: str, tensor: Tensor) -> Tensor:
            if path in counted:
                change(counted[path], note_item, path)
                padded[id(counted[path].values)] = 2
            else:
                reals.append((path, tensor, cut_along(self.batch_dim, path, tensor) if assumed.any_rows else None))
            return tensor

        def note_item(path: str, tensor: Tensor) -> Tensor:
            reals.append((path, tensor, 0))
            if path.endswith(".values"):
                padded[id(tensor)] = tensor.dim()
            return tensor

        for name, value in named:
            change(value, note, name, memo={id(items): (items, items) for items, _ in lists.values()} or None)
        for path, (_, untraced) in lists.items():
            if path not in self.told:
                self.told.add(path)
                log.info("the items of %s are the samples", path)
            change(untraced, note_item, path)
        if not isinstance(self.batch_dim, int):
            check_names(
                self.batch_dim, [path for path, _, _ in reals], (*self.signature.parameters, self.target), self.open
            )
        batch = common_size(reals)
        rows = None if batch is None else rows or max(2, max(self.sizes(batch)))  # Dynamo has no symbol for one
        leaves: dict[int, Leaf] = {}
        by_real: dict[int, Tensor] = {}
        for position, (path, real, dim) in enumerate(reals):
            if id(real) not in by_real:
                lengths = real.dim() if assumed.any_lengths and holds_whole_numbers(real) else 0
                twin = self.twin(position, real, dim, rows, device, padded.get(id(real), lengths))
                by_real[id(real)] = twin
                leaves[id(twin)] = Leaf(path, real, twin, dim)

        def swap(path: str, tensor: Tensor) -> Any:
            return change(counted[path], swap) if path in counted else by_real[id(tensor)]

        objects = ArgumentObjects()
        objects.memo |= {id(items): (items, change(untraced, swap)) for items, untraced in lists.values()}
        hollowed = [change(value, swap, path, memo=objects.memo) for path, value in named]
        new, aims = tuple(hollowed[: len(args)]), tuple(hollowed[len(args) + len(kwargs) :])
        new_kwargs = dict(zip(kwargs, hollowed[len(args) :], strict=False))
        given = (new, new_kwargs) if request.targets is None else (new, new_kwargs, aims)
        target = dict(zip((self.target,), aims, strict=False))
        objects.begin()
        supposed = tuple(path for path, (_, stand_in) in lists.items() if stand_in.supposed)
        return Call(
            new, new_kwargs, given, leaves, batch, rows, names, target, request.rest, objects, (*lists,), supposed
        )  # fmt: skip

    def twin(
        self,
        position: int,
        real: Tensor,
        dim: int | None,
        rows: int | None,
        device: torch.device | None,
        lengths: int,
    ) -> Tensor:
        """The stand-in of an argument, whose batch dimension and first `lengths` dimensions are symbols."""
        strides = real.stride() if real.layout is torch.strided else real.layout
        form = real.shape, strides, real.dtype, real.device, real.requires_grad, type(real)
        key = position, form, dim, rows, lengths
        made = self.twins.get(key)
        if made is None:
            made = hollow(dense(real), device, None if dim is None or rows is None else (dim, rows))
            for each in {*range(lengths), *(() if dim is None else (dim,))}:
                let_vary(made, each)
            if len(self.twins) > 1000:
                self.twins.clear()  # a program whose shapes never repeat
            self.twins[key] = made
        return made

    def names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: bool = False) -> tuple[str, ...]:
        """The name of each argument in the signature of forward. Raises TypeError as the model would."""
        key = (len(args), *kwargs)
        if key not in self.named:
            bound = self._bound(args, kwargs, step)
            found: list[str] = []
            for parameter in bound.signature.parameters.values():
                if parameter.kind is parameter.VAR_POSITIONAL:
                    extra = bound.arguments.get(parameter.name, ())
                    found += [f"{parameter.name}[{i}]" for i in range(len(extra))]
                elif len(found) < len(args):
                    found.append(parameter.name)
            self.named[key] = (*found[: len(args)], *kwargs)
        return self.named[key]

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: bool) -> inspect.BoundArguments:
        """The arguments bound to the signature of forward, or of its decorator, which may add arguments."""
        forward = self.model.forward
        for signature in (self.signature, forward_signature(self.model, follow_wrapped=False)):
            with suppress(TypeError):
                return signature.bind(*args, **kwargs)
        try:
            forward(*args, **kwargs)  # it cannot be called so, and Python's own error says why
        except TypeError as error:
            own, others = tuple(self.signature.parameters), STEP if step else ()
            near = [nearest(name, (*own, *others)) for name in kwargs if name not in own]
            told = ["; did you mean " + (repr(one) if one in own else f"step's {one}=") + "?" for one in near if one]
            error.add_note(f"it is {type(self.model).__name__}.forward{self.signature}{''.join(told)}")
            if step:
                error.add_note(
                    "what step() is given goes to the model, but for its own options: write "
                    "pipe.step(x, target=y, loss_fn=loss_fn)"
                )
            raise
        raise AssertionError(f"{forward} takes what its signature {self.signature} does not")


def with_static_sizes(assumed: Assumed, call: Call) -> Assumed | None:
    """The same without `any_lengths`, as not every op takes symbols; None if that changes nothing for the call."""
    lengths = any(
        holds_whole_numbers(leaf.real) and leaf.real.dim() > (leaf.batch_dim is not None)
        for leaf in call.leaves.values()
    )
    return assumed._replace(any_lengths=False) if assumed.any_lengths and lengths else None


def holds_whole_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has whole numbers or truth values."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def form(request: RequestedCall) -> Any:
    """A cache key of a call whose arguments are distinct plain tensors with strides: calls with equal keys have the
    same stand-ins. None for other calls."""
    values = (*request.args, *request.kwargs.values(), *(request.targets or ()))
    facts = []
    for x in values:
        if type(x) is not Tensor or x.layout is not torch.strided:
            return None
        facts.append((x.shape, x.stride(), x.dtype, x.device, x.requires_grad))
    if len(set(map(id, values))) < len(values):
        return None
    return len(request.args), (*request.kwargs,), request.targets is None, tuple(facts)


def with_reals(call: Call, reals: Iterable[Tensor], rest: tuple[Any, ...]) -> Call:
    """The call with other tensors of the user, in the order of the leaves."""
    leaves = {
        key: Leaf(path, real, twin, dim)
        for (key, (path, _, twin, dim)), real in zip(call.leaves.items(), reals, strict=True)
    }
    return call._replace(leaves=leaves, rest=rest)


def paths_of(call: Call) -> dict[int, list[str]]:
    """All paths of each stand-in, by its `id`."""
    paths: dict[int, list[str]] = {}

    def note(path: str, tensor: Tensor) -> Tensor:
        paths.setdefault(id(tensor), []).append(path)
        return tensor

    values = (*call.args, *call.kwargs.values(), *call.target.values())
    for name, value in zip((*call.names, *call.target), values, strict=True):
        change(value, note, name)
    return paths


def cut_along(batch_dim: BatchDim, path: str, tensor: Tensor) -> int | None:
    """The dimension along which an argument is cut, at least 0; None if it is not. Raises InputError if the argument
    does not have the dimension."""
    default = batch_dim if isinstance(batch_dim, int) else 0
    dim: int | str | RowCounts | None = default if tensor.dim() else None
    if not isinstance(batch_dim, int) and (names := [name for name in batch_dim if within(path, name)]):
        request = max(names, key=len)
        dim = batch_dim[request] if request == path or tensor.dim() else None
    if dim is None:
        return None
    if isinstance(dim, RowCounts):
        raise InputError(f"batch_dim says that {dim.name} counts the rows of {path}: name the tensor by its path")
    if not isinstance(dim, int):
        raise InputError(f"batch_dim says that the items of {path} are the samples, and it is a tensor here")
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(
            f"{path} has {tensor.dim()} dimensions, so it cannot be cut along dimension {dim}; "
            f"write batch_dim={{{path!r}: None}} to give it whole to every micro-batch"
        )
    return dim % tensor.dim()


def check_names(batch_dim: Mapping[str, Any], paths: Sequence[str], optional: Sequence[str], open: bool) -> None:
    """Raise InputError for a name in `batch_dim` that no input can have. Names of inputs that this call leaves out are
    allowed. `open`: forward takes arguments of any name."""
    for name in batch_dim:
        if name not in paths and re.split(r"[.\[]", name)[0] not in optional and not open:
            near = did_you_mean(name, [*paths, *optional])
            raise InputError(f"batch_dim names {name!r}, which is no input; the inputs are {', '.join(paths)}{near}")


def common_size(tensors: Sequence[tuple[str, Tensor, int | None]]) -> int | None:
    """The size that all tensors have in their batch dimension; None if nothing is cut. Raises InputError if sizes
    differ or are 0."""
    sizes = {path: tensor.shape[dim] for path, tensor, dim in tensors if dim is not None}
    if not sizes:
        return None
    batch = next(iter(sizes.values()))
    if batch > 0 and all(size == batch for size in sizes.values()):
        return batch
    if all(size == 0 for size in sizes.values()):
        raise InputError("the batch is empty: " + ", ".join(f"{path} has size 0" for path in sizes))
    listing = "\n".join(
        f"    {path}: {size} in dimension {dim} of {tuple(tensor.shape)}"
        for path, tensor, dim in tensors
        if dim is not None
        for size in (tensor.shape[dim],)
    )
    counts = list(sizes.values())
    common = max(set(counts), key=lambda size: (counts.count(size), -counts.index(size)))
    odd = {path: None for path, size in sizes.items() if size != common}
    raise InputError(
        f"the inputs have no common batch size:\n{listing}\n"
        f"give as many samples of each; or write batch_dim={odd} to give an input whole to every micro-batch, or its "
        "dimension in place of None"
        + ", or 'items' for a list whose items are the samples" * any("[" in path for path in sizes)
        + counts_of_others(tensors, common)
    )
