"""Stages for the schedules of torch.distributed.pipelining.

torch's stages are a chain: a value that stage 3 needs from stage 1 goes through stage 2, and only tensors can be sent.
That is the program as `cut` makes it, before portals and loans: every value is relayed, tied weights too, whose
gradients come back the same way. Numbers are sent as tensors of one element.

    stage 0        takes the model's own arguments        gives x, skip
    stage 1        takes x, skip                          gives y, skip       skip passes through
    stage 2        takes y, skip                          gives the outputs
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from fxpipe.codegen.package import package_files as package
from fxpipe.codegen.package.load_package import load_package, tensors_of
from fxpipe.errors import FxpipeError, PlanError
from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.opaque_call import opaques
from fxpipe.ir.graph.value_types import ScalarType, TensorType, dim_size
from fxpipe.ir.program.program import Program
from fxpipe.ir.program.program import Stage as StageOps
from fxpipe.passes import PASSES, Pass, lower
from fxpipe.pipe.drop_in_module import SHARED
from fxpipe.pipe.options.user_passes import checked
from fxpipe.runtime import Stage
from fxpipe.runtime.random import Draws, new_seed
from fxpipe.torch_internals.moved_tensors import move_to

from .build import Build

CHAIN = tuple(run for run in PASSES if run.__name__ not in ("portals", "tie_weights", "recompute"))
SCHEDULER = '"""The stages of this package are run by torch.distributed.pipelining."""\n\nScheduler = None\n'
NUMBERS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}


@dataclass(frozen=True)
class Link:
    """What one stage sends the next: the values, and the sizes that cannot be read from the shapes of these values."""

    values: tuple[str, ...]
    sizes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.values + self.sizes


class ChainStage(nn.Module):
    """A generated stage, with the model's own keys, that takes and returns tensors; the first one takes the model's
    arguments. `takes` and `gives` are the links before and after it."""

    stage: Stage
    device: torch.device
    graph: Graph
    plan: StageOps
    takes: Link | None
    gives: Link
    seen: dict[str, tuple[str, int]]
    last: bool
    made: Any

    def __init__(
        self, stage: Stage, program: Program, index: int, links: Sequence[Link], made: ModuleType, training: bool
    ) -> None:
        super().__init__()
        self.training = training
        takes = links[index] if index else None
        seen = {} if takes is None else shapes_seen(program, takes.values)
        own = {
            "stage": stage, "device": stage.device, "graph": program.graph, "plan": program.stages[index],
            "takes": takes, "gives": links[index + 1], "seen": seen, "last": index == len(program.stages) - 1,
            "made": made, **{name: vars(stage)[name] for name in SHARED},
        }  # fmt: skip
        for name, value in own.items():
            object.__setattr__(self, name, value)  # not nn.Module's: the model may have submodules of these names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keywords are the model's arguments: torch passes them to all stages, but only the first one uses them."""
        known = self._first(args, kwargs) if self.takes is None else self._received(args)
        draw = [Draws(new_seed(), 0, self.device)] if any(op.random for op in self.plan.ops) else []
        found = self.stage(*(known[name] for name in self.plan.takes), *draw)
        known |= zip(self.plan.gives, found if len(self.plan.gives) > 1 else (found,), strict=False)
        given = tuple(sendable(known[name], self.device) for name in self.gives.names)
        return given[0] if self.last and len(given) == 1 else given

    def _first(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        inputs = [item.name for item in self.graph.inputs if item.path]
        known: dict[str, Any] = dict(zip(inputs, self.made.inputs(*args, **kwargs), strict=True))
        return known | {size.name: int(known[size.input].shape[size.dim]) for size in self.graph.sizes}

    def _received(self, args: tuple[Any, ...]) -> dict[str, Any]:
        assert self.takes is not None
        known = dict(zip(self.takes.names, args, strict=True))
        types = self.graph.types
        for name in self.takes.names:
            if isinstance(types.get(name), ScalarType):
                known[name] = known[name].item()
        return known | {size: int(known[name].shape[dim]) for size, (name, dim) in self.seen.items()}


def torch_stages(
    model: nn.Module,
    made: Build,
    folder: Path,
    stages: Collection[int],
    device: str | torch.device | None = None,
    group: Any = None,
    passes: Sequence[Pass] = (),
) -> list[PipelineStage]:
    """The given stages as PipelineStages of torch.distributed.pipelining, generated in `folder`; see
    `Pipe.torch_stages`."""
    n, device = len(made.plan.stages), torch.device("cpu" if device is None else device)
    found = []
    chain = chain_stages(model, made, folder, stages, device, passes)
    for index, (chained, before, after) in zip(stages, chain, strict=True):
        found.append(PipelineStage(chained, index, n, device, input_args=before, output_args=after, group=group))
    return found


def chain_stages(
    model: nn.Module,
    made: Build,
    folder: Path,
    stages: Collection[int],
    device: torch.device,
    passes: Sequence[Pass] = (),
) -> Iterator[tuple[ChainStage, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """The given stages, each with examples of the tensors that it takes and gives for one micro-batch. `passes`: the
    user's."""
    refuse(made.graph, made.plan.deferred_batch_norm)
    program = lower(made.graph, made.plan, passes=(*CHAIN, *map(checked, passes)))
    links = links_of(program)
    package.write(package.package(program, made.plan, SCHEDULER), folder)
    loaded = load_package(folder)
    tensors, held = tensors_of(model), package.constants(program)
    calls = {opaque.called: opaque for opaque in opaques(made.graph)}
    for index in stages:
        if not 0 <= index < len(program.stages):
            raise PlanError(f"there is no stage {index}: the pipe has stages 0 to {len(program.stages) - 1}")
        kind = loaded.STAGES[index]
        if empty := [path for path in kind.states if tensors[path].is_meta]:
            raise FxpipeError(
                f"{empty[0]}, of stage {index}, is on the meta device; call pipe.materialize(stages=[{index}]) first"
            )
        for path in kind.states:
            move_to(tensors[path], device)
        chained = ChainStage(kind(tensors, held, device, calls), program, index, links, loaded, model.training)
        before, after = (examples(program, made.sizes, link) for link in (links[index], links[index + 1]))
        yield chained, before, after


def refuse(graph: Graph, deferred: bool) -> None:
    """Raise FxpipeError if the graph cannot run as a chain: a loss, totals, deferred norms, or a size as output."""
    if graph.loss is not None:
        raise FxpipeError(
            "this pipe was compiled for step(), in which the loss is part of the last stage; torch's schedules compute "
            "it themselves: compile with example_inputs=, and make the stages before the first step"
        )
    if graph.totals is not None or graph.epilogue is not None:
        raise FxpipeError(
            "the model computes a loss that depends on the whole batch, of which torch's micro-batches know nothing; "
            "compile a model that returns what the loss is computed from"
        )
    if deferred:
        raise FxpipeError("deferred_batch_norm needs to know the whole batch, and torch's schedules do not tell it")
    sizes = {size.name for size in graph.sizes}
    if returned := [output.value for output in graph.outputs if output.value in sizes]:
        raise FxpipeError(f"the model returns {returned[0]}, a size of its input, and torch's stages return tensors")


def links_of(program: Program) -> list[Link]:
    """The link into each stage, and then the link out of the last one."""
    n, names = len(program.stages), {size.name for size in program.graph.sizes}
    inputs = tuple(item.name for item in program.graph.inputs if item.path)
    values = [inputs, *(stage.gives for stage in program.stages[:-1])]
    values.append(tuple(output.value for output in program.graph.outputs))
    hidden: list[set[str]] = [
        {*stage.takes} & names - shapes_seen(program, values[j]).keys() for j, stage in enumerate(program.stages)
    ]
    sizes = [tuple(sorted(set().union(*hidden[j:]))) if 0 < j < n else () for j in range(n + 1)]
    return [Link(*pair) for pair in zip(values, sizes, strict=True)]


def shapes_seen(program: Program, values: Sequence[str]) -> dict[str, tuple[str, int]]:
    """The sizes that can be read from the shape of a value, with the value and the dimension."""
    sizes = {size.name for size in program.graph.sizes}
    return {
        dim: (name, at)
        for name in values
        if isinstance(kind := program.types[name], TensorType)
        for at, dim in enumerate(kind.shape)
        if isinstance(dim, str) and dim in sizes
    }


def sendable(value: Any, device: torch.device) -> Tensor:
    """A tensor that torch's stages can send: contiguous, and not a leaf of autograd that needs a gradient."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=NUMBERS[type(value).__name__], device=device)
    dense: Tensor = value.contiguous()
    return dense.view_as(dense) if dense.is_leaf and dense.requires_grad else dense


def examples(program: Program, sizes: Mapping[str, int], link: Link) -> tuple[Tensor, ...]:
    """Tensors on the meta device with the types and shapes of a link's values for one micro-batch."""

    def example(kind: Any) -> Tensor:
        if isinstance(kind, ScalarType):
            return torch.empty((), dtype=NUMBERS[kind.kind], device="meta")
        shape = [dim_size(dim, sizes) for dim in kind.shape]
        return torch.empty(
            shape, dtype=getattr(torch, DTYPES[kind.dtype].torch), device="meta", requires_grad=kind.grad
        )

    return tuple(example(program.types[name]) for name in link.names)
