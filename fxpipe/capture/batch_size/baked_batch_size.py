"""Models that use the batch size as a Python int, so that the graph is specialized to it: `len(range(x.shape[0]))`, a
library that computes shapes as numbers, a loop over the samples (`sample_loops.py`).

Such a model is traced at two sizes of micro-batch. What differs is the batch: the sizes of types, and the numbers among
the arguments of ops, which become `b`. The graph holds for these two sizes.

    two samples    x.view(2, 4, -1)    f32[2, 4, 6]
    three          x.view(3, 4, -1)    f32[3, 4, 6]
    merged         x.view(b, 4, -1)    f32[b, 4, 6]
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from torch import Tensor

from fxpipe.batching.op_errors import refuse
from fxpipe.capture.call_arguments import Call
from fxpipe.capture.capture_errors import ValuesOfOtherSamples
from fxpipe.capture.nested_values import template
from fxpipe.capture.tracing.dynamo import Traced
from fxpipe.capture.tracing.fx_to_graph import Draft
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.graph import Op, Ref
from fxpipe.ir.graph.value_types import BATCH, Dim, ScalarType, TensorType, TupleType, ValueType, tensors
from fxpipe.ir.unique_names import Names

from .batch_size_checks import baking_line
from .loops_as_ops import with_loops_as_ops

log = logging.getLogger("fxpipe")


@dataclass(frozen=True)
class DryPass:
    """A dry pass of a call with a number of samples.

    - `traced`, `draft`: its trace, and the graph of it.
    - `result`: what the model returned.
    - `graph_of`: makes the graph of another form of the trace.
    """

    call: Call
    traced: Traced
    draft: Draft
    result: Any
    graph_of: Callable[[Traced], Draft]

    @property
    def rows(self) -> int:
        assert self.call.rows is not None
        return self.call.rows


def at_two_sizes(
    one: DryPass, sizes: Sequence[int], again: Callable[[int], DryPass], uncut: bool
) -> tuple[Draft, Draft, frozenset[int]]:
    """The graph of a call that uses the batch size as a Python int (a loop bound, for example), for micro-batches of
    two `sizes` at most: as traced, with `b`, and the sizes that it holds for. `again` makes a dry pass with another
    number of samples. If no call is cut, loops stay loops. Raises CaptureError if there is no such graph, or the whole
    batch has another one."""
    path, others = one.draft.baked or "", sorted({*sizes} - {one.rows})
    if one.traced.read is not None and one.rows != one.call.batch:
        raise ValuesOfOtherSamples(path)
    if len(others) > 1:
        rows = ", ".join(map(str, (one.rows, *others)))
        line = baking_line(one.traced, one.rows)
        raise CaptureError(
            f"{line}uses the batch size as a Python int (a loop bound, for example), so that the graph holds for one "
            f"or two sizes of {path}, and here are micro-batches of {rows} samples; choose chunks so that there are "
            "two sizes at most"
        )
    compared = others or [one.rows + 1]
    if not uncut and one.call.batch not in (None, one.rows):
        compared = [*others, one.call.batch]  # that of the plain model, which may ask `if len(x) > 15`
    made = [_at(one, again(rows), again, uncut) for rows in compared]
    first, last = (draft.graph.ops for _, draft in (made[0], made[-1]))
    if first != last:
        raise _differs(next((op for op, other in zip(first, last, strict=False) if op != other), None))
    return *made[0], frozenset({one.rows, *others})


def _at(one: DryPass, other: DryPass, again: Callable[[int], DryPass], uncut: bool) -> tuple[Draft, Draft]:
    """The graph of two passes, as traced and with `b`."""
    try:
        return one.draft, _merged(one, other)
    except CaptureError:
        loops = None if uncut else _with_loops_as_ops(one, other, again)
        if loops is None:
            raise
    return loops[0].draft, _merged(*loops)


def _with_loops_as_ops(one: DryPass, other: DryPass, again: Callable[[int], DryPass]) -> tuple[DryPass, DryPass] | None:
    """The passes with ops of all samples for each loop over them; None if something else differs, or a vmap cannot do
    it. A loop over one sample shows nothing, so one sample more is looked at then, and the one has to fit."""
    more = other if other.rows > 1 else again(one.rows + 1)
    found = with_loops_as_ops((one.traced, one.rows), (more.traced, more.rows))
    if found is None or (other is not more and not _fits_one(other.draft, one.draft, more.draft, one.rows)):
        return None
    try:
        first, second = one.graph_of(found[0]), more.graph_of(found[1])
    except Exception as error:  # torch's own, of an op that vmap does not know
        log.debug("a loop over samples stays one: %s", error)
        return None
    return replace(one, draft=first), replace(more, draft=second)


def _merged(one: DryPass, other: DryPass) -> Draft:
    return merge(one.draft, other.draft, (one.rows, other.rows), (one.result, other.result))


def merge(draft: Draft, other: Draft, rows: tuple[int, int], results: tuple[Any, Any]) -> Draft:
    """The draft with `b` where it differs from a trace at another number of rows. Raises CaptureError if the two traces
    have different ops or results, or a number that is no linear function of the batch size."""
    ops, others = draft.graph.ops, other.graph.ops
    inputs = [[item.name for item in one.graph.inputs] for one in (draft, other)]
    if (
        inputs[0] != inputs[1]
        or [op.target for op in ops] != [op.target for op in others]
        or _structure(results[0]) != _structure(results[1])
    ):
        counts = Counter(str(op.origin) for op in ops if any(tensors(op.type)))
        counts.subtract(str(op.origin) for op in others if any(tensors(op.type)))
        at_lines = (op for op in (*others, *ops) if counts[str(op.origin)])
        pairs = zip(ops, others, strict=False)
        swapped = (two for one, two in pairs if one.target != two.target)
        raise _differs(next(chain(at_lines, swapped, others[-1:]), None))
    merged = _Ops(rows, Names(draft.graph.types))
    for op, like in zip(ops, others, strict=True):
        merged.add(op, like)
    typed = tuple(
        replace(item, type=merged.type(item.type, like.type))
        for item, like in zip(draft.graph.inputs, other.graph.inputs, strict=True)
    )
    return replace(draft, graph=replace(draft.graph, ops=tuple(merged.ops), inputs=typed))


def _fits_one(one: Draft, few: Draft, more: Draft, rows: int) -> bool:
    """Whether a trace of one sample has the ops that `rows` samples have, less those that each of them adds, as one
    sample `more` shows: then what holds for these two holds for one."""
    of_one, of_few, of_more = (Counter(op.target for op in draft.graph.ops) for draft in (one, few, more))
    targets = of_one.keys() | of_few.keys() | of_more.keys()
    alike = all(of_one[x] == of_few[x] - (rows - 1) * (of_more[x] - of_few[x]) for x in targets)
    return alike and [type(x) for x in one.fakes] == [type(x) for x in few.fakes]


def _differs(op: Op | None) -> CaptureError:
    return refuse(
        op,
        "forward runs other ops, or returns another structure, depending on the batch size, as where it goes through "
        "the samples one by one and does not treat them alike",
        "write it as tensor operations over the whole batch",
    )


@dataclass
class _Ops:
    """Ops of two traces, at `rows` samples, merged so far.

    - `names`: those that are taken, and new ones.
    - `same`: the names of the first trace, by those of the second.
    - `numbers`: the values that compute a number from the batch size, by its factor and rest.
    """

    rows: tuple[int, int]
    names: Names
    ops: list[Op] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)
    numbers: dict[tuple[int, int], Ref] = field(default_factory=lambda: {(1, 0): Ref(BATCH)})

    def add(self, op: Op, like: Op) -> None:
        """Add an op, given the same op of the other trace."""

        def leaf(one: Any, two: Any) -> Any:
            if isinstance(one, Ref) and isinstance(two, Ref):
                if self.same.get(two.name, two.name) != one.name:
                    raise _differs(like)
                return one
            changes = type(one) in (bool, int, float, complex, str) and repr(one) != repr(two)
            if type(one) is not type(two) or (changes and type(one) not in (int, float)):
                raise _differs(like)
            return self._number(one, two, op) if changes else one

        def differs() -> CaptureError:
            return _differs(like)

        args, kwargs = both((op.args, dict(op.kwargs)), (like.args, dict(like.kwargs)), leaf, differs)
        self.same[like.name] = op.name
        self.ops.append(replace(op, args=args, kwargs=kwargs, type=self.type(op.type, like.type, op)))

    def type(self, one: ValueType, two: ValueType, op: Op | None = None) -> ValueType:
        """The type of a value with `b` in its sizes."""
        if isinstance(one, TupleType) and isinstance(two, TupleType) and len(one.items) == len(two.items):
            return TupleType(tuple(self.type(a, b, op) for a, b in zip(one.items, two.items, strict=True)))
        if isinstance(one, TensorType) and isinstance(two, TensorType) and len(one.shape) == len(two.shape):
            pairs = zip(one.shape, two.shape, strict=True)
            return replace(one, shape=tuple(self._dim(a, b, op) for a, b in pairs))
        if type(one) is not type(two):
            raise _differs(op)
        return one

    def _dim(self, one: Dim, two: Dim, op: Op | None) -> Dim:
        if one == two:
            return one
        (first, size), (second, other) = _times(one), _times(two)
        found = linear(first, second, self.rows) if size == other else None
        if found is None or (size and found[1]):
            raise refuse(op, f"makes a size of {one} for {self.rows[0]} samples and of {two} for {self.rows[1]}")
        return f"{as_text(*found)}*{size}" if size else as_text(*found)

    def _number(self, one: float, two: float, op: Op) -> Ref:
        """The value of a number that depends on the batch size."""
        found = linear(one, two, self.rows)
        if found is None:
            raise refuse(
                op,
                f"computes with the number {one}, which is made of the batch size: a micro-batch has another one",
                "make it of x.shape[0], without int() or len()",
            )
        if found not in self.numbers:
            factor, rest = found
            ref = Ref(BATCH)
            if factor != 1:
                ref = self._computed(op, f"{BATCH}_times_{factor}", operator.mul, ref, factor)
            if rest:
                ref = self._computed(
                    op, f"{ref.name}_{'plus' if rest > 0 else 'minus'}_{abs(rest)}", operator.add, ref, rest
                )
            self.numbers[found] = ref
        return self.numbers[found]

    def _computed(self, op: Op, wish: str, function: Callable[..., Any], of: Ref, by: int) -> Ref:
        name = self.names(wish.replace("-", "minus_"))  # a factor may be negative
        self.ops.append(Op(name, function, (of, by), {}, ScalarType("int"), op.origin, op.regions))
        return Ref(name)


def both(one: Any, two: Any, leaf: Callable[[Any, Any], Any], differs: Callable[[], CaptureError]) -> Any:
    """A nest with `leaf` of the leaves of two nests of the same structure. Raises `differs()` if they have another."""
    if type(one) is not type(two):
        return leaf(one, two)
    if isinstance(one, (tuple, list)):
        if len(one) != len(two):
            raise differs()
        items = [both(a, b, leaf, differs) for a, b in zip(one, two, strict=True)]
        return type(one)(*items) if hasattr(one, "_fields") else type(one)(items)
    if isinstance(one, dict):
        if one.keys() != two.keys():
            raise differs()
        return {key: both(value, two[key], leaf, differs) for key, value in one.items()}
    if isinstance(one, slice):
        ends = zip((one.start, one.stop, one.step), (two.start, two.stop, two.step), strict=True)
        return slice(*(both(a, b, leaf, differs) for a, b in ends))
    return leaf(one, two)


def linear(one: float, two: float, rows: tuple[int, int]) -> tuple[int, int] | None:
    """The factor and rest of the linear function of the batch size that is `one` at the first number of rows and `two`
    at the second; None if it has other coefficients than integers.

    >>> linear(4, 6, (2, 3)), linear(2, 1, (2, 1)), linear(1, 2, (2, 3)), linear(0.5, 0.25, (2, 4))
    ((2, 0), (1, 0), (1, -1), None)
    """
    if not (type(one) is type(two) is int) or (two - one) % (rows[1] - rows[0]):
        return None
    factor = (two - one) // (rows[1] - rows[0])
    return factor, one - factor * rows[0]


def _times(dim: Dim) -> tuple[int, str]:
    """A factor, and what it is multiplied with.

    >>> _times(12), _times("3*seq"), _times("seq")
    ((12, ''), (3, 'seq'), (1, 'seq'))
    """
    if isinstance(dim, int):
        return dim, ""
    factor, _, rest = dim.partition("*")
    return (int(factor), rest) if factor.isdigit() else (1, dim)


def as_text(factor: int, rest: int) -> Dim:
    """A linear function of the batch size as a dimension of a type.

    >>> as_text(2, 0), as_text(1, 0), as_text(1, -1)
    ('2*b', 'b', 'b - 1')
    """
    times = BATCH if factor == 1 else f"{factor}*{BATCH}"
    return times if rest == 0 else f"{times} {'+' if rest > 0 else '-'} {abs(rest)}"


def _structure(result: Any) -> str:
    """The structure of a result, with a mark for each tensor."""
    return str(template(result, lambda leaf: Ref("tensor") if isinstance(leaf, Tensor) else None))
