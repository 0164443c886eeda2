"""The results of submodules that are kept whole, learnt from two runs of the plain model.

To trace past such an op, Dynamo must know the number, types and shapes of its results. So the plain model runs twice
with the real inputs: on as many samples as a micro-batch has, and on one more (or twice as many, if one more fails).
Sizes that differ are along the batch, and values that differ show that samples are mixed (`mixing_in_runs.py`).
Afterwards buffers, random states and attributes are restored.

    router(f32[2, 8]) -> f32[2, 3], i64[4]        f32[b, 8] -> f32[b, 3], i64[2 * b]
    router(f32[3, 8]) -> f32[3, 3], i64[6]
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from fxpipe.capture.call_arguments import Call
from fxpipe.capture.capture_errors import Refused
from fxpipe.capture.nested_values import change
from fxpipe.capture.twins.attribute_changes import Changes, Snapshot
from fxpipe.capture.twins.twin import Slot, Twins, as_held
from fxpipe.capture.twins.untraced_lists import Listed, with_lists
from fxpipe.ir.graph.module_parts import function_named, is_used, running_in, slots, used_modules
from fxpipe.ir.graph.opaque_call import (
    ATOMS,
    Gives,
    OwnRows,
    Place,
    Promise,
    addresses,
    alike,
    leaves,
    take_apart,
    wanting,
)
from fxpipe.ir.sample_lists import of_samples, rebuilt
from fxpipe.torch_internals.tensor_memory import version_of
from fxpipe.torch_internals.tracing.is_compiling import said_to_compile

from .calls_around import of_module, put
from .derivatives import Derivatives, depended_on
from .mixing_in_runs import Contents, check_supposed, in_another_order, mixing
from .opaque_submodules import FORWARD, Joins, Piece, Pieces
from .returned_parts import NO_RESULT, Part, joinable, other_lengths
from .used_tensors import Uses


def _call_of(promise: Promise) -> tuple[Any, ...]:
    return promise.key, promise.takes, promise.wants


@dataclass(frozen=True)
class Heard:
    """One call of a piece in a run of the plain model."""

    piece: Piece
    key: Any
    takes: list[tuple[torch.dtype, tuple[int | None, ...]]]
    wants: tuple[bool, ...]
    depends: tuple[bool, ...]
    result: Part
    drew: bool
    aliased: bool
    wrote: bool
    derived: bool
    lists: bool
    given: list[Tensor] | None  # copies; None if they do not show whether samples are mixed

    def contents(self, promise: Promise) -> Contents | None:
        """What it was given and returned, if that shows whether samples are mixed."""
        parts = self.result.leaves(promise.without, promise.joined)
        copies = (part.contents or part.content for part in parts)
        returned = [part for part in copies if part is not None]
        return None if self.given is None else Contents(self.given, returned)


def learn(pieces: Pieces, run: Callable[..., Any], call: Call, twins: Twins, holders: tuple[Any, ...]) -> Piece | None:
    """Run twins of the model with real tensors, `run(twin, *arguments)`, for two batch sizes, and record results of
    the pieces. `holders` are objects besides the model that it may change. Returns a piece that cannot be kept whole or
    None; raises what the model raises."""
    heard: list[list[Heard]] = []
    rows = call.rows or 0

    grad = torch.is_grad_enabled()

    def hear(samples: Sequence[int]) -> None:
        # What is made in inference mode does not show that it is written.
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            running, given, rest, beside = _real_call(twins, call, holders, samples)
            given, lists = with_lists(given)
            # sooner than the snapshot, in which it would be a change
            calls = _listen(pieces, running, lists, call.rows is not None)
            with _undone(running, beside, call) as changes, said_to_compile(compiling):
                run(running.root, *given, *rest)
        heard.append(calls)
        _note_memories(pieces, changes, running)

    compiling = True
    try:
        hear(range(rows))
    except Exception:  # as when it is traced, a model that cannot be compiled is not told that it is
        compiling = False
        hear(range(rows))
    turned = in_another_order(rows, call.batch or rows) if rows else []
    # Samples may have to come in their order, or in groups, as in `x.reshape(-1, 4, width)`.
    ways: list[Sequence[int]] = [turned, range(rows + 1), range(2 * rows)] if rows else [turned]
    for samples in ways:
        try:
            hear(samples)
            break
        except Exception:
            if samples is ways[-1]:
                raise
    if len(heard[0]) != len(heard[1]):
        if (often := _called_otherwise(*heard)).called == FORWARD:
            raise _refused_calls(often)
        often.unfit = "is called another number of times for another number of samples"  # by a method, which is not
        return often
    if more := [method for method in pieces.by_key.values() if _uses_more(method)]:
        for method in more:
            if all(is_used(name, method.used) for name, _, _ in slots(method.twin)):
                method.unfit = "uses all that its module has"
                return method
            pieces.narrow(method, twins)
        return learn(pieces, run, call, twins, holders)
    for one, two in zip(*heard, strict=True):
        piece: Piece = one.piece
        promise = _promise(one, two, rows) if piece is two.piece else None
        if promise is None:
            piece.writes = one.wrote or two.wrote
            piece.varies = not alike(one.key, two.key)
            return piece
        seen = [call.contents(promise) for call in (one, two)]
        if samples is turned and seen[0] and seen[1]:
            promise = replace(promise, mixing=mixing(seen[0], seen[1], rows, turned))
        check_supposed(call.supposed, rows, piece.opaque, promise)
        others = [old for old in piece.opaque.promises if not alike(_call_of(old), _call_of(promise))]
        if len(others) == len(piece.opaque.promises):
            piece.asked = False  # else, what was asked for is another call than that
        piece.opaque.promises[:] = [*others, promise]
        piece.forms[one.key[0]] = one.result.form(promise.without, promise.joined)
        piece.draws |= one.drew or two.drew
    return next((piece for piece in pieces.by_key.values() if piece.asked), None)


def _called_otherwise(one: list[Heard], two: list[Heard]) -> Piece:
    """The piece whose number of calls depends on the number of samples."""
    counts = [Counter(id(call.piece) for call in calls) for calls in (one, two)]
    return next(call.piece for call in (*one, *two) if len({count[id(call.piece)] for count in counts}) > 1)


def _refused_calls(piece: Piece) -> Refused:
    """The refusal of a forward in which the number of calls of a submodule depends on the number of samples."""
    return Refused(
        piece.opaque.origin,
        f"{piece.opaque} is kept whole because of this line, and forward calls it another number of times for another "
        "number of samples",
        "call it once, with all samples",
        attempt_label="running it, to see what a submodule returns",
    )


def run_plainly(call: Call, twins: Twins, holders: tuple[Any, ...], function: Callable[..., Any], count: int) -> None:
    """Call `function(model, *arguments)` on a copy with `count` samples; the model does not change. Raises what it
    raises."""
    running, given, rest, beside = _real_call(twins, call, holders, range(count))
    with _undone(running, beside, call):
        function(running.root, *with_lists(given)[0], *rest)


def _real_call(
    twins: Twins, call: Call, holders: tuple[Any, ...], samples: Sequence[int]
) -> tuple[Twins, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Twins with real tensors, these samples of the arguments, further arguments of the captured function, and the
    other objects that it may change."""
    running = twins.with_stand_ins(_copy)
    beside = running.twinned(*call.rest, *holders)
    given = tuple(change(part, lambda _, x: _cut(call, x, samples)) for part in call.given)
    return running, given, beside[: len(call.rest)], beside[len(call.rest) :]


def _note_memories(pieces: Pieces, changes: Changes, running: Twins) -> None:
    """Record for each piece the attributes that changed: of its own modules, and of all objects that are no modules."""
    for piece in pieces.by_key.values():
        own = {part for _, part in used_modules(running.twin(piece.opaque.module), piece.opaque.uses)}
        piece.opaque.remembers.update(
            name for (_, name), to in changes.items() if to.holder in own or not isinstance(to.holder, nn.Module)
        )


def _promise(one: Heard, two: Heard, rows: int) -> Promise | None:
    """The promise that fits two calls, of which the first had `rows` samples; None if the piece cannot be an op."""
    if not alike((one.key, one.wants), (two.key, two.wants)) or len(one.takes) != len(two.takes):
        return None
    without = frozenset(other_lengths(one.result, two.result) if rows else _of_own_lengths(one))
    if one.wrote or two.wrote or one.piece.leaves or one.piece.unfit:
        return None
    takes = []
    varying: list[tuple[int, int, int, int]] = []  # tensor, dimension, and its two sizes
    for i, ((dtype, small), (_, large)) in enumerate(zip(one.takes, two.takes, strict=True)):
        if len(small) != len(large):
            return None
        takes.append((dtype, tuple(a if a == b else None for a, b in zip(small, large, strict=True))))
        varying += [
            (i, d, a, b)
            for d, (a, b) in enumerate(zip(small, large, strict=True))
            if a != b and a is not None and b is not None
        ]
    joined = frozenset(place for place in without if _fit_together(place, one.result, two.result))
    returned = [list(call.result.leaves(without, joined)) for call in (one, two)]
    if len(returned[0]) != len(returned[1]) or () in without - joined:
        return None
    gives = [_gives(a, b, varying, rows) for a, b in zip(*returned, strict=True)]
    if any(item is NO_RESULT for item in gives):
        return None
    either = one.aliased or two.aliased, one.wants, one.derived or two.derived, one.lists, None
    depends = tuple(map(min, one.depends, two.depends))
    return Promise(one.key, tuple(takes), tuple(gives), *either, without, joined, depends)


def _of_own_lengths(call: Heard) -> Iterator[Place]:
    """Places of lists whose items may have other lengths for other values. Without a second batch size no run shows it,
    so `Pieces.joins` decides."""
    joins = call.piece.pieces.joins
    return joinable(call.result, alike=joins is Joins.ALL) if joins is not Joins.NONE else iter(())


def _fit_together(place: Place, one: Part, two: Part) -> bool:
    """Whether the items of the lists at a place are tensors that can be put one after another."""
    a, b = one.at(place).joined, two.at(place).joined
    return a is not None and b is not None and a.leaf.dtype == b.leaf.dtype and a.leaf.shape[1:] == b.leaf.shape[1:]


def _gives(one: Part, two: Part, varying: list[tuple[int, int, int, int]], rows: int) -> Any:
    a, b = one.leaf, two.leaf
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a if type(a) in ATOMS and type(a) is type(b) and a == b else NO_RESULT
    if a.dtype != b.dtype or a.dim() != b.dim():
        return NO_RESULT
    shape: list[Any] = []
    for dim, (size, other) in enumerate(zip(a.shape, b.shape, strict=True)):
        fitting = [(i, d, size, of) for i, d, of, to in varying if size * to == other * of]
        if one.items and dim == 0:  # a list has items as values decide, even if those so far had the same lengths
            shape.append(OwnRows(size, rows))
        elif size != other and not fitting:
            return NO_RESULT
        else:
            shape.append(size if size == other else min(fitting, key=lambda found: found[2] != found[3]))
    strides = a.stride()
    order = sorted(range(a.dim()), key=lambda dim: -strides[dim])
    return Gives(a.dtype, tuple(shape), tuple(order), a.requires_grad or b.requires_grad)


def _cut(call: Call, twin: Tensor, samples: Sequence[int]) -> Tensor:
    """Samples of the real tensor, which are repeated if it has fewer."""
    leaf = call.leaves.get(id(twin))
    if leaf is None:
        return twin
    real = leaf.real.detach()
    if leaf.batch_dim is not None:
        index = torch.tensor(samples, dtype=torch.int64, device=real.device) % real.shape[leaf.batch_dim]
        real = real.index_select(leaf.batch_dim, index)
    return (real.to(twin.device) if real.device != twin.device else real.clone()).requires_grad_(
        leaf.real.requires_grad
    )


def _listen(pieces: Pieces, running: Twins, lists: Listed, cut: bool) -> list[Heard]:
    """Let the twins of the pieces record their calls in the returned list. `lists`: those whose items are samples;
    `cut`: whether there are any."""
    calls: list[Heard] = []

    def listener(piece: Piece, module: nn.Module) -> Callable[..., Any]:
        opaque, own = piece.opaque, function_named(module, piece.opaque.method)
        uses = Uses(module, piece.used)  # now: to look at a tensor in a run is to use it
        is_method = opaque.method != "forward"
        places = [] if is_method and opaque.uses is None else slots(module, opaque.uses)

        def ran(args: Any, kwargs: Any, named: Any) -> Any:
            if not is_method:
                return own(*args, **kwargs)
            with uses.noted():
                if opaque.uses is not None and not piece.unfit:
                    try:
                        with running_in(module, opaque.method, opaque.uses) as (_, method):
                            return method(*named[0], **named[1])
                    except Exception:  # if it is the model's own, the next line raises it, too
                        piece.unfit = "does not run with only the tensors that it uses, or sets its module's attributes"
                return own(*args, **kwargs)

        def stands_for(part: Any) -> Any:
            found = of_module(module, part) if is_method else None
            if found is not None and found not in piece.held:
                piece.held.append(found)
            return part if id(part) in lists else found

        def forward(*args: Any, **kwargs: Any) -> Any:
            named = rebuilt((args, kwargs), stands_for)
            given = rebuilt(named, lambda part: lists[id(part)][1] if id(part) in lists else None)
            tensors, key = take_apart(module, *given)
            own_sizes = {id(x) for x in of_samples(given)}
            takes = [(x.dtype, _shape(x, id(x) in own_sizes)) for x in tensors]
            states = [getattr(part, name) for _, part, name in places]
            wants = wanting((*states, *tensors))
            held = {address for x in (*tensors, *states) for address in addresses(x)}
            before, others, versions = torch.get_rng_state(), _other_numbers(), [version_of(x) for x in tensors]
            contents = [x.detach().clone() if x.layout is torch.strided else None for x in states]
            derivatives = Derivatives(tensors)
            with said_to_compile(False), derivatives:  # as when the pipeline runs it
                result = ran(args, kwargs, named)
            piece.leaves |= derivatives.leave
            found = leaves(result)
            aliased = any(isinstance(x, Tensor) and not held.isdisjoint(addresses(x)) for x in found)
            drew = not torch.equal(before, torch.get_rng_state())
            wrote = versions != [version_of(x) for x in tensors]
            if drew_others := others != _other_numbers():
                piece.opaque.remembers.add("random numbers that are not torch's")
            written = {  # a write to `.data` leaves the version
                path: isinstance(now, nn.Parameter)
                for (path, part, name), content in zip(places, contents, strict=True)
                if content is not None and not torch.equal(now := getattr(part, name), content)
            }
            opaque.writes.update(path for path, is_parameter in written.items() if not is_parameter)
            if True in written.values():
                opaque.remembers.add("parameters that it writes")
            shows = cut and not (drew or drew_others or written)
            copies = [x.detach().clone() for x in tensors if id(x) not in own_sizes] if shows else None
            returned = Part.of(result, shows)
            of = piece, key, takes, wants, depended_on(found, (*states, *tensors))
            calls.append(Heard(*of, returned, drew, aliased, wrote, derivatives.taken, bool(own_sizes), copies))
            return result

        return forward

    twins = ((piece, running.twin(piece.opaque.module)) for piece in pieces.by_key.values())
    put(running, ((twin, piece.called, listener(piece, twin)) for piece, twin in twins))
    return calls


def _uses_more(piece: Piece) -> bool:
    """Whether a method was seen to use more than it is given."""
    uses = piece.opaque.uses
    return piece.opaque.method != "forward" and (uses is None or not all(is_used(path, uses) for path in piece.used))


def _shape(x: Tensor, of_samples: bool) -> tuple[int | None, ...]:
    """The shape of a tensor that a piece is given; of each sample's own sizes only that of the batch."""
    return (x.shape[0], *(None for _ in x.shape[1:])) if of_samples else tuple(x.shape)


def _other_numbers() -> tuple[Any, ...]:
    """The states of the random generators of Python and numpy."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *rest


def _copy(slot: Slot, real: Tensor) -> Tensor:
    """A copy, for forward may write it, where the model was. Of a tensor without memory, as another rank has it, one
    with values that are likely to run: what a submodule returns must not depend on values anyway."""
    dense = real.layout is torch.strided and not real.is_meta
    if dense and real.numel() and not real.untyped_storage().nbytes():
        copy = torch.zeros(real.shape, dtype=real.dtype, device=slot.device)
        if real.is_floating_point() and slot.kind == "parameter":  # the same in each run, and on each rank
            copy.normal_(0, 0.02, generator=torch.Generator(slot.device).manual_seed(crc32(slot.path.encode())))
        elif real.is_floating_point():
            copy.fill_(1)
    else:
        copy = real.detach().to(slot.device, copy=True)
    return as_held(slot, real, copy)


@contextmanager
def _undone(running: Twins, holders: tuple[Any, ...], call: Call) -> Iterator[Changes]:
    """A context that restores attributes, the call's objects and random states at its end. It yields a dict, which then
    has the values that attributes were set to."""
    changes: Changes = {}
    before = Snapshot((*(module for _, module in running.named()), *holders))
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng():
            yield changes
    finally:
        changes.update(before.restore())
        call.objects.restore()
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
