"""The tensors of this rank, of a model that is spread over several ranks.

Each rank has the model's own module with all its keys, but only the values of its own stages: it lets go of all others
(`released_tensors.py`). The parameters, buffers and state_dict of a pipe show only its own; all ranks together have the
whole model.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpipe.codegen.package.load_package import tensors_of
from fxpipe.engines.ranks.rendezvous import LEADER
from fxpipe.pipe.libraries.own_methods import own_attribute
from fxpipe.pipe.processes import Tensors
from fxpipe.torch_internals.gradient_norms import allow_norms_of, refuse_norms_of
from fxpipe.torch_internals.moved_tensors import move_to

from .parallelize import fill
from .ranks import Ranks
from .released_tensors import Released, release, restored, standing_in_for_released
from .torch_clipping import unless_partial

# Where earlier pipes have put the tensors of a model: the ranks of their group, and the owner of each tensor by path.
SPREAD: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], dict[str, str]]] = WeakKeyDictionary()

FindReplicaGroups = Callable[[Mapping[str, Tensor]], Mapping[int, Sequence[str]] | None]


class RankTensors(Tensors):
    """The model's tensors that this rank holds.

    `replica_groups` returns, by the `id` of each tensor, the devices of the stage that owns it, or None before the
    model is cut. The leader holds the tensors that no stage uses. `known`: the paths of those that the model had when
    it was spread, or None until then. Every rank holds tensors that have been added since, until a call decides which
    stage has them.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, replica_groups: FindReplicaGroups) -> None:
        super().__init__(model)
        self.ranks, self.replica_groups = ranks, replica_groups
        self.known: Collection[str] | None = None

    def held(self) -> dict[str, Tensor]:
        return self._on(lambda replica_group: self.ranks.world.label in replica_group) | self._added()

    def _added(self) -> dict[str, Tensor]:
        """The tensors that the model has got since it was spread, and that no call has used yet, by path."""
        if self.known is None:
            return {}
        tensors = tensors_of(self.model)
        homes = self.replica_groups(tensors) or {}
        return {path: x for path, x in tensors.items() if path not in self.known and id(x) not in homes}

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

    def attribute(self, pipe: Any, name: str) -> Any:
        return own_attribute(pipe, name, whole=self.ranks.gathered)

    def only_held(self, pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        tensors = tensors_of(self.model)
        held = {id(tensors[path]): now for path, now in self.held().items()}
        found = [(key, held[id(tensor)]) for key, tensor in pairs if id(tensor) in held]
        if len(self.ranks.world.labels) == 1:
            return iter(found)
        if not self.ranks.gathered:
            refuse_norms_of(tensor for _, tensor in found)  # after parallelize(), others than the model's
        return unless_partial(found)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        keep, own, prefix = kwargs.pop("keep_vars", False), self.own(), kwargs.get("prefix", "")
        found = self.model.state_dict(*args, keep_vars=True, **kwargs)  # others have no values to detach
        for path in tensors_of(self.model).keys() - own.keys():
            found.pop(prefix + path, None)
        found.update({prefix + path: x.detach() for path, x in self._now().items() if prefix + path in found})
        if not keep:
            found.update({key: x.detach() for key, x in found.items() if isinstance(x, Tensor)})
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        parts = {path: tensor for path, tensor in self._now().items() if isinstance(tensor, DTensor)}
        elsewhere = tensors_of(self.model).keys() - self.held().keys()
        kept = {key: value for key, value in state_dict.items() if key not in elsewhere and key not in parts}
        with ExitStack() as standing:  # a norm loads a number that an old state_dict does not have
            for module in self.model.modules():
                standing.enter_context(standing_in_for_released(module))
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

    def release_others(self) -> None:
        """Let go of the tensors that belong to other ranks, once it is decided which do, and this rank has values for
        its own, which move to its device: also those that the first call does not use here, as a replica's are in a
        call without backward. An optimizer's state is loaded to where its parameters are."""
        tensors, labels = tensors_of(self.model), self.ranks.world.labels
        groups, own = self.replica_groups(tensors), self.held()
        if groups is None or any(tensor.is_meta for tensor in own.values()):
            return
        self.known = self.known or frozenset(tensors)
        for path, tensor in own.items():
            if id(tensors[path]) in groups and not isinstance(tensor, DTensor):
                move_to(tensor, self.ranks.world.device)

        def where(path: str) -> str:
            ranks = [labels.index(label) for label in groups.get(id(tensors[path]), labels[LEADER : LEADER + 1])]
            return f"on rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"

        release({path: tensor for path, tensor in tensors.items() if path not in own}, own.values(), where)
        first = {path: groups.get(id(tensor), labels[LEADER : LEADER + 1])[0] for path, tensor in tensors.items()}
        SPREAD[self.model] = self._everywhere, first
        if len(labels) > 1:
            refuse_norms_of(own.values())

    @property
    def _everywhere(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self.ranks.world.group))

    def known_owners(self) -> dict[str, str]:
        """The owner of each tensor by path, if an earlier pipe of these ranks has spread the model; else nothing."""
        ranks, owners = SPREAD.get(self.model, ((), {}))
        return owners if ranks == self._everywhere else {}

    def gather(self, to: Collection[int]) -> None:
        """Put the values of all ranks into the model on the ranks `to`. All ranks call this. Raises Lost."""
        if self.ranks.gathered:
            self.release_others()  # so that each rank that is told a value listens for it
        world, added = self.ranks.world, self._added()
        tensors = {path: tensor for path, tensor in tensors_of(self.model).items() if path not in added}
        held, groups = self.held(), self.replica_groups(tensors) or {}
        leader = (world.labels[LEADER],)
        for tensor_id, path in {id(tensor): path for path, tensor in reversed(tensors.items())}.items():
            home = [world.labels.index(label) for label in groups.get(tensor_id, leader)]
            mine = held.get(path)
            whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
            if world.rank == home[0]:
                assert whole is not None
                others = [rank for rank in to if rank not in home]
                world.tell(*others, data=pickle.dumps(whole.detach().cpu()))
            if world.rank in to and isinstance(tensors[path], Released):
                value = pickle.loads(world.hear(home[0])) if whole is None else whole.detach().cpu()
                restored(tensors[path], value)
        self.ranks.gathered = True
        if world.rank in to:
            allow_norms_of(tensors.values())
        if len(to) == len(world.labels):
            SPREAD.pop(self.model, None)
