"""Inputs of which each sample has several parts, as tensors that can be cut along the batch and sent.

    targets = [{"boxes": f32[3, 4], "label": 7},          SampleList({"boxes": Padded(f32[2, 3, 4], i64[2, 2]),
               {"boxes": f32[1, 4], "label": 2}]                      "label": Numbers(i64[2])})

    patches = f32[20, 8], counts = [12, 8]                CountedRows(f32[2, 12, 8], bool[2, 12], "counts")

Only submodules and loss functions that are kept whole look into a list: they are given the list of their samples. Rows
by counts are put together where forward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.torch_internals.pytrees import tree_leaves

NUMBERS = (bool, int, float)
SHORTEST = 2  # sizes of zero and one are numbers for a trace, and larger ones are symbols


class Padded(NamedTuple):
    """A tensor of each sample: all of them, padded with zeros at the end of each dimension, and the sizes of each."""

    values: Tensor
    sizes: Tensor

    def of(self, sample: int) -> Tensor:
        value: Tensor = self.values[sample]
        return value[tuple(map(slice, self.sizes[sample].tolist()))] if value.dim() else value


class Numbers(NamedTuple):
    """A Python number of each sample."""

    values: Tensor

    def of(self, sample: int) -> bool | int | float:
        return self.values[sample].item()


@dataclass(frozen=True)
class RowCounts:
    """In `batch_dim`: that a tensor has rows of samples, one sample's after another's, as many of each as the input of
    this name says."""

    name: str


BatchDim = int | Mapping[str, int | Literal["items"] | RowCounts | None]  # the option `batch_dim`


def rows(counts: str) -> RowCounts:
    """Says in `batch_dim` that an input has rows of samples, one sample's after another's, and that the input named
    `counts` says how many of each: a number for each sample, or several whose product it is, as `(time, height, width)`
    of an image.

    >>> import fxpipe
    >>> batch_dim = {"pixel_values": fxpipe.rows("image_grid_thw")}
    """
    return RowCounts(counts)


class CountedRows(NamedTuple):
    """Rows of samples, f[rows, ...], padded to the most that a sample has: `values`, f[samples, most, ...], and where
    there is no padding, `places`, bool[samples, most]. `by`: the path of the input that says how many each has."""

    values: Tensor
    places: Tensor
    by: str

    def together(self) -> Tensor:
        """The rows of all samples, one after another."""
        return self.values[self.places]


def places_of(by: str, counts: Tensor) -> Tensor:
    """`CountedRows.places`, on the CPU, for counts of [samples, ...]. Raises InputError if they are none."""
    if not counts.dim() or not counts.numel() or counts.is_floating_point() or counts.is_complex():
        raise InputError(f"{by} is to count rows, and is no tensor of whole numbers with a row for each sample")
    each = counts.detach().to("cpu", torch.int64).reshape(len(counts), -1).prod(1)
    return torch.arange(max(SHORTEST, int(each.max()))) < each.unsqueeze(1)


def counted_rows(path: str, tensor: Tensor, by: str, places: Tensor) -> CountedRows:
    """The rows of a tensor with the places of its samples' rows. Raises InputError if it has another number of rows, or
    needs a gradient."""
    if tensor.requires_grad:
        raise InputError(f"{path} has rows of samples and needs a gradient, which cannot be; write {path}.detach()")
    each = places.sum(1)
    if not tensor.dim() or int(each.sum()) != tensor.shape[0]:
        shown = ", ".join(map(str, each[:8].tolist())) + ", ..." * (len(each) > 8)
        found = f"{tensor.shape[0]} rows" if tensor.dim() else "no rows"
        raise InputError(f"{path} has {found}, and by {by} the samples have {shown}: {each.sum().item()} together")
    values = tensor.new_zeros(*places.shape, *tensor.shape[1:])
    values[places.to(tensor.device)] = tensor
    return CountedRows(values, places, by)


def counted(path: str, tensor: Tensor, by: str, counts: Tensor) -> CountedRows:
    """The rows of a tensor by their counts, [samples, ...]. Raises InputError as those two do."""
    return counted_rows(path, tensor, by, places_of(by, counts))


def with_rows(nest: Any) -> Any:
    """The nest of arguments with the tensors themselves in place of counted rows. Parts without any are themselves, as
    forward may change them."""
    if isinstance(nest, CountedRows):
        return nest.together()
    if not _has_rows(nest):
        return nest
    if type(nest) is dict:
        return {key: with_rows(part) for key, part in nest.items()}
    return type(nest)([with_rows(part) for part in nest])


def _has_rows(nest: Any) -> bool:
    if isinstance(nest, CountedRows):
        return True
    inside = nest.values() if type(nest) is dict else nest if type(nest) in (list, tuple) else ()
    return any(map(_has_rows, inside))


class SampleList(NamedTuple):
    """A list with an item for each sample. `each`: an item, with `Padded` or `Numbers` in place of what differs from
    sample to sample."""

    each: Any

    def items(self) -> list[Any]:
        """The list itself."""
        return [_item(self.each, sample) for sample in range(tensors_of(self.each)[0].shape[0])]


def packed(path: str, items: Sequence[Any]) -> Any:
    """What `SampleList.each` is for these items, at least one. Raises InputError for items that differ in more than
    numbers, and the contents and sizes of tensors."""
    first = items[0]
    if all(isinstance(item, Tensor) for item in items):
        return _padded(path, items)
    if all(isinstance(item, Mapping) for item in items):
        if any(item.keys() != first.keys() for item in items):
            raise _unlike(path, "have other keys", [sorted(map(str, item)) for item in items])
        return {key: packed(f"{path}[{key!r}]", [item[key] for item in items]) for key in first}
    if type(first) in (list, tuple) and all(type(item) is type(first) for item in items):
        if len({len(item) for item in items}) > 1:
            raise _unlike(path, "differ in length", [len(item) for item in items])
        return type(first)(packed(f"{path}[{i}]", list(parts)) for i, parts in enumerate(zip(*items, strict=True)))
    if type(first) in NUMBERS and all(type(item) is type(first) for item in items):
        return Numbers(torch.tensor(items, dtype=torch.float64 if type(first) is float else None))
    if any(type(item) is not type(first) or repr(item) != repr(first) for item in items):
        raise _unlike(path, "differ", items)
    return first


def _padded(path: str, items: Sequence[Tensor]) -> Padded:
    kinds = {(str(item.dtype), item.dim(), str(item.device)) for item in items}
    if len(kinds) > 1:
        raise _unlike(path, "differ in their types, dimensions or devices", sorted(kinds))
    shapes = torch.tensor([tuple(item.shape) for item in items], dtype=torch.int64).view(len(items), items[0].dim())
    most = [max(SHORTEST, size) for size in shapes.amax(0).tolist()]
    values = torch.zeros((len(items), *most), dtype=items[0].dtype, device=items[0].device)
    for place, item in zip(values, items, strict=True):
        place[tuple(map(slice, item.shape))] = item
    return Padded(values, shapes)


def _unlike(path: str, how: str, what: Sequence[Any]) -> InputError:
    return InputError(
        f"{path} {how} from sample to sample: {', '.join(map(str, what[:4]))}; a list whose items are samples is cut "
        "where these have the same keys, and tensors or numbers for what differs: leave the rest out"
    )


def _item(each: Any, sample: int) -> Any:
    return rebuilt(each, lambda part: part.of(sample) if isinstance(part, (Padded, Numbers)) else None)


def rebuilt(nest: Any, change: Callable[[Any], Any]) -> Any:
    """The nest of dicts, lists and tuples with `change(part)` in place of parts for which that is not None."""
    found = change(nest)
    if found is not None:
        return found
    if type(nest) is dict:
        return {key: rebuilt(part, change) for key, part in nest.items()}
    return type(nest)([rebuilt(part, change) for part in nest]) if type(nest) in (list, tuple) else nest


def tensors_of(each: Any) -> list[Tensor]:
    """The tensors of a packed item, in order."""
    return [leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)]


def unpacked(nest: Any) -> Any:
    """The nest of arguments with the lists themselves."""
    return rebuilt(nest, lambda part: part.items() if isinstance(part, SampleList) else None)


def of_samples(nest: Any) -> list[Tensor]:
    """The tensors of all lists among the arguments."""
    parts = tree_leaves(nest, is_leaf=lambda part: isinstance(part, SampleList))
    return [tensor for part in parts if isinstance(part, SampleList) for tensor in tensors_of(part)]
