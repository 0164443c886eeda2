"""The pipe in a world of torch.distributed: each rank has the stages of its own device, and all make the same calls.

    rank 0, the leader                        every other rank
    step(x, target=y)                         step(x, target=y), or what of it is used there, or step()
      │ front: which kind of call?              │
      ├─ header: number of the kind, seed ─────▶├ front, with stand-ins for what was left out
      │  a new one? all capture, compare graphs, and follow the leader's plan
      ▼                                         ▼
    its part of the step, the verdict         its part of the step, the verdict

Whatever a rank raises on the way, it takes part until the others know of it.
"""

from __future__ import annotations

import pickle
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
from .capture.nest import change
from .codegen.load import bound_stages, tensors_of
from .codegen.package import constants
from .codegen.wires import wires
from .engines.distributed import Ranked, on_rank
from .engines.timed_rank import take_step
from .engines.verdict import describe
from .engines.world import LEADER, World
from .errors import FxpipeError, RankError
from .given import Given, check_same, filled, glance, on_meta
from .ir.cluster import Cluster
from .ir.graph import Graph
from .ir.opaque import opaques
from .ir.plan import Plan
from .ir.profile import Profile
from .ir.schedule import Schedule
from .options import Options
from .pipe import Pipe
from .rank_shell import RankShell, scale_of
from .runtime.random import new_seed
from .shell import check_grad
from .street import Build, build

NEW = -1  # the number of a kind of call that nobody has seen yet


class Outdated(Exception):
    """The leader's arguments look different now. Never leaves this file."""


@dataclass(frozen=True)
class Header:
    """What the leader says before each call. `kind`: its number, in the order of their first calls; `seed` of the
    random ops; `scale` of the gradients; `timeline`: whether the step is timed; `given`: the arguments, if they look
    different from those of the last call, pickled, with tensors on the meta device; `failed`: why the leader makes no
    call."""

    kind: int = NEW
    seed: int = 0
    scale: float | None = None
    timeline: bool = False
    given: bytes | None = None
    failed: str | None = None


UNHEARD = Header(failed="interrupted")  # Ctrl-C while it was heard: it may have come, and comes no second time


@dataclass(frozen=True)
class Decided:
    """What the leader has decided for a kind of call."""

    plan: Plan
    schedule: Schedule
    profile: Profile
    cluster: Cluster


Run = Callable[[Graph, tuple[Any, ...]], tuple[Any, ...]]


class RankPipe(RankShell, Pipe):
    """What `fxpipe.compile` returns inside a torch.distributed world; see there, and `Pipe`."""

    def __init__(self, model: nn.Module, options: Options, world: World) -> None:
        super().__init__(model, options)
        self.__dict__.update(
            world=world,
            _known={},
            _texts=[],
            _keys=[],
            _given=None,
            _seen=None,
            _looks=None,
            _header=None,
            _joined=False,
        )

    # Running ----------------------------------------------------------------------------------------------------------

    def forward_only(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch, without gradients, on every rank."""

        def call(given: Given, run: Run) -> Any:
            with torch.no_grad():
                return self._front(given[0], given[1], run)

        return self._call(call, (args, kwargs, NO_TARGET))

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

        def call(given: Given, run: Run) -> Any:
            check_grad()
            given_args, given_kwargs, given_target = given
            return self._stepper.step(given_args, given_kwargs, given_target, loss_fn, outputs, run)

        loss, output = self._call(call, (args, kwargs, target), scale_of(scaler, self.world.device), timeline)
        return (loss, output) if outputs else loss

    def rehearse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Only for pipes in one process."""
        raise FxpipeError("rehearse is for pipes in one process")

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture, plan and generate for this kind of call, on all ranks, without running it."""

        def call(given: Given, run: Run) -> None:
            graph = self._front.capture(given[0], given[1])
            found: dict[str, Any] = {}
            match(graph.call, (given[0], given[1]), found)
            inputs = tuple(found[item.name] for item in graph.inputs if item.path)
            made = self._agree(graph, inputs)
            if not any(tensor.is_meta for tensor in self.held_tensors().values()):
                self._live(made)
            if self.world.leads and not self._joined:
                self.__dict__["_joined"] = True
                self.world.tell_all(pickle.dumps(replace(self._header, kind=self._number(graph))))

        self._call(call, (args, kwargs, NO_TARGET), runs=False)

    # The protocol of a call -------------------------------------------------------------------------------------------

    def _call(
        self,
        call: Callable[[Given, Run], Any],
        given: Given,
        scale: float | None = None,
        timeline: bool = False,
        runs: bool = True,
    ) -> Any:
        """One call, made by all ranks together."""
        with self.together():
            self.__dict__["_joined"] = False
            if self.world.leads:
                return self._lead(call, given, Header(scale=scale, timeline=timeline))
            return self._follow(call, given, runs)

    def _lead(self, call: Callable[[Given, Run], Any], given: Given, header: Header) -> Any:
        self.__dict__["_header"] = header = replace(header, given=self._news(given))
        try:
            return call(given, self._run)
        except BaseException as error:
            if not self._joined:  # nobody else knows yet
                self.__dict__.update(_given=None, _seen=None)
                self.world.tell_all(pickle.dumps(Header(failed=describe(error))))
            raise

    def _news(self, given: Given) -> bytes | None:
        """What the leader's arguments look like, pickled, if not as in the last call."""
        seen = glance(given)
        if seen is not None and seen == self._seen:
            return None
        looks, before = pickle.dumps(change(given, on_meta)), self._given
        self.__dict__.update(_given=looks, _seen=seen)
        return None if looks == before else looks

    def _follow(self, call: Callable[[Given, Run], Any], given: Given, runs: bool) -> Any:
        """The front goes ahead with what the leader has said of the arguments before, if those of this rank look as
        they did then, while the leader's front works on the same call; what the leader says now is heard in between."""
        seen, before = glance(given), self._seen
        self.__dict__.update(_header=None, _seen=seen)
        if seen is None or seen != before:
            self._listen()
        while True:
            looks: Given = self._looks
            try:
                whole = filled(looks, given)
                check_same(whole, looks, self.world.rank)
                return call(whole, self._run)
            except Outdated:
                continue
            except BaseException as error:
                if self._header is None and self._listen().given is not None:
                    continue
                header: Header = self._header
                if header.failed is None and not self._joined and (runs or header.kind == NEW):
                    self._refuse(header, looks, error)
                raise

    def _listen(self) -> Header:
        """The leader's next header. Raises RankError if it makes no call."""
        self.__dict__["_header"] = UNHEARD
        header: Header = pickle.loads(self.world.hear(LEADER))
        self.__dict__["_header"] = header
        if header.failed is not None:
            raise RankError(f"rank {LEADER}: {header.failed}")
        if header.given is not None:
            self.__dict__["_looks"] = pickle.loads(header.given)
        return header

    def _heard(self) -> Header:
        """The leader's header for this call. Raises Outdated if its arguments do not look as they did before."""
        if self._header is None and self._listen().given is not None:
            raise Outdated
        header: Header = self._header
        return header

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
        if self._joined:  # a new kind
            on_each(self.world, lambda: self._live(made))
        scheduler: Ranked = self._live(made).scheduler  # type: ignore[assignment]
        if self._joined:
            scheduler.share_values()
        number = self._number(graph)
        if self.world.leads:
            seed = new_seed() if scheduler.random else 0
            header = replace(self._header, kind=number, seed=seed)
            self.__dict__["_joined"] = True
            self.world.tell_all(pickle.dumps(header))
        else:
            header = self._heard()
            header = self._listen() if header.kind == NEW else header
            if header.kind != number:
                raise RankError(
                    f"this call is of another kind on rank {self.world.rank} than on rank {LEADER}: is the model in "
                    "training on one and in evaluation on the other, or does the loss function differ?"
                )
            self.__dict__["_joined"] = True
        scale = None if header.scale is None else torch.tensor(header.scale)
        found, timeline = take_step(scheduler, inputs, self.options.chunks, scale, header.seed, header.timeline)
        if timeline is not None:
            self.__dict__.update(_timeline=timeline, _timed=self.build)
        return found

    def _number(self, graph: Graph) -> int:
        return int(self._known[kind_of(graph, self.model.training, None)])

    def _agree(self, graph: Graph, inputs: Sequence[Any]) -> Build:
        """The build for a kind of call, the same on all ranks; a new one if it is new to all."""
        new = not self._knows(graph)
        if self.world.leads and new:
            self.__dict__["_joined"] = True
            self.world.tell_all(pickle.dumps(self._header))
            self.__dict__["_header"] = replace(self._header, given=None)
        elif not self.world.leads and new != (self._heard().kind == NEW):
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
        self.__dict__["_joined"] = True
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
