"""Tensors of the model that this process has let go of: another rank has them, or each rank a part.

    before    layers.3.weight    a Parameter with the values of the start
    after     layers.3.weight    the same object without memory, of a class that says where the values are

It keeps its shape, dtype and name, so that the model can be captured again, frozen, cast and copied. What needs values
(an op, `state_dict()`, a pickle) raises ReleasedError.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fxpipe.capture.tracing.storageless_tensors import hollow, without_memory
from fxpipe.errors import ReleasedError
from fxpipe.torch_internals.gradient_norms import allow_norms_of
from fxpipe.torch_internals.moved_tensors import set_data

from .torch_clipping import refuse_partial

# What tells nothing of values: attributes and methods of tensors, and what may be set.
READS = [
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "is_meta", "is_cuda", "is_cpu",
    "is_mkldnn", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "ndim", "nbytes", "itemsize", "_version",
    "_backward_hooks", "output_nr", "retains_grad",
]  # fmt: skip
WRITES = ["requires_grad", "grad", "data"]
METHODS = [
    "size", "dim", "stride", "numel", "nelement", "element_size", "storage_offset", "is_floating_point", "is_complex",
    "is_signed", "is_contiguous", "ndimension", "requires_grad_", "get_device", "is_inference", "is_conj", "is_neg",
    "untyped_storage", "register_hook", "register_post_accumulate_grad_hook", "__hash__",
]  # fmt: skip
FUNCTIONS = ["is_floating_point", "is_complex", "_has_compatible_shallow_copy_type"]
CASTS = ["to", "float", "double", "half", "bfloat16", "type", "cpu", "cuda", "ipu", "mtia", "xpu"]

_class: Any = Tensor
_without_override: Any = nn.Parameter.__torch_function__  # runs the function as it is
_plain = {getattr(Tensor, name).__get__ for name in READS if hasattr(Tensor, name)}
_plain |= {getattr(Tensor, name).__set__ for name in WRITES}
_plain |= {getattr(Tensor, name) for name in METHODS} | {getattr(torch, name) for name in FUNCTIONS}
_casts = {getattr(Tensor, name) for name in CASTS if hasattr(Tensor, name)} | {torch.empty_like}


_data, _grad = _class.data.__get__, _class.grad.__get__


class Released(Tensor):
    """A buffer that this process has let go of. `_place`: its name and where it is, in words."""

    _place: tuple[str, str]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _plain:
            if func == _grad:
                refuse_partial()
            return _without_override(func, types, args, kwargs or {})
        if func == _data:
            return released(_without_override(func, types, args, {}), *args[0]._place)
        if func in _casts and isinstance(args[0], Released):
            one, *others = args
            made = func(torch.empty((0,) * one.dim(), dtype=one.dtype, device=one.device), *others, **kwargs or {})
            return released(without_memory(one.shape, one.stride(), made.dtype, made.device), *one._place)
        if func is Tensor.share_memory_:
            return args[0]  # there is nothing to share
        refuse(args, kwargs or {})

    @property
    def holder(self) -> str:
        """Where its values are, in words."""
        return self._place[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = without_memory(self.shape, self.stride(), self.dtype, self.device)
        made = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        made = released(made, *self._place)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse((self,), {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name, where = self._place
        return f"{type(self).__name__}({name}, {list(self.shape)}, {where})"


class ReleasedParameter(Released, nn.Parameter):
    """A parameter that this process has let go of."""

    __torch_function__ = Released.__torch_function__


def refuse(args: Any, kwargs: Mapping[str, Any]) -> NoReturn:
    """Raise the error for the first released tensor among the arguments of a function of torch."""
    found = next(find((args, list(kwargs.values()))), None)
    name, where = ("a tensor", "on another rank") if found is None else found._place
    raise ReleasedError(
        f"{name} has no values in this process: it is {where}, and each rank has the tensors of its own stages. Call "
        "the pipe in place of the model: pipe.forward_only(...), pipe.state_dict() for this rank's part, "
        "fxpipe.save_checkpoint; or, on all ranks, pipe.gather(), which puts the values of all ranks into the model"
    )


def find(value: Any) -> Iterator[Released]:
    """The released tensors in nested lists and tuples."""
    if isinstance(value, Released):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find(item)


def released(tensor: Tensor, name: str, where: str) -> Tensor:
    """The same tensor object without values. `where` they are, as in "on rank 1"."""
    kind = ReleasedParameter if isinstance(tensor, nn.Parameter) else Released
    if not isinstance(tensor, Released):
        tensor.grad = None
        tensor.data = hollow(tensor.detach())
        tensor.__class__ = kind
    tensor._place = name, where  # type: ignore[attr-defined]
    return tensor


def release(tensors: Mapping[str, Tensor], kept: Iterable[Tensor], where: Callable[[str], str]) -> None:
    """Let go of these tensors of the model, by path, but for those that are also `kept`. `where(path)`: in words, where
    the values are."""
    own = {id(tensor) for tensor in kept}
    for path, tensor in tensors.items():
        if id(tensor) not in own and not isinstance(tensor, Released):
            allow_norms_of([tensor])  # the model's is not used from now on
            released(tensor, path, where(path))


def trim() -> None:
    """Return memory that is free to the system, where the C library of this process keeps it: tensors of some MiB, as
    those of a model or in messages, otherwise stay a part of the process after they are gone. Once a kind of call."""
    gc.collect()
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # the C library of GNU
        library.malloc_trim(0)


@contextmanager
def standing_in_for_released(module: nn.Module) -> Iterator[None]:
    """A context in which the module's own released tensors have memory, which is forgotten at its end."""
    dicts: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    places = [(held, key, x) for held in dicts for key, x in held.items() if isinstance(x, Released)]
    try:
        for held, key, x in places:
            made = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            held[key] = nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made
        yield
    finally:
        for held, key, x in places:
            held[key] = x


def restored(tensor: Tensor, value: Tensor) -> Tensor:
    """The same tensor object, with this value."""
    if isinstance(tensor, Released):
        del tensor._place
        plain: Any = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
        tensor.__class__ = plain
    set_data(tensor, value.detach())
    return tensor
