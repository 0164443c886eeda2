"""Submodules that cannot be traced, kept whole: each is one op of the graph, and the rest of the model is traced.

    if x.sum() > 0:            in the forward of a submodule, `router`: Dynamo stops there, and says in which module
    x = router(x)              so during capture the submodule's forward is replaced by one that adds a single op to the
                               graph, with the submodule's parameters and buffers as arguments

Dynamo must know the results of the op to trace on: they are learnt by running the model (`learn_outputs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.batching.data_sizes import unnamed_sizes
from fxpipe.batching.op_errors import DATA_SIZES
from fxpipe.capture.capture_errors import HOOKED, Refused
from fxpipe.capture.twins.script_twin import WHY, ScriptTwin
from fxpipe.capture.twins.twin import Twins
from fxpipe.capture.twins.untraced_lists import for_ops
from fxpipe.errors import warn
from fxpipe.ir.graph.graph import Graph, map_leaves
from fxpipe.ir.graph.module_parts import OfModule, is_used, slots, used_modules
from fxpipe.ir.graph.opaque_call import NOWHERE, Gives, Opaque, wanting
from fxpipe.ir.sample_lists import rebuilt

from .calls_around import Called, calls_of, frames_at, one_of, put
from .random_names import may_draw

MOST_ROWS = 1 << 40  # of a result of which only a run tells how many it has


class Joins(IntEnum):
    """Which returned lists of tensors the trace sees only as their concatenation: all, those with items of unequal
    lengths, or none."""

    NONE, UNEQUAL, ALL = 0, 1, 2


Key = tuple[int, str]  # the id of a twin, and the name of the method or function
FORWARD = Called("forward")


@dataclass(eq=False)
class Piece:
    """A submodule, or a method of one, that is kept whole.

    - `forward`: replaces the method of its `twin`; `call`: the op in the traced graph.
    - `draws`: whether it may draw random numbers.
    - `pieces`: all of the model's.
    - `forms`: by training mode, the function that builds the result from the returned tensors.
    - `places`: the twin's parameters and buffers (`slots`).
    - `asked`: whether a call was traced whose results are not learnt yet.
    - `wanted`: for these calls, which tensors needed a gradient.
    - `leaves`: whether it differentiates with respect to a tensor upstream of its own inputs.
    - `writes`: whether it writes into its arguments; `varies`: whether an argument that is no tensor had another value
      in the second run.
    - `around`: whether it is kept whole in place of one inside of it, which cannot be an op.
    - `told`: whether the user was warned.
    - `frames`: the calls that led to the line that cannot be traced.
    - `used`: what a method uses, seen in runs; `unfit`: why it cannot run with only that, or "".
    - `called`: the method, or the function that one calls; `held`: the objects of its module that it is given.
    """

    opaque: Opaque
    twin: nn.Module
    draws: bool
    pieces: Pieces
    forms: dict[bool, Callable[[Any], Any]] = field(default_factory=dict)
    asked: bool = False
    wanted: set[tuple[bool, ...]] = field(default_factory=set)
    leaves: bool = False
    writes: bool = False
    varies: bool = False
    around: bool = False
    told: bool = False
    frames: Sequence[FrameSummary] = ()
    used: set[str] = field(default_factory=set)
    unfit: str = ""
    called: Called = FORWARD
    held: list[OfModule] = field(default_factory=list)

    def __post_init__(self) -> None:
        module, forms, pieces, held = self.twin, self.forms, self.pieces, self.held
        self.places = places = slots(module, self.opaque.uses)

        def call(tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self.stand_in(tensors, *map_leaves((args, kwargs), lambda leaf: leaf))  # torch.fx has its own lists

        call.opaque, call.piece = self.opaque, self  # type: ignore[attr-defined]
        name = self.opaque.called.rpartition(".")[2]
        call.__name__ = name if name.isidentifier() else type(module).__name__.lower()  # what the result is called
        op = torch.compiler.allow_in_graph(call)  # type: ignore[no-untyped-call]

        def forward(*args: Any, **kwargs: Any) -> Any:  # traced by Dynamo, and never run
            tensors = [getattr(part, key) for _, part, key in places]
            if pieces.lists:
                args, kwargs = for_ops((args, kwargs))
            if held:
                args, kwargs = rebuilt((args, kwargs), lambda part: one_of(held, module, part))
            return forms[module.training](op(tensors, args, kwargs))  # no name: it would be one in the generated code

        self.call, self.forward = call, forward
        self.forms.update(dict.fromkeys((True, False), list))  # until they are learnt

    @property
    def key(self) -> Key:
        return id(self.twin), self.opaque.method

    def refusal(self) -> Refused:
        """Why it cannot be kept whole."""
        path = str(self.opaque)
        odd = (
            f"{path} returns a value that is no tensor, or one whose shape is not determined by its arguments' shapes",
            "return new tensors, of shapes that do not depend on the values of others",
        )
        writes = f"{path} writes into what it is given", "write x = x + 1 in place of x += 1"
        varies = (
            f"{path} is given what is no tensor, and is another value in another run, or while the model is traced",
            "give it tensors in place of numbers made of them, the same whatever torch.compiler.is_compiling() says",
        )
        leaves = (
            f"{path} differentiates with respect to a tensor upstream of its own inputs",
            "take the derivative in the forward of a submodule that computes both",
        )
        unfit = (f"{path} {self.unfit}", "let it return what it computes, and forward do the rest")
        differs = self.varies or (self.asked and bool(self.opaque.promises))
        own = leaves if self.leaves else writes if self.writes else varies if differs else odd
        reason = unfit if self.unfit else own
        return Refused(self.opaque.origin, *reason, attempt_label=f"one graph, {path} kept whole")

    def stand_in(self, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Empty tensors like those that the call returns. Raises LookupError if these are not learnt yet."""
        promises, given = self.opaque.fitting(args, kwargs)
        known = {promise.wants: promise for promise in promises}
        wants = wanting((*tensors, *given))
        # If trace and run differ in which tensors need a gradient, use what was learnt from another call.
        promise = known.get(wants, next(iter(known.values()), None) if wants in self.wanted else None)
        if promise is None:
            self.asked = True
            self.wanted.add(wants)
            raise LookupError(f"what {self.opaque} returns is not known yet")
        self.opaque.hold_for(promise, args, kwargs)
        device = next((x.device for x in (*given, *tensors)), torch.device("cpu"))
        made = [_empty(gives, given, device) for gives in promise.gives if isinstance(gives, Gives)]
        return made[0] if len(made) == 1 else tuple(made)


def _empty(gives: Gives, given: list[Tensor], device: torch.device) -> Tensor:
    sizes = gives.sizes(given, lambda: torch.empty(MOST_ROWS, device=device).nonzero().shape[0])
    made = torch.empty([sizes[dim] for dim in gives.order], dtype=gives.dtype, device=device)
    if gives.grad:
        made = made.requires_grad_().clone()  # no leaf: it may be written in place
    return made.permute([gives.order.index(dim) for dim in range(len(sizes))])


class Pieces:
    """The submodules and methods of a model that are kept whole.

    - `lists`: whether the current call has lists whose items are the samples; to look for them in each call of a piece
      took a fourth of a first step.
    - `joins`: used where calls are not cut into micro-batches; otherwise the lists are those whose number of items
      differed between the two runs.
    """

    def __init__(self) -> None:
        self.lists, self.joins = False, Joins.ALL
        self.by_key: dict[Key, Piece] = {}
        self.structure_token: object = None  # `Twins.structure_token` at the last `renew`
        self.warmed = -1  # how many there were when forward last ran once before a capture (`first_call.py`)
        self.given_up: set[Key] = set()  # what cannot be an op: the ones around them are kept whole

    @property
    def whole(self) -> dict[int, Piece]:
        """The submodules that are kept whole, by the ids of their twins."""
        return {key: piece for (key, method), piece in self.by_key.items() if method == "forward"}

    @property
    def how(self) -> str:
        """How a call is captured, in words."""
        every = [piece.opaque for piece in self.by_key.values()]
        outer = (one for one in every if not any(is_inside(one.path, other) for other in every))
        kept = ", ".join(map(str, outer))
        return f"one graph, {kept} kept whole" if kept else "one graph"

    def renew(self, twins: Twins) -> bool:
        """Renew the pieces whose tensors' places changed, and drop pieces that are no longer in the model. Returns
        whether there were any. What has no code in Python is a piece from the start."""
        if self.structure_token is twins.structure_token:
            return False
        self.structure_token = twins.structure_token
        there = {id(module) for _, module in twins.named()}
        rows = self.by_key.items()
        stale = [key for key, p in rows if key[0] not in there or p.places != slots(p.twin, p.opaque.uses)]
        for key in stale:
            old = self.by_key.pop(key)
            twins.put_method(old.twin, None, old.called.changed)
            if key[0] in there:
                self._put(old.opaque, old.twin, twins, old.called, old.frames, old.around)
        self._keep_scripts(twins)
        return bool(stale)

    def narrow(self, piece: Piece, twins: Twins) -> None:
        """Let a piece have the tensors that were seen to be used, and keep what is in it no more."""
        opaque = piece.opaque
        uses = frozenset(piece.used).union(opaque.uses or ())
        opaque = replace(opaque, uses=uses)
        self._put(opaque, piece.twin, twins, piece.called, piece.frames, piece.around).told = piece.told
        for _, part in used_modules(piece.twin, uses):
            self._drop(part, twins)

    def _keep_scripts(self, twins: Twins) -> None:
        """Keep each script module whole, and each one inside, which the modules around may call too."""
        kept = [piece for piece in self.by_key.values() if not isinstance(piece.twin, ScriptTwin)]
        for path, twin in twins.named():
            key = id(twin), "forward"
            known = key in self.by_key or key in self.given_up or any(is_inside(path, piece.opaque) for piece in kept)
            if isinstance(twin, ScriptTwin) and not known:
                self._put(Opaque(path, twin.script, reason=WHY), twin, twins)

    def _put(
        self,
        opaque: Opaque,
        twin: nn.Module,
        twins: Twins,
        called: Called = FORWARD,
        frames: Sequence[FrameSummary] = (),
        around: bool = False,
    ) -> Piece:
        """Keep this whole, without what was learnt of it before."""
        opaque = replace(opaque, promises=[], written=[], remembers=set(), writes=set(), deferred=None)
        opaque = replace(opaque, method=called.name)
        draws = may_draw(twin, opaque.uses, called.code)
        piece = Piece(opaque, twin, draws, self, around=around, frames=frames, called=called)
        self.by_key[piece.key] = piece
        put(twins, self._stand_ins(twin))
        return piece

    def _stand_ins(self, twin: nn.Module | None = None) -> Iterator[tuple[nn.Module, Called, Callable[..., Any]]]:
        """What stands in for what is called, of one twin or of all."""
        pieces = (piece for piece in self.by_key.values() if twin is None or piece.twin is twin)
        return ((piece.twin, piece.called, piece.forward) for piece in pieces)

    def _drop(self, twin: nn.Module, twins: Twins) -> None:
        """Keep a submodule no more, nor methods of it."""
        for key in [key for key in self.by_key if key[0] == id(twin)]:
            twins.put_method(twin, None, self.by_key.pop(key).called.changed)

    def reset(self, before: dict[Key, Piece], twins: Twins) -> None:
        """Keep the pieces in `before` instead of the current ones."""
        for piece in self.by_key.values():
            twins.put_method(piece.twin, None, piece.called.changed)
        self.by_key = before
        put(twins, self._stand_ins())

    def keep(self, twins: Twins, refused: Refused) -> bool:
        """Keep one more submodule whole: the innermost around the refused line that is not kept yet; at last the model
        itself. Of one that has most of the model, only the method with the line, if that can be. False if there is
        none, or if a hook would get the gradient of each micro-batch."""
        if refused.reason == HOOKED:
            return False
        named = {id(module): (path, module) for path, module in twins.named()}
        inside = [named[key] for key in refused.modules or () if key in named]
        opaque = Opaque("", twins.original(twins.root), refused.where or NOWHERE, refused.reason, advice=refused.advice)
        return self._keep(inside, opaque, twins, refused.frames)

    def keep_around(self, twins: Twins, piece: Piece, refused: Refused) -> bool:
        """Keep what is around a piece whole, in place of the piece, which is `refused`: a method that calls it, or a
        submodule."""
        self.given_up.add(piece.key)
        self._drop(piece.twin, twins)
        path, part, opaque = piece.opaque.path, piece.twin, piece.opaque
        around = [
            (p, m)
            for p, m in twins.named()
            if m is part or (path.startswith(f"{p}.") if p else part in set(m.modules()))
        ]
        reason = f"{opaque.reason}; and {refused.reason}"
        made = Opaque("", twins.original(twins.root), opaque.origin, reason, advice=refused.advice)
        return self._keep(around, made, twins, piece.frames, around=True)

    def _keep(
        self,
        inside: Sequence[tuple[str, nn.Module]],
        why: Opaque,
        twins: Twins,
        frames: Sequence[FrameSummary],
        around: bool = False,
    ) -> bool:
        """Keep the innermost of these submodules whole, or a method of it, for the reason that `why` has. If another
        one of its class is kept already (one of many layers), keep all of the class: each one alone would cost another
        trace of the whole model."""
        for path, module in reversed(inside):
            own = type(module).forward is not nn.Module.forward  # lists of modules have none
            if not own or self._is_done(module):
                continue
            opaque = replace(why, path=path, module=twins.original(module))
            for called in calls_of(opaque.module, frames) if _has_most(module, twins) else ():
                if not self._is_done(module, called):
                    self._put(opaque, module, twins, called, frames, around)
                    return True
            found = [(path, module)]
            if any(type(piece.twin) is type(module) for piece in self.whole.values()):
                found += [pair for pair in twins.named() if type(pair[1]) is type(module)]
                found = [(place, one) for place, one in found if (id(one), "forward") not in self.given_up]
            for place, one in found:
                if not any(is_inside(place, piece.opaque) for piece in self.whole.values()):
                    for part in one.modules():
                        self._drop(part, twins)
                    kept = replace(opaque, path=place, module=twins.original(one))
                    self._put(kept, one, twins, FORWARD, frames, around)
            return True
        return False

    def _is_done(self, module: nn.Module, called: Called = FORWARD) -> bool:
        """Whether it is kept whole, or cannot be."""
        key = id(module), called.name
        return key in self.given_up or (key in self.by_key and self.by_key[key].called == called)

    @property
    def asked(self) -> bool:
        """Whether a call of a piece was traced whose results are not learnt yet."""
        return any(piece.asked for piece in self.by_key.values())

    def tell(self) -> None:
        """Warn of each piece that is called, once; pieces of one class with one reason share a warning."""
        new: dict[tuple[type, str, str], list[Piece]] = {}
        for piece in self.by_key.values():
            if not piece.told and piece.opaque.promises:
                piece.told = True
                key = type(piece.opaque.module), piece.opaque.method, piece.opaque.because
                new.setdefault(key, []).append(piece)
        for alike in new.values():
            warn(_told(alike[0], len(alike) - 1))


def _told(piece: Piece, others: int) -> str:
    opaque = piece.opaque
    has_line = opaque.origin.line > 0
    runs = "as plain Python" if has_line else "as it is"
    traced = f"to have {'less kept whole' if piece.around else 'it traced'}, {opaque.advice}" if opaque.advice else ""
    if opaque.called:
        more = f", as {others} more of its class are" if others else ""
        what = f"one opaque op that no cut goes through and that runs {runs}"
        return f"{opaque} is kept whole{more}: {what}, {opaque.because}" + f"; {traced}" * bool(traced)
    move = "move these lines into the forward of a submodule" if has_line else "let this be done to submodules"
    advice = traced if piece.around and traced else f"{move}, and the rest is cut" + f"; or, {traced}" * bool(traced)
    return (
        f"{opaque} is kept whole, and nothing is pipelined: the model is one opaque op on one stage, which runs {runs} "
        f"on each micro-batch, {opaque.because}; {advice}"
    )


def is_inside(path: str, opaque: Opaque) -> bool:
    """Whether the submodule at a path is inside of what is kept whole."""
    around = f"{opaque.path}." if opaque.path else ""
    if opaque.method == "forward":
        return bool(around) and path.startswith(around)
    return path.startswith(around) and is_used(path.removeprefix(around), opaque.uses or ())


def _has_most(module: nn.Module, twins: Twins) -> bool:
    """Whether a submodule has at least half of the model's parameters: without it, there is little to cut."""
    own, of_all = (sum(x.numel() for x in one.parameters()) for one in (module, twins.root))
    return 2 * own >= of_all


def refuse_unbounded_size(graph: Graph, twins: Twins) -> Refused | None:
    """The refusal of the first op whose result has a size that depends on data and has no known bound; None if none."""
    for op in graph.ops:
        if unnamed_sizes(op.type):
            inside = [m for path, m in twins.named() if not path or f"{op.origin.module}.".startswith(f"{path}.")]
            frames = frames_at(inside[-1], op.origin)
            return Refused(op.origin, *DATA_SIZES, [id(module) for module in inside], frames=frames)
    return None
