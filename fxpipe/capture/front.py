"""The door of capture: a call of the model comes in, its `Graph` and the real inputs go to whoever runs it.

Not every model can be traced in one graph. What is tried, in this order, until a call is captured:

  - the model as it is, under settings for recurrent layers, loggers and Python numbers (`dynamo.py`), then reading into
    functions that Dynamo would pass over
  - the same, after forward ran once on fake tensors: some libraries set things up in the first call (`warm.py`)
  - the same, with the innermost submodule that cannot be traced kept whole, as one op (`opaque.py`); and the next one

If nothing is left, the error has a table of all that was tried. torch.export is not among it: it bakes train or eval
mode and every flag into its graph without a guard that would tell when they change, and drops the backward of custom
autograd functions without a word. What it can trace and Dynamo cannot, runs as an opaque op.

front(args, kwargs, run)
  1. arguments: one batch size for all; hollow copies of the tensors
  2. the model's parameters and buffers are swapped for hollow ones, and the route's function is called
  3. a kind of call not seen before: the route traces it. A dry pass gives back hollow outputs, which shows where
     they stand in what the model returns; what it did to the model's attributes is undone
  4. the model has its own tensors again, and `run(graph, real inputs)` computes the outputs
  5. the route puts them into the object that the model returns
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import CaptureError, FxpipeError
from fxpipe.ir.graph import Graph, Mixed

from .arguments import Arguments, Asked, BatchDim, Call
from .baked import merge
from .convert import Draft, Owner, draft
from .dynamo import Capture, Traced, dynamo
from .explain import Refused, failed, refusals, written_by_dynamo
from .finish import Finished, Seen, feed, finish, stand_ins
from .folded import made_of_floats
from .guards import check_outputs, check_sizes
from .hollow import Changes, Slot, Snapshot, Twins
from .inline import inline_checkpoints
from .learn import learn
from .mixing import Reduce, tell
from .nest import change
from .opaque import Pieces, sized_by_data
from .unrolled import rejoin
from .warm import SIGNS, warm

Run = Callable[[Graph, tuple[Any, ...]], tuple[Any, ...]]
Route = Callable[[nn.Module, Callable[..., Any], Capture], Callable[..., Any]]
Sizes = Callable[[int], Sequence[int]]


def call_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is captured of a model where nothing else is said."""
    return model(*args, **kwargs)


@dataclass(eq=False)
class Kind:
    """A kind of call: what was traced of it, and, once its dry pass is over, what is run. `touched` are the attributes
    that forward sets, `fits` the batch sizes that are known to be right for it."""

    traced: Traced
    drafted: Draft | None = None
    hollows: tuple[Any, ...] = ()
    finished: Finished | None = None
    touched: Changes = field(default_factory=dict)
    fits: set[int | None] = field(default_factory=set)


@dataclass
class Now:
    """The call under way. `snapshot` is of the model before a dry pass touched it; `swapped`: the model is hollow."""

    call: Call
    twins: Twins
    run: Run | None
    holders: tuple[Any, ...] = ()
    kind: Kind | None = None
    snapshot: Snapshot | None = None
    rebound: dict[int, Slot] = field(default_factory=dict)
    swapped: bool = True

    def real(self, path: str, tensor: Tensor) -> Tensor:
        """The user's or the model's own tensor for a stand-in, any other tensor as it is."""
        leaf = self.call.leaves.get(id(tensor))
        if leaf is not None:
            return leaf.real
        slot = self.twins.of.get(id(tensor))
        return tensor if slot is None or slot.real is None else slot.real


class Front:
    """Stands in front of a model: `front(args, kwargs, run)` returns what `model(*args, **kwargs)` would, with its
    arithmetic done by `run(graph, inputs)`, which gets the real values of `graph.inputs` and returns those of
    `graph.outputs`.

    `sizes(batch)` are the sizes of the micro-batches that a batch is cut into. With a `function`, the front stands for
    that instead: a plain function of the model, args, kwargs, and what else `Asked` brings, which uses nothing but its
    arguments and what is global in its module. If `loss` is true, it returns a loss and something else.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_dim: BatchDim = 0,
        *,
        reduce: Reduce = None,
        sizes: Sizes = lambda batch: (batch,),
        function: Callable[..., Any] = call_model,
        loss: bool = False,
        route: Route = dynamo,
    ) -> None:
        self.model = model
        self.reduce = reduce
        self.sizes = sizes
        self.loss = loss
        self.arguments = Arguments(model, batch_dim, sizes)
        self.twins = Twins({"": model})
        self.pieces = Pieces()
        self._function = function
        # Weak, for torch keeps every backend it has seen, and would keep the model with it.
        capture = weakref.WeakMethod(self._capture)
        self._begin = partial(route, model, function, lambda traced: capture()(traced))  # type: ignore[misc]
        self._route, self._hooks = self._begin(), self.twins.hooks()
        self._now: Now | None = None
        self._told: set[Mixed] = set()
        self._warm = False
        self._lock = threading.RLock()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run) -> Any:
        return self.run(Asked(args, kwargs), run)

    def run(self, asked: Asked, run: Run) -> Any:
        """What the captured function returns."""
        with self._lock:
            now, result = self._complete(asked, run)
            for _ in range(2):  # a hook that fills a dict makes the second call of another kind than the first
                if now.snapshot is not None:
                    now, result = self._complete(asked, run)
            kind = now.kind
            assert kind is not None
            if now.snapshot is not None:
                raise CaptureError(
                    f"{type(self.model).__name__}, or a hook on it, changes what it depends on, so that no two calls "
                    "are of one kind; does it append to a list? Put values into a dict, or return them, instead"
                )
            for (_, name), touched in kind.touched.items():
                attributes = vars(touched.holder)
                if name in attributes:
                    attributes[name] = change(attributes[name], now.real)
            return change(result, now.real)

    def capture(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
        """The graph of this kind of call. Nothing changes; nothing is run but for submodules that are kept whole."""
        return self.graph(Asked(args, kwargs))

    def graph(self, asked: Asked) -> Graph:
        """The graph of this kind of call of the captured function."""
        with self._lock:
            now, _ = self._complete(asked, None)
            assert now.kind is not None
            assert now.kind.finished is not None
            return now.kind.finished.graph

    def _complete(self, asked: Asked, run: Run | None) -> tuple[Now, Any]:
        """One call of the route; if it is a dry pass, the graph of its kind is complete afterwards. Where a graph is
        refused in which data decides how large something is, that may do inside of a submodule that is kept whole."""
        now, result = self._pass(asked, run)
        if now.kind is None:
            raise CaptureError(
                f"{type(self.model).__name__} has no ops: there is nothing to run on devices; call the model itself"
            )
        if now.snapshot is None:
            return now, result
        try:
            self._finish(now, result, asked)
        except CaptureError:
            refused = sized_by_data(now.kind.drafted.graph, self.twins) if now.kind and now.kind.drafted else None
            if refused is None or self._another_way(now, [refused]) is None:
                raise
            self._route, self._hooks = self._begin(), self.twins.hooks()
            return self._complete(asked, run)
        return now, result

    def _finish(self, now: Now, result: Any, asked: Asked) -> Finished:
        """Complete the graph of the kind of call that a dry pass has shown."""
        kind = now.kind
        assert kind is not None
        assert kind.drafted is not None
        if kind.finished is None:
            self._check(kind, now.call)
            drafted = kind.drafted
            if drafted.baked is not None and now.call.rows is not None:
                rows = now.call.rows, now.call.rows + 1
                other, result_of_other = self._pass(asked, None, rows[1])
                assert other.kind is not None
                assert other.kind.drafted is not None
                drafted = merge(drafted, other.kind.drafted, rows, (result, result_of_other))
            seen = Seen(
                result, now.rebound, tuple(touched.value for touched in kind.touched.values()), self.twins.slots
            )
            kind.finished = finish(drafted, kind.hollows, now.call, seen, self.reduce, self.loss)
            self._check(kind, now.call)
        return kind.finished

    def _pass(self, asked: Asked, run: Run | None, rows: int | None = None) -> tuple[Now, Any]:
        """One call of the route, with everything hollow up to the moment when `run` runs."""
        self.twins.sync()
        if self.pieces.renew(self.twins) or self._hooks != self.twins.hooks():
            # Dynamo has guards for hooks, too, but they would double what all guards of a call take (torch 2.13).
            self._route, self._hooks = self._begin(), self.twins.hooks()
        # Where the model is, so that the caller may keep the batch anywhere.
        now = Now(self.arguments.call(asked, self.twins.device, rows), self.twins, run, asked.holders)
        self._now, before = now, self._now
        self.twins.enter()
        self.pieces.enter()
        try:
            result = self._routed(now)
            if now.snapshot is not None:
                now.rebound = self.twins.rebound()
            return now, result
        finally:
            self._now = before
            if now.swapped:
                self.twins.leave()
            if now.snapshot is not None and now.kind is not None:
                now.kind.touched |= now.snapshot.restore()
            self.pieces.leave()  # not sooner: the snapshot has them

    def _routed(self, now: Now) -> Any:
        """What the route returns. A call that is refused gets another chance as long as there is another way."""
        tried: list[Refused] = []
        before = dict(self.pieces.of)
        how: str | None = self._how()
        while how is not None:
            try:
                result = self._route(*now.call.given)
            except Refused as refused:
                refused.route = how
                tried.append(refused)
            except Exception as error:
                if isinstance(error, FxpipeError) or not now.swapped:  # ours; or what the pipeline raised
                    raise
                tried.append(failed(error, how))
            else:
                self.pieces.tell()
                return result
            how = self._another_way(now, tried)
            self._route, self._hooks = self._begin(), self.twins.hooks()
            self.twins.enter()
            self.pieces.enter()
        self.pieces.of = before
        raise refusals(tried) from tried[-1].__cause__

    def _how(self) -> str:
        """How a call is captured, in words."""
        kept = [str(piece.opaque) for piece in self.pieces.of.values()]
        return f"one graph, {', '.join(kept)} kept whole" if kept else "one graph"

    def _another_way(self, now: Now, tried: list[Refused]) -> str | None:
        """Try the next way, the model being itself again: first to run forward once, as some libraries put off to the
        first call what is no arithmetic; then to keep the submodule whole that was refused, or the one around it. Gives
        what was done, or None if nothing is left. Ways that fail at once are added to those that were tried."""
        self.pieces.leave()
        refused = tried[-1]
        if not self._warm and any(sign in str(refused) for sign in SIGNS):
            self._warm = True
            warm(self.twins, now.call, now.holders)
            return "one graph, after forward ran once"
        self.twins.leave()
        if not self.pieces.asked and not self.pieces.keep(self.twins, refused):
            if refused.modules is not None:
                tried.append(refused.in_no_submodule())
            return None
        while True:
            try:
                odd = learn(self.pieces, partial(self._function, self.model), now.call, self.twins, now.holders)
            except Exception as error:  # the model's own
                tried.append(failed(error, "running it, to see what a submodule returns"))
                return None
            if odd is None:
                return self._how()
            tried.append(odd.refusal())
            if not self.pieces.keep_around(self.twins, odd):
                return None

    def _capture(self, traced: Traced) -> Callable[..., Any]:
        """What the route is to call for a kind of call that it has just traced."""
        inline_checkpoints(traced.module)
        kind = Kind(traced)
        front = weakref.ref(self)

        def compute(*flat: Any) -> tuple[Any, ...]:
            self = front()
            assert self is not None
            now = self._now
            assert now is not None
            now.kind = kind
            if kind.finished is None or now.run is None:
                return self._dry(kind, now, flat)
            assert kind.drafted is not None
            self._check(kind, now.call)
            kind.finished = finished = kind.finished.renewed(flat)
            self.twins.leave()  # whoever runs the graph may look at the model
            self.pieces.leave()
            now.swapped = False
            results = now.run(finished.graph, feed(finished.graph, kind.drafted, now.call, flat))
            self.pieces.enter()  # what the route puts together may come from what stands in
            return tuple(give(results, now.call, flat) for give in finished.gives)

        return compute

    def _dry(self, kind: Kind, now: Now, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hollow outputs, in place of running. The route has not touched the model yet: it does so afterwards."""
        if kind.drafted is None:
            rejoin(kind.traced.module, now.call.rows or 0)
            traced = kind.traced.module.graph
            if refused := written_by_dynamo(traced) or (made_of_floats(traced) if kind.traced.folded else None):
                raise refused
            modules = {str(id(module)): path for path, module in self.twins.named()}
            owner = Owner(type(self.model).__name__, self.model.training, self.twins.slots, modules)
            kind.drafted = draft(owner, kind.traced, flat, now.call)
            kind.hollows = stand_ins(kind.drafted)
        # Not sooner, lest it undo what other threads do.
        now.snapshot = Snapshot((*(module for _, module in self.twins.named()), *now.holders))
        return kind.hollows

    def _check(self, kind: Kind, call: Call) -> None:
        if call.batch not in kind.fits:
            assert kind.drafted is not None
            check_sizes(kind.traced, kind.drafted, call, self.sizes)
            if kind.finished is not None:
                check_outputs(kind.finished.graph, call.batch, self.sizes)
                tell(kind.finished.graph, call.batch, self.sizes, self._told)
                kind.fits.add(call.batch)


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    batch_dim: BatchDim = 0,
    *,
    reduce: Reduce = None,
) -> Graph:
    """The graph of `model(*args, **kwargs)`. Nothing changes. Nothing is run, and the model may be on the meta device,
    unless a submodule is to be kept whole.

    >>> from torch import nn, ones
    >>> print(capture(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (ones(4, 2),)).inputs[0].type)
    f32[b, 2]
    """
    return Front(model, batch_dim, reduce=reduce).capture(args, kwargs or {})
