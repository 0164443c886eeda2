"""Which variables a stage lets go of, and where.

    h = F.linear(x, self.fc.weight)
    y = h.view(8, -1)
    z = y + 1
    del h, y

Without `del`, a large tensor that nobody needs any more lives until forward ends. A view keeps the memory of what it
views, so both go together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from fxpipe.codegen.stage.variables import Variables
from fxpipe.ir.graph.graph import Op
from fxpipe.ir.graph.shared_memory_values import viewed
from fxpipe.ir.graph.value_types import ValueType, tensors
from fxpipe.ir.program.program import Stage

LARGE = 1 << 16  # elements from which on letting go of a tensor is worth a line


def releases(stage: Stage, variables: Variables, types: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
    """After each op, the variables whose large tensors nobody needs any more, unless a statement soon to come gives
    the variable to another tensor. What the stage takes is held by the caller; letting go of it here frees nothing."""
    dying: dict[float, list[str]] = defaultdict(list)
    for name, position in variables.last_use.items():
        dying[position].append(name)
    bound = {position: _bound(op, variables) for position, op in enumerate(stage.ops)}
    made = defaultdict(int, {op.name: position for position, op in enumerate(stage.ops)})
    holder: dict[str, str] = {}  # the value that each variable holds
    shared: dict[str, list[str]] = defaultdict(list)  # for a view, the values whose memory it keeps alive
    found = {}
    for position, op in enumerate(stage.ops):
        holder |= bound[position]
        soon = {name for later in range(position, position + 3) for name in bound.get(later, ())}
        gone = []
        for name in dying[position]:
            memory = [*shared.pop(name, ()), name]
            if name in op.writes or viewed(op, types) == name:  # letting go of it frees nothing yet
                shared[op.name] += memory
            elif _is_large(types[name]):
                gone += memory
        names = ((variables.of.get(value, ""), value) for value in sorted(gone, key=made.__getitem__))
        found[op.name] = tuple(name for name, value in names if holder.get(name) == value and name not in soon)
    return found


def _bound(op: Op, variables: Variables) -> dict[str, str]:
    """The variables that the op's statement sets, with the values they then hold."""
    values = variables.unpacked.get(op.name, (op.name,)) if op.name not in variables.folded else ()
    return {variables.of[name]: name for name in values if name in variables.of}


def _is_large(kind: ValueType) -> bool:
    """Sizes that depend on the batch count as large: a micro-batch is what memory goes into."""
    return any(
        any(isinstance(dim, str) for dim in item.shape) or math.prod(map(int, item.shape)) >= LARGE
        for item in tensors(kind)
    )
