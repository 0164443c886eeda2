"""The pipe in a world of torch.distributed: each rank has the stages of its own device, and all make the same calls.

    rank 0, the leader                        every other rank
    step(x, target=y)                         step(x, target=y), or what of it is used there, or step()
      │ front: which kind of call?              │ front, with stand-ins for what was left out
      ├─ header: number of the kind, seed ─────▶│
      │  a new one? all capture, compare graphs, and follow the leader's plan
      ▼                                         ▼
    its part of the step, the verdict         its part of the step, the verdict

How ranks make a call together is in `rank_calls`; here is which kind of call it is, and what is made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .agreement import agree, described, digest, on_each
from .calls import kind_of, match, micro_batch_sizes, with_states
from .capture import NO_TARGET
from .codegen.load import bound_stages, tensors_of
from .codegen.package import constants
from .codegen.wires import wires
from .engines.distributed import Ranked, on_rank
from .engines.verdict import describe
from .engines.world import LEADER, World
from .errors import FxpipeError, RankError
from .given import Given
from .ir.cluster import Cluster
from .ir.graph import Graph
from .ir.opaque import opaques
from .ir.plan import Plan
from .ir.profile import Profile
from .ir.schedule import Schedule
from .options import Options
from .pipe import Pipe
from .rank_calls import NEW, Header, RankCalls
from .rank_shell import RankShell, scale_of
from .shell import check_grad
from .street import Build, build


@dataclass(frozen=True)
class Decided:
    """What the leader has decided for a kind of call."""

    plan: Plan
    schedule: Schedule
    profile: Profile
    cluster: Cluster


class RankPipe(RankShell, Pipe):
    """What `fxpipe.compile` returns inside a torch.distributed world; see there, and `Pipe`."""

    def __init__(self, model: nn.Module, options: Options, world: World) -> None:
        super().__init__(model, options)
        self.__dict__.update(world=world, _calls=RankCalls(world), _known={}, _texts=[], _keys=[])

    # Running ----------------------------------------------------------------------------------------------------------

    def forward_only(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch, without gradients, on every rank."""

        def call(given: Given) -> Any:
            with torch.no_grad():
                return self._front(given[0], given[1], self._run)

        return self._call(call, (args, kwargs, NO_TARGET), self._refuse)

    def step(
        self,
        *args: Any,
        target: Any = NO_TARGET,
        loss_fn: Callable[..., Any] | None = None,
        outputs: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        timeline: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The loss of the batch, on every rank; gradients are added to those of this rank's parameters.

        Every rank makes this call. The leader, rank 0, passes all arguments; any other rank passes what its stages use,
        and may leave out the rest, or pass None for it: `pipe.step(target=y, loss_fn=loss_fn)` on the last one.
        `loss_fn` and `outputs` are the same on all. With `outputs`, every rank gets what the model returns. The scale
        is that of the leader's `scaler`. With the leader's `timeline`, `pipe.timeline` is that of all ranks, on every
        rank, by the leader's clock. An input that needs a gradient gets it on every rank that passes it.

        If anything fails on any rank, no gradient is added on any. Raises what failed here, and RankError for what
        failed elsewhere or if a rank is lost.
        """

        def call(given: Given) -> Any:
            check_grad()
            given_args, given_kwargs, given_target = given
            return self._stepper.step(given_args, given_kwargs, given_target, loss_fn, outputs, self._run)

        header = Header(scale=scale_of(scaler, self.world.device), timeline=timeline)
        loss, output = self._call(call, (args, kwargs, target), self._refuse, header)
        return (loss, output) if outputs else loss

    def rehearse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Only for pipes in one process."""
        raise FxpipeError("rehearse is for pipes in one process")

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture, plan and generate for this kind of call, on all ranks, without running it."""

        def call(given: Given) -> None:
            graph = self._front.capture(given[0], given[1])
            found: dict[str, Any] = {}
            match(graph.call, (given[0], given[1]), found)
            inputs = tuple(found[item.name] for item in graph.inputs if item.path)
            made = self._agree(graph, inputs)
            if not any(tensor.is_meta for tensor in self.held_tensors().values()):
                self._live(made)
            if self.world.leads and not self._calls.joined:
                self._calls.tell(self._number(graph))

        def refuse(header: Header, looks: Given, error: BaseException) -> None:
            if header.kind == NEW:  # the others run nothing else
                self._refuse(header, looks, error)

        self._call(call, (args, kwargs, NO_TARGET), refuse)

    # One call ---------------------------------------------------------------------------------------------------------

    def _refuse(self, header: Header, looks: Given, error: BaseException) -> None:
        """Take part in a call that has failed here, so that all ranks know."""
        if header.kind == NEW:
            agree(self.world, None, error)
            return
        live = self._live(self._builds[self._keys[header.kind]])
        graph = live.build.graph
        args, kwargs, target = looks
        named = kwargs if target is NO_TARGET else {**kwargs, "target": target, "loss_target": target}
        found: dict[str, Any] = {}
        match(graph.call, (args, named), found)
        inputs = [found.get(item.name, 0) for item in graph.inputs if item.path]
        scheduler: Any = live.scheduler
        scheduler.run(inputs, self.options.chunks, error=error)  # raises it

    def _run(self, graph: Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """This rank's part of a call of this kind."""
        made = self._agree(graph, inputs)
        new = self._calls.joined
        if new:
            on_each(self.world, lambda: self._live(made))
        scheduler: Ranked = self._live(made).scheduler  # type: ignore[assignment]
        if new:
            scheduler.share_values()
        found, timeline = self._calls.take(scheduler, inputs, self.options.chunks, self._number(graph))
        if timeline is not None:
            self.__dict__.update(_timeline=timeline, _timed=self.build)
        return found

    def _number(self, graph: Graph) -> int:
        return int(self._known[kind_of(graph, self.model.training, None)])

    def _agree(self, graph: Graph, inputs: Sequence[Any]) -> Build:
        """The build for a kind of call, the same on all ranks; a new one if it is new to all."""
        new = not self._knows(graph)
        if self.world.leads and new:
            self._calls.tell()
        elif not self.world.leads and new != (self._calls.heard().kind == NEW):
            raise RankError(
                f"this call is of a kind that is new on rank {self.world.rank if new else LEADER} alone: is the model "
                "in training on one rank and in evaluation on the other, or does the loss function differ?"
            )
        made = self._built(graph, inputs)
        if new:
            self._note(graph)
        return made

    def _knows(self, graph: Graph) -> bool:
        """Whether there is a build for this kind of call: ranks do not capture equally often, so one that was captured
        again is the same if its graph looks the same."""
        key = kind_of(graph, self.model.training, None)
        if key in self._known:
            return True
        graph = replace(graph, training=self.model.training)
        text = str(graph)
        if text not in self._texts:
            return False
        number = self._texts.index(text)
        self._builds[key] = replace(with_states(self._builds[self._keys[number]], graph), graph=graph)
        self._known[key] = number
        return True

    def _note(self, graph: Graph) -> None:
        """A kind of call that all ranks have agreed on."""
        key = kind_of(graph, self.model.training, None)
        self._known[key] = len(self._keys)
        self._texts.append(str(replace(graph, training=self.model.training)))
        self._keys.append(key)

    def _make(self, graph: Graph, inputs: Sequence[Any]) -> Build:
        """The street from a graph on: the leader decides, the others follow."""
        self._calls.joined = True
        agree(self.world, f"{described(self.options)}\n{graph}")
        if self.world.leads:
            error, decided = None, None
            try:
                made = super()._make(graph, inputs)
                decided = Decided(made.plan, made.schedule, made.profile, made.cluster)
            except Exception as failed:
                error = failed
            self.world.share((decided, describe(error)))
            if error is not None:
                raise error
        else:
            decided, failed_there = self.world.share()
            if decided is None:
                raise RankError(f"rank {LEADER}: {failed_there}")
            made = self._made_like(graph, inputs, decided)
        agree(self.world, f"{made.program}\n{made.schedule}\n{digest(made.files)}")
        return made

    def _made_like(self, graph: Graph, inputs: Sequence[Any], decided: Decided) -> Build:
        """The street, without decisions."""
        sizes = micro_batch_sizes(graph, inputs, self.options.chunks)
        devices = tuple(stage.device for stage in decided.plan.stages)
        options = replace(self.options, plan=decided.plan, schedule=decided.schedule, devices=devices)
        return build(graph, decided.profile, sizes, decided.cluster, options, None)

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """As in one process. All ranks call it, and the leader writes."""
        with self.together():
            on_each(self.world, lambda: super(RankPipe, self).save(folder, overwrite) if self.leads else None)

    def _bound(self, package: ModuleType, made: Build, others: Mapping[str, Tensor]) -> Any:
        calls = {opaque.path: opaque for opaque in opaques(made.graph)}
        held, here = constants(made.program, made.totals), {self.world.label: self.world.device}
        stages, whole = bound_stages(package, self.model, held, others, calls, here=here)
        return on_rank(package.Scheduler, stages, whole, self.world, wires(made.program, made.schedule))

    # The model --------------------------------------------------------------------------------------------------------

    def on_ranks(self, wanted: Callable[[Sequence[str]], bool]) -> dict[str, Tensor]:
        """All of the model's before the first call, which decides."""
        tensors = tensors_of(self.model)
        if self._home is None:
            return tensors
        stages, leader = self._home.plan.stages, (self.world.labels[LEADER],)
        crews = {tensor: stages[stage].devices for tensor, stage in self._homes(tensors).items()}
        return {path: tensor for path, tensor in tensors.items() if wanted(crews.get(id(tensor), leader))}

    def keys_here(self) -> Collection[str]:
        """The keys of `held_tensors`. Raises FxpipeError before the first call, which decides."""
        if self._home is None:
            raise FxpipeError("it is not decided yet which rank has which stage: pass example_inputs to fxpipe.compile")
        return super().keys_here()
