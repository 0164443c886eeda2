"""The tensors of this rank, of a model that is spread over several ranks.

Each rank has the model's own module with all its keys, but only the values of its own stages. The parameters, buffers
and state_dict of a pipe show only these; all ranks together have the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpipe.codegen.package.load_package import tensors_of
from fxpipe.engines.ranks.rendezvous import LEADER
from fxpipe.pipe.processes import Tensors

from .parallelize import fill, release
from .ranks import Ranks
from .torch_clipping import unless_clipped

FindReplicaGroups = Callable[[Mapping[str, Tensor]], Mapping[int, Sequence[str]] | None]


class RankTensors(Tensors):
    """The model's tensors that this rank holds.

    `replica_groups` returns, by the `id` of each tensor, the devices of the stage that owns it, or None before the
    model is cut. The leader holds the tensors that no stage uses.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, replica_groups: FindReplicaGroups) -> None:
        super().__init__(model)
        self.ranks, self.replica_groups = ranks, replica_groups

    def held(self) -> dict[str, Tensor]:
        return self._on(lambda replica_group: self.ranks.world.label in replica_group)

    def own(self) -> dict[str, Tensor]:
        shared = {} if self.ranks.parallel is None else self.ranks.parallel.shared
        mine = self._on(lambda replica_group: self.ranks.world.label == replica_group[0])
        return mine | {path: tensor for path, tensor in self.held().items() if path in shared}

    def _on(self, wanted: Callable[[Sequence[str]], bool]) -> dict[str, Tensor]:
        """The current tensors whose devices are `wanted`, by path; all tensors before the model is cut."""
        tensors, now = tensors_of(self.model), self._now()
        replica_groups, leader = self.replica_groups(tensors), (self.ranks.world.labels[LEADER],)
        return {
            path: now.get(path, tensor)
            for path, tensor in tensors.items()
            if replica_groups is None or wanted(replica_groups.get(id(tensor), leader))
        }

    def _now(self) -> dict[str, Tensor]:
        """The tensors that replace the model's own after `parallelize`, by path."""
        return {} if self.ranks.parallel is None else self.ranks.parallel.tensors()

    def only_held(self, pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        tensors = tensors_of(self.model)
        held = {id(tensors[path]): now for path, now in self.held().items()}
        found = [(key, held[id(tensor)]) for key, tensor in pairs if id(tensor) in held]
        return iter(found) if len(self.ranks.world.labels) == 1 else unless_clipped(found)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found, own, prefix = self.model.state_dict(*args, **kwargs), self.own(), kwargs.get("prefix", "")
        for path in tensors_of(self.model).keys() - own.keys():
            found.pop(prefix + path, None)
        found.update({prefix + path: x.detach() for path, x in self._now().items() if prefix + path in found})
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        parts = {path: tensor for path, tensor in self._now().items() if isinstance(tensor, DTensor)}
        elsewhere = tensors_of(self.model).keys() - self.held().keys()
        kept = {key: value for key, value in state_dict.items() if key not in elsewhere and key not in parts}
        found = self.model.load_state_dict(kept, strict=False, assign=assign and not parts)
        missing = [key for key in found.missing_keys if key not in elsewhere and key not in parts]
        missing += [key for key in parts if key not in state_dict]
        if strict and (missing or found.unexpected_keys):
            raise RuntimeError(
                f"rank {self.ranks.world.rank} cannot load this state_dict: missing {missing}, unexpected "
                f"{found.unexpected_keys}"
            )
        for key in parts.keys() & state_dict.keys():
            fill(parts[key], state_dict[key])
        return type(found)(missing, found.unexpected_keys)

    def drop_others(self) -> None:
        """Free the memory of tensors that belong to other ranks. They keep their shapes."""
        release(tensors_of(self.model).values(), self.held().values())
