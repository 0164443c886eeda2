"""Plans with ZeRO-3 over ranks: each replica of a stage has some rows of each of its parameters, as a DTensor.

    between steps   weight    rows 0-3 on replica 0, rows 4-7 on replica 1, and so its gradient and optimizer state
    in a step       ops of the stage gather weight, and scatter its gradient: `runtime/autograd/gathered_parameters.py`
    in evaluation   the first replica, which runs alone, has all parameters of its stages during the call

Parameters that cannot be used in part stay whole on each replica, and their gradients are added up at the end of a
step, as without ZeRO-3: numbers, those that several stages use or that forward writes, and those of submodules that
are called whole. They are replicated DTensors, as optimizers want all parameters to be DTensors, or none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxpipe.codegen.package.load_package import tensors_of
from fxpipe.engines.ranks.failure_attribution import Lost
from fxpipe.engines.ranks.rank_engine import RankScheduler
from fxpipe.engines.ranks.rank_group import World
from fxpipe.engines.ranks.replicas.replica_reduce import broadcast_values
from fxpipe.engines.ranks.replicas.shard_exchange import ShardExchange
from fxpipe.errors import FxpipeError, RankError
from fxpipe.ir.graph.module_parts import is_used
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.program.program import Program
from fxpipe.runtime import Stage
from fxpipe.runtime.autograd.gathered_parameters import Gathered, Sharded, Shards, gathering_forward
from fxpipe.runtime.dtensor_stage import Forward, Layout

from .parallelize import Parallel, lent_paths, local
from .process_group import replica_process_group
from .released_tensors import release
from .stage_module import Graded, Part


class ReplicaShards(Parallel):
    """The parameters of this rank's stages, of which it has the part of one replica.

    - `ranks`: the replicas of its stages.
    - `shared`: how each parameter is shared out, by path.
    - `gathered`: the bytes that are gathered, now and at most.
    """

    def __init__(self, part: Part, world: World, ranks: Sequence[int]) -> None:
        super().__init__(part, world, replicated=True, placed=False)
        self.ranks = tuple(ranks)
        self.exchange = ShardExchange(world, ranks)
        self.shared: dict[str, Shards] = {}
        self.gathered = Gathered()
        self._whole: dict[int, Tensor] = {}  # during an evaluation, by number

    def shard(self, model: nn.Module, whole: Collection[str]) -> None:
        """Keep this replica's part of each parameter, with the values of the first replica, and free the memory of the
        model's own. Those at the paths of `whole` stay whole. All replicas call this. Raises Lost."""
        mesh = DeviceMesh.from_group(replica_process_group(self.world, self.ranks), self.world.device.type)
        before = {path: x for path, x in self.tensors().items() if isinstance(x, nn.Parameter)}
        alone = {id(before[path]) for path in whole if path in before}
        unique = list({id(x): x for x in before.values()}.values())
        broadcast_values(self.world, self.ranks, unique)
        made: dict[int, nn.Parameter] = {}
        shared: dict[int, Shards] = {}
        for number, x in enumerate(unique):
            if x.dim() and id(x) not in alone:
                shared[id(x)] = Shards(number, dealt(len(x), len(self.ranks)))
            made[id(x)] = self._part(x, shared.get(id(x)), mesh)
        self.shared = {path: shared[id(x)] for path, x in before.items() if id(x) in shared}
        self.cut = frozenset(self.shared)
        for module in self.part.modules():
            module._parameters.update({name: made[id(x)] for name, x in module._parameters.items() if x is not None})
        release(before, self.tensors().values(), lambda path: f"cut over the ranks {', '.join(map(str, self.ranks))}")

    def _part(self, x: Tensor, shards: Shards | None, mesh: DeviceMesh) -> nn.Parameter:
        """This replica's part of a parameter, or all of it."""
        rows = x.detach()
        if shards is not None:
            first = sum(shards.rows[: self.exchange.place])
            rows = rows[first : first + shards.rows[self.exchange.place]].clone()
        placement = Replicate() if shards is None else Shard(0)
        found = DTensor.from_local(rows, mesh, (placement,), run_check=False, shape=x.shape, stride=x.stride())
        return nn.Parameter(found, x.requires_grad)

    def check(self, scheduler: RankScheduler, others: Mapping[str, Tensor]) -> None:
        """Let the scheduler exchange parameters. Raises FxpipeError if its stages cannot compute with parts of them."""
        if scheduler.steps.splits:
            raise FxpipeError(
                "with optimizer_sharding='zero3' each backward is one action: write a schedule without halves of "
                "backward, such as '1f1b'"
            )
        for stage in scheduler.stages:
            if found := self.cut.intersection(stage.mutates):
                raise FxpipeError(f"{min(found)} is written by forward in this call, and was sharded before")
        scheduler.shards = self.exchange if scheduler.replicated else None

    @contextmanager
    def held(self, scheduler: RankScheduler, error: BaseException | None) -> Iterator[BaseException | None]:
        """As of `Parallel`. In a call without replicas, all send their parts to the first one, and in one with replicas
        those of lent parameters to each other, whatever has failed. Raises RankError if one of them is lost."""
        now, paths = self.tensors(), lent_paths(scheduler, self.cut) if scheduler.replicated else [*self.shared]
        ones = {self.shared[path].number: self._one(path, now) for path in paths}
        try:
            found = self.exchange.give(list(ones.values()), scheduler.replicated)
        except Lost as lost:
            raise RankError(str(lost)) from None
        self._whole = dict(zip(ones, found, strict=True)) if found else {}
        try:
            with super().held(scheduler, error) as error:
                yield error
        finally:
            self._whole = {}

    def _one(self, path: str, now: Mapping[str, Tensor]) -> Sharded:
        return Sharded(self.shared[path], local(now[path]))

    def _lent(self, scheduler: RankScheduler) -> dict[str, Tensor]:
        if not scheduler.replicated:
            return {}  # stages have whole parameters
        return {path: self._whole[self.shared[path].number] for path in lent_paths(scheduler, self.cut)}

    def _returned(self, gradients: Mapping[str, Tensor | None]) -> Iterator[Graded]:
        now: dict[str, Any] = self.tensors()
        try:
            for path, grad in gradients.items():
                rows = self.exchange.take(self._one(path, now), grad)
                yield now[path], Layout.of(now[path]).whole(rows)
        except Lost as lost:
            raise RankError(str(lost)) from None

    def _put(self, scheduler: RankScheduler) -> list[tuple[dict[str, Any], str, Tensor]]:
        if scheduler.replicated:
            return super()._put(scheduler)
        now, swapped = self.tensors(), []
        for stage in scheduler.stages:
            for path in stage.states:
                if path in now:
                    held, name = stage.slot(path)
                    swapped.append((held, name, held[name]))
                    held[name] = self._whole[self.shared[path].number] if path in self.shared else local(now[path])
        return swapped

    def forward_of(self, stage: Stage, layouts: Mapping[str, Layout]) -> Forward:
        return gathering_forward(stage, {path: self.shared[path] for path in layouts}, self.exchange, self.gathered)


def dealt(rows: int, ranks: int) -> tuple[int, ...]:
    """How many of the rows each rank has, as DTensor shards them.

    >>> dealt(10, 4), dealt(2, 3)
    ((3, 3, 3, 1), (1, 1, 0))
    """
    each = -(-rows // ranks)
    return tuple(max(0, min(each, rows - k * each)) for k in range(ranks))


def with_shards(program: Program, cut: Collection[str]) -> Program:
    """The program, in which replicas have parts of the parameters at these paths: nothing is left to add up for them at
    the end of a step."""
    names = [name for stage in program.stages if stage.replicas for name in stage.states]
    return replace(program, sharded=frozenset(name for name in names if program.state(name).held in cut))


def stays_whole(program: Program) -> set[str]:
    """The paths of parameters that cannot be used in part: see above."""
    names = {loan.state for loan in program.loans} | {name for stage in program.stages for name in stage.mutates}
    return {program.state(name).held for name in names}


def kept_whole(program: Program) -> list[str]:
    """The paths of the submodules that are called whole, and of what methods use that are."""
    targets = (op.target for stage in program.stages for op in stage.ops if isinstance(op.target, Opaque))
    return [".".join(filter(None, (t.path, use))) for t in targets for use in ([""] if t.uses is None else t.uses)]


def faults(tensors: Mapping[str, Tensor]) -> list[str]:
    """Why parameters cannot be sharded by rows, one line each."""
    return [
        f"{path} is not contiguous in memory"
        for path, x in tensors.items()
        if isinstance(x, nn.Parameter) and x.layout == torch.strided and not x.is_contiguous()
    ]


def paths_in(model: nn.Module, module: str) -> list[str]:
    """The paths of the model's tensors that are in a submodule, or at that path; "" for the model."""
    return [path for path in tensors_of(model) if not module or is_used(path, {module})]
