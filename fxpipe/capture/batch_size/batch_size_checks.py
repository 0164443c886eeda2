"""Whether a captured graph is valid for every micro-batch: forward may depend on the batch size.

A graph is traced at the size of the largest micro-batch. If forward branches on that size (`if x.shape[0] > 4`), the
trace has a guard on the batch symbol; if it loops over it (`for i in range(x.shape[0])`), the size is a plain number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]

from fxpipe.batching.batch_facts import batch_dims
from fxpipe.batching.op_errors import refuse
from fxpipe.capture.call_arguments import Call
from fxpipe.capture.tracing.dynamo import Traced
from fxpipe.capture.tracing.fx_to_graph import Draft
from fxpipe.errors import CaptureError, file_name
from fxpipe.ir.graph.graph import UNKNOWN, Graph
from fxpipe.ir.graph.value_types import BATCH
from fxpipe.torch_internals.compiling.dynamic_sizes import is_of_tensor, printed


def check_sizes(traced: Traced, draft: Draft, call: Call, sizes: Callable[[int], Sequence[int]]) -> None:
    """Raise CaptureError, with the user's line, if the model would do something else for some micro-batch. A
    graph that is specialized to the batch size (`draft.baked`) is traced for each size instead."""
    guards = traced.mode.shape_env.guards if traced.mode.shape_env is not None and draft.baked is None else []
    if call.batch is None:
        return
    if call.batch == 1 and draft.squeezed:
        op = draft.squeezed[0]
        raise refuse(
            op, "squeeze without a dimension also takes away a batch of one", "name the dimension, as in x.squeeze(1)"
        )
    for guard in guards:
        if _asks_for_layout(guard):
            continue
        batch = [s for s in guard.expr.free_symbols if draft.symbols.get(s) == BATCH]
        for rows in sorted(set(sizes(call.batch))) if batch else ():
            if _fails(guard.expr, batch, rows, traced) and (rows > 1 or _asked_by_user(guard)):
                raise CaptureError(
                    f"{_line(guard)}looks at the batch size, and does another thing for a micro-batch of {rows} than "
                    f"for one of {call.rows}; make forward independent of the batch size, or choose chunks so that "
                    f"all micro-batches are of one size"
                )
        if batch and _asked_by_user(guard) and _fails(guard.expr, batch, call.batch, traced):
            raise CaptureError(
                f"{_line(guard)}looks at the batch size, and does another thing for the whole batch of {call.batch} "
                f"than for a micro-batch of {call.rows}; make forward independent of the batch size, or write chunks=1"
            )


def conditions(traced: Traced, draft: Draft, rows: Collection[int]) -> tuple[str, ...]:
    """The conditions, as Python, on the sizes of a micro-batch and the numbers of another call, under which the graph
    is valid for it; UNKNOWN for a condition on a value without a name. `rows`: the sizes for which it holds, unless for
    any."""
    env, names = traced.mode.shape_env, draft.symbols
    known = {symbol: name for symbol, name in names.items() if name != BATCH} if env is not None else {}
    found = [f"{name} >= 2" for symbol, name in known.items() if _least(env, symbol) == 2]  # Dynamo's, of all sizes
    for guard in env.guards if env is not None else ():
        if _asks_for_layout(guard):
            continue
        if not names.keys() >= guard.expr.free_symbols:
            found += [] if _fixes_a_size(guard.expr, env) else [UNKNOWN]
            continue
        integers = {s: sympy.Symbol(names[s], integer=True) for s in guard.expr.free_symbols}
        expression = guard.expr.xreplace(integers)
        if expression == sympy.true:  # of two sizes of the batch, which are equal
            continue
        said = printed(expression)
        of_batch = BATCH in {names[s] for s in guard.expr.free_symbols}
        # It is met by these rows; but with one number of rows, other sizes must still meet it, too.
        if of_batch and rows and (len(rows) > 1 or len(expression.free_symbols) == 1):
            continue
        found.append(f"{BATCH} == 1 or {said}" if of_batch and not _asked_by_user(guard) else said)
    found += [f"{BATCH} in {sorted(rows)}" if len(rows) > 1 else f"{BATCH} == {min(rows)}"] if rows else []
    found += [f"{BATCH} != 1"] if draft.squeezed else []
    return tuple(dict.fromkeys(found))


def _fixes_a_size(expression: Any, env: Any) -> bool:
    """Whether it says that the size of a tensor is a number, which is in the tensor's type then."""
    if not isinstance(expression, sympy.Eq) or not any(isinstance(side, sympy.Integer) for side in expression.args):
        return False
    sources = [source for symbol in expression.free_symbols for source in env.var_to_sources.get(symbol, ())]
    return bool(sources) and all(map(is_of_tensor, sources))


def _least(env: Any, symbol: sympy.Symbol) -> Any:
    found = env.var_to_range.get(symbol)
    return None if found is None else found.lower


def check_outputs(graph: Graph, batch: int | None, sizes: Callable[[int], Sequence[int]]) -> None:
    """Raise CaptureError for an output of shape `b` by `b` if micro-batches differ in size: it cannot be joined."""
    if batch is None or len(set(sizes(batch))) == 1:
        return
    for output in graph.outputs:
        kind = graph.types[output.value]
        if output.batch_dim is not None and len(batch_dims(kind)) > 1:
            raise CaptureError(
                f"the output {output.value}, {kind}, cannot be joined from micro-batches of the sizes "
                f"{', '.join(map(str, sizes(batch)))}; choose chunks so that all are of one size, leave out what "
                "is left of the data at the end (drop_last=True), or return what it is made of, and make it of what "
                "the pipe returns"
            )


def baking_line(traced: Traced, rows: int | None) -> str:
    """The user's line that made a number of the batch size, if that is known, and a line break."""
    guards = traced.mode.shape_env.guards if traced.mode.shape_env is not None else []
    found = next((g for g in guards if isinstance(g.expr, sympy.Eq) and rows in g.expr.args), None)
    return _line(found) if found else ""


def _fails(expression: Any, batch: list[sympy.Symbol], rows: int, traced: Traced) -> bool:
    """Whether the guard fails for a micro-batch of `rows` samples, with the other sizes as traced."""
    said = expression.xreplace(dict.fromkeys(batch, sympy.Integer(rows)))
    if said.free_symbols:
        hints = traced.mode.shape_env.backed_var_to_val if traced.mode.shape_env is not None else {}
        said = said.xreplace({s: hints[s] for s in said.free_symbols if s in hints})
    return bool(said == sympy.false)


def _asked_by_user(guard: Any) -> bool:
    """Whether the guard comes from the model's code, not from an op that checks for size 1 to broadcast."""
    frame = guard.sloc.framework_loc
    return "_dynamo" in str(getattr(frame, "filename", frame))


def _asks_for_layout(guard: Any) -> bool:
    """Whether the guard is torch's, for the memory layout of a convolution's result, which does not change values."""
    frame = guard.sloc.framework_loc
    return getattr(frame, "name", "") == "conv" and str(frame.filename).endswith("fake_impls.py")


def _line(guard: Any) -> str:
    """The user's line that a guard comes from, which torch keeps as `code  # file:line in function`."""
    found = re.match(r"(.*?)\s*# (.*):(\d+) in ", guard.sloc.maybe_user_loc or "", re.DOTALL)
    return f"{file_name(found[2])}:{found[3]}\n    {found[1].strip()}\n" if found else ""
