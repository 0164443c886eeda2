"""The state of a kind of call, and of the current call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fxpipe.capture.batch.batch_size_checks import check_outputs, check_sizes
from fxpipe.capture.batch.mixed_samples import tell
from fxpipe.capture.tracing.dynamo import Traced
from fxpipe.capture.tracing.fx_to_graph import Draft
from fxpipe.capture.tracing.rewriting.written_inputs import NO_WRITES, WrittenInputs
from fxpipe.capture.twins.attribute_changes import Changes, Snapshot
from fxpipe.capture.twins.twin import Slot, Twins
from fxpipe.ir.graph.graph import Graph, Mixed
from fxpipe.ir.operators.training_mode import mode_input

from .call_arguments import Call, RequestedCall, Want
from .finish_graph import Finished, feed

Run = Callable[[Graph, tuple[Any, ...]], tuple[Any, ...]]
Sizes = Callable[[int], Sequence[int]]
Work = Callable[[str], AbstractContextManager[None]]
Part = tuple[Want, bool | None]  # what is wanted of a call, and the mode that its graph is for; None: any


@dataclass(eq=False)
class Kind:
    """A kind of call: its trace, and, after its dry pass, the graph that runs, for each part of the result that was
    wanted, and, where that must be, for each mode.

    - `touched`: the attributes that forward sets.
    - `given`: what forward sets in the objects among the arguments; `written`: the arguments that it writes into.
    - `rebound`: the buffers that forward sets.
    - `past`: the user's own modules that the trace reached without the twins, for example by a global variable.
    - `fits`: the batch sizes that are known to be valid, with the part.
    """

    traced: Traced
    drafted: Draft | None = None
    hollows: tuple[Any, ...] = ()
    finished: dict[Part, Finished] = field(default_factory=dict)
    touched: Changes = field(default_factory=dict)
    given: tuple[Any, ...] = ()
    written: WrittenInputs = NO_WRITES
    rebound: Mapping[int, Slot] = field(default_factory=dict)
    past: tuple[nn.Module, ...] = ()
    fits: set[tuple[int | None, Part]] = field(default_factory=set)

    @property
    def set_to(self) -> tuple[Any, ...]:
        """The values that forward leaves anywhere but in its result."""
        return (*(one.value for one in self.touched.values()), *self.given, *self.written.of(self.hollows))

    def check(self, call: Call, part: Part, sizes: Sizes, told: set[Mixed]) -> None:
        """Raise CaptureError if the graph is not valid for the micro-batches of a call; warn of what is not `told`."""
        if (call.batch, part) in self.fits:
            return
        assert self.drafted is not None
        check_sizes(self.traced, self.drafted, call, sizes)
        if part in self.finished:
            check_outputs(self.finished[part].graph, call.batch, sizes)
            tell(self.finished[part].graph, call.batch, sizes, told)
            self.fits.add((call.batch, part))


@dataclass
class Now:
    """The current call.

    - `beside`: the arguments of the captured function besides the model and tensors.
    - `holders`: objects besides the model that it may change.
    - `flat`: what the trace was given.
    - `snapshot`: the twin's attributes before the dry pass.
    - `running`: whether the pipeline runs, so that errors come from it.
    """

    call: Call
    request: RequestedCall
    twins: Twins
    run: Run | None
    beside: tuple[Any, ...] = ()
    holders: tuple[Any, ...] = ()
    kind: Kind | None = None
    flat: tuple[Any, ...] = ()
    snapshot: Snapshot | None = None
    running: bool = False

    def real(self, path: str, tensor: Tensor) -> Tensor:
        """The user's or the model's own tensor for a stand-in, any other tensor as it is."""
        leaf = self.call.leaves.get(id(tensor))
        if leaf is not None:
            return leaf.real
        slot = self.twins.of.get(id(tensor))
        return tensor if slot is None or slot.real is None else slot.real

    def fed(self, graph: Graph, training: bool) -> tuple[Any, ...]:
        """The real values of the graph's inputs. `training`: the model's mode."""
        assert self.kind is not None
        assert self.kind.drafted is not None
        return self.kind.written.kept(graph, feed(graph, self.kind.drafted, self.call, self.flat, training))

    @property
    def is_whole(self) -> bool:
        """Whether the trace has the model's result, though only the loss is wanted."""
        return self.request.want == "loss" and bool(self.request.rest[-1])

    @property
    def part(self) -> Part:
        """The part that is wanted. A graph that does not depend on the mode is for any."""
        drafted = self.kind.drafted if self.kind is not None else None
        one = drafted is not None and mode_input(drafted.graph) is not None
        return self.request.want, self.request.mode if one else None

    def parts(self, result: Any) -> tuple[Any, Any]:
        """The part of the returned object that is wanted, and the other one."""
        if self.request.want == "outputs":
            return result[1], result[0]
        return ((result[0], None), result[1]) if self.is_whole else (result, None)
