"""The backward of an op that is kept whole: autograd's, for this op alone (`generated_gradients.py` runs it).

    y = opaque(tensors, args, kwargs)       forward    y, graph = opaque(tensors, args, kwargs, of)
                                            backward   dweight, dx = gradients_of(graph, dy)

`of` has the places of the tensors whose gradients are wanted, among all leaves of the arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.graph.graph import Op, Ref, Region, Struct, map_leaves, map_refs, refs
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.value_types import TensorType, TupleType, ValueType
from fxpipe.ir.program.backward import GRAPH
from fxpipe.ir.program.program import RuntimeCall
from fxpipe.passes.backward.refused import Refused
from fxpipe.passes.backward.tracing.fake_tensors import empty
from fxpipe.passes.backward.tracing.record_ops import Recorder
from fxpipe.torch_internals.pytrees import tree_flatten

GRADIENTS = RuntimeCall("gradients_of")


def inseparable(op: Op) -> str:
    """Why autograd cannot compute the gradients of this op alone; "" if it may."""
    assert isinstance(op.target, Opaque)
    kinds = op.type.items if isinstance(op.type, TupleType) else (op.type,)
    objects = any(isinstance(leaf, (Struct, slice)) and any(refs(leaf)) for leaf in tree_flatten(op.args)[0])
    later = op.target.deferred is not None
    return why(op) if objects or later or not all(isinstance(kind, TensorType) for kind in kinds) else ""


def why(op: Op) -> str:
    """Why an op is kept whole."""
    assert isinstance(op.target, Opaque)
    return f"{op.target} is kept whole, {op.target.because}"


def run_whole(op: Op, values: Mapping[str, Any], around: tuple[Region, ...], recorder: Recorder) -> Any:
    """The value of an op that is kept whole, on fake tensors, with the names that it is recorded by. Its backward is
    recorded when autograd asks for it, which raises Refused if only a run tells whether it has one."""
    assert isinstance(op.target, Opaque)
    several, regions = isinstance(op.type, TupleType), (*around, *op.regions)
    kinds: Sequence[Any] = op.type.items if isinstance(op.type, TupleType) else (op.type,)
    made = [empty(replace(kind, grad=False), (), recorder.sizes, recorder.device) for kind in kinds]
    given = map_refs(op.args, lambda ref: values[ref.name])
    args = map_leaves(given, lambda leaf: recorder.argument(leaf, op.target))
    of = _graded(given) if any(kind.grad for kind in kinds) else {}
    word = str(op.target).rpartition(".")[2]
    call, graph = recorder.fresh(word), recorder.fresh(f"{word}_vjp") if of else ""
    if op.draw is not None:
        recorder.drew.add(call)
    if of:
        ungraded = [x for x, kind in zip(made, kinds, strict=True) if not kind.grad]
        back = partial(_backward, recorder, op, graph, [*of.values()], _certain(op.target, given, of))
        made = [*_Whole.apply(back, made, ungraded, *of.values())]  # type: ignore[no-untyped-call]
    parts = [(recorder.type_of(x), x) for x in made]
    alone = not (several or of)
    kind: ValueType = parts[0][0] if alone else TupleType((*(one for one, _ in parts), *([GRAPH] if of else [])))
    writes = tuple(recorder.argument(values[name], op.target).name for name in op.writes)
    whole = Op(call, op.target, (*args, tuple(of)) if of else args, {}, kind, recorder.origin(), regions, writes)
    recorder.types[call] = kind
    recorder.ops.append(whole)
    if alone:
        recorder.hold(made[0], call)
    else:
        names = [f"{word}_{place}" for place in range(len(made))] if several else [word]
        _items(recorder, call, [(recorder.fresh(name), x) for name, x in zip(names, made, strict=True)])
    if of:
        recorder.types[graph] = GRAPH
        recorder.ops.append(Op(graph, operator.getitem, (Ref(call), len(made)), {}, GRAPH, recorder.origin()))
    return tuple(made) if several else made[0]


def _graded(given: Sequence[Any]) -> dict[int, Tensor]:
    """The tensors that have a gradient, by place; one that several parts of the module share, by its first."""
    found: dict[int, Tensor] = {}
    for place, x in enumerate(tree_flatten(given)[0]):
        again = place < len(given[0]) and any(x is other for other in found.values())
        if isinstance(x, Tensor) and x.requires_grad and not again:
            found[place] = x
    return found


def _certain(target: Opaque, given: Sequence[Any], of: Collection[int]) -> tuple[int, ...]:
    """The places, among those `of` sources, of the ones that results have depended on in all runs."""
    tensors = [place for place, leaf in enumerate(tree_flatten(given)[0]) if isinstance(leaf, Tensor)]
    known = target.depends
    return tuple(n for n, place in enumerate(of) if tensors.index(place) in known)


def _items(recorder: Recorder, call: str, named: Sequence[tuple[str, Tensor]]) -> None:
    """Record that these tensors are the items of what an op gives."""
    for place, (name, tensor) in enumerate(named):
        kind = recorder.types[name] = recorder.type_of(tensor)
        recorder.ops.append(Op(name, operator.getitem, (Ref(call), place), {}, kind, recorder.origin()))
        recorder.hold(tensor, name)


class _Whole(torch.autograd.Function):
    """Gives the tensors `made`, and calls `back` with their gradients for those of the sources."""

    @staticmethod
    def forward(ctx: Any, back: Any, made: Sequence[Tensor], ungraded: Sequence[Tensor], *sources: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*ungraded)
        ctx.back = back
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, None, *ctx.back(grads))


def _backward(
    recorder: Recorder,
    op: Op,
    graph: str,
    sources: Sequence[Tensor],
    certain: tuple[int, ...],
    grads: Sequence[Tensor | None],
) -> list[Tensor]:
    """Record the backward of an op that is kept whole: the gradients of the sources, of which some are `certain`."""
    assert isinstance(op.target, Opaque)
    if any(grads[place] is not None for place in op.target.unsure):
        raise Refused(why(op), by_ops=True)
    with recorder.silent():
        found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in sources]
    call = recorder.fresh("gradients")
    kind = recorder.types[call] = recorder.type_of(found)
    given = [grad if grad is None else recorder.argument(grad, op.target) for grad in grads]
    recorder.ops.append(Op(call, GRADIENTS, (Ref(graph), *given), {"zeros": certain}, kind, recorder.origin()))
    _items(recorder, call, [(recorder.fresh("gradient"), x) for x in found])
    return found


def with_zeros(backward: Sequence[Op]) -> list[Op]:
    """Backward, where an op that reads one of these gradients gets zeros if a run has none. Raises Refused if earlier
    runs had none: then autograd has none either for what depends on it."""
    asked = {op.name for op in backward if op.target == GRADIENTS}
    places = {
        op.name: (op.args[0].name, op.args[1])
        for op in (backward if asked else ())
        if op.target is operator.getitem and isinstance(op.args[0], Ref) and op.args[0].name in asked
    }
    read = {places[name] for op in backward for name in op.reads if name in places}
    zeros = {call: tuple(sorted(place for other, place in read if other == call)) for call in asked}
    uncertain = [op for op in backward if not set(zeros.get(op.name, ())) <= set(op.kwargs.get("zeros", ()))]
    if uncertain:
        at = uncertain[0].origin
        raise Refused(f"what is kept whole has no gradient for all that it is given, at {at}", by_ops=True)
    return [
        replace(op, kwargs={"zeros": zeros[op.name]} if zeros[op.name] else {}) if op.name in asked else op
        for op in backward
    ]
