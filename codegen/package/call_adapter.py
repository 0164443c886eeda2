"""The model's own call, as two functions in the package.

The scheduler takes and returns flat tuples of tensors. The model's arguments and result may be nested, named, or
dataclasses. From the templates that capture kept, this module writes

    def inputs(batch, *, scale=2.0):                      def result(logits, hidden):
        if scale != 2.0:                                      return zoo.models.Output(logits=logits, hidden=[hidden])
            raise ValueError(...)
        return batch["ids"], batch["mask"]

so that a loaded package is called like the model, and raises an error for a call that it was not made for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fxpipe.codegen.text.line_layout import Brackets, flat, prefix
from fxpipe.codegen.text.object_text import literal, modules_of, nest
from fxpipe.codegen.text.source_names import identifier, member, spells, string
from fxpipe.codegen.text.statements import BLANK, Assign, Block, Call, Statement, tuple_of
from fxpipe.errors import PackageError
from fxpipe.ir.graph.graph import Graph, Ref, Struct, refs
from fxpipe.ir.sample_lists import CountedRows, SampleList, counted, packed


class _Part(NamedTuple):
    """A value inside an argument: the expression that reaches it, and the value at capture."""

    access: str
    found: Any


def call_functions(graph: Graph) -> tuple[tuple[Statement, ...], frozenset[str], str]:
    """The functions `inputs` and `result`, the modules that they need, and the arguments of a call of the pipe, such as
    `(image, mask=mask)`. An argument whose name the graph does not know is named after the path of its first tensor."""
    names = _arguments(graph)
    result, modules = _result(graph)
    call = ", ".join([*(name for name, _ in names[0]), *(f"{name}={name}" for name, _ in names[1])])
    reached = {part.found.name: part.access for part in reversed(list(_parts(names))) if isinstance(part.found, Ref)}
    accesses = {item.path: reached[item.name] for item in graph.inputs if item.name in reached}
    checks = (statement for part in _parts(names) for statement in _check(part, accesses))
    needed = modules | {module for group in names for _, found in group for module in _modules(found)}
    return (_inputs(graph, names, reached, checks), BLANK, BLANK, result), frozenset(needed), f"({call})"


_Arguments = tuple[
    list[tuple[str, Any]], list[tuple[str, Any]]
]  # by position and by name: what each is called, and was


def _arguments(graph: Graph) -> _Arguments:
    args, kwargs = graph.call
    paths = {item.name: item.path for item in graph.inputs}
    taken: set[str] = set(kwargs)
    positional = []
    for index, template in enumerate(args):
        known = [*graph.arguments[index : index + 1], *(paths[ref.name] for ref in refs(template) if ref.name in paths)]
        roots = (re.match(r"\w+", path) for path in known)
        name = _parameter(next((root[0] for root in roots if root), f"argument_{index}"))
        while name in taken:
            name += "_"
        taken.add(name)
        positional.append((name, template))
    for name in kwargs:
        if _parameter(name) != name:
            raise PackageError(f"the call has an argument named {name!r}, which Python cannot spell")
    return positional, list(kwargs.items())


def _parameter(name: str) -> str:
    return name if spells(name) else identifier(name)


def _inputs(graph: Graph, names: _Arguments, reached: Mapping[str, str], checks: Iterable[Statement]) -> Statement:
    """`reached`: the expressions that reach the inputs, by name."""
    positional, named = names
    optional = len(positional)
    while optional and not any(True for _ in refs(positional[optional - 1][1])):
        optional -= 1
    parameters = [name if at < optional else _with_default(name, was) for at, (name, was) in enumerate(positional)]
    parameters += ["*"] if named else []
    parameters += [name if any(True for _ in refs(was)) else _with_default(name, was) for name, was in named]
    unknown = unreachable(graph)
    given = tuple(reached.get(item.name, "") for item in graph.inputs if item.path)
    bare = len(given) > 1
    returned: Statement = Brackets("return ", given, "", "bare") if bare else prefix("return ", tuple_of(given))
    if unknown:
        returned = Call("raise NotImplementedError", (string(f"the model's own {unknown[0]} changes"),))
    about = '"""The inputs in the order of the scheduler\'s, from a call of the model."""'
    return Block(Brackets("def inputs(", tuple(parameters), "):"), (about, *checks, returned))


def unreachable(graph: Graph) -> tuple[str, ...]:
    """Inputs that are not arguments of the call: numbers of the model that have changed, such as `self.step`."""
    reached = {ref.name for ref in refs(graph.call)}
    return tuple(item.path for item in graph.inputs if item.path and item.name not in reached)


def _with_default(name: str, was: Any) -> str:
    """The parameter, with its value at capture as the default if that is None, a number or a string."""
    plain = was is None or isinstance(was, (bool, int, float, str))
    return f"{name}={flat(literal(was))}" if plain else name


def _parts(names: _Arguments) -> Iterator[_Part]:
    for name, template in (*names[0], *names[1]):
        yield from _walk(name, template)


def _walk(access: str, template: Any) -> Iterator[_Part]:
    """The parts of an argument, outer before inner."""
    yield _Part(access, template)
    if _is(SampleList, template):
        yield from _walk(_packed(access), template.fields[0][1])
    elif _is(CountedRows, template):
        for name, item in template.fields[:2]:
            yield from _walk(f"{_packed(access)}.{name}", item)
    elif isinstance(template, Struct):
        for name, item in template.fields:
            yield from _walk(member(access, name), item)
    elif isinstance(template, (tuple, list)):
        for index, item in enumerate(template):
            yield from _walk(f"{access}[{index}]", item)
    elif isinstance(template, Mapping):
        for key, item in template.items():
            yield from _walk(f"{access}[{flat(literal(key))}]", item)


def _is(kind: type, template: Any) -> bool:
    return isinstance(template, Struct) and template.cls is kind


def _packed(access: str) -> str:
    """The variable with the tensors of a list whose items are the samples, or of counted rows."""
    return f"{identifier(access)}_each"


def _check(part: _Part, accesses: Mapping[str, str]) -> tuple[Statement, ...]:
    """Statements that raise an error if the value differs from the one at capture. `accesses`: the expressions that
    reach the inputs, by path."""
    access, found = part
    if _is(SampleList, found):
        return (Assign((_packed(access),), Call(_full_name(packed), (string(access), access))),)
    if _is(CountedRows, found):
        by = dict(found.fields)["by"]
        given = (string(access), access, string(by), accesses[by])
        return (Assign((_packed(access),), Call(_full_name(counted), given)),)
    if isinstance(found, (Ref, Struct)):
        return ()
    if isinstance(found, (tuple, list)):
        return _refuse(f"len({access}) != {len(found)}", f"{len(found)} items in {access}")
    if isinstance(found, Mapping):
        keys = ", ".join(flat(literal(key)) for key in found)
        wanted = f"{{{keys}}}" if found else "set()"
        return _refuse(f"set({access}) != {wanted}", f"the keys {keys} in {access}")
    text = _text(found)
    if text is None or found != found:
        return ()  # nothing to compare with
    sign = "is not" if found is None or isinstance(found, bool) else "!="
    return _refuse(f"{access} {sign} {text}", f"{access}={text}")


def _full_name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__name__}"


def _refuse(condition: str, made_for: str) -> tuple[Statement, ...]:
    message = string(f"this package was made for calls with {made_for}")
    return (Block(f"if {condition}:", (Call("raise ValueError", (message,)),)),)


def _text(value: Any) -> str | None:
    try:
        return flat(literal(value))
    except ValueError:
        return None


def _modules(value: Any) -> set[str]:
    parts = list(_walk("", value))
    lists = {packed.__module__ for part in parts if _is(SampleList, part.found) or _is(CountedRows, part.found)}
    try:
        literals = [part.found for part in parts if not isinstance(part.found, (Ref, Struct))]
        return lists | {module for item in literals for module in modules_of(item)} - {""}
    except ValueError:
        return lists


def _result(graph: Graph) -> tuple[Statement, frozenset[str]]:
    names: dict[str, str] = {}
    parameters = []
    for output in graph.returned:
        name = identifier(output.value)
        while name in parameters:
            name += "_"
        parameters.append(name)
        names.setdefault(output.value, name)
    try:
        modules = frozenset(modules_of(graph.result)) - {""}
        returned: Statement = prefix("return ", nest(graph.result, names.__getitem__))
    except ValueError as error:
        message = string(f"the model's result cannot be put together outside of the process that captured it: {error}")
        returned, modules = Call("raise NotImplementedError", (message,)), frozenset()
    about = '"""What the model returns, from the scheduler\'s outputs."""'
    return Block(Brackets("def result(", tuple(parameters), "):"), (about, returned)), modules
