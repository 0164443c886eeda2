"""Parameters of which this process has a shard, gathered for each op that uses them (ZeRO-3). Generated code is the
same.

    forward     F.linear(x, weight)      the mode sees the call: all-gather weight, run the op, and let go of it
                what autograd saves      of weight: only which one it was
    backward    the op's gradient        all-gather weight again, and let go of it
                the gradient of weight   reduce-scatter: each process keeps its shard of the sum

So besides the shards only the parameters of one op are there, and in backward the gradient of one. FSDP gathers modules
instead, by hooks on them, which the ops of a stage do not have.

A stage holds placeholders on the meta device, of the whole shape: what is no op that the mode sees cannot compute with
one, and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fxpipe.runtime.stage import Stage
from fxpipe.torch_internals.pytrees import tree_flatten, tree_unflatten
from fxpipe.torch_internals.tensor_memory import memory_key, storage_key

AS_WHOLE = {"shape", "dtype", "ndim"}  # what a placeholder has as the whole parameter has it


@dataclass(frozen=True)
class Shards:
    """How a parameter is shared out by the rows of its first dimension.

    - `number`: its number, the same in all processes.
    - `rows`: how many rows each process has.
    """

    number: int
    rows: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Sharded:
    """A parameter in a step. `part`: the rows that this process has, a leaf that collects their gradient."""

    shards: Shards
    part: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole parameter."""
        return (sum(self.shards.rows), *self.part.shape[1:])


class Exchange(Protocol):
    """What the processes that share a parameter do together, all in the same order."""

    def gather(self, one: Sharded) -> Tensor:
        """The whole parameter, in new memory."""

    def scatter(self, one: Sharded, gradient: Tensor) -> Tensor:
        """This process's rows of the sum of all processes' gradients of the whole parameter."""


class Gathered:
    """The gathered parameters that are in memory. `now`: their bytes; `peak`: the most there have been."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[ref[Any], Sharded, int]] = {}
        self.now = self.peak = 0

    def add(self, whole: Tensor, one: Sharded) -> None:
        """Note whose memory this is, for as long as a tensor uses it."""
        storage = whole.untyped_storage()
        key, size = storage_key(storage), storage.nbytes()

        def gone(_: object) -> None:
            del self._live[key]
            self.now -= size

        self._live[key] = ref(storage, gone), one, size
        self.now += size
        self.peak = max(self.peak, self.now)

    def owner(self, tensor: Tensor) -> Sharded | None:
        """The parameter whose memory a tensor uses, or None."""
        if tensor.layout != torch.strided:
            return None
        found = self._live.get(memory_key(tensor))
        return None if found is None else found[1]


@dataclass(frozen=True)
class Place:
    """A tensor in the memory of a gathered parameter, instead of the tensor."""

    one: Sharded
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class GatherFunction(Function):
    """The whole parameter from this process's part of it, and back."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, one: Sharded, gathering: Gathering) -> Tensor:
        ctx.one, ctx.exchange = one, gathering.exchange
        return gathering.gather(one)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.scatter(ctx.one, gradient), None, None


class Gathering(TorchFunctionMode):
    """In this context ops get whole parameters in place of placeholders. `held`: the parameters by the `id` of their
    placeholder."""

    def __init__(self, held: Mapping[int, Sharded], exchange: Exchange, gathered: Gathered) -> None:
        super().__init__()
        self.held, self.exchange, self.gathered = held, exchange, gathered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, tree = tree_flatten((args, kwargs))
        read = getattr(getattr(func, "__self__", None), "__name__", "")  # of `x.shape` the "shape"
        if read in AS_WHOLE or not any(id(leaf) in self.held for leaf in leaves):
            return func(*args, **kwargs)
        args, kwargs = tree_unflatten(self.whole(leaves), tree)
        return func(*args, **kwargs)

    def whole(self, leaves: list[Any]) -> list[Any]:
        """The values, with whole parameters in place of placeholders."""
        found: dict[int, Tensor] = {}
        for leaf in leaves:
            if id(leaf) in self.held and id(leaf) not in found:
                one = self.held[id(leaf)]
                if one.part.requires_grad and torch.is_grad_enabled():
                    found[id(leaf)] = GatherFunction.apply(one.part, one, self)  # type: ignore[no-untyped-call]
                else:
                    found[id(leaf)] = self.gather(one)
        return [found.get(id(leaf), leaf) for leaf in leaves]

    def gather(self, one: Sharded) -> Tensor:
        whole = self.exchange.gather(one)
        self.gathered.add(whole, one)
        return whole

    # What autograd saves ----------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Tensor | Place:
        one = self.gathered.owner(tensor)
        if one is None or tensor.is_conj() or tensor.is_neg():
            return tensor.detach()  # the op's own result would refer to itself
        return Place(one, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Tensor | Place) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        whole = self.gather(saved.one)
        if whole.dtype != saved.dtype:
            whole = whole.view(saved.dtype)
        return whole.as_strided(saved.shape, saved.stride, saved.offset)


@contextmanager
def placeholders(stage: Stage, shared: Mapping[str, Shards]) -> Iterator[dict[int, Sharded]]:
    """In this context the stage holds placeholders for the parameters at the paths of `shared`. Gives the parameters by
    the `id` of their placeholder."""
    slots = [(*stage.slot(path), shards) for path, shards in shared.items()]
    parts = [held[name] for held, name, _ in slots]
    found: dict[int, Sharded] = {}
    try:
        for (held, name, shards), part in zip(slots, parts, strict=True):
            one = Sharded(shards, part)
            grad = part.requires_grad  # so that a gradient which comes by another way is an error
            held[name] = torch.empty(one.shape, dtype=part.dtype, device="meta", requires_grad=grad)
            found[id(held[name])] = one
        yield found
    finally:
        for (held, name, _), part in zip(slots, parts, strict=True):
            held[name] = part


def gathering_forward(
    stage: Stage, shared: Mapping[str, Shards], exchange: Exchange, gathered: Gathered
) -> Callable[..., Any]:
    """A forward for a stage that holds parts of the parameters at the paths of `shared`. All processes that share these
    run it together."""
    run = stage.forward

    def forward(*args: Any) -> Any:
        with placeholders(stage, shared) as held:
            mode = Gathering(held, exchange, gathered)
            with saved_tensors_hooks(mode.pack, mode.unpack):
                with mode:
                    results = run(*args)
                leaves, tree = tree_flatten(results)  # a stage may give a parameter itself
                return tree_unflatten(mode.whole(leaves), tree)

    return forward
