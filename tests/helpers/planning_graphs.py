"""Graphs written as text, one op a line, for the tests of planning.

a = conv2d(x, w) @ encoder.0        the module that the op is in
v = view(a)
a1 = relu_(a) ! a v                 what it writes
p = chunk(x) : tuple                a result that cannot leave its stage
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fxpipe.ir.graph.check_graph import check
from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, Size, State
from fxpipe.ir.graph.value_types import IN_VMAP, VMAP, ScalarType, TensorType, TupleType, ValueType
from fxpipe.ir.plan.profile import OpCost, Profile

ROW = TensorType("f32", ("batch", 2), "cpu", grad=True)
WEIGHT = TensorType("f32", (2, 2), "cpu", grad=True)
PLAIN = TensorType("f32", ("batch", 2), "cpu")
KINDS: dict[str, ValueType] = {
    "": ROW, "tuple": TupleType((ROW, ROW)), "plain": PLAIN, "int": ScalarType("int"), "vmap": VMAP, "inside": IN_VMAP,
}  # fmt: skip
LINE = re.compile(r"(\w+) = (\w+)\(([\w, ]*)\)([^:!@]*)(?:: (\w+) ?)?(?:! ([\w ]+?) ?)?(?:@ ([\w.]+))?")


def graph(*lines: str, inputs: Sequence[str] = ("x",), states: Mapping[str, str] | None = None) -> Graph:
    """The graph of these ops. `states` are name and kind; parameters are found by names that start with w."""
    ops, names = [], []
    for number, text in enumerate(lines):
        match = LINE.fullmatch(text)
        assert match is not None, text
        name, target, reads, _, kind, writes, module = match.groups()
        args = tuple(Ref(read) for read in re.findall(r"\w+", reads))
        names += [arg.name for arg in args]
        where = Origin("net.py", number + 1, text, module or "")
        drawn = 0 if target.startswith("rand") else None
        ops.append(Op(name, target, args, {}, KINDS[kind or ""], where, (), tuple((writes or "").split()), drawn))
    kinds = {name: "parameter" for name in dict.fromkeys(names) if name.startswith("w")} | dict(states or {})
    held = tuple(State(name, f"net.{name}", kind, WEIGHT) for name, kind in kinds.items())
    given = tuple(Input(name, name, ROW, 0) for name in inputs)
    last = ops[-1].name if ops else inputs[0]
    made = Graph(
        "Net", True, given, (Size("batch", inputs[0], 0),), held, tuple(ops), (Output(last, 0),), ((), {}), Ref(last)
    )
    check(made)
    return made


def flat(made: Graph, **changes: Mapping[str, float]) -> Profile:
    """A profile in which every op takes 1 s forward, 2 s backward, and gives 8 bytes; `changes` by column and op."""
    rows = []
    for op in made.ops:
        costs = {"forward": 1.0, "backward": 2.0, "saved": 8, "output": 8, "parameters": 0}
        costs |= {column: values[op.name] for column, values in changes.items() if op.name in values}
        rows.append(OpCost(op.name, **costs))
    return Profile(made.model, 4, "cpu", "measured", tuple(rows))


def names(made: Graph) -> str:
    return " ".join(op.name for op in made.ops)


def vmap(name: str, read: str, *inside: str) -> list[str]:
    """The lines of a vmap over `read` whose result is `name`; `inside` are its ops between `in_name` and `out_name`."""
    return [
        f"enter_{name} = _vmap_increment_nesting(batch) : vmap",
        f"in_{name} = _add_batch_dim({read}, enter_{name}) : inside",
        *inside,
        f"out_{name} = tanh(in_{name}) : inside",
        f"{name} = _remove_batch_dim(out_{name}, enter_{name})",
        f"leave_{name} = _vmap_decrement_nesting() : vmap",
    ]
