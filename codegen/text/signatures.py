"""The names and defaults of the arguments of torch's functions.

Captured calls have every argument by position: `conv2d(x, w, None, (1, 1), (1, 1), (1, 1), 1)`. A reader wants
`F.conv2d(x, w, padding=1)`. Python functions have a signature; C++ functions have none, so the usual ones are listed
here, as in torch's documentation. Calls of all others are printed as they were captured.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fxpipe.ir.program.program import RuntimeCall

REQUIRED = inspect.Parameter.empty
Signature = tuple[tuple[str, Any], ...]  # (name, default or REQUIRED) of what may be given by position or by name

# Where torch takes one number for all dimensions, `(1, 1)` and `1` are the same.
PER_DIMENSION = frozenset(("kernel_size", "stride", "padding", "dilation", "output_padding"))

# Literals that need no name to be understood where they stand.
PLAIN = frozenset((
    "kernel_size", "output_size", "normalized_shape", "num_groups", "chunks", "split_size_or_sections", "dim0", "dim1",
    "tensors", "size", "exponent", "equation", "upscale_factor", "num_classes", "pad",
))  # fmt: skip

_POOL = "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True"
_MAX_POOL = "input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False"
_RECURRENT = "input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first"
_CONV = "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1"
_CONV_TRANSPOSE = "input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1"

_OVER = "input, dim, keepdim=False"


def _each(names: str, signature: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), signature)


_FUNCTIONS = {
    "F.linear": "input, weight, bias=None",
    "F.bilinear": "input1, input2, weight, bias=None",
    **_each("F.conv1d F.conv2d F.conv3d", _CONV),
    **_each("F.conv_transpose1d F.conv_transpose2d F.conv_transpose3d", _CONV_TRANSPOSE),
    **_each("F.max_pool1d F.max_pool2d F.max_pool3d", _MAX_POOL),
    "F.avg_pool1d": _POOL,
    **_each("F.avg_pool2d F.avg_pool3d", f"{_POOL}, divisor_override=None"),
    "F.adaptive_avg_pool1d": "input, output_size",
    **_each(
        "F.adaptive_max_pool1d F.adaptive_max_pool2d F.adaptive_max_pool3d", "input, output_size, return_indices=False"
    ),
    "F.pixel_shuffle": "input, upscale_factor",
    "F.pad": "input, pad, mode='constant', value=None",
    "F.gelu": "input, approximate='none'",
    "F.scaled_dot_product_attention": "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False",
    **_each("torch.lstm torch.gru torch.rnn_tanh torch.rnn_relu", _RECURRENT),
    "F.one_hot": "input, num_classes",
    **_each("torch.cat torch.concat torch.stack", "tensors, dim=0"),
    "torch.chunk": "input, chunks, dim=0",
    "torch.flatten": "input, start_dim=0, end_dim=-1",
    **_each("torch.softmax torch.log_softmax", "input, dim, dtype=None"),
    **_each("torch.sum torch.mean torch.amax torch.amin torch.argmax torch.argmin torch.max torch.min", _OVER),
    **_each("torch.cumsum torch.unsqueeze", "input, dim"),
    **_each("torch.tril torch.triu", "input, diagonal=0"),
    "torch.clamp": "input, min=None, max=None",
    "torch.transpose": "input, dim0, dim1",
}
_RUNTIME = {
    "deferred_batch_norm": "input, running_mean, running_var, num_batches_tracked, weight, bias, momentum, eps, call=0",
    "deferred_instance_norm": "input, running_mean, running_var, weight, bias, momentum, eps, call=0",
}
# Methods share their arguments with the functions above.
_METHODS = (
    "flatten", "softmax", "log_softmax", "sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "cumsum",
    "tril", "triu", "clamp", "chunk",
)  # fmt: skip


def _parse(text: str) -> Signature:
    arguments = ast.parse(f"def _({text}): ...").body[0].args  # type: ignore[attr-defined]
    names = [argument.arg for argument in arguments.args]
    defaults = [ast.literal_eval(default) for default in arguments.defaults]
    return tuple(zip(names, [REQUIRED] * (len(names) - len(defaults)) + defaults, strict=True))


def of_call(name: str, target: Callable[..., Any] | str, args: tuple[Any, ...]) -> Signature | None:
    """What the arguments are called in this call of `target`, which prints as `name`; None if that is not sure."""
    signature = _of_method(target) if isinstance(target, str) else _of_function(name, target)
    known = signature is not None and len(args) <= len(signature) and _usual_overload(name, args)
    return signature if known else None


def _usual_overload(name: str, args: tuple[Any, ...]) -> bool:
    """Some functions take other arguments if the second is a tensor (max: of two), or the third (lstm: packed)."""
    if name in ("torch.max", "torch.min", "max", "min"):
        return len(args) < 2 or type(args[1]) is int
    return _FUNCTIONS.get(name) != _RECURRENT or isinstance(args[2], (list, tuple))


@lru_cache(maxsize=1024)
def _of_function(name: str, target: Callable[..., Any]) -> Signature | None:
    known = _RUNTIME if isinstance(target, RuntimeCall) else _FUNCTIONS
    if name in known:
        return _parse(known[name])
    if not name.startswith("F.") or not inspect.isfunction(target):
        return None
    parameters = inspect.signature(target).parameters.values()
    if any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    return tuple((p.name, p.default) for p in parameters)


@lru_cache(maxsize=1024)
def _of_method(name: str) -> Signature | None:
    return (("self", REQUIRED), *_parse(_FUNCTIONS[f"torch.{name}"])[1:]) if name in _METHODS else None


def is_default(value: Any, default: Any, name: str) -> bool:
    """Whether leaving the argument out means the same; the types must agree too, as 1 is True in Python."""
    value = one_number(value, name)
    return default is not REQUIRED and type(value) is type(default) and bool(value == default)


def one_number(value: Any, name: str) -> Any:
    """`(2, 2)` as `2`, where torch spreads one number over all dimensions."""
    spread = name in PER_DIMENSION and isinstance(value, (tuple, list)) and value
    if spread and all(type(item) is int and item == value[0] for item in value):
        return value[0]
    return value
