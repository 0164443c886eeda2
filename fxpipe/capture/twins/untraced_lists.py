"""Lists among the arguments whose items are the samples, and rows that belong to samples by counts: which these are,
and what a trace is given for them.

    images      f32[2, 3, 8, 8]                                      two samples
    targets     [{"boxes": f32[3, 4]}, {"boxes": f32[1, 4]}]         a list of two items, one a sample
    masks       [f32[3, 8, 8], f32[1, 8, 8]]                         taken for one, and what reads it is tested
    levels      [f32[2, 8], f32[2, 4], f32[2, 2]]                    no such list: each tensor has two rows

A list of as many tensors as there are samples may be anything, such as one for each layer. Where they cannot be rows of
the samples it is `supposed`: what looks into it runs twice, and each sample must have the same result beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor

from fxpipe.capture.capture_errors import LOOKS_INTO_LIST, LOOKS_INTO_RESULT
from fxpipe.capture.nested_values import HiddenItems, change, parts_of
from fxpipe.errors import InputError, did_you_mean
from fxpipe.ir.sample_lists import (
    CountedRows,
    RowCounts,
    SampleList,
    counted_rows,
    packed,
    places_of,
    rebuilt,
    tensors_of,
)

ITEMS = "items"  # in `batch_dim`: the items of this list are the samples
DEPTH = 4  # how far the arguments are searched for lists


class UntracedList(HiddenItems, list[Any]):
    """What forward is given in place of a list whose items are the samples. A trace can hand it on, see that it is a
    list and count its items, and ends where it looks into it: whatever does so is kept whole, and runs with the list
    itself.

    - `each`: that of `SampleList`.
    - `supposed`: only its length says that its items are the samples.
    """

    def __init__(self, each: Any, supposed: bool = False) -> None:
        super().__init__()
        self.each, self.supposed, self.end_trace = each, supposed, _end_of_trace(LOOKS_INTO_LIST)

    def __len__(self) -> int:
        return tensors_of(self.each)[0].shape[0]


class _Joining(HiddenItems):
    """What may be known of hidden items: the tensor that they make one after another, `rows`."""

    @classmethod
    def joining(cls, rows: Tensor) -> Any:
        """An object of which this is known."""
        made = cls((_Items(),))  # type: ignore[call-arg]
        made.rows = rows  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`torch.cat(items)` in a trace; other functions of torch end it."""
        given = dict(zip(("tensors", "dim"), args, strict=False)) | (kwargs or {})
        items = given.pop("tensors", None)
        if func is torch.cat and type(items) is cls and hasattr(items, "rows") and given in ({}, {"dim": 0}):
            return torch.cat((items.rows,))
        return cls.end_trace()


class _Items:
    """What stands for the items. From torch 2.15 on, a trace asks the items of a list what a function of torch makes of
    it, and not the list."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return UnknownList.__torch_function__(func, types, args, kwargs)


class UnknownList(_Joining, list[Any]):
    """A list that a submodule kept whole returns, of which only a run tells how many items there are."""


class UnknownTuple(_Joining, tuple[Any, ...]):
    """A tuple of that kind."""


def with_unknown_items(kind: type) -> type[UnknownList | UnknownTuple]:
    """The class of which a trace makes a list or a tuple with an unknown number of items."""
    found = UnknownList if kind is list else UnknownTuple
    found.end_trace = staticmethod(_end_of_trace(LOOKS_INTO_RESULT))
    return found


def _look_into(self: HiddenItems, *args: Any, **kwargs: Any) -> Never:
    self.end_trace()


MADE_OF = ("__new__", "__init__", "__getattribute__", "__repr__", "__hash__", "__sizeof__", "__doc__",
           "__class_getitem__", "__getnewargs__")  # fmt: skip
for _kind, _plain in ((UntracedList, list), (UnknownList, list), (UnknownTuple, tuple)):
    for _name in {*vars(_plain), "__radd__"}.difference(MADE_OF, vars(_kind)):
        setattr(_kind, _name, _look_into)


@cache
def _end_of_trace(reason: str) -> Callable[[], Never]:
    """A function that no trace goes through, made when it is needed: it imports Dynamo."""

    def looked_into() -> Never:
        raise TypeError(reason)

    made: Callable[[], Never] = torch.compiler.disable(looked_into, reason=reason)  # type: ignore[no-untyped-call]
    return made


def for_ops(nest: Any) -> Any:
    """The nest of arguments with values that an op can take in place of untraced lists."""
    return rebuilt(nest, lambda part: SampleList(part.each) if isinstance(part, UntracedList) else None)


Listed = dict[int, tuple[list[Any], SampleList]]  # by the id of a list, it and its values for an op


def with_lists(nest: Any) -> tuple[Any, Listed]:
    """The nest of arguments with the lists themselves in place of untraced ones, and these lists; and with the tensors
    themselves in place of counted rows."""
    made: Listed = {}

    def listed(part: Any) -> list[Any] | Tensor | None:
        if isinstance(part, CountedRows):
            return part.together()
        if not isinstance(part, UntracedList):
            return None
        values = SampleList(part.each)
        items = values.items()
        made[id(items)] = items, values
        return items

    return rebuilt(nest, listed), made


class _Found(NamedTuple):
    """A list among the arguments: `rows` are the sizes of its tensors along the batch; `records`: it is of dicts."""

    path: str
    items: Sequence[Any]
    rows: frozenset[int]
    records: bool


def untraced_lists(
    named: Sequence[tuple[str, Any]], batch_dim: int | Mapping[str, Any], suppose: bool = True
) -> dict[str, tuple[Sequence[Any], UntracedList]]:
    """The lists among the named arguments whose items are the samples, and what stands for them, by path.

    Lists named 'items' in `batch_dim`; also lists of dicts, not named there, whose length is the batch size while the
    tensors inside are not all of that size along the batch; and other lists of that length whose tensors are not all of
    that size, which are `supposed` unless there is such a list of dicts, if one may `suppose` any. Raises InputError
    for a list of dicts that may be either."""
    told = batch_dim if isinstance(batch_dim, Mapping) else {}
    dim = batch_dim if isinstance(batch_dim, int) else 0
    lists, outside = list[_Found](), set[int]()

    def is_told(path: str) -> bool:
        return any(within(path, name) for name in told)

    for name, value in named:
        for part in _walk(name, value, dim):
            if isinstance(part, _Found):
                lists.append(part)
            elif not is_told(part[0]):
                outside |= _rows(part[1], dim)
    asked = [name for name, dim in told.items() if dim == ITEMS]
    for name in asked:
        if all(one.path != name for one in lists):
            raise InputError(
                f"batch_dim says that the items of {name} are the samples, and there is no list of that name with "
                "tensors in each item"
            )
    chosen, supposed = [one for one in lists if one.path in asked], list[_Found]()
    counts = outside or {len(one.items) for one in lists if one.records}
    if len(counts) == 1:
        alike = [one for one in lists if len(one.items) in counts and not is_told(one.path)]
        if any(one.records and _by_items(one) for one in alike):
            chosen += [one for one in alike if one.records or one.rows != counts]
        elif outside and suppose:
            supposed = [one for one in alike if one.rows - counts]
    found = {one.path: (one.items, UntracedList(packed(f"{one.path}[...]", one.items))) for one in chosen}
    for one in supposed:
        with suppress(InputError):  # items that are not alike
            found[one.path] = one.items, UntracedList(packed(one.path, one.items), supposed=True)
    return found


def rows_by_counts(named: Sequence[tuple[str, Any]], batch_dim: int | Mapping[str, Any]) -> dict[str, CountedRows]:
    """The tensors among the named arguments whose rows another input counts, by path. Raises InputError for counts that
    do not fit."""
    told = batch_dim if isinstance(batch_dim, Mapping) else {}
    asked = {path: dim.name for path, dim in told.items() if isinstance(dim, RowCounts)}
    found: dict[str, Tensor] = {}

    def note(path: str, tensor: Tensor) -> Tensor:
        found[path] = tensor
        return tensor

    for path, value in named if asked else ():
        change(value, note, path)
    for path, by in asked.items():
        if path in found and by not in found:
            raise InputError(
                f"batch_dim says that {by} counts the rows of {path}, and no tensor of that name is given; the tensors "
                f"are {', '.join(found)}{did_you_mean(by, found)}"
            )
    asked = {path: by for path, by in asked.items() if path in found}
    places = {by: places_of(by, found[by]) for by in asked.values()}  # one for all that it counts
    return {path: counted_rows(path, found[path], by, places[by]) for path, by in asked.items()}


def counts_of_others(tensors: Sequence[tuple[str, Tensor, int | None]], batch: int) -> str:
    """The end of an error about inputs without a common size: what to write where one of `batch` samples seems to count
    the rows of another; else ""."""
    for by, counts, _ in tensors:
        whole = counts.dim() and not (counts.is_meta or counts.is_floating_point() or counts.is_complex())
        if not whole or counts.shape[0] != batch:
            continue
        total = int(counts.reshape(batch, -1).prod(1).sum())
        for path, tensor, dim in tensors:
            if dim == 0 and tensor.shape[0] == total != batch:
                return (
                    f"; or batch_dim={{{path!r}: fxpipe.rows({by!r})}} if {by} says how many of its rows a sample has"
                )
    return ""


def _by_items(one: _Found) -> bool:
    """Whether the samples are the list's items rather than the rows of the tensors inside. Raises InputError if they
    may be either."""
    count = len(one.items)
    if one.rows == {count} and count > 1:
        raise InputError(
            f"{one.path} has {count} items, and the tensors in them have {count} rows: either may be the samples; "
            f"write batch_dim={{{one.path!r}: {ITEMS!r}}}, or batch_dim={{{one.path!r}: 0}} for the rows"
        )
    return one.rows != {count}


def within(path: str, name: str) -> bool:
    """Whether `name` is that of the tensor at `path`, or of a nest that contains it.

    >>> within("rope[0]", "rope"), within("batch['ids']", "batch['ids']"), within("ropes", "rope")
    (True, True, False)
    """
    return path.startswith(name) and path[len(name) : len(name) + 1] in ("", ".", "[")


def _walk(path: str, value: Any, dim: int, depth: int = 0) -> Iterator[_Found | tuple[str, Tensor]]:
    """The outermost lists that have tensors in each item, and the tensors that are in none."""
    if isinstance(value, Tensor):
        yield path, value
        return
    inside = [_tensors(item) for item in value] if type(value) in (list, tuple) else []
    if inside and all(inside):
        rows = frozenset(size for tensors in inside for tensor in tensors for size in _rows(tensor, dim))
        yield _Found(path, value, rows, all(isinstance(item, Mapping) for item in value))
        return
    for name, part in parts_of(value) if depth < DEPTH else ():
        yield from _walk(path + name, part, dim, depth + 1)


def _rows(tensor: Tensor, dim: int) -> set[int]:
    """The size along the batch, if the tensor has the dimension."""
    return {tensor.shape[dim]} if -tensor.dim() <= dim < tensor.dim() else set()


def _tensors(item: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(path: str, tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    change(item, note)
    return found
