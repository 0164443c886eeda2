"""Frozen dataclasses as JSON text and back. Every file format of fxpipe is one dataclass, and the types of its
fields are the schema. A value of another type, a missing field and an unknown one are errors that say where it is, and
what to write.

    stages[0].device is null: write a device label, such as 'cpu:0' or 'cuda:1'
    stages[1].chekpoint is no field here: did you mean 'checkpoint'?

A dataclass is an object, a NamedTuple or tuple a list, a Mapping an object of any keys. Fields with a default may be
left out, and `write` leaves them out if they are empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from fxpipe.errors import nearest

T = TypeVar("T")

LARGEST = 2**63 - 1  # whole number that is read


@dataclass(frozen=True)
class Rule:
    """A condition on a field beyond its type, as in `Annotated[int, Rule(is_even, "an even number")]`: `holds` tests a
    value, `expected` says in errors what to write."""

    holds: Callable[[Any], bool]
    expected: str


def at_least(least: int, most: int = LARGEST) -> Rule:
    """The rule for a whole number from `least` to `most`."""
    upper = "" if most == LARGEST else f" to {most:,}".replace(",", "")
    return Rule(lambda value: least <= value <= most, f"a whole number from {least}{upper or ' on'}")


def one_of(*values: str) -> Rule:
    """The rule for one of these texts."""
    return Rule(lambda value: value in values, f"one of {', '.join(map(repr, values))}")


# Reading --------------------------------------------------------------------------------------------------------------


def read(kind: type[T], text: str) -> T:
    """The value of type `kind` that JSON text describes. Raises ValueError with the place and the value at fault."""
    return from_plain(kind, parse(text))


def parse(text: str, finite: bool = True) -> Any:
    """The plain value of JSON text: lists, dicts and scalars. Raises ValueError for text that is not JSON, a key that
    comes twice, or, if `finite`, NaN and Infinity, which JSON does not have."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant if finite else None)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: too many lists or objects within each other") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for at, (key, _) in enumerate(pairs) if key in dict(pairs[:at]))
        raise ValueError(f"the key {_shown(twice)} comes twice in an object: keep one of them")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON: write a finite number")


def from_plain(kind: type[T], value: Any) -> T:
    """The value of type `kind` made of lists, dicts and scalars. Raises ValueError, see `read`."""
    return cast(T, _read(kind, value, ""))


def check(value: Any) -> None:
    """Raise ValueError if a dataclass holds a value that its field's type or rules do not allow."""
    from_plain(type(value), to_plain(value))


def _read(kind: Any, value: Any, path: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        found = _read(arguments[0], value, path)
        for rule in arguments[1:]:
            if not rule.holds(found):
                raise _wrong(path, value, rule.expected)
        return found
    if origin in (Union, UnionType):
        return _read_union(arguments, value, path)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            raise _wrong(path, value, f"one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        return _read_tuple(arguments, value, path)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _wrong(path, value, "an object, as in {...}")
        return {_text(key, path): _read(arguments[1], one, _member(path, key)) for key, one in value.items()}
    if is_dataclass(kind):
        return _read_fields(kind, value, path)
    if hasattr(kind, "_fields"):
        return kind(*_read_tuple(tuple(_types(kind).values()), value, path))
    return _read_scalar(kind, value, path)


def _read_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    """The value as the first type that fits. If none does, raises the error of the first type that is no scalar."""
    faults = []
    for kind in kinds:
        try:
            return _read(kind, value, path)
        except ValueError as error:
            faults.append((kind in (NoneType, str, int, float, bool), error))
    raise min(faults, key=lambda fault: fault[0])[1]


def _read_tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(path, value, "a list, as in [...]")
    if kinds[1:] == (Ellipsis,):
        return tuple(_read(kinds[0], one, f"{path}[{at}]") for at, one in enumerate(value))
    if len(value) != len(kinds):
        raise _wrong(path, value, f"a list of {len(kinds)}")
    return tuple(_read(kind, one, f"{path}[{at}]") for at, (kind, one) in enumerate(zip(kinds, value, strict=True)))


def _read_fields(kind: Any, value: Any, path: str) -> Any:
    types = _types(kind)
    if not isinstance(value, dict):
        raise _wrong(path, value, f"an object with {', '.join(map(repr, types))}")
    for key in value:
        if key not in types:
            near = nearest(key, types)
            instead = f"did you mean {near!r}?" if near else f"there are {', '.join(types)}"
            raise ValueError(f"{_clipped(_member(path, key))} is no field here: {instead}")
    for field in fields(kind):
        if field.name in types and field.name not in value and field.default is field.default_factory is MISSING:
            raise ValueError(f"{_member(path, field.name)} is missing: write {_expected(types[field.name])}")
    return kind(**{name: _read(types[name], one, _member(path, name)) for name, one in value.items()})


def _read_scalar(kind: Any, value: Any, path: str) -> Any:
    if kind in (int, float) and type(value) is int and abs(value) <= LARGEST:
        return value
    if kind is float and type(value) is float and math.isfinite(value):
        return value
    if kind is str and isinstance(value, str):
        return _text(value, path)
    if (kind is bool and isinstance(value, bool)) or (kind is NoneType and value is None):
        return value
    raise _wrong(path, value, _expected(kind))


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(path, value, "text that Unicode knows: half of a surrogate pair stands alone in it") from None
    return value


@lru_cache
def _types(kind: Any) -> dict[str, Any]:
    """The type of each field that is written."""
    hints = get_type_hints(kind, include_extras=True)
    names = (
        [field.name for field in fields(kind) if field.init and field.compare] if is_dataclass(kind) else kind._fields
    )
    return {name: hints[name] for name in names}


_EXPECTED = {int: "a whole number", float: "a finite number", str: "text in quotes", bool: "true or false",
             NoneType: "null"}  # fmt: skip


def _expected(kind: Any) -> str:
    """What to write for a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return cast(str, arguments[-1].expected)
    if origin in (Union, UnionType):
        return " or ".join(_expected(one) for one in arguments)
    if origin is tuple:
        return "a list, as in [...]"
    return _EXPECTED.get(kind, "an object, as in {...}")


def _wrong(path: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{_clipped(path) or 'the file'} is {_shown(value)}: write {expected}")


def _member(path: str, key: str) -> str:
    name = key if key.isidentifier() and key.isascii() else f"[{_shown(key)}]"
    return f"{path}.{name}" if path and name == key else f"{path}{name}"


def _shown(value: Any) -> str:
    """A value as JSON has it, clipped."""
    try:
        return _clipped(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"


def _clipped(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:76]} ..."


# Writing --------------------------------------------------------------------------------------------------------------


def write(value: Any, depth: int = 2) -> str:
    """The value as JSON text. Down to `depth` each item has its own line, so that files can be compared by line and
    edited by hand."""
    return "\n".join(_lines(to_plain(value), depth)) + "\n"


def to_plain(value: Any) -> Any:
    """The value as lists, dicts and scalars."""
    if is_dataclass(value) and not isinstance(value, type):
        items = {field.name: (getattr(value, field.name), field.default) for field in fields(value) if field.compare}
        return {name: to_plain(one) for name, (one, default) in items.items() if one or one != default}
    if isinstance(value, Mapping):
        return {key: to_plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(one) for one in value]
    return value


def _lines(value: Any, depth: int) -> Iterator[str]:
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{json.dumps(key)}: ", one) for key, one in value.items()]
    elif isinstance(value, list):
        items = [("", one) for one in value]
    nested = any(isinstance(one, (dict, list)) for _, one in items)
    if not items or depth == 0 or (isinstance(value, list) and not nested):
        yield json.dumps(value, allow_nan=False)
        return
    start, end = "{}" if isinstance(value, dict) else "[]"
    yield start
    for at, (key, one) in enumerate(items, 1):
        first, *rest = _lines(one, depth - 1)
        lines = [key + first, *rest]
        lines[-1] += "," if at < len(items) else ""
        yield from (f" {line}" for line in lines)
    yield end
