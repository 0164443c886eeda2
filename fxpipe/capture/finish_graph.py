"""Completes a graph after the dry pass: the places of its tensors in the result, and states that forward changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from fxpipe.batching.batch_facts import batch_dims
from fxpipe.batching.join_outputs import check_shapes, of_one, with_outputs
from fxpipe.batching.mixed_samples import Reduce
from fxpipe.batching.op_errors import at
from fxpipe.batching.whole_batch.batch_totals import spread
from fxpipe.batching.whole_batch.epilogue import with_epilogue
from fxpipe.capture.batch_size.places_of_rows import with_checked_places
from fxpipe.capture.capture_errors import LOOKS_INTO_RESULT, Refused
from fxpipe.capture.tracing.fx_to_graph import Draft
from fxpipe.capture.tracing.storageless_tensors import dense, has_no_values, like_traced
from fxpipe.capture.tracing.symbolic_sizes import type_of
from fxpipe.capture.twins.twin import Slot
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.check_graph import check
from fxpipe.ir.graph.dead_code import without_dead_ops
from fxpipe.ir.graph.graph import Graph, Op, Origin, Ref, Region, State, refs
from fxpipe.ir.graph.shared_memory_values import memory
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.unique_names import Names
from fxpipe.torch_internals.compiling.dynamic_sizes import depends_on_data

from .call_arguments import Call
from .model_with_loss import name_loss
from .nested_values import template
from .twins.untraced_lists import UnknownList, UnknownTuple, for_ops

NO_GRAD = (Region("grad", (False,)),)

# A function that computes an output of the trace from the graph's outputs, the call, and the trace's flat arguments.
Give = Callable[[tuple[Any, ...], Call, tuple[Any, ...]], Any]


class Marker(int):
    """A number among the hollow outputs, known by its identity."""


@dataclass(frozen=True)
class Finished:
    """A complete graph.

    - `gives`: for each output of the trace, the function that computes it.
    - `constants`: the position of each constant in the trace's flat arguments.
    """

    graph: Graph
    gives: tuple[Give, ...]
    constants: Mapping[str, int]

    def renewed(self, flat: tuple[Any, ...]) -> Finished:
        """The same with the constants of this call: a plain tensor attribute may have been set to another tensor.
        Raises CaptureError if one has no values, because the dry pass has set a global or closure variable to it: only
        attributes are restored after a dry pass."""
        if not self.constants:
            return self
        totals, epilogue = self.graph.totals, self.graph.epilogue
        states = [state for part in (self.graph, totals, epilogue) if part is not None for state in part.states]
        old = {state.name: state.value for state in states if state.name in self.constants}
        if all(flat[place] is old[name] for name, place in self.constants.items()):
            return self
        for name, place in self.constants.items():
            if has_no_values(flat[place]):
                flat[place].data = old[name].detach().clone()  # what is outside of the model holds it now
                raise CaptureError(
                    f"forward, or the loss, reads a tensor ({old[name].dtype}, {list(old[name].shape)}) by a global "
                    "variable or a closure, and sets it to another one; hold it in an attribute of the model, or of "
                    "the object that loss_fn is"
                )
        new = self._with_constants(self.graph, flat)
        totals, epilogue = (part and self._with_constants(part, flat) for part in (totals, epilogue))
        return replace(self, graph=replace(new, totals=totals, epilogue=epilogue))

    def _with_constants(self, graph: Graph, flat: tuple[Any, ...]) -> Graph:
        states = tuple(
            replace(state, value=flat[self.constants[state.name]]) if state.name in self.constants else state
            for state in graph.states
        )
        return replace(graph, states=states)


@dataclass(frozen=True)
class Seen:
    """What a dry pass showed.

    - `result`: the returned object.
    - `rebound`: the buffers that were set to a new tensor, by the tensor's `id`.
    - `touched`: the new values of attributes.
    - `slots`: all slots.
    """

    result: Any
    rebound: Mapping[int, Slot]
    touched: tuple[Any, ...]
    slots: list[Slot]


def stand_ins(draft: Draft) -> tuple[Any, ...]:
    """Hollow values for the traced outputs; tensors of the model or the user are used as they are."""
    made: dict[str, Any] = {}
    for name, fake in zip(draft.outputs, draft.fakes, strict=True):
        if name not in made:
            made[name] = draft.held[name] if isinstance(draft.held.get(name), Tensor) else _stand_in(fake)
    return tuple(made[name] for name in draft.outputs)


def _stand_in(fake: Any) -> Any:
    if isinstance(fake, Tensor):
        return like_traced(fake)
    return Marker() if isinstance(fake, (int, float, torch.SymInt, torch.SymFloat)) else fake


def feed(graph: Graph, draft: Draft, call: Call, flat: tuple[Any, ...]) -> tuple[Any, ...]:
    """The real values of the graph's inputs, without those that its totals compute."""
    reals, places, values = {leaf.path: leaf.real for leaf in call.leaves.values()}, draft.places, []
    for item in graph.inputs:
        if item.path and item.name in places:
            value = flat[places[item.name]]
            values.append(value.item() if isinstance(value, Tensor) else value)
        elif item.path:
            values.append(dense(reals[item.path]))
    return tuple(values)


def finish(
    draft: Draft,
    hollows: tuple[Any, ...],
    call: Call,
    seen: Seen,
    reduce: Reduce,
    loss: bool = False,
    uncut: bool = False,
) -> Finished:
    """The complete graph, from the hollow outputs of the dry pass and what it showed. `loss`: the first returned value
    is the loss. `uncut`: no call is cut. Raises CaptureError if an output cannot be combined from micro-batches."""
    of_hollow = {id(made): name for made, name in zip(hollows, draft.outputs, strict=True)}
    of_hollow |= {
        id(leaf.twin): i.name for leaf in call.leaves.values() for i in draft.graph.inputs if i.path == leaf.path
    }
    seen = replace(seen, rebound=_keeping_shape(draft, hollows, seen))
    graph = _with_returned_states(draft.graph, seen, of_hollow)

    def ref(leaf: Any) -> Ref | None:
        if isinstance(leaf, (UnknownList, UnknownTuple)):
            if uncut:  # it need not be unknown
                raise Refused(None, LOOKS_INTO_RESULT)
            raise CaptureError(
                f"{draft.graph.model} returns a list that a submodule kept whole has made, with another number of "
                "items for each batch; let it return one tensor, train it by pipe.step, or write chunks=1"
            )
        known = isinstance(leaf, (Tensor, Marker)) and id(leaf) in of_hollow
        return Ref(of_hollow[id(leaf)]) if known else None

    graph = replace(
        graph,
        result=template(seen.result, ref),
        call=template(for_ops((call.args, {**call.kwargs, **call.target})), ref),
        arguments=call.names[: len(call.args)],
    )
    kept: Any = [template(value, ref) for value in seen.touched]
    lasting = {state.name for state in graph.states} | {item.name for item in graph.inputs}
    kept_values = [found.name for found in refs(kept) if found.name not in lasting]
    # Values that are neither in the result nor in attributes went elsewhere, such as into a dict by a hook.
    traced = zip(hollows, draft.outputs, strict=True)
    gone = [name for made, name in traced if isinstance(made, Tensor) and id(made) not in seen.rebound]
    results = {op.name for op in graph.ops}
    kept_values += [name for name in gone if name in results]
    values = list(dict.fromkeys([found.name for found in refs(graph.result)] + kept_values))
    graph = _with_rebound_buffers(graph, draft, hollows, seen)
    check_shapes(graph, values)
    sizes = {
        name: fake
        for name, fake in zip(draft.outputs, draft.fakes, strict=True)
        if (isinstance(fake, torch.SymInt) and not depends_on_data(fake))
        or (type(fake) is int and name in results)  # a size that does not vary
    }
    exact = {name: size_function(fake, graph, draft) for name, fake in sizes.items()}
    graph = graph if uncut else with_checked_places(graph)
    graph = spread(name_loss(graph, own=call.rest[0] is None) if loss else graph, values, reduce)
    if uncut:
        graph = replace(graph, outputs=tuple(of_one(value, graph) for value in values))
    else:
        graph, given = with_epilogue(graph, values, exact, reduce)
        graph = with_outputs(graph, given, exact, reduce)
    check(graph)
    places = {output.value: position for position, output in enumerate(graph.returned)}
    slots = {slot.path: slot for slot in seen.slots}
    held = {state.name: slots[state.path] for state in graph.states if state.path in slots}
    gives = tuple(
        _give(made, name, graph, draft, seen.rebound.get(id(made), held.get(name)), places, exact)
        for made, name in zip(hollows, draft.outputs, strict=True)
    )
    graph = without_dead_ops(graph)
    parts = (graph, *(part for part in (graph.totals, graph.epilogue) if part is not None))
    states = [state for part in parts for state in part.states]
    constants = {s.name: draft.places[s.name] for s in states if s.kind == "constant" and s.name in draft.places}
    return Finished(graph, gives, constants)


def _with_returned_states(graph: Graph, seen: Seen, of_hollow: dict[int, str]) -> Graph:
    """The graph with states for tensors that the model returns without using them; adds the names of all stand-ins of
    states to `of_hollow`."""
    names = Names(graph.types)
    named = {path: state.name for state in graph.states for path in (state.path, *state.aliases)}
    found: list[Any] = []
    template(seen.result, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    returned = {id(leaf) for leaf in found}
    states = list(graph.states)
    for slot in seen.slots:
        for tensor in (slot.twin, slot.real):
            if tensor is None or id(tensor) in of_hollow:
                continue
            if slot.path not in named and id(tensor) in returned:
                states.append(State(names(slot.path), slot.path, slot.kind, type_of(tensor, {})))
                named[slot.path] = states[-1].name
            if slot.path in named:
                of_hollow[id(tensor)] = named[slot.path]
    return replace(graph, states=tuple(states))


def _keeping_shape(draft: Draft, hollows: tuple[Any, ...], seen: Seen) -> dict[int, Slot]:
    """The buffers that were set to a tensor of the old shape. A buffer with a new shape (a table whose length was not
    known before), or that was None, is set like an attribute instead. Raises CaptureError if it has the batch."""
    graph, types = draft.graph, draft.graph.types
    made_by = {op.name: op for op in graph.ops}
    keeping = dict(seen.rebound)
    for made, value in zip(hollows, draft.outputs, strict=True):
        slot = keeping.get(id(made))
        if slot is None:
            continue
        kind, new = type_of(slot.twin, {}), types[value]
        if not isinstance(kind, TensorType) or not isinstance(new, TensorType) or kind.shape != new.shape:
            if value not in made_by or not isinstance(new, TensorType) or batch_dims(new):
                origin = made_by[value].origin if value in made_by else Origin("", 0, "", "")
                raise CaptureError(
                    f"{at(origin)}sets the buffer {slot.path}, {kind}, to {new}; a buffer must not have the shape of "
                    "the batch: return the tensor instead"
                )
            del keeping[id(made)]
    return keeping


def _with_rebound_buffers(graph: Graph, draft: Draft, hollows: tuple[Any, ...], seen: Seen) -> Graph:
    """The graph with copies into buffers that forward sets: `self.ema = self.ema * 0.9` makes a new tensor, which is
    copied into the buffer.

    A copy comes as early as possible, after the new value is made and the old contents are last read: all ops that use
    a changed buffer must be in one stage, so an early copy allows more cuts."""
    names, types = Names(graph.types), graph.types
    states = {state.path: state for state in graph.states}
    held = {state.name for state in graph.states}
    made_at = {op.name: position for position, op in enumerate(graph.ops)}
    root = memory(graph.ops, types)
    last_use = {root(name): at for at, op in enumerate(graph.ops) for name in (*op.reads, *op.writes)}
    copies: dict[int, list[Op]] = {}  # by the position of the op that they come after
    for made, value in dict(zip(map(id, hollows), draft.outputs, strict=True)).items():
        slot = seen.rebound.get(made)
        if slot is None or slot.twin is None or (slot.path in states and states[slot.path].name == value):
            continue
        origin = graph.ops[made_at[value]].origin if value in made_at else Origin("", 0, "", "")
        kind = type_of(slot.twin, {})
        if slot.path not in states:
            states[slot.path] = State(names(slot.path), slot.path, "buffer", kind)
        name = states[slot.path].name
        copied = Op(names(f"new_{name}"), "copy_", (Ref(name), Ref(value)), {}, kind, origin, NO_GRAD, (name,))
        ready = made_at.get(value, len(graph.ops) - 1 if value in held else -1)  # another buffer may still be written
        place = max(ready, last_use.get(root(name), -1))
        copies.setdefault(place, []).append(copied)
        last_use |= {root(name): place, root(value): max(place, last_use.get(root(value), -1))}
    ops = [*copies.get(-1, ()), *(o for p, op in enumerate(graph.ops) for o in (op, *copies.get(p, ())))]
    return replace(graph, states=tuple(states.values()), ops=tuple(ops))


def size_function(fake: torch.SymInt | int, graph: Graph, draft: Draft) -> Callable[[Mapping[str, int]], int]:
    """A function that computes a size expression, from numbers for the names of the graph's sizes and inputs."""
    if not isinstance(fake, torch.SymInt):
        return lambda values: fake
    expression = fake.node.expr

    def compute(values: Mapping[str, int]) -> int:
        return int(expression.xreplace({s: sympy.Integer(values[draft.symbols[s]]) for s in expression.free_symbols}))

    return compute


def _give(
    made: Any,
    name: str,
    graph: Graph,
    draft: Draft,
    slot: Slot | None,
    places: Mapping[str, int],
    exact: Mapping[str, Callable[[Mapping[str, int]], int]],
) -> Give:
    """The function that computes one of the trace's outputs; `slot`: the output is the tensor of this slot."""
    if slot is not None:
        return lambda results, call, flat: slot.tensors[slot.key]
    if name in exact:
        return lambda results, call, flat: exact[name](numbers(graph, draft, call, flat))
    if name in draft.places:
        return lambda results, call, flat: flat[draft.places[name]]
    path = next((item.path for item in graph.inputs if item.name == name), None)
    if path is not None:
        return lambda results, call, flat: next(leaf.real for leaf in call.leaves.values() if leaf.path == path)
    if name not in places:
        return lambda results, call, flat: made  # the value is not used
    return lambda results, call, flat: results[places[name]]


def numbers(graph: Graph, draft: Draft, call: Call, flat: tuple[Any, ...]) -> dict[str, int]:
    """The sizes of the whole batch, and the inputs that are numbers."""
    paths = {item.name: item.path for item in graph.inputs}
    shapes = {leaf.path: leaf.real.shape for leaf in call.leaves.values()}
    found = {size.name: shapes[paths[size.input]][size.dim] for size in graph.sizes}
    return found | {i.name: flat[draft.places[i.name]] for i in graph.inputs if i.name in draft.places}
