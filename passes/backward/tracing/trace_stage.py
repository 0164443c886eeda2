"""Traces a stage forward and backward: its ops run on fake tensors, under autograd, and what torch runs below autograd
is recorded. Ops that are alike run once for all stages (`compose_trace.py`); where that may not tell all, the stage
runs whole (`trace_whole.py`).

    y = linear(x, weight)       forward    t = weight.t(); y = addmm(bias, x, t)
                                backward   dx = mm(dy, t.t()); dweight = mm(dy.t(), x); dbias = dy.sum([0])

Each recorded op of forward belongs to the op of the stage that ran, and each one of backward to the op whose gradient
it computes.

What torch runs depends on the layout of memory: some of its kernels read memory as if it was contiguous, and a copy
is recorded only where it was not; and random numbers are drawn in the order of memory. So what another stage gives has
the order of dimensions here that it has there (`layouts`), all else is contiguous, and both are made so in a run
(`fxpipe/engines/common/generated_backward.py`, `fxpipe/runtime/autograd/gradient_aliases.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

from fxpipe.ir.graph.evaluate_graph import left_to_right
from fxpipe.ir.graph.graph import called
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.shared_memory_values import known
from fxpipe.ir.graph.value_types import ScalarType, TensorType, dim_names
from fxpipe.ir.program.program import Program, RuntimeCall, Stage
from fxpipe.passes.backward.refused import Refused
from fxpipe.passes.backward.tracing.compare_traces import same_at
from fxpipe.passes.backward.tracing.compose_trace import ComposedTracing
from fxpipe.passes.backward.tracing.data_sized_ops import decided, decided_by
from fxpipe.passes.backward.tracing.fake_sizes import Sizes, numbers_in
from fxpipe.passes.backward.tracing.fake_tensors import device_of
from fxpipe.passes.backward.tracing.op_traces import KnownTraces
from fxpipe.passes.backward.tracing.opaque_vjp import inseparable
from fxpipe.passes.backward.tracing.record_ops import Recorder
from fxpipe.passes.backward.tracing.tensor_forms import Inseparable
from fxpipe.passes.backward.tracing.trace_whole import WholeTracing
from fxpipe.passes.backward.tracing.traces import Orders, Task, Trace, Tracing, run_tracing
from fxpipe.passes.backward.vmap_ops import untraceable_vmaps, with_vmaps
from fxpipe.runtime.microbatch import checked_places
from fxpipe.torch_internals.operator_classes import HigherOrderOperator

Traced = Callable[..., tuple[Trace, Sizes]]

AS_STRIDED = {"as_strided", "as_strided_scatter", "as_strided_"}
# What the first cannot do, the second does or refuses.
TRACINGS: tuple[Callable[[Task], Tracing], ...] = (ComposedTracing, WholeTracing)


def trace(program: Program, stage: Stage, arriving: Sequence[str], orders: Orders, known: KnownTraces) -> Trace:
    """The stage's forward and backward. `arriving`: the results for which a gradient arrives. `orders`: as of
    `layouts`. Raises Refused, with the reason."""
    reason = untraceable(program, stage)
    if reason:
        raise Refused(reason, by_ops=True)
    traced = partial(_traced, program, stage, arriving, orders, known)
    try:
        return _for_all_sizes(traced, bool(program.graph.sizes))
    except Refused as refused:
        try:  # what is refused may be sizes that the graph is not for
            return _for_all_sizes(partial(traced, fitting=True), True)
        except Refused:
            raise refused from None


def _for_all_sizes(traced: Traced, sized: bool) -> Trace:
    """The trace, if it is the same for all sizes. `sized`: whether any vary."""
    try:
        found, sizes = traced()
    except Untraceable as error:  # some functions know no symbols
        if not sized:
            raise Refused(str(error)) from error
        try:
            found, sizes = traced(symbolic=False)
        except Untraceable:
            raise Refused(str(error)) from error
    if sizes.specialised:  # some ops may hold for this size only
        again, _ = traced(turn=1, symbolic=sizes.symbolic)
        if again != found:
            raise Refused("its ops are not the same for every size")
    if not _holds_elsewhere(traced, found, sizes):
        first, *others = sorted(sizes.conditions(), key=len)
        raise Refused(f"its ops depend on sizes: {first}" + f", and {len(others)} more conditions" * bool(others))
    return found


def _holds_elsewhere(traced: Traced, found: Trace, sizes: Sizes) -> bool:
    """Whether the trace is the same for sizes for which these conditions do not hold: what torch asks may be about
    strides only. Where torch refuses all sizes that are tried, so it does in a run."""
    asked = sizes.conditions()
    while asked:
        _, against = asked.popitem()
        for given in against:
            try:
                chosen = _same_at(given, traced, found, sizes.symbolic)
            except Untraceable:
                continue
            if chosen is None:
                return False
            asked = sizes.holding(asked, chosen)
            break
    return True


def _same_at(given: Mapping[str, int], traced: Traced, found: Trace, symbolic: bool) -> Mapping[str, int] | None:
    """The sizes of another trace, with those that are `given`, that is the same as this one; None if it is not. Plain
    numbers are much faster than symbols, but torch may take other functions for them."""
    for symbols in (False, True) if symbolic else (False,):
        try:
            again, sizes = traced(given=given, symbolic=symbols)
        except Refused:
            continue
        if same_at(sizes.chosen, found, again):
            return sizes.chosen
    return None


def layouts(program: Program, known: KnownTraces) -> Orders:
    """For each value that a stage gives, and that is not contiguous, its dimensions from the largest stride to the
    smallest. Values of stages that cannot be traced count as contiguous. Adds the numbers that stages give to those
    that are `known`."""
    orders: Orders = {}
    sizes = {size.name for size in program.graph.sizes}
    for stage in program.stages:
        if untraceable(program, stage):
            continue
        traced = partial(_traced, program, stage, (), orders, known)
        # As `trace`, which finds the ops known then.
        for way in (traced, partial(traced, symbolic=False), partial(traced, fitting=True)):
            try:
                found = way()[0]
            except (Refused, Untraceable):
                continue
            orders |= found.orders
            known.numbers |= {name: size for name, size in found.numbers.items() if sizes.issuperset(dim_names(size))}
            break
    return orders


def untraceable(program: Program, stage: Stage) -> str:
    """Why the stage cannot be traced, as far as its ops tell; "" if they do not."""
    for op in stage.ops:
        if isinstance(op.target, Opaque):
            if reason := inseparable(op):
                return reason
            continue
        if isinstance(op.target, RuntimeCall):
            return f"{op.target.name} keeps state in Python"
        if called(op) == "each_sample":
            return f"a loop over samples, which have numbers of their own, at {op.origin}"
        if not (isinstance(op.target, HigherOrderOperator) or op.target is checked_places or known(op.target)):
            return f"{called(op)} is not an operation of torch, at {op.origin}"
        if called(op) in AS_STRIDED:
            return f"as_strided depends on the layout of memory, at {op.origin}"
    if reason := untraceable_vmaps(stage):
        return reason
    for name in (*stage.takes, *stage.borrows, *stage.states):
        if name in program.graph.layouts:
            return f"{name} is {program.graph.layouts[name]}"
    for name in stage.mutates:
        if any(kind.grad for kind in [program.types[name]] if isinstance(kind, TensorType)):
            return f"it writes into {program.state(name).path}, which has a gradient"
    for name in stage.takes:
        if isinstance(kind := program.types[name], ScalarType) and kind.kind != "int":
            return f"it computes with the number {name}"
    return ""


def _traced(
    program: Program,
    stage: Stage,
    arriving: Sequence[str],
    orders: Orders,
    known: KnownTraces,
    turn: int = 0,
    symbolic: bool = True,
    given: Mapping[str, int] = MappingProxyType({}),
    fitting: bool = False,
) -> tuple[Trace, Sizes]:
    """One trace. `turn`, `symbolic`, `given`, `fitting`: as in `Sizes`. Raises Refused, or Untraceable if torch cannot
    do it."""
    program, stage = with_vmaps(program, stage)
    numbers = numbers_in(value for op in stage.ops for value in (op.args, dict(op.kwargs)))
    shapes = [kind.shape for name in _names(stage) if isinstance(kind := program.types[name], TensorType)]
    named = dict.fromkeys(size.name for size in program.graph.sizes)
    numbers_taken = [name for name in stage.takes if isinstance(program.types[name], ScalarType)]
    computed = {name: known.numbers[name] for name in numbers_taken if name in known.numbers}
    named |= dict.fromkeys(name for name in numbers_taken if name not in computed)
    own = {op.name: decided_by(op, program.types) for op in stage.ops}
    bounds = {name: text for one in own.values() for name, text in one.items()}
    of_ops = dict.fromkeys(own, tuple[str, ...]())
    for op in stage.ops if bounds else ():  # none of these sizes comes from another stage
        read = (name for one in op.reads for name in decided(program.types[one]))
        of_ops[op.name] = tuple(own[op.name]) or tuple(dict.fromkeys(read))
    for tracing in TRACINGS[-1:] if stage.index in known.inseparable else TRACINGS:
        try:
            every, conditions = numbers | numbers_in(shapes), program.graph.conditions
            sizes = Sizes(named, every, turn, symbolic, given, conditions, bounds, computed, fitting)
        except ValueError as error:
            raise Refused(str(error)) from None
        traces = known.taken(sizes, device_of(stage.device))
        recorder = Recorder(traces.sizes, traces.device, {*program.types, *(f"d{name}" for name in _names(stage))})
        task = Task(program, stage, traces, recorder, orders, of_ops)
        try:
            with _silent(), left_to_right():
                found = run_tracing(tracing, task, arriving)
            known.keep(traces)
            return found, traces.sizes
        except Exception as error:  # whatever torch cannot do with fake tensors
            reason = error
            if isinstance(error, Inseparable):
                known.inseparable.add(stage.index)
    if isinstance(reason, Refused):
        raise reason
    said = str(reason).strip().split("\n")[0]
    raise Untraceable(f"{type(reason).__name__} while it was traced: {said}") from reason


class Untraceable(Exception):
    """Torch cannot run the stage on fake tensors, or not with symbols for sizes."""


@contextmanager
def _silent() -> Iterator[None]:
    """Torch does not log what it cannot do with fake tensors: it is an error here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _names(stage: Stage) -> tuple[str, ...]:
    return (*stage.takes, *stage.states, *stage.borrows, *(op.name for op in stage.ops))
