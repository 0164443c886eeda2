"""What is known of a kind of call, and of the call under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fxpipe.capture.tracing.dynamo import Traced
from fxpipe.capture.tracing.fx_to_graph import Draft
from fxpipe.capture.twins.attribute_changes import Changes, Snapshot
from fxpipe.capture.twins.twin import Slot, Twins
from fxpipe.ir.graph.graph import Graph

from .call_arguments import Call, RequestedCall
from .finish_graph import Finished

Run = Callable[[Graph, tuple[Any, ...]], tuple[Any, ...]]


@dataclass(eq=False)
class Kind:
    """A kind of call: what was traced of it, and, once its dry pass is over, what is run. `touched` are the attributes
    that forward sets, `rebound` the buffers that it sets, `past` the user's own modules that the trace reached past the
    twins, as by a global variable, and `fits` the batch sizes that are known to be right for it."""

    traced: Traced
    drafted: Draft | None = None
    hollows: tuple[Any, ...] = ()
    finished: Finished | None = None
    touched: Changes = field(default_factory=dict)
    rebound: Mapping[int, Slot] = field(default_factory=dict)
    past: tuple[nn.Module, ...] = ()
    fits: set[int | None] = field(default_factory=set)


@dataclass
class Now:
    """The call under way. `beside` is what the captured function gets besides the model and tensors, `holders` are
    objects beside the model that it may change. `snapshot` is of the twin before a dry pass touched it; `running`: what
    is raised comes from the pipeline."""

    call: Call
    request: RequestedCall
    twins: Twins
    run: Run | None
    beside: tuple[Any, ...] = ()
    holders: tuple[Any, ...] = ()
    kind: Kind | None = None
    snapshot: Snapshot | None = None
    running: bool = False

    def real(self, path: str, tensor: Tensor) -> Tensor:
        """The user's or the model's own tensor for a stand-in, any other tensor as it is."""
        leaf = self.call.leaves.get(id(tensor))
        if leaf is not None:
            return leaf.real
        slot = self.twins.of.get(id(tensor))
        return tensor if slot is None or slot.real is None else slot.real
