"""The statements of one op: `x = f(y)`, or Python's statement for an op that changes its first argument."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator

from fxpipe.codegen.stage.variables import Variables, rebinds
from fxpipe.codegen.text.line_layout import INDENT, WIDTH, Brackets, Doc, flat, prefix
from fxpipe.codegen.text.object_text import Names, nest
from fxpipe.codegen.text.op_text import IN_PLACE_METHODS, expression, in_place_sign, subscript
from fxpipe.codegen.text.source_names import identifier
from fxpipe.codegen.text.statements import Assign
from fxpipe.ir.graph.graph import Op, Ref
from fxpipe.ir.graph.opaque_call import Opaque

LONG_PATH = 80  # a path of the model with more characters is written in two statements
_OWNER = re.compile(
    r"((?:self|other)\.(?:.*\]\.\w+|.*))((?:\.\w+)+)"
)  # up to the last index, if there is one; the rest


def assignments(op: Op, variables: Variables, taken: Collection[str]) -> Iterator[Doc | Assign]:
    """`x = f(y)`, or Python's statement for an op that changes its first argument. If a path of the model is too long,
    the module that holds the tensor gets a variable first, with a name that is not in `taken`."""
    modules: dict[str, str] = {}
    paths: dict[str, str] = {}
    for path in _long_paths(op, variables):
        owner, rest = _OWNER.fullmatch(path).groups()  # type: ignore[union-attr]
        if owner not in modules:
            name = identifier(re.findall(r"\w+", owner)[-1])
            while name in taken or name in modules.values():
                name += "_"
            modules[owner] = name
            yield f"{name} = {owner}"
        paths[path] = modules[owner] + rest
    yield from _statement(op, variables, lambda name: paths.get(variables.of[name], variables.of[name]))


def _long_paths(op: Op, variables: Variables) -> list[str]:
    """The model's tensors whose path is too long for the op's statement: on its own, or as what is indexed or called
    when the statement has to be broken."""
    if isinstance(op.target, Opaque):  # it finds its tensors itself
        return []
    used = [variables.of[name] for name in dict.fromkeys(op.reads)]
    paths = [path for path in used if "." in path and _OWNER.fullmatch(path)]
    first = variables.of[op.args[0].name] if op.args and isinstance(op.args[0], Ref) else ""
    if first in paths and "[" in first and (isinstance(op.target, str) or op.target is operator.getitem):
        statement = _statement(op, variables, variables.of.__getitem__)
        if any(not isinstance(doc, Assign) and len(flat(doc)) > WIDTH - 3 * len(INDENT) for doc in statement):
            return paths
    return [path for path in paths if len(path) > LONG_PATH]


def _statement(op: Op, variables: Variables, names: Names) -> Iterator[Doc | Assign]:
    if not rebinds(op):
        yield _assignment(op, variables, names)
        return
    owner, sign = names(op.args[0].name), in_place_sign(op)
    if op.target is operator.setitem:
        yield prefix(f"{flat(subscript(owner, op.args[1], names))} = ", nest(op.args[2], names))
    elif sign and owner.isidentifier():
        yield prefix(f"{owner} {sign} ", nest(op.args[1], names))
    elif sign:  # `self.count += 1` would set the attribute; the tensor itself is meant
        yield Brackets(f"{owner}.{IN_PLACE_METHODS[sign]}(", (nest(op.args[1], names),), ")")
    else:
        yield expression(op, names)
    if names(op.name) != owner:
        yield f"{names(op.name)} = {owner}"


def _assignment(op: Op, variables: Variables, names: Names) -> Doc | Assign:
    written = expression(op, names)
    items = variables.unpacked.get(op.name, (op.name,))
    targets = [names(name) if name else "_" for name in items if not name or name in variables.of]
    if len(targets) > 1:
        return Assign(tuple(targets), written)
    if targets:
        return prefix(f"{', '.join(targets)} = ", written)
    is_call = isinstance(written, Brackets) and written.kind == "call"
    return written if is_call else prefix("_ = ", written)  # an operator alone would look like a slip
