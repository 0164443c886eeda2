"""The state of a kind of call, and an attempt at a call."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from fxpipe.batching.mixed_samples import tell
from fxpipe.batching.op_errors import at
from fxpipe.capture.batch_size.batch_size_checks import check_outputs, check_sizes
from fxpipe.capture.opaque.compared_types import compared_type
from fxpipe.capture.opaque.derivatives import derived
from fxpipe.capture.tracing.dynamo import Traced
from fxpipe.capture.tracing.fx_to_graph import Draft
from fxpipe.capture.tracing.rewriting.written_inputs import NO_WRITES, WrittenInputs
from fxpipe.capture.twins.attribute_changes import Changes, Snapshot
from fxpipe.capture.twins.twin import Slot, Twins
from fxpipe.errors import warn
from fxpipe.ir.graph.graph import Graph, Mixed

from .call_arguments import Call, RequestedCall
from .capture_errors import INSTALLED, Refused, line_of, made_of_floats, written_by_dynamo
from .finish_graph import Finished, feed

log = logging.getLogger("fxpipe")
Run = Callable[[Graph, tuple[Any, ...]], tuple[Any, ...]]
Sizes = Callable[[int], Sequence[int]]
Work = Callable[[str], AbstractContextManager[None]]


@dataclass(eq=False)
class CallKind:
    """A kind of call: its trace, and, after its dry pass, the graph that runs.

    - `touched`: the attributes that forward sets.
    - `given`: what forward sets in the objects among the arguments; `written`: the arguments that it writes into.
    - `rebound`: the buffers that forward sets.
    - `past`: the user's own modules that the trace reached without the twins, for example by a global variable.
    - `rows`: the sizes of micro-batches for which the graph holds; empty if for any.
    - `fits`: the batch sizes that are known to be valid.
    """

    traced: Traced
    drafted: Draft | None = None
    hollows: tuple[Any, ...] = ()
    finished: Finished | None = None
    touched: Changes = field(default_factory=dict)
    given: tuple[Any, ...] = ()
    written: WrittenInputs = NO_WRITES
    rebound: Mapping[int, Slot] = field(default_factory=dict)
    past: tuple[nn.Module, ...] = ()
    rows: frozenset[int] = frozenset()
    fits: set[int | None] = field(default_factory=set)

    def check_trace(self, attempt: Attempt, kept: Container[int]) -> None:
        """Raise Refused if an op was traced that runs inside of Dynamo only, or that a stage does not run; or if code
        outside of submodules kept whole compares type(x) with list, where x stands for a list of samples: the trace
        may have taken the wrong branch."""
        traced = self.traced.module.graph
        floats = made_of_floats(traced) if self.traced.folded else None
        if refused := written_by_dynamo(traced) or derived(traced) or floats:
            raise refused
        if refused := attempt.compared_type(kept):
            raise refused

    @property
    def failed_assertion(self) -> Refused | None:
        """The refusal of an assertion of forward's that does not hold for the values of the inputs."""
        node = self.traced.asserts.failed
        if node is None:
            return None
        return Refused(line_of(node), "the assertion on this line fails", steered=True)

    def tell_unchecked(self, warned: set[str]) -> None:
        """Warn of the user's assertions that are no part of the graph, and not in `warned`; log those of a library."""
        for node in self.traced.asserts.unknown:
            line = line_of(node)
            if at(line) not in warned:
                warned.add(at(line))
                text = f"{at(line)}is not checked in a pipe, as it is about values that parameters have made"
                if line is None or re.search(INSTALLED, line.file):
                    log.info(text)
                else:
                    warn(f"{text}; check what the model returns instead")

    @property
    def set_to(self) -> tuple[Any, ...]:
        """The values that forward leaves anywhere but in its result."""
        return (*(one.value for one in self.touched.values()), *self.given, *self.written.final_values(self.hollows))

    def holds(self, call: Call, sizes: Sizes) -> bool:
        """Whether the graph is finished, and holds for micro-batches of these sizes."""
        known = self.finished is not None
        return known and (not self.rows or call.batch is None or self.rows.issuperset(sizes(call.batch)))

    def check(self, call: Call, sizes: Sizes, warned: set[Mixed]) -> None:
        """Raise CaptureError if the graph is not valid for a call's micro-batches; warn of what is not in `warned`."""
        if call.batch in self.fits:
            return
        assert self.drafted is not None
        check_sizes(self.traced, self.drafted, call, sizes)
        if self.finished is not None:
            check_outputs(self.finished.graph, call.batch, sizes)
            tell(self.finished.graph, call.batch, sizes, warned)
            self.fits.add(call.batch)


@dataclass(frozen=True, eq=False)
class Reached:
    """The kind of call whose function an attempt has reached: the trace of that kind was right for the call.

    - `flat`: what the trace was given.
    - `snapshot`: the twin's attributes before a dry pass; None if the pipeline runs, so that errors come from it.
    """

    kind: CallKind
    flat: tuple[Any, ...]
    snapshot: Snapshot | None

    def fed(self, graph: Graph, call: Call) -> tuple[Any, ...]:
        """The real values of the graph's inputs."""
        assert self.kind.drafted is not None
        return self.kind.written.with_clones(graph, feed(graph, self.kind.drafted, call, self.flat))


@dataclass(eq=False)
class Attempt:
    """An attempt at a call.

    - `arguments`: those of the captured function besides the model and tensors.
    - `holders`: objects besides the model that it may change.
    - `reached`: set by the function of a kind of call, which Dynamo calls; None if none was called.
    """

    call: Call
    request: RequestedCall
    twins: Twins
    run: Run | None
    arguments: tuple[Any, ...]
    holders: tuple[Any, ...]
    reached: Reached | None = None

    def real(self, path: str, tensor: Tensor) -> Tensor:
        """The user's or the model's own tensor for a stand-in, any other tensor as it is."""
        leaf = self.call.leaves.get(id(tensor))
        if leaf is not None:
            return leaf.real
        slot = self.twins.slot_by_id.get(id(tensor))
        return tensor if slot is None or slot.real is None else slot.real

    def compared_type(self, kept: Container[int]) -> Refused | None:
        """The refusal of a line outside of submodules `kept` whole that compares type(x) with list, where x stands for
        a list of samples: the trace may have taken the wrong branch. None if there is no such line."""
        call = self.call
        return compared_type(self.twins, kept, call.rest, call.lists) if call.lists else None


class Passed(NamedTuple):
    """An attempt that has come to an end."""

    attempt: Attempt
    reached: Reached
    result: Any
