"""The call of a submodule that is kept whole: one op that is not traced inside and runs as plain Python.

    x = router(x)        one op of the graph, which reads the submodule's parameters and buffers

The submodule's forward may do what a graph cannot express: `if x.sum() > 0`, `.item()`, numpy, a lock. The op holds the
model's own submodule. While the op runs, the submodule's parameters and buffers are replaced by the tensors that the op
is given: aliases in a step, scratch buffers in a recomputation. The types and shapes of the results were learnt in
earlier runs (`Promise`), and every run is checked against them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxpipe.ir.once import once
from fxpipe.ir.sample_lists import unpacked
from fxpipe.torch_internals.pytrees import tree_flatten
from fxpipe.torch_internals.tensor_memory import memory_key, sparse_parts, version_of

from .graph import Graph, Op, Origin, called
from .module_parts import holding, running_in, slots
from .value_types import BATCH, Dim

# A dimension along the batch, as (take, dim, times, over): dimension `dim` of tensor `take`, times `times` // `over`.
Scaled = tuple[int, int, int, int]


@dataclass(frozen=True)
class OwnRows:
    """A dimension with rows of each sample's own, of which only a run tells how many there are; a run on so many
    `samples` had `count`."""

    count: int
    samples: int


Place = tuple[int, ...]  # where a part of a result is: the number of the part, of the part in that part, and so on
ATOMS = (type(None), bool, int, float, complex, str, bytes)
NOWHERE = Origin("", 0, "", "")


@dataclass(frozen=True)
class Promise:
    """What one kind of call of an opaque submodule returns.

    - `key`: everything about the call but its tensors.
    - `takes`: element type and shape of each tensor of the call, None for dimensions along the batch.
    - `gives`: for each leaf of the result a `Gives` if it is a tensor, else the leaf itself.
    - `aliased`: whether a result may be memory that the call was given.
    - `wants`: for each of the submodule's own and the given tensors, whether it needed a gradient.
    - `derives`: whether it takes derivatives inside, by autograd.
    - `lists`: whether it is given lists whose items are the samples.
    - `mixing`: which of the tensors that it returns depend, for a sample, on other samples, if runs have shown that;
      else None.
    - `depends`: for each of the tensors of `wants`, whether autograd went from a result back to it in the runs.
    - `without`: the places of lists in the result whose number of items is known only when it has run; `joined`: those
      of them that give one tensor, their items one after another.
    """

    key: Any
    takes: tuple[tuple[torch.dtype, tuple[int | None, ...]], ...]
    gives: tuple[Any, ...]
    aliased: bool = False
    wants: tuple[bool, ...] = ()
    derives: bool = False
    lists: bool = False
    mixing: frozenset[int] | None = None
    without: frozenset[Place] = frozenset()
    joined: frozenset[Place] = frozenset()
    depends: tuple[bool, ...] = ()

    def fits(self, key: Any, tensors: Sequence[Tensor]) -> bool:
        """Whether a call is of this kind. Comparing turns symbolic sizes that are not along the batch into numbers."""
        return (
            len(tensors) == len(self.takes)
            and alike(key, self.key)
            and all(
                tensor.dtype == dtype
                and tensor.dim() == len(shape)
                and all(want is None or int(size) == want for size, want in zip(tensor.shape, shape, strict=True))
                for tensor, (dtype, shape) in zip(tensors, self.takes, strict=True)
            )
        )


@dataclass(frozen=True)
class Gives:
    """A tensor that is returned: element type, shape, its dimensions in the `order` of memory from the largest stride
    to the smallest, and whether it needed a gradient."""

    dtype: torch.dtype
    shape: tuple[int | Scaled | OwnRows, ...]
    order: tuple[int, ...]
    grad: bool = False

    def sizes(self, tensors: Sequence[Tensor], unknown: Callable[[], Any]) -> list[Any]:
        """The shape, given the tensors that the call takes; `unknown` makes the sizes that only a run tells."""
        return [
            size
            if isinstance(size, int)
            else unknown()
            if isinstance(size, OwnRows)
            else _scaled(tensors[size[0]].shape[size[1]], size)
            for size in self.shape
        ]


def alike(key: Any, other: Any) -> bool:
    """Whether two keys of calls are equal. Values that cannot be compared as one truth, such as arrays, are not."""
    try:
        return bool(key == other)
    except Exception:
        return False


def _scaled(size: Any, by: Scaled) -> Any:
    _, _, times, over = by
    return size if times == over else size * times // over


@dataclass(frozen=True, eq=False)
class Opaque:
    """A submodule, a method of one, or a function that it calls, that is kept whole. `opaque(tensors, args, kwargs)`,
    with its parameters and buffers in the order of `names`, returns a tuple of the tensors in its result, in order; a
    single tensor without the tuple.

    - `path`: the submodule's path in the model, "" for the model itself.
    - `origin`, `reason`, `advice`: the line that cannot be traced, why, and what to write instead.
    - `promises`: the kinds of calls captured so far; if there are none, results are not checked.
    - `written`: lines that write into its results.
    - `remembers`: attributes that its forward sets, or sources of random numbers other than torch; with any, it may
      behave differently when it runs again.
    - `writes`: the buffers, among `names`, that runs have shown it to write.
    - `deferred`: None, or its norms update running statistics at the end of the mini-batch: how many calls in a forward
      have updated them before this one.
    - `method`: the name of what is called; `uses`: the paths in the submodule of what that uses, None for all.
    - `lists`: `without` and `joined` of its promises, for a saved pipe, which has none of these.
    """

    path: str
    module: nn.Module
    origin: Origin = NOWHERE
    reason: str = ""
    promises: list[Promise] = field(default_factory=list)
    written: list[Origin] = field(default_factory=list)
    remembers: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    deferred: int | None = None
    advice: str = ""
    method: str = "forward"
    uses: frozenset[str] | None = None
    lists: tuple[Collection[Place], Collection[Place]] = ((), ())
    is_opaque: ClassVar[bool] = True

    @property
    def __name__(self) -> str:
        return f"opaque {self}"

    def __repr__(self) -> str:
        method = "" if self.method == "forward" else f".{self.method}"
        return f"{self.path or type(self.module).__name__}{method}"

    @property
    def called(self) -> str:
        """The path under which it is called."""
        return self.path if self.method == "forward" else f"{self.path}.{self.method}".lstrip(".")

    @property
    def because(self) -> str:
        """Why it is kept whole."""
        return f"because of {self.origin} ({self.reason})" if self.origin.line else f"because {self.reason}"

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of its parameters and buffers, relative to the submodule."""
        return tuple(name for name, _, _ in slots(self.module, self.uses))

    @property
    def unsure(self) -> frozenset[int]:
        """The floating-point or complex tensors in the result, by place, that needed no gradient in a run so far: they
        may need one when forward takes another branch."""
        runs = ([x for x in promise.gives if isinstance(x, Gives)] for promise in self.promises if promise.wants)
        without = ((place, x.dtype) for gives in runs for place, x in enumerate(gives) if not x.grad)
        return frozenset(place for place, dtype in without if dtype.is_floating_point or dtype.is_complex)

    @property
    def depends(self) -> frozenset[int]:
        """The tensors that it reads and is given, by place, on which its results depended in all runs so far."""
        runs = [promise.depends for promise in self.promises if promise.wants]
        return frozenset(place for place, depends in enumerate(zip(*runs, strict=False)) if all(depends))

    @property
    def derives(self) -> bool:
        """Whether it takes derivatives inside, by autograd, for which it must run with gradients."""
        return any(promise.derives for promise in self.promises)

    @property
    def mixing(self) -> frozenset[int]:
        """Which of the tensors that it returns depend, for a sample, on other samples, as runs have shown."""
        return frozenset().union(*(promise.mixing or () for promise in self.promises))

    @property
    def keeps_samples(self) -> bool:
        """Whether runs have shown that nothing that it returns for a sample depends on other samples."""
        return bool(self.promises) and all(promise.mixing == frozenset() for promise in self.promises)

    def about_rows(self, cut: bool) -> Dim:
        """Of a result of which only a run tells how many rows it has: about how many, `cut` into micro-batches."""
        gives = (gives for promise in self.promises for gives in promise.gives if isinstance(gives, Gives))
        found = next(size for one in gives for size in one.shape if isinstance(size, OwnRows))
        return f"{-(-found.count // found.samples)}*{BATCH}" if cut and found.samples else found.count

    @property
    def buffers(self) -> tuple[bool, ...]:
        """For each of `names`, whether it is a buffer, which forward may write."""
        return tuple(key in module._buffers for _, module, key in slots(self.module, self.uses))

    def promise(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Promise | None, list[Tensor]]:
        """The first promise for such a call, or None, and the call's tensors."""
        promises, tensors = self.fitting(args, kwargs)
        return next(promises, None), tensors

    def fitting(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Iterator[Promise], list[Tensor]]:
        """The promises for such a call, which differ in the tensors that need a gradient; and the call's tensors."""
        tensors, key = take_apart(self.module, args, kwargs)
        return (promise for promise in self.promises if promise.fits(key, tensors)), tensors

    def hold_for(self, promise: Promise, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Let the promise hold for all calls like this one, whose bool arguments may be symbolic."""
        _, key = take_apart(self.module, args, kwargs)
        self.promises[:] = [replace(one, key=key) if one is promise else one for one in self.promises]

    def __call__(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        promise, given = self.promise(args, kwargs)
        if self.promises and promise is None:
            raise RuntimeError(f"{self._who} is called in a way in which it was not captured")
        versions = _versions(given)
        with running_in(self.module, self.method, self.uses) as (named, run), holding(named, tensors, self.uses):
            if promise is None or promise.lists:
                args, kwargs = unpacked((args, dict(kwargs)))
            result = run(*args, **kwargs)
        if versions != _versions(given):
            raise RuntimeError(f"{self._who} writes into what it is given; write x = x + 1 in place of x += 1")
        found = leaves(result, *self.lists) if promise is None else leaves(result, promise.without, promise.joined)
        if promise is not None:
            self._check(promise, found, given)
        memory = {address for x in (*tensors, *given) for address in addresses(x)}
        gives = [self._own(x, memory) for x in found if isinstance(x, Tensor)]
        return gives[0] if len(gives) == 1 else tuple(gives)

    def _own(self, x: Tensor, memory: set[int]) -> Tensor:
        """The result, cloned if it is in `memory`. Raises RuntimeError if a later op would write into it."""
        if memory_key(x) not in memory:
            return x
        if self.written:
            raise RuntimeError(
                f"{self._who} returned memory that it was given, which {self.written[0]} writes into; there, write "
                "y = y + 1 in place of y += 1"
            )
        return x.clone()

    def _check(self, promise: Promise, found: Sequence[Any], given: Sequence[Tensor]) -> None:
        """Raise RuntimeError if the call did not return what was promised."""
        wanted = [(x.dtype, tuple(x.sizes(given, AnySize))) if isinstance(x, Gives) else x for x in promise.gives]
        got = [(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else x for x in found]
        if wanted != got:
            raise RuntimeError(
                f"{self._who} returned {_show(got)}, where {_show(wanted)} was expected from earlier runs; types and "
                "shapes of what it returns, and what is no tensor, must not depend on the values of tensors"
            )

    @property
    def _who(self) -> str:
        return f"{self}, which runs as it is because of {self.origin}," if self.origin.line else str(self)


def _show(parts: Sequence[Any]) -> str:
    shown = [f"{str(p[0]).removeprefix('torch.')}{list(p[1])}" if isinstance(p, tuple) else repr(p) for p in parts]
    return ", ".join(shown) or "nothing"


def addresses(tensor: Tensor) -> set[int]:
    """The addresses of the tensor's memory, which is in several pieces if it is sparse."""
    if tensor.layout is torch.strided:
        return {memory_key(tensor)}
    if tensor.layout is torch.sparse_coo:
        return {address for part in sparse_parts(tensor) for address in addresses(part)}
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    parts = (tensor.crow_indices(), tensor.col_indices()) if rows else (tensor.ccol_indices(), tensor.row_indices())
    return set().union(*map(addresses, (*parts, tensor.values())))


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [version_of(x) for x in tensors]


def take_apart(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], Any]:
    """The tensors of a call, and the key: everything else about it (mode, autocast, nesting, other arguments)."""
    found, nest = tree_flatten((args, dict(kwargs)))
    others = [Tensor if isinstance(x, Tensor) else _known(x) for x in found]
    here = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if here is None else ("cpu", here.type)
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    training = getattr(module, "training", False)  # a frozen script module has no mode
    return [x for x in found if isinstance(x, Tensor)], (training, autocast, nest, others)


class AnySize:
    """Among sizes that were promised, one that only a run tells: it equals all sizes."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (int, AnySize))

    def __repr__(self) -> str:
        return "?"

    __hash__ = None  # type: ignore[assignment]


class Truth:
    """In the key of a call, a bool that depends on data: it equals True and False."""

    def __eq__(self, other: object) -> bool:
        return type(other) in (bool, Truth)

    __hash__ = None  # type: ignore[assignment]


def _known(x: Any) -> Any:
    """An argument that is no tensor, in the key of a call."""
    return Truth() if isinstance(x, torch.SymBool) else int(x) if isinstance(x, torch.SymInt) else x


def wanting(tensors: Iterable[Tensor]) -> tuple[bool, ...]:
    """For each tensor whether it needs a gradient now; () if none does or gradients are switched off."""
    wants = tuple(x.requires_grad for x in tensors) if torch.is_grad_enabled() else ()
    return wants if any(wants) else ()


def has_vjp(op: Op) -> bool:
    """Whether the op calls a submodule whole, and returns what its backward needs after its results: generated code
    asks for that. Its last argument has the places of the tensors whose gradients are wanted."""
    return isinstance(op.target, Opaque) and len(op.args) == 4


@once
def opaques(graph: Graph) -> tuple[Opaque, ...]:
    """The submodules that the graph calls whole."""
    return tuple(dict.fromkeys(op.target for op in graph.ops if isinstance(op.target, Opaque)))


def unsure(ops: Iterable[Op]) -> set[str]:
    """The names of ops whose results may or may not need a gradient: only a run tells."""
    found: set[str] = set()
    touched: set[str] = set()  # these results, and the values that those ops write
    for op in ops:
        opaque = isinstance(op.target, Opaque) and bool(op.target.unsure)
        if not opaque and (not touched or touched.isdisjoint(op.reads)):
            continue
        stopped = called(op) == "detach" or any(region.kind == "grad" and not region.args[0] for region in op.regions)
        if not stopped:
            found.add(op.name)
            touched |= {op.name, *op.writes}
    return found


# What a call returns --------------------------------------------------------------------------------------------------


def apart(value: Any) -> tuple[Callable[[list[Any]], Any], list[Any]] | None:
    """A function that builds such an object from its parts, and the parts; None for a leaf."""
    kind = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return lambda items: kind(*items), list(value)
    if kind in (tuple, list):
        return kind, list(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value) if f.init]
        return lambda items: kind(**dict(zip(names, items, strict=True))), [getattr(value, name) for name in names]
    if kind is dict:
        keys = list(value)
        return lambda items: dict(zip(keys, items, strict=True)), list(value.values())
    return None


def leaves(value: Any, without: Collection[Place] = (), joined: Collection[Place] = (), place: Place = ()) -> list[Any]:
    """The tensors and other leaves of a nest, in order, but for those at the places `without`; of the lists at the
    places `joined`, the items one after another."""
    parts = apart(value)
    if parts is None:
        return [value]
    if place in without:
        return [torch.cat(parts[1])] if place in joined else []
    return [leaf for at, part in enumerate(parts[1]) for leaf in leaves(part, without, joined, (*place, at))]
