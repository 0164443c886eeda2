"""The text of one op, as a person would have written it.

What was captured, `conv2d(x, w, None, (1, 1), (1, 1), (1, 1), 1)`, becomes `F.conv2d(x, self.conv.weight, padding=1)`:
operators as operators, functions by their public name, numbers by the name of the argument that they are, and nothing
that only repeats a default.
"""

from __future__ import annotations

import enum
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fxpipe.codegen.text.line_layout import Brackets, Doc, Infix, flat, prefix
from fxpipe.codegen.text.object_text import Names, modules_of, nest, spell
from fxpipe.codegen.text.signatures import PLAIN, Signature, is_default, of_call, one_number
from fxpipe.codegen.text.source_names import member, spells, state_path
from fxpipe.errors import FxpipeError
from fxpipe.ir.graph.graph import Op, Ref
from fxpipe.ir.graph.opaque_call import Opaque

_BINARY: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.and_: "&", operator.or_: "|",
    operator.xor: "^", operator.lshift: "<<", operator.rshift: ">>", operator.eq: "==", operator.ne: "!=",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.is_: "is",
    operator.is_not: "is not",
}  # fmt: skip
_UNARY: dict[Any, str] = {operator.neg: "-", operator.pos: "+", operator.invert: "~", operator.not_: "not "}
_MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
# In-place operators, with the plain one that they are for numbers.
_IN_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv, operator.ifloordiv: operator.floordiv, operator.imod: operator.mod,
    operator.ipow: operator.pow, operator.imatmul: operator.matmul, operator.iand: operator.and_,
    operator.ior: operator.or_, operator.ixor: operator.xor, operator.ilshift: operator.lshift,
    operator.irshift: operator.rshift,
}  # fmt: skip
# The methods behind the in-place signs; `@=` is none, it makes a new tensor.
IN_PLACE_METHODS = {
    "+=": "add_", "-=": "sub_", "*=": "mul_", "/=": "div_", "//=": "floor_divide_", "%=": "remainder_", "**=": "pow_",
    "&=": "bitwise_and_", "|=": "bitwise_or_", "^=": "bitwise_xor_", "<<=": "bitwise_left_shift_",
    ">>=": "bitwise_right_shift_",
}  # fmt: skip
_HAVE_SIGNS = frozenset((*_BINARY, *_UNARY, *_IN_PLACE, operator.getitem, getattr))


class EmitError(FxpipeError):
    """Something in the model cannot be written as source; the message names it and the user's line."""


def expression(op: Op, names: Names) -> Doc:
    """The right side of the op's statement. Raises EmitError, with the user's line, for what has no source form."""
    try:
        return _expression(op, names)
    except ValueError as error:
        raise EmitError(f"cannot write the op {op.name!r}, at {op.origin}: {error}") from None


def _expression(op: Op, names: Names) -> Doc:
    target, args = _IN_PLACE.get(op.target, op.target) if not isinstance(op.target, str) else op.target, op.args
    if isinstance(target, str):
        return _method(target, args, op.kwargs, names)
    if isinstance(target, Opaque):
        return _whole(target, args, names)
    if target is dict and not args:
        return nest(dict(op.kwargs), names)
    if not op.kwargs:
        written = _operator(target, args, names)
        if written is not None:
            return written
    name = spell(target).text
    return Brackets(f"{name}(", _arguments(name, target, args, op.kwargs, names), ")")


def _whole(target: Opaque, args: tuple[Any, ...], names: Names) -> Doc:
    """`self.router(x)`: a submodule called whole. Tensors that the stage has under another path are named."""
    tensors, given, others, *of = args
    owner = state_path(target.called) if target.called else "self.whole_model"
    inside = f"{target.path}." if target.path else ""
    pairs = zip(target.names, tensors, strict=True)
    elsewhere = {name: ref for name, ref in pairs if names(ref.name) != state_path(f"{inside}{name}")}
    named = [flat(nest(elsewhere, names))] if elsewhere else []
    if of:
        owner = f"{owner}.vjp({', '.join([flat(nest(of[0], names)), *named])})"
    elif target.deferred is not None:
        owner = f"{owner}.deferring({', '.join([str(target.deferred), *named])})"
    elif named:
        owner = f"{owner}.with_tensors({named[0]})"
    return Brackets(f"{owner}(", (*(nest(arg, names) for arg in given), *_keywords(others, names)), ")")


def _operator(target: Any, args: tuple[Any, ...], names: Names) -> Doc | None:
    """The op as an operator; None if it has no such form, or one that linters would refuse (`x == None`)."""
    if target is operator.getitem and len(args) == 2:
        return subscript(_receiver(args[0], names), args[1], names)
    if target is getattr and len(args) == 2 and isinstance(args[1], str):
        return member(_receiver(args[0], names), args[1])
    if target in _UNARY and len(args) == 1:
        return _UNARY[target] + _receiver(args[0], names)
    if target in _BINARY and len(args) == 2:
        return _infix(_BINARY[target], *args, names)
    return None


def _infix(sign: str, left: Any, right: Any, names: Names) -> Doc | None:
    if sign == "+" and isinstance(left, (tuple, list)) | isinstance(right, (tuple, list)):
        return None
    if sign in ("==", "!=") and any(item is None or isinstance(item, bool) for item in (left, right)):
        return None
    if sign in _MIRRORED and not isinstance(left, Ref):
        sign, left, right = _MIRRORED[sign], right, left
    first = _receiver(left, names) if sign == "**" else flat(nest(left, names))
    second = flat(nest(right, names))
    tight = sign == "**" and _simple_operand(first) and _simple_operand(second)
    return Infix(first, sign if tight else f" {sign} ", second)


def _simple_operand(text: str) -> bool:
    """What formatters put `**` next to without spaces."""
    return re.fullmatch(r"-?[\d.e+-]+|[\w.]+", text) is not None


def _receiver(value: Any, names: Names) -> str:
    """What stands before `.` or `[`, or beside a sign that binds tightly: numbers with signs need parentheses there."""
    text = flat(nest(value, names))
    number = isinstance(value, (int, float)) and not isinstance(value, (bool, enum.Enum))
    return f"({text})" if number and (text.startswith("-") or "**" in text or isinstance(value, int)) else text


def _method(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Names) -> Doc:
    method = member(_receiver(args[0], names), name)
    return Brackets(f"{method}(", _arguments(name, name, args, kwargs, names), ")")


def _arguments(
    name: str, target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Names
) -> tuple[Doc, ...]:
    """The arguments between the brackets; a method's receiver is not among them."""
    first = 1 if isinstance(target, str) else 0
    signature = of_call(name, target, args)
    if signature is None:
        return (*(nest(arg, names) for arg in args[first:]), *_keywords(kwargs, names))
    given = dict(zip((name for name, _ in signature), args, strict=False)) | dict(kwargs)
    others = {key: value for key, value in kwargs.items() if key not in dict(signature)}
    return (*_named_arguments(signature[first:], given, names), *_keywords(others, names))


def _named_arguments(signature: Signature, given: Mapping[str, Any], names: Names) -> Iterator[Doc]:
    """The arguments that the signature knows, in its order; from the first literal on that is not plain, and after
    the first that is left out, by their names. Defaults are left out."""
    by_name = False
    for position, (name, default) in enumerate(signature):
        if name not in given or _redundant(name, given[name], default, given):
            by_name = True
            continue
        value = one_number(given[name], name)
        plain = name in PLAIN or _has_ref(value) or (position == 0 and name == "input")
        by_name = by_name or not plain
        text = nest(value, names)
        yield prefix(f"{name}=", text) if by_name else text


def _redundant(name: str, value: Any, default: Any, given: Mapping[str, Any]) -> bool:
    """Whether the call means the same without the argument."""
    if name == "_stacklevel":  # only tells a warning which caller to blame
        return given.get("dim") is not None
    if name == "stride" and default is None and "kernel_size" in given:
        size = one_number(given["kernel_size"], "kernel_size")
        return value is None or bool(one_number(value, "stride") == size)
    return is_default(value, default, name)


def _has_ref(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_ref, value))
    return isinstance(value, Ref)


def _keywords(kwargs: Mapping[str, Any], names: Names) -> Iterator[Doc]:
    plain = {k: v for k, v in kwargs.items() if spells(k)}
    for key, value in plain.items():
        yield prefix(f"{key}=", nest(one_number(value, key), names))
    others = {k: v for k, v in kwargs.items() if k not in plain}
    if others:
        yield prefix("**", nest(others, names))


def subscript(owner: str, index: Any, names: Names) -> Doc:
    """`owner[index]`."""
    if not isinstance(index, tuple) or hasattr(index, "_fields"):
        return Brackets(f"{owner}[", (_index(index, names),), "]", "index")
    if len(index) == 1:
        certain = index[0] is None or index[0] is Ellipsis or type(index[0]) in (int, slice)
        item = flat(_index(index[0], names))
        return Brackets(f"{owner}[", (item if certain else item + ",",), "]", "index")
    items = tuple(_index(item, names) for item in index)
    return Brackets(f"{owner}[", items, "]", "literal") if items else f"{owner}[()]"


def _index(item: Any, names: Names) -> Doc:
    if not isinstance(item, slice):
        return nest(item, names)
    start, stop, step = ("" if part is None else flat(nest(part, names)) for part in (item.start, item.stop, item.step))
    if all(re.fullmatch(r"-?\w*", part) for part in (start, stop, step)):
        return f"{start}:{stop}" + (f":{step}" if step else "")
    words = (start, ":", stop, *((":", step) if step else ()))
    return " ".join(word for word in words if word)


def in_place_sign(op: Op) -> str | None:
    """`+=` for an op that is an in-place operator on a tensor or list; numbers know no in-place."""
    if isinstance(op.target, str) or op.target not in _IN_PLACE or not op.writes:
        return None
    sign = _BINARY[_IN_PLACE[op.target]] + "="
    return sign if sign in IN_PLACE_METHODS else None


def modules(op: Op) -> frozenset[str]:
    """The modules that the op's source needs."""
    try:
        called = frozenset() if isinstance(op.target, str) else _target_modules(op)
        return called | frozenset(modules_of((op.args, dict(op.kwargs))))
    except ValueError as error:
        raise EmitError(f"cannot write the op {op.name!r}, at {op.origin}: {error}") from None


def _target_modules(op: Op) -> frozenset[str]:
    if op.target is operator.setitem or in_place_sign(op) or isinstance(op.target, Opaque):
        return frozenset()
    if op.target not in _HAVE_SIGNS:
        return frozenset((spell(op.target).module,)) - {""}
    text = flat(_expression(op, str))
    spelling = spell(_IN_PLACE.get(op.target, op.target))
    return frozenset((spelling.module,)) - {""} if text.startswith(f"{spelling.text}(") else frozenset()
