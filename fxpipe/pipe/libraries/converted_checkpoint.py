"""Files of the hub by the keys of a model of transformers, which has other names for some tensors, or several in one.

    block_sparse_moe.experts.0.w1.weight ─┐
    block_sparse_moe.experts.0.w3.weight ─┼─▶ mlp.experts.gate_up_proj
    block_sparse_moe.experts.1.w1.weight ─┘

transformers knows which, and how one is made of the others; only what is asked for is read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import CheckpointError
from fxpipe.pipe.saved.tensor_sources import Source, copy_from

from .library_classes import PRETRAINED, is_of


@dataclass
class Conversion:
    """Tensors of a model that are made together. `target`: the first one's key; `sources`: the keys in the file, each
    with the pattern that it fits."""

    target: str
    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)

    @property
    def targets(self) -> list[str]:
        """The keys of all that are made."""
        first, *others = self.converter.target_patterns
        return [self.target, *(self.target.replace(first, other) for other in others)]

    def of(self, tensors: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
        """What is made of tensors of the file. Raises CheckpointError."""
        converter = copy.deepcopy(self.converter)  # it keeps what it is given
        for key, pattern in self.sources:
            converter.add_tensor(self.target, key, pattern, tensors[key])
        try:
            made = converter.convert(self.target, model=model, config=model.config)
        except Exception as error:  # whatever transformers raises for tensors that do not fit
            raise CheckpointError(f"transformers cannot make {self.target} of {self.sources[0][0]}: {error}") from error
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def converted(source: Source, model: nn.Module, keys: Iterable[str]) -> Source:
    """The source by the `keys` of the model, if that is one of transformers; those that are in the file are kept."""
    if not is_of(model, PRETRAINED):
        return source
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:  # before transformers 5, models had the names of the files
        return source
    of_model = dict.fromkeys(keys, True)
    own = {key: key for key in of_model if key in source.keys}
    names, conversions = dict[str, str](), dict[str, Conversion]()
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    converters = [one for one in transforms if isinstance(one, core_model_loading.WeightConverter)]
    renamings = [one for one in transforms if isinstance(one, core_model_loading.WeightRenaming)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    for key in sorted(set(source.keys) - own.keys(), key=_in_order):
        prefix = model.base_model_prefix
        target, pattern = core_model_loading.rename_source_key(key, renamings, converters, prefix, of_model)
        if pattern is None:
            names[target] = key
        else:
            conversion = conversions.setdefault(target, Conversion(target, of_pattern[pattern]))
            conversion.sources.append((key, pattern))
    return _with_conversions(source, {**names, **own}, conversions, model)


def _with_conversions(
    source: Source, names: Mapping[str, str], conversions: Mapping[str, Conversion], model: nn.Module
) -> Source:
    made_by = {key: one for one in conversions.values() for key in one.targets if key not in names}

    @cache
    def shapes(target: str) -> dict[str, tuple[int, ...]]:
        one = conversions[target]
        hollow = {key: torch.empty(source.shape(key), device="meta") for key, _ in one.sources}
        return {key: tuple(value.shape) for key, value in one.of(hollow, model).items()}

    def shape(key: str) -> tuple[int, ...]:
        if key in names:
            return source.shape(names[key])
        found = shapes(made_by[key].target)
        if key not in found:
            raise CheckpointError(f"transformers makes {', '.join(found)} of {made_by[key].sources[0][0]}, not {key}")
        return found[key]

    def fill(tensors: Mapping[str, Tensor]) -> None:
        source.fill({names[key]: tensor for key, tensor in tensors.items() if key in names})
        wanted: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            if key not in names:
                wanted.setdefault(made_by[key].target, {})[key] = tensor
        for target, those in wanted.items():  # one after the other, so that little is in memory at a time
            like, one = next(iter(those.values())), conversions[target]
            read = {key: torch.empty(source.shape(key), dtype=like.dtype) for key, _ in one.sources}
            source.fill(read)
            copy_from(one.of(read, model).__getitem__, those)

    return Source(source.name, names.keys() | made_by.keys(), shape, fill)


def _in_order(key: str) -> list[tuple[int, str]]:
    """A key's place in an order in which 10 comes after 2.

    >>> sorted(["e.10.w", "e.2.w", "e.1.w"], key=_in_order)
    ['e.1.w', 'e.2.w', 'e.10.w']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", key)]
