"""Lists with an item for each sample, as tensors that can be cut along the batch and sent.

    targets = [{"boxes": f32[3, 4], "label": 7},          SampleList({"boxes": Padded(f32[2, 3, 4], i64[2, 2]),
               {"boxes": f32[1, 4], "label": 2}]                      "label": Numbers(i64[2])})

Only submodules and loss functions that are kept whole look into such a list: they are given the list of their samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
