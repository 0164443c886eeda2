"""What is on this rank of a model that is spread over several, and what ranks do together.

Each rank has the model's own module with all of its keys, and the values of its own stages: what looks at parameters,
buffers or the state sees those, and what all ranks see together is the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from .codegen.load import tensors_of
from .engines.world import Lost, World
from .errors import FxpipeError, RankError
from .given import Given
from .parallel import release
from .rank_calls import CALL, Call, Header, RankCalls, Refuse
from .shell import Shell


class RankShell(Shell):
    """A pipe over the ranks of `world`, as one of them sees it."""

    world: World
    _calls: RankCalls

    def on_ranks(self, wanted: Callable[[Sequence[str]], bool]) -> dict[str, Tensor]:
        """The parameters and buffers of the stages that are on such devices, by path. The leader has those that no
        stage uses."""
        raise NotImplementedError

    def held_tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that this rank keeps and trains, by path: those of its stages, on the leader also
        those that no stage uses. A stage with replicas is on each of their ranks, with the same values."""
        return self.on_ranks(lambda crew: self.world.label in crew)

    def own_tensors(self) -> dict[str, Tensor]:
        """As `held_tensors`, but each is on one rank alone, that of the first replica."""
        return self.on_ranks(lambda crew: self.world.label == crew[0])

    def keys_here(self) -> Collection[str]:
        """The keys of `held_tensors`."""
        return self.held_tensors().keys()

    # Calls ------------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward_only`. Raises FxpipeError where gradients are wanted."""
        if torch.is_grad_enabled():
            raise FxpipeError(
                "autograd does not reach from one process to another: call pipe.step(...) to train, and "
                "pipe.forward_only(...) to evaluate"
            )
        return self.forward_only(*args, **kwargs)

    def _call(self, call: Call, given: Given, refuse: Refuse, header: Header = CALL) -> Any:
        """What a call returns that all ranks make together; see `RankCalls`."""
        with self.together():
            return self._calls.make(call, given, refuse, header)

    @contextmanager
    def together(self) -> Iterator[None]:
        """In this context is what all ranks do at once. Raises RankError if one is lost, now or before."""
        with self._lock:
            if self.world.lost is not None:
                raise RankError(f"{self.world.lost}; start all ranks again")
            try:
                yield
            except Lost as lost:
                raise RankError(str(lost)) from None

    @property
    def leads(self) -> bool:
        """Whether this is the leader, rank 0."""
        return bool(self.world.leads)

    def collect(self, value: Any) -> list[Any]:
        """What the ranks pass here, all of them together, in their order. Raises RankError if one is lost."""
        with self.together():
            found: list[Any] = self.world.collect(value)
            return found

    @property
    def place(self) -> int:
        """The number of this rank among all that train the model: what it passes to `collect_all` comes there."""
        return self.world.rank

    # The model --------------------------------------------------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Those of the stages on this rank, with the model's own keys."""
        return self._only_own(super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Those of the stages on this rank, with the model's own keys."""
        return self._only_own(super().named_buffers(*args, **kwargs))

    def _only_own(self, pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        tensors = tensors_of(self.model)
        own = {id(tensors[path]) for path in self.held_tensors()}
        return iter([pair for pair in pairs if id(pair[1]) in own])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What of the model's belongs to this rank, with the model's own keys; all ranks together have all of it, and
        nothing twice: what replicas hold belongs to the first of them."""
        found, own = super().state_dict(*args, **kwargs), self.own_tensors()
        elsewhere = tensors_of(self.model).keys() - own.keys()
        prefix = kwargs.get("prefix", "")
        for path in elsewhere:
            found.pop(prefix + path, None)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the model: all of it, or what this rank holds. What belongs elsewhere is left alone. All replicas of a
        stage load the same, as from the `state_dict()` of the first one."""
        own = self.held_tensors()
        elsewhere = tensors_of(self.model).keys() - own.keys()
        kept = {key: value for key, value in state_dict.items() if key not in elsewhere}
        with self._lock:
            found = self.model.load_state_dict(kept, strict=False, assign=assign)
        missing = [key for key in found.missing_keys if key not in elsewhere]
        if strict and (missing or found.unexpected_keys):
            raise RuntimeError(
                f"rank {self.world.rank} cannot load this state_dict: missing {missing}, unexpected "
                f"{found.unexpected_keys}"
            )
        return type(found)(missing, found.unexpected_keys)

    def drop_others(self) -> None:
        """Free the memory of the parameters and buffers that belong to other ranks. They keep their shapes, for
        captures to come; nobody may look at their values. Raises FxpipeError before the first call."""
        self.keys_here()  # decided?
        release(tensors_of(self.model).values(), self.held_tensors().values())

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise FxpipeError("a pipe over ranks is not copied: copy pipe.model and compile that")

    def __reduce__(self) -> NoReturn:
        raise FxpipeError("a pipe over ranks is not pickled: save pipe.state_dict() on each rank")


def scale_of(scaler: torch.amp.GradScaler | None, device: torch.device) -> float | None:
    """What gradients are multiplied with. Raises FxpipeError for a scaler that looks at one rank alone."""
    if scaler is None:
        return None
    if type(scaler) is torch.amp.GradScaler:
        raise FxpipeError(
            "this GradScaler sees the infinities of one rank alone, so ranks would skip other steps; use "
            "fxpipe.GradScaler(pipe, ...)"
        )
    return float(scaler.scale(torch.ones((), device=device)))
