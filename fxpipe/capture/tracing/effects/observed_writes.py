"""Observes which memory the primitive ops of a run write, and whether one of them is random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.capture.tracing.layers.layer_values import Known
from fxpipe.torch_internals.compiling.vmap_levels import outside_vmaps
from fxpipe.torch_internals.op_modes import TorchDispatchMode
from fxpipe.torch_internals.operator_classes import schema as schema_of
from fxpipe.torch_internals.tensor_memory import memory_key

# These write their running statistics without declaring it: the places of mean and variance, and of `training`.
SILENT_WRITES = {
    "aten::native_batch_norm": ((3, 4), 5),
    "aten::cudnn_batch_norm": ((3, 4), 5),
    "aten::miopen_batch_norm": ((3, 4), 5),
}


class Effects(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records what primitive ops do besides their results.

    - `written`: the memory that they write, in order of the writes.
    - `random`: whether one of them draws random numbers.
    - `reshaped`: whether one of them changes the sizes of a tensor, or gives it other memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: dict[int, None] = {}
        self.random = self.reshaped = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        writes = [
            kwargs.get(argument.name) if argument.name in kwargs or position >= len(args) else args[position]
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.written |= dict.fromkeys(memory(writes))
        if schema.name in SILENT_WRITES:
            stats, training = SILENT_WRITES[schema.name]
            if args[training]:
                self.written |= dict.fromkeys(address for position in stats for address in memory(args[position]))
        if torch.Tag.nondeterministic_seeded in func.tags and not _idle(schema, args, kwargs):
            self.random = True
        self.reshaped |= torch.Tag.inplace_view in func.tags
        result = func(*args, **kwargs)
        self.written |= dict.fromkeys(memory(writes))  # `x.data = y` gives x other memory
        return result

    def of(self, run: Callable[[], Any]) -> tuple[Any, tuple[int, ...], bool]:
        """What `run` returns, the memory that its ops write, and whether one of them is random."""
        self.written, self.random = {}, False
        value = run()
        return value, tuple(self.written), self.random


def as_fake(value: Any) -> Any:
    """What an op made under a fake mode. torch gives `torch.tensor([0.0], device="meta")` a real tensor there, which
    ops of fake tensors do not take: a fake one is made in its place."""
    if type(value) is not Tensor or not value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _idle(schema: Any, args: Any, kwargs: Any) -> bool:
    """Whether a random op draws nothing, its probability being zero."""
    given = {a.name: args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(schema.arguments)}
    return any(name in ("dropout_p", "dropout") and not given[name] for name in given) or given.get("train") is False


def memory(value: Any) -> Iterator[int]:
    """The storages of a value."""
    if isinstance(value, Known):
        yield value.memory
    if isinstance(value, Tensor):
        yield memory_key(outside_vmaps(value))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from memory(item)


def tensors_in(nest: Any) -> Iterator[Any]:
    """The tensors, or nodes of a trace, in arguments, in order."""
    if isinstance(nest, (Tensor, fx.Node)):
        yield nest
    elif isinstance(nest, (tuple, list)):
        for item in nest:
            yield from tensors_in(item)
    elif isinstance(nest, dict):
        yield from tensors_in(tuple(nest.values()))
    elif isinstance(nest, slice):
        yield from tensors_in((nest.start, nest.stop, nest.step))
