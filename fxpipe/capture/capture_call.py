"""The entry point of capture: from a call of the model to its `Graph` and real inputs, which a given function runs.

Not every model can be traced in one graph. These ways are tried in this order, until a call is captured:

  - the model as it is, under settings for recurrent layers, loggers and Python numbers (`dynamo.py`), then reading into
    functions that Dynamo would pass over
  - the same, after forward ran once on fake tensors: some libraries set things up in the first call (`first_call.py`)
  - the same, with the innermost submodule that cannot be traced kept whole (`opaque_submodules.py`); and the next

Sizes of integer tensors are symbols at first, and constants if that fails; with `uncut`, the batch size then too. Sizes
of other tensors become symbols once a second value was seen.

If all ways fail, the error has a table of them. torch.export is not used: it fixes train or eval mode and every flag in
its graph without a guard that detects changes, and silently drops the backward of custom autograd functions. Code that
it could trace and Dynamo cannot runs as an opaque op.

front(args, kwargs, run)
  1. arguments: one batch size for all; hollow copies of the tensors
  2. the compiled function is called with a twin of the model, which has hollow parameters and buffers (`twin.py`)
  3. for a new kind of call: Dynamo traces it. A dry pass returns hollow outputs, to find their places in the
     model's result; its changes of the twin's attributes are undone
  4. `run(graph, real inputs)` computes the outputs
  5. the compiled function puts them into the model's result; attributes that forward has set are copied to the model
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from fxpipe.batching.data_sizes import reads_numbers
from fxpipe.batching.mixed_samples import Reduce
from fxpipe.capture.batch_size.baked_batch_size import DryPass, at_two_sizes
from fxpipe.capture.batch_size.batch_size_checks import conditions
from fxpipe.capture.opaque.another_way import another_way, refusal_of
from fxpipe.capture.opaque.learn_outputs import run_plainly
from fxpipe.capture.opaque.opaque_submodules import Pieces
from fxpipe.capture.tracing.dynamo import MOST_TRACES, Traced, TraceModes, dynamo
from fxpipe.capture.tracing.fx_to_graph import draft, drafted, owner_of
from fxpipe.capture.tracing.layers.compiled_entries import CompiledEntries
from fxpipe.capture.tracing.layers.place_layers import Stale
from fxpipe.capture.tracing.layers.separate_layers import Layers
from fxpipe.capture.tracing.placeholders import size_of
from fxpipe.capture.tracing.rewriting.graph_view import Transform
from fxpipe.capture.tracing.rewriting.transforms import transformed
from fxpipe.capture.tracing.torch_modes import check_modes
from fxpipe.capture.twins.attribute_changes import Snapshot
from fxpipe.capture.twins.twin import Twins
from fxpipe.errors import CaptureError, FxpipeError, PlanError
from fxpipe.ir.graph.graph import Graph, Mixed
from fxpipe.ir.sample_lists import BatchDim

from .call_arguments import Arguments, Assumed, Call, Leaf, RequestedCall, with_static_sizes
from .call_kinds import Attempt, CallKind, Passed, Reached, Run, Sizes, Work
from .capture_errors import NoOps, Refused, ValuesOfOtherSamples, failed, no_ops, no_two_alike, refusals, without_frames
from .finish_graph import Finished, Seen, finish, stand_ins
from .model_exceptions import diagnosed
from .model_with_loss import function_for
from .nested_values import change
from .recapture_reason import CallSignature, signature_of, why_new


class CallCapture:
    """Captures calls of a model: `front(args, kwargs, run)` returns the result of `model(*args, **kwargs)`, computed
    by `run(graph, inputs)`, which gets the real values of `graph.inputs` and returns those of `graph.outputs`.

    - `sizes(batch)`: the sizes of the micro-batches that a batch is cut into.
    - `work(what)`: a context for the time that a capture takes.
    - `loss`: whether what is captured is the model with its loss, and returns a pair of the loss and its result.
    - `transforms`: the user's functions that change what was traced.
    - `dynamic`: whether lengths are symbols, where that can be captured.
    - `uncut`: whether no call is cut; what cannot be captured for any number of samples is captured for each.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_dim: BatchDim = 0,
        *,
        reduce: Reduce = None,
        sizes: Sizes = lambda batch: (batch,),
        loss: bool = False,
        work: Work = lambda what: nullcontext(),
        transforms: Sequence[Transform] = (),
        dynamic: bool = False,
        uncut: bool = False,
    ) -> None:
        self.model = model
        self.reduce = reduce
        self.transforms = transforms
        self.sizes, self.loss = sizes, loss
        self.arguments = Arguments(model, batch_dim, sizes, uncut, suppose=reduce is None)
        self.assumed = Assumed(dynamic)
        self.twins = Twins({"": model})
        self.pieces = Pieces()
        self.layers = Layers()
        function = function_for(loss, self.arguments.counts)
        self._another_way = partial(another_way, self.pieces, function)
        self.trace_modes = TraceModes()
        # Weak, because torch keeps every backend alive, and with it would keep the model.
        self._entries = CompiledEntries(partial(dynamo, function, weakref.ref(self)), self.layers)
        self._traces = 0
        self._unguarded = self.twins.unguarded
        self._attempt: Attempt | None = None  # the one under way
        self._start_progress, self._progress, self._progress_shown = work, ExitStack(), False
        self._signatures: list[CallSignature] = []
        self._warned: set[Mixed] = set()
        self._unchecked: set[str] = set()
        self._has_set: set[str] = set()
        self._lock = threading.RLock()

    def reset(self) -> None:
        """Forget what was captured."""
        self._traces = 0
        self.trace_modes.used = frozenset()
        self.layers.forget()
        self._entries.reset()
        self._unguarded = self.twins.unguarded

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run) -> Any:
        return self.run(RequestedCall(args, kwargs), run)

    def run(self, request: RequestedCall, run: Run) -> Any:
        """The result of the captured function, computed by `run`."""
        with self._lock:
            attempt, reached, result = self._captured(request, run)
            for _ in range(2):  # a hook that fills a dict makes the second call of another kind than the first
                if reached.snapshot is not None:
                    attempt, reached, result = self._captured(request, run)
            if reached.snapshot is not None:
                raise no_two_alike(self.model)
            memo = attempt.call.objects.give_back(attempt.real)
            for (_, name), touched in reached.kind.touched.items():
                self.twins.give_back(touched.holder, name, attempt.real, memo)
            return change(result, attempt.real, memo=memo)

    def capture(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
        """The graph of this kind of call. The model does not change, and runs only if submodules are kept whole."""
        return self.with_inputs(RequestedCall(args, kwargs))[0]

    def with_inputs(self, request: RequestedCall) -> tuple[Graph, tuple[Any, ...]]:
        """The graph of this kind of call of the captured function, and the real values of its inputs in this call."""
        with self._lock:
            passed = self._captured(request, None)
            graph = self._finish(passed, request).graph
            return graph, passed.reached.fed(graph, passed.attempt.call)

    def _captured(self, request: RequestedCall, run: Run | None) -> Passed:
        """One call of the captured function. Raises the model's own exception if it raises one, else CaptureError."""
        try:
            return self._attempted(request, run)
        except NoOps:
            raise
        except PlanError as error:  # about a transform
            raise without_frames(error) from error.__cause__
        except CaptureError as error:
            refused = without_frames(error)
        if self.twins.structure_token is None:  # it has parameters without a shape
            raise refused
        raise self._diagnosed(refused, self.arguments.call(request, self.assumed, self.twins.device), request)

    def _diagnosed(self, refused: CaptureError, call: Call, request: RequestedCall) -> Exception:
        """The exception to raise for a refused call: the model's own, if it raises one."""
        return diagnosed(refused, self.model, call, partial(run_plainly, call, self.twins, request.holders))

    def _attempted(self, request: RequestedCall, run: Run | None) -> Passed:
        """As `_captured`, with fewer assumptions if it is refused. Raises what it raised for any number of samples."""
        before = self.assumed, [*self._signatures]
        refused: CaptureError | None = None
        try:
            while True:
                self.trace_modes.in_vain.clear()
                try:
                    return self._completed(request, run)
                except NoOps:
                    raise
                except CaptureError as error:
                    refused = error if refused is None or self.assumed.any_rows else refused
                less = self._assumed_less(request)
                if less is None:
                    raise refused
                self.assumed = less
                self.pieces.given_up.clear()  # with less assumed, each may be an op
                self.reset()
        except BaseException:
            self.assumed, self._signatures = before  # what is refused is no kind of call
            raise
        finally:
            if self._progress_shown:
                self._progress_shown = False
                self._progress.close()

    def _assumed_less(self, request: RequestedCall) -> Assumed | None:
        """What to assume of a call that was refused; None if nothing less can be assumed."""
        if self.twins.structure_token is None:
            return None
        rows = self.assumed._replace(any_rows=False) if self.arguments.uncut and self.assumed.any_rows else None
        return with_static_sizes(self.assumed, self.arguments.call(request, self.assumed, self.twins.device)) or rows

    def starts(self) -> None:
        """Called when Dynamo begins to trace a new kind of call."""
        assert self._attempt is not None
        self._traces += 1
        signature = signature_of(self._attempt.call, self.model.training)
        if not self._progress_shown:
            name = type(self.model).__name__ + (" with its loss" if self.loss else "")
            why = why_new(signature, self._signatures, "step" if self.loss else "call", self._has_set)
            if self.trace_modes.other_values:
                why = "forward reads another value of its inputs"
            self._progress.enter_context(self._start_progress(f"capturing {name}: {why}"))
            self._progress_shown = True
            self._signatures.append(signature)

    def _completed(self, request: RequestedCall, run: Run | None) -> Passed:
        """One call of the captured function; after a dry pass, the graph of its kind is complete. If the graph is
        refused because a size depends on data, keep the submodule with this op whole and try again."""
        passed = self._pass(request, run)
        attempt, kind = passed.attempt, passed.reached.kind
        if passed.reached.snapshot is None:
            return passed
        try:
            if not self._finish(passed, request).graph.ops:
                raise no_ops(self.model)
        except NoOps:
            raise
        except ValuesOfOtherSamples:
            if "values" in self.trace_modes.barred:
                raise
            self.reset()
            with self.trace_modes.without_values():
                return self._completed(request, run)
        except CaptureError as error:
            draft = kind.drafted if with_static_sizes(self.assumed, attempt.call) is None else None
            if draft is not None and reads_numbers(draft.graph) and self.trace_modes.may("values"):
                self.reset()
                self.trace_modes.used |= {"values"}
                return self._completed(request, run)
            refused = refusal_of(error, draft, self.twins)
            if refused is None or self._another_way(attempt, [refused]) is None:
                raise
            self.reset()
            return self._completed(request, run)
        self.pieces.tell()
        kind.tell_unchecked(self._unchecked)
        return passed

    def _finish(self, passed: Passed, request: RequestedCall) -> Finished:
        """Complete the graph of a kind of call after its dry pass."""
        kind, call, result = passed.reached.kind, passed.attempt.call, passed.result
        assert kind.drafted is not None
        if not kind.holds(call, self.sizes):
            kind.check(call, self.sizes, self._warned)
            drafted = kind.drafted
            if drafted.baked is not None and call.batch is not None:
                first, sizes = self._dry_pass(passed), self.sizes(call.batch)
                again = lambda rows: self._dry_pass(self._pass(request, None, rows))  # noqa: E731
                kind.drafted, drafted, kind.rows = at_two_sizes(first, sizes, again, self.arguments.uncut)
            seen = Seen(result, kind.rebound, kind.set_to, self.twins.slots)
            finished = finish(drafted, kind.hollows, call, seen, self.reduce, self.loss, self.arguments.uncut)
            limits, changes = conditions(kind.traced, kind.drafted, kind.rows), bool(kind.given or kind.written.paths)
            kind.finished = replace(finished, graph=replace(finished.graph, conditions=limits, changes=changes))
            kind.check(call, self.sizes, self._warned)
        assert kind.finished is not None
        return kind.finished

    def _dry_pass(self, passed: Passed) -> DryPass:
        kind, flat = passed.reached.kind, passed.reached.flat
        call, owner = passed.attempt.call, owner_of(self.model, self.twins)
        assert kind.drafted is not None
        return DryPass(call, kind.traced, kind.drafted, passed.result, lambda traced: draft(owner, traced, flat, call))

    def _pass(self, request: RequestedCall, run: Run | None, rows: int | None = None) -> Passed:
        """One call of the captured function; tensors are hollow until `run` runs. Raises NoOps if it has no graph."""
        check_modes()
        self.twins.sync()
        if self.pieces.renew(self.twins) or self._unguarded != self.twins.unguarded:
            # Dynamo could guard hooks too, but that would double the time of all guards of a call (torch 2.13).
            self.reset()
        if self._traces >= MOST_TRACES or self.trace_modes.give_up_values():  # torch.compile would refuse another one
            self.reset()
        self.layers.renew(self.twins)
        # On the model's device, so that the caller may have the batch on any device.
        call = self.arguments.call(request, self.assumed, self.twins.device, rows)
        twinned, count = self.twins.twinned(*request.rest, *request.holders), len(request.rest)
        attempt = Attempt(call, request, self.twins, run, twinned[:count], twinned[count:])
        self.pieces.lists = bool(call.lists)
        self._attempt, before = attempt, self._attempt
        self.trace_modes.other_values = done = False
        try:
            result = self._compiled_result(attempt)
            if (reached := attempt.reached) is None:
                raise no_ops(self.model)
            if reached.snapshot is not None:
                reached.kind.rebound = self.twins.rebound(reached.kind.past)
                result = call.objects.shown(result)
            else:
                self.twins.give_back_buffers(reached.kind.rebound.values(), attempt.real)
                self.twins.reset(self.twins.buffers)  # `self.count += 1` sets the real one, which the run has written
                self.twins.give_back_lists(attempt.real)
            done = True
            return Passed(attempt, reached, result)
        finally:
            self._attempt, reached = before, attempt.reached
            if not done or reached is None or reached.snapshot is not None:
                self.twins.reset()
                given = call.objects.restore()
            if reached is not None and reached.snapshot is not None:
                kind = reached.kind
                kind.touched |= reached.snapshot.restore()
                self._has_set |= {f"{type(one.holder).__name__}.{name}" for (_, name), one in kind.touched.items()}
                kind.given = given

    def _compiled_result(self, attempt: Attempt) -> Any:
        """The result of the compiled function. A refused call of which nothing is assumed is tried in other ways."""
        call, tried, others = attempt.call, list[Refused](), 0
        before = dict(self.pieces.by_key)
        how: str | None = self.pieces.how
        while how is not None:
            traces = self._traces
            call.objects.restore()
            try:
                result = self._entries.first(self.twins.root, *call.given, *attempt.arguments)
            except Stale:
                others += 1
                self._entries.next_entry(others, self._traces > traces and not self.trace_modes.other_values)
                continue
            except Refused as refused:
                refused = attempt.compared_type(self.pieces.whole) or refused
                tried.append(refused.spelled(partial(size_of, call), how))
                if refused.steered and self._diagnosed(tried[-1], call, attempt.request) is not tried[-1]:
                    break
            except Exception as error:
                runs = attempt.reached is not None and attempt.reached.snapshot is None
                if isinstance(error, FxpipeError) or runs:  # ours; or what the pipeline raised
                    raise
                tried.append(failed(error, how))
            else:
                return result
            how = None if with_static_sizes(self.assumed, call) else self._another_way(attempt, tried)
            self.reset()
            self.layers.renew(self.twins)
        self.pieces.reset(before, self.twins)
        raise refusals(tried) from tried[-1].__cause__

    def input_of(self, stand_in: Tensor) -> Leaf | None:
        """The user's tensor in the current call."""
        return None if self._attempt is None else self._attempt.call.leaves.get(id(stand_in))

    def captured(self, traced: Traced) -> Callable[..., Any]:
        """The function that Dynamo calls for a kind of call that it has just traced."""
        kind, placed = CallKind(traced), traced.placed
        assert placed is not None
        call_capture = weakref.ref(self)

        def compute(*flat: Any) -> tuple[Any, ...]:
            self = call_capture()
            assert self is not None
            attempt = self._attempt
            assert attempt is not None
            flat, call = placed.flat(flat), attempt.call
            if not all(read.same(call) for read in (traced.read, traced.asserts.read) if read is not None):
                self.trace_modes.other_values = True
                raise Stale
            if attempt.run is None or not kind.holds(call, self.sizes):
                return self._dry(kind, attempt, flat)
            kind.check(call, self.sizes, self._warned)
            assert kind.finished is not None
            kind.finished = finished = kind.finished.renewed(flat)
            attempt.reached = reached = Reached(kind, flat, None)
            results = attempt.run(finished.graph, reached.fed(finished.graph, call))
            made = tuple(give(results, call, flat) for give in finished.gives)
            return kind.written.copy_back(made, kind.drafted.outputs, call) if kind.drafted else made

        return compute

    def _dry(self, kind: CallKind, attempt: Attempt, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return hollow outputs instead of running. Dynamo changes the twin's attributes only afterwards."""
        call = attempt.call
        if kind.drafted is None:
            kind.check_trace(attempt, self.pieces.whole)
            failed = kind.failed_assertion
            if failed is not None and self._diagnosed(failed, call, attempt.request) is not failed:
                raise failed  # else the values are those of the whole batch, and sizes those of a micro-batch
            if self.transforms:
                kind.traced = transformed(kind.traced, flat, call, self.twins.slots, self.transforms)
            owner = owner_of(self.model, self.twins)
            kind.drafted, kind.written = drafted(owner, kind.traced, flat, call)
            kind.hollows = stand_ins(kind.drafted)
            kind.past = self.twins.reached(kind.traced.guarded())
        # As late as possible, so that changes of other threads are not undone.
        snapshot = Snapshot((*(module for _, module in self.twins.named()), *kind.past, *attempt.holders))
        attempt.reached = Reached(kind, flat, snapshot)
        return kind.written.original_outputs(kind.hollows)
