"""A pipe as a row of a mesh: what `fxpipe.compile` returns inside a torch.distributed world.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "pp"))
    pipe = fxpipe.compile(model, chunks=8, group=mesh["pp"], example_inputs=batch)
    pipe.parallelize(mesh["dp"], lambda part, dp: fully_shard(part, mesh=dp))

Alone it is a `RankPipe` like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .codegen.load import tensors_of
from .engines.world import World
from .options import Options
from .parallel import Function, Parallel, fill, release
from .part import Part
from .ranks import RankPipe
from .street import Build


class RowPipe(RankPipe):
    """See `fxpipe.compile`, `RankPipe` and `Pipe`."""

    def __init__(self, model: nn.Module, options: Options, world: World) -> None:
        super().__init__(model, options, world)
        self.__dict__["_parallel"] = None

    def parallelize(self, mesh: Any, function: Function) -> nn.Module:
        """Train this pipe beside others like it, by torch's own data and tensor parallelism: `function(part, mesh)` is
        called once with this rank's part of the model, a module with the model's own submodules and names; what it
        makes of it is returned.

            pipe.parallelize(mesh["dp"], lambda part, dp: DistributedDataParallel(part, device_mesh=dp))
            pipe.parallelize(mesh["dp"], lambda part, dp: fully_shard(part, mesh=dp))            # or this
            pipe.parallelize(mesh["tp"], lambda part, tp: parallelize_module(part, tp, plan))    # or this; or it first

        Over data, each row of the mesh has a batch of its own, as large as those of the others. Gradients are averaged
        over the rows, once a step: where the loss is a mean, they are those of its mean over the whole batch. With
        tensor parallelism all rows have the same batch. What counts of a plan are the placements of parameters: values
        in between are cut as follows from these, and whole between stages.

        With FSDP2 and tensor parallelism, parameters are DTensors afterwards, and the model's own have no memory any
        more: make the optimizer of `pipe.parameters()` then. All ranks call it, after `example_inputs` or `prepare`.
        If anything fails in a row, no gradient is added in any. Collectives that have begun wait for a lost rank for as
        long as the mesh's process groups do.

        Raises FxpipeError before there is a plan, if the function returns something else, and where stages cannot
        compute with parts of tensors; RankError if the rows have not the same parts.
        """
        with self.together():
            made: Parallel | None = self._parallel
            if made is None:
                self.keys_here()  # decided?
                tensors = tensors_of(self.model)
                homes = self._homes(tensors)
                made = Parallel(
                    Part(self.model, {id(x) for x in super().held_tensors().values()} & homes.keys()), self.world
                )
            found = made.apply(mesh, function)
            tensors, now = tensors_of(self.model), made.tensors()
            release([tensors[path] for path in now if tensors[path] is not now[path]], now.values())
            self.__dict__["_parallel"] = made
            for live in self._lives.values():
                self._along(live.scheduler, {})
            return found

    def _along(self, scheduler: Any, others: Mapping[str, Tensor]) -> None:
        """Let a scheduler know what is beside."""
        if self._parallel is not None:
            self._parallel.check(scheduler, others)
            scheduler.parallel = self._parallel

    def _bound(self, package: ModuleType, made: Build, others: Mapping[str, Tensor]) -> Any:
        scheduler = super()._bound(package, made, others)
        known = {id(tensor) for tensor in tensors_of(self.model).values()}
        self._along(scheduler, {path: tensor for path, tensor in others.items() if id(tensor) not in known})
        return scheduler

    # Calls ------------------------------------------------------------------------------------------------------------

    def forward_only(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch, without gradients, on every rank; a call of all rows together where
        they have parts of the parameters."""
        with self._beside(trains=False):
            return super().forward_only(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with self._beside(trains=True):
            return super().step(*args, **kwargs)

    step.__doc__ = RankPipe.step.__doc__

    def _beside(self, trains: bool) -> AbstractContextManager[None]:
        """A context for a call that all rows make together."""
        if self._parallel is None:
            return nullcontext()
        found: AbstractContextManager[None] = self._parallel.call(trains)
        return found

    # All rows ---------------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this is the leader, rank 0, of the first row."""
        return super().leads and (self._parallel is None or self._parallel.beside.leads)

    def collect_all(self, value: Any) -> list[Any]:
        values = self.collect(value)
        if self._parallel is None:
            return values
        with self.together():
            found: list[Any] = self._parallel.beside.collect(values)
            return found

    @property
    def place(self) -> int:
        """The number of this rank among all that train the model."""
        own: int = super().place
        return own if self._parallel is None else int(self._parallel.beside.place(own, len(self.world.labels)))

    # The model --------------------------------------------------------------------------------------------------------

    def _now(self) -> dict[str, Tensor]:
        """What is in the place of the model's own tensors, by path."""
        return {} if self._parallel is None else self._parallel.tensors()

    def on_ranks(self, wanted: Callable[[Sequence[str]], bool]) -> dict[str, Tensor]:
        """The parameters and buffers that this rank keeps and trains, by path; DTensors where rows have parts."""
        now = self._now()
        return {path: now.get(path, tensor) for path, tensor in super().on_ranks(wanted).items()}

    def _only_own(self, pairs: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """As they are now."""
        tensors = tensors_of(self.model)
        now = {id(tensors[path]): tensor for path, tensor in self._now().items()}
        return iter([(key, now.get(id(tensor), tensor)) for key, tensor in super()._only_own(pairs)])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What of the model's is kept on this rank, with the model's own keys; all ranks together have all of it."""
        found, prefix = super().state_dict(*args, **kwargs), kwargs.get("prefix", "")
        found.update({prefix + path: x.detach() for path, x in self._now().items() if prefix + path in found})
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the model: all of it, or what belongs on this rank. What belongs elsewhere is left alone."""
        now = {path: tensor for path, tensor in self._now().items() if isinstance(tensor, DTensor)}
        if not now:
            return super().load_state_dict(state_dict, strict, assign)
        others = {path: value for path, value in state_dict.items() if path not in now}
        missing, unexpected = super().load_state_dict(others, strict=False)
        missing = [path for path in missing if path not in now] + [path for path in now if path not in state_dict]
        if strict and (missing or unexpected):
            raise RuntimeError(f"rank {self.world.rank} cannot load this state_dict: missing {missing}, {unexpected}")
        with self._lock:
            for path in now.keys() & state_dict.keys():
                fill(now[path], state_dict[path])
        return nn.modules.module._IncompatibleKeys(missing, unexpected)
