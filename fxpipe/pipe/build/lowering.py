"""Lowers the plans of a graph that a build tries. What they have in common is done once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fxpipe.capture import sample_dims
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.plan.plan import Plan, with_modes
from fxpipe.ir.program.kept_bytes import KeptBytes, kept_bytes
from fxpipe.ir.program.program import Program
from fxpipe.passes import lower
from fxpipe.passes.recompute import recomputing
from fxpipe.pipe.options.backward_options import is_coded
from fxpipe.pipe.options.compile_options import Options
from fxpipe.pipe.options.user_passes import passes_of


@dataclass(frozen=True)
class Lowered:
    """A plan and its program.

    - `trail`: the program after each pass that changed it, by the pass's name.
    - `kept`: what each stage keeps of a micro-batch, where its backward is code.
    """

    plan: Plan
    program: Program
    trail: Mapping[str, Program | Placed]
    kept: tuple[KeptBytes | None, ...]

    def recomputing(self, modes: Sequence[str]) -> Lowered:
        """The same with other modes, of `WHOLE_MODES`, for the stages that can recompute; the others are "never"."""
        can = [stage.checkpoint != "never" for stage in self.program.stages]
        modes = [mode if able else "never" for mode, able in zip(modes, can, strict=True)]
        trail = {name: recomputing(one, modes) if isinstance(one, Program) else one for name, one in self.trail.items()}
        return replace(self, plan=with_modes(self.plan, modes), program=recomputing(self.program, modes), trail=trail)


@dataclass(frozen=True)
class Lowering:
    """Makes the programs of plans.

    - `options`: those of any of the plans; in what matters here, they do not differ.
    - `sizes`: a number for each symbolic size of a micro-batch.
    - `owners`: the devices that own tensors of the model already, by path.
    """

    graph: Graph
    options: Options
    sizes: Mapping[str, int]
    owners: Mapping[str, str]
    _made: dict[Plan, Lowered] = field(default_factory=dict, init=False)
    _traces: dict[Any, Any] = field(default_factory=dict, init=False)

    @cached_property
    def samples(self) -> Mapping[str, int | None] | None:
        """As in `PassContext`."""
        return sample_dims(self.graph) if self.graph.loss is not None and any(self.options.replicas.values()) else None

    @property
    def is_coded(self) -> bool:
        """Whether generated code computes the gradients, in the stages where it can."""
        return is_coded(self.options) and self.graph.loss is not None

    def __call__(self, plan: Plan) -> Lowered:
        """The plan, lowered. Raises PlanError where the model cannot be cut as planned."""
        key = replace(plan, schedule="")  # programs are for any
        if key not in self._made:
            trail: dict[str, Program | Placed] = {}
            found = lower(
                self.graph, plan, trail.__setitem__, passes_of(self.options), self.samples, owners=self.owners,
                backward="code" if self.is_coded else "autograd", sizes=self.sizes, traces=self._traces,
            )  # fmt: skip
            self._made[key] = Lowered(plan, found, trail, kept_bytes(found, self.sizes, not self.options.ranks))
        return replace(self._made[key], plan=plan)
