"""Data or tensor parallelism of pipes side by side, by torch's own modules: what `RankPipe.parallelize` does.

The pipes are the rows of a mesh; a column has the ranks with the same place in all pipes, a data-parallel group. The
user's function wraps or shards this rank's part of the model. What it returns decides what happens in a step:

                                   before                            after
    DistributedDataParallel        nothing                           gradients are averaged in each column
    fully_shard (FSDP2)            parameters are gathered           and each rank keeps those of its shard
    parallelize_module (DTensor)   stages get their local tensors    nothing: gradients are right where they are
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fxpipe.codegen.package.load_package import tensors_of
from fxpipe.engines.ranks.mesh_sync import MeshSync
from fxpipe.engines.ranks.rank_engine import RankScheduler
from fxpipe.engines.ranks.rank_group import World
from fxpipe.engines.ranks.weight_exchange import WholeLoans
from fxpipe.errors import FxpipeError, PlanError
from fxpipe.runtime import Stage
from fxpipe.runtime.autograd.gradient_aliases import Pair, alias, commit_gradients
from fxpipe.runtime.dtensor_stage import Forward, Layout, compute_sharded

from .process_group import join
from .rank_consistency import agree, on_each
from .stage_module import Graded, Part, add_through

DDP, FSDP, TENSOR, NOTHING = "DistributedDataParallel", "fully_shard", "parallelize_module", "nothing"
Function = Callable[[nn.Module, Any], nn.Module]
WHAT = "return DistributedDataParallel(part, ...), fully_shard(part, ...) or parallelize_module(part, ...)"


class Parallel:
    """The parallel form of this rank's part of the model.

    - `replicated`: whether stages have replicas; `placed`: whether a strategy, or a plan, cuts ops over ranks.
    - `module`: the module that backward of a step goes through.
    - `beside`: the ranks in the same column of the mesh.
    - `reduces`: whether there are collectives after a step; `gathers`: before or in it.
    - `splits`: whether stages compute with parts of tensors, by DTensors.
    - `averaged`: the parameters whose gradients DistributedDataParallel averages.
    - `cut`: the paths of the tensors of which each rank uses only a part; `shared`: of these, those that replicas of a
      stage share out, so that each saves its part.
    - `owners`: during a step, the parameter and layout for each tensor that a stage holds, by the tensor's `id`.
    - `lent`: during a step, the tensors of which this rank has a part and that stages borrow, whole.
    """

    def __init__(self, part: Part, world: World, replicated: bool, placed: bool) -> None:
        self.part, self.world, self.replicated, self.placed = part, world, replicated, placed
        self.module: nn.Module = part
        self.beside = MeshSync(())
        self.reduces = self.gathers = self.splits = False
        self.averaged: tuple[nn.Parameter, ...] = ()
        self.cut: frozenset[str] = frozenset()
        self.shared: Mapping[str, Any] = {}
        self.owners: dict[int, tuple[Tensor, Layout | None]] = {}
        self.lent = WholeLoans({})

    def apply(self, mesh: Any, function: Function) -> nn.Module:
        """Call the user's function with the part and the mesh; returns its result. Raises FxpipeError if the result is
        of no known kind, or the part cannot be made parallel."""
        column = join(group_of(mesh), self.world.device, self.world.timeout)
        tensors = self.tensors()
        agree(column, "\n".join(f"{path}  {list(x.shape)} {x.dtype}" for path, x in tensors.items()))
        if any(x.is_meta for x in tensors.values()):
            raise FxpipeError("tensors of the part are on the meta device: call pipe.materialize() first")
        if self.reduces:
            raise FxpipeError("the part is parallel over its data already: call parallelize for that last, and once")
        made, kind, kinds = self._made_everywhere(column, mesh, function)
        if kind == NOTHING and TENSOR not in kinds and any(p.requires_grad for p in made.parameters()):
            raise FxpipeError(f"nothing was made of the part: {WHAT}")
        if kind == DDP:
            self.module, self.reduces = made, True
            self.averaged = tuple(p for p in made.parameters() if p.requires_grad)
        elif kind == FSDP:
            self._begin_fsdp({path: x.dtype for path, x in tensors.items()})
        elif TENSOR in kinds:
            self.gathers = self.splits = True
            distribute_module(made, mesh)  # optimizers want all parameters to be DTensors, or none
            tie_again(made, tensors)
            now = self.tensors()
            self.cut = frozenset(path for path, x in now.items() if isinstance(x, DTensor) and Layout.of(x).cut)
        self.beside = MeshSync((*self.beside.worlds, column))
        return made

    def _made_everywhere(self, column: World, mesh: Any, function: Function) -> tuple[nn.Module, str, list[str]]:
        """The function's result on this rank, its kind, and the kinds of all ranks of the row. Raises the function's
        error on the ranks where it fails, and RankError on all others of the mesh."""
        found: list[nn.Module] = []

        def make() -> str:
            found.append(self._made(mesh, function))
            return self._kind(found[0])

        def collect(value: Any) -> list[Any]:
            return [one for row in column.all_gather_object(self.world.all_gather_object(value)) for one in row]

        count = len(self.world.labels)
        kinds = on_each(collect, make)[column.rank * count :][:count]  # a plan may have nothing for some ranks
        return found[0], kinds[self.world.rank], kinds

    def _made(self, mesh: Any, function: Function) -> nn.Module:
        """The function's result for the part; an empty part is returned as it is."""
        if not list(self.part.parameters()):
            return self.part
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Parallelize plan key")  # the key is for a stage on another rank
            return function(self.part, mesh)

    def _kind(self, made: nn.Module) -> str:
        """The kind of the function's result: DDP, FSDP, TENSOR or NOTHING. Raises FxpipeError if it is another."""
        if isinstance(made, DistributedDataParallel) and made.module is self.part:
            if self.cut:
                raise FxpipeError("DistributedDataParallel does not know DTensors: use fully_shard over the data")
            return DDP
        if self.placed:
            raise FxpipeError(
                "the plan or strategy of this pipe cuts ops over ranks: return DistributedDataParallel(part, ...)"
            )
        root = made is self.part and isinstance(made, FSDPModule)
        if not root and (made is not self.part or self._sharded()):
            raise FxpipeError(f"what was made of the part is a {type(made).__name__}: {WHAT}")
        if not any(isinstance(p, DTensor) for p in made.parameters()):
            return FSDP if root else NOTHING
        if self.replicated:
            raise FxpipeError(
                "stages have replicas, which copy each other's whole tensors: leave out replicas, and give the mesh "
                "more rows, or use DistributedDataParallel"
            )
        return FSDP if root else TENSOR

    def _begin_fsdp(self, types: Mapping[str, torch.dtype]) -> None:
        """Gather all parameters once. Raises FxpipeError if a gathered parameter has another dtype than before: the
        stages are not made for that."""
        self.reduces = self.gathers = True
        with torch.no_grad():
            self.part()  # FSDP2 learns that this is the root
        for module in self._sharded():
            module.unshard()
        odd = next(((path, x.dtype) for path, x in self.tensors().items() if x.dtype != types[path]), None)
        for module in self._sharded():
            module.reshard()
        if odd is not None:
            raise FxpipeError(
                f"{odd[0]} is gathered as {odd[1]}, and the stages are made for {types[odd[0]]}: leave param_dtype out "
                "of the MixedPrecisionPolicy, and call pipe.step under torch.autocast"
            )

    def _sharded(self) -> list[FSDPModule]:
        return [module for module in self.part.modules() if isinstance(module, FSDPModule)]

    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers as they are now, by the model's paths."""
        return tensors_of(self.part)

    def check(self, scheduler: RankScheduler, others: Mapping[str, Tensor]) -> None:
        """Raise FxpipeError if the stages would not compute the right gradients in this form. `others`: tensors that
        are not the model's, by path."""
        strange = next((path for path, tensor in others.items() if tensor.requires_grad), None)
        if strange is not None and self.reduces:
            raise FxpipeError(
                f"nobody would average the gradient of {strange}, which is not the model's: make the loss function a "
                "part of the model"
            )
        known = {id(parameter) for parameter in self.averaged}
        for path, tensor in self.tensors().items() if self.averaged else ():
            if tensor.requires_grad and id(tensor) not in known:
                raise FxpipeError(
                    f"{path} was frozen when DistributedDataParallel was made, which would not average its gradient: "
                    "unfreeze it before parallelize(), or compile the model again"
                )
        if not self.cut:
            return
        if scheduler.random:
            raise FxpipeError(
                "the model draws random numbers, which would not be those of the plain model where ranks have parts of "
                "a tensor: set the probability of its dropouts to 0, or leave out tensor parallelism"
            )
        if any(stage.compiled for stage in scheduler.stages):
            raise FxpipeError("compile_stages is for stages whose tensors are whole; leave it out")
        if any(stage.graded is not None for stage in scheduler.stages):
            raise FxpipeError(
                "the backward of the stages is code for whole tensors: write backward='autograd', or call parallelize "
                "before the first step"
            )

    # A step -----------------------------------------------------------------------------------------------------------

    def call(self, trains: bool) -> AbstractContextManager[None]:
        """A context for a call."""
        return self.beside.call(self.gathers + trains)

    @contextmanager
    def held(self, scheduler: RankScheduler, error: BaseException | None) -> Iterator[BaseException | None]:
        """A context in which the stages of this rank hold the tensors that they compute with. Yields the error so far:
        this rank's, or, if the column has collectives, another row's."""
        swapped: list[tuple[dict[str, Any], str, Tensor]] = []
        try:
            if self.gathers:
                error = self.beside.agree(error)
            if error is None:
                error = self._gather()
            if error is None:
                swapped = self._put(scheduler)
                now, lent = self.tensors(), self._lent(scheduler)
                self.lent = WholeLoans({p: x.detach().requires_grad_(now[p].requires_grad) for p, x in lent.items()})
            yield error
        finally:
            self.owners, self.lent = {}, WholeLoans({})
            for held, name, before in swapped:
                held[name] = before
            for module in self._sharded():
                module.reshard()

    def _gather(self) -> Exception | None:
        """Gather the parameters; returns the error, if any."""
        try:
            for module in self._sharded():
                module.unshard()
        except RuntimeError as error:
            return error
        return None

    def _put(self, scheduler: RankScheduler) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Put the current tensors into the stages; returns for each replaced one its dict, key and old tensor."""
        now, swapped = self.tensors(), []
        parts = {id(x): part_of(x) for x in now.values()}
        self.owners = {id(part): (x, layout) for x in now.values() for part, layout in [parts[id(x)]]}
        for stage in scheduler.stages:
            for path in stage.states:
                if path in now:
                    held, name = stage.slot(path)
                    swapped.append((held, name, held[name]))
                    held[name] = parts[id(now[path])][0]
            mine = {path: layout for path in stage.states if path in self.cut and (layout := parts[id(now[path])][1])}
            if mine and "forward" not in vars(stage):
                object.__setattr__(stage, "forward", self.forward_of(stage, mine))
        return swapped

    def _lent(self, scheduler: RankScheduler) -> dict[str, Tensor]:
        """The tensors of which this rank has a part and that stages borrow, whole. All rows make this call."""
        now: dict[str, Any] = self.tensors()
        with torch.no_grad():
            return {path: now[path].full_tensor() for path in lent_paths(scheduler, self.cut)}

    def _returned(self, gradients: Mapping[str, Tensor | None]) -> Iterator[Graded]:
        """The parameters that stages have borrowed, each with this rank's part of its gradient. `gradients`: those of
        the whole parameters, by path."""
        now: dict[str, Any] = self.tensors()
        for path, grad in gradients.items():
            if grad is not None:
                mesh, placements = now[path].device_mesh, now[path].placements
                yield now[path], distribute_tensor(grad, mesh, placements, src_data_rank=None)

    def forward_of(self, stage: Stage, layouts: Mapping[str, Layout]) -> Forward:
        """A forward for a stage that holds parts of the parameters at the paths of `layouts`."""
        return compute_sharded(stage, layouts)

    def add(self, pairs: Sequence[Pair]) -> None:
        """Add the gradients of a step to those of the parameters, once the step is done in all rows."""
        ours = [pair for pair in pairs if id(pair[0]) in self.owners]
        others = [pair for pair in pairs if id(pair[0]) not in self.owners]
        error = self.beside.agree(None)
        if error is not None:
            raise error
        commit_gradients(others)
        graded = self._graded(ours)
        if self.reduces:
            add_through(self.module, self.part, graded, self.averaged)
        else:
            commit_gradients([(parameter, holding(parameter, grad)) for parameter, grad in graded])

    def _graded(self, pairs: Sequence[Pair]) -> list[Graded]:
        """The parameters, each with the sum of the gradients of the tensors that stages held for it."""
        found: dict[int, Graded] = {}
        for held, stand_in in pairs:
            if stand_in.grad is not None:
                parameter, layout = self.owners[id(held)]
                grad, stand_in.grad = stand_in.grad, None
                grad = grad if layout is None else layout.whole(grad)
                known = found.get(id(parameter))
                found[id(parameter)] = parameter, grad if known is None else known[1] + grad
        for parameter, grad in self._returned(self.lent.gradients()):
            known = found.get(id(parameter))
            found[id(parameter)] = parameter, grad if known is None else known[1] + grad
        return list(found.values())


def lent_paths(scheduler: RankScheduler, cut: Collection[str]) -> list[str]:
    """The paths in `cut` of the tensors that stages of this rank lend, sorted."""
    program = scheduler.program
    return sorted({loan.path for loan in scheduler.table.lent if program.here(loan.home) and loan.path in cut})


def tie_again(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Restore tied weights: keys that shared a tensor in `before` share one again, the cut one if there is one. Raises
    FxpipeError if several are cut in different ways."""
    now, chosen = tensors_of(module), dict[int, DTensor]()
    for path, tensor in before.items():
        made: Any = now[path]
        known = chosen.setdefault(id(tensor), made)
        if Layout.of(known).cut and Layout.of(made).cut and known.placements != made.placements:
            raise FxpipeError(f"{path} is shared, and cut in one way here and in another elsewhere: cut it alike")
        if Layout.of(made).cut:
            chosen[id(tensor)] = made
    for path, tensor in before.items():
        parent, _, name = path.rpartition(".")
        scope = module.get_submodule(parent)
        held: Any = scope._parameters if name in scope._parameters else scope._buffers
        held[name] = chosen[id(tensor)]


def group_of(mesh: Any) -> Any:
    """The process group of a column. Raises PlanError if `mesh` is not a DeviceMesh of one dimension."""
    if not isinstance(mesh, torch.distributed.device_mesh.DeviceMesh) or mesh.ndim != 1:
        raise PlanError("name one dimension of a DeviceMesh, beside that of the pipe, as in mesh['dp']")
    return mesh.get_group()


def part_of(tensor: Tensor) -> tuple[Tensor, Layout | None]:
    """The tensor that a stage computes with, and the layout of the DTensor that it is a part of, or None."""
    if not isinstance(tensor, DTensor):
        return tensor, None
    return local(tensor).detach().requires_grad_(tensor.requires_grad), Layout.of(tensor)


def local(tensor: Tensor) -> Tensor:
    """The part of the tensor on this rank."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def holding(parameter: Tensor, grad: Tensor) -> Tensor:
    """An alias of the parameter with this gradient."""
    stand_in = alias(parameter)
    stand_in.grad = grad
    return stand_in


def fill(tensor: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor; into a DTensor, this rank's part of the value."""
    with torch.no_grad():
        if isinstance(tensor, DTensor) and not isinstance(value, DTensor):
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(value)
