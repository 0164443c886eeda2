"""Run one rank's part of a pipe: the same generated scheduler, of which each process runs the row of its own device.

    rank 0  run 0F0  send x[0]  run 0F1  send x[1]  receive dx[0] ...       every rank goes through its program, which
    rank 1  receive x[0]  run 1F0  receive x[1]  run 1B0  send dx[0] ...    `add_transfers` has made and checked

To receive is to begin to: nobody waits until an action takes what was to come. To send never waits. All forms are
known, so beside the values little is said: the leader's header before a step, and after it how it went, by all to all.

A rank that fails goes on to the end of its program without computing: what it sends says that it has failed, and who
takes that fails in turn. So nothing hangs and nothing is left over, and the verdict tells everyone what happened where.
If a rank is lost, those who were to hear from it fail in the same way, and no step can be any more.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxpipe.engines.common.replica_routing import Cut, Routes, sliced
from fxpipe.engines.common.scheduler_base import Batches
from fxpipe.engines.common.step import Scale, Step
from fxpipe.engines.common.step_engine import Leaves, StepScheduler
from fxpipe.engines.transports.message_format import FailedElsewhere, Size
from fxpipe.errors import InputError, RankError
from fxpipe.ir.graph.value_types import dim_size
from fxpipe.ir.program.device_programs import Message
from fxpipe.ir.program.messages import Wires
from fxpipe.ir.schedule.schedule import Action
from fxpipe.runtime import Stage
from fxpipe.runtime.deferred_norms import commit
from fxpipe.runtime.microbatch import gather, scatter, split_sizes
from fxpipe.runtime.step_leaves import Pair, alias, commit_gradients
from fxpipe.runtime.streams import use_stream

from .rank_group import LEADER, Lost, World
from .rank_step import RankMessage, RankStep, key_of, name_of
from .replica_reduce import broadcast_values, commit_statistics, written
from .step_consensus import Failure, consensus, share_value

R = TypeVar("R", bound=RankStep)


class RankScheduler(StepScheduler):
    """A generated scheduler on one rank, see `on_rank`. The stages of other ranks are empty.

    - `world`: the ranks of the pipe; `wires`: what they send each other; `cuts`: as in `ReplicatedScheduler`.
    - `parallel`: how the rows of a mesh add up gradients, or None.
    """

    cuts: tuple[Cut, ...] = ()
    parallel: Any = None

    def __init__(self, stages: Sequence[Stage], whole: Stage | None, world: World, wires: Wires) -> None:
        self.world, self.wires = world, wires
        # Of each stage the ranks of its replicas; of this rank, all that have the same stages.
        self._ranks = tuple(tuple(map(world.labels.index, labels)) for labels in wires.replica_groups)
        self.replica_group = next((ranks for ranks in self._ranks if world.rank in ranks), (world.rank,))
        self.replica = self.replica_group.index(world.rank)
        self.routes = Routes(map(len, wires.replica_groups), self.cuts)
        super().__init__(stages, whole)
        labels = [world.label if self.here(j) else label for j, label in enumerate(self.devices)]
        self.place = replace(self.place, devices=tuple(labels))
        programs = wires.programs
        rows = dict(zip(programs.devices, programs.rows, strict=True))
        self.program = [(do, self._wire(do, what)) for do, what in rows.get(world.label, ())]
        self._sizes: dict[tuple[str, tuple[int, ...]], Size] = {}
        self._coming: dict[int, dict[int, list[RankMessage]]] = {}
        used = {name for name, j in self.feeds if self.here(j)}
        gives, takes = self.totals
        self._summing = not used.isdisjoint(gives)
        used |= set(takes) if self._summing else set()
        used |= {
            name for (name, _, _), maker in zip(self.outputs, wires.makers, strict=True) if maker < 0 and world.leads
        }
        self._used = used
        self._on_cpu = False  # inputs move to their stages alone

    def replica_count(self, j: int) -> int:
        return len(self._ranks[j])

    def _wire(self, do: str, what: Action | Message) -> Action | Message | RankMessage:
        """A line of the program, with all that can be known before a step."""
        if isinstance(what, Action) or do in ("reduce", "gather"):
            return what
        form, end = self.wires.forms[what.value], what.target if do == "send" else what.source
        dtype: torch.dtype = getattr(torch, form.dtype)
        peer = self._ranks[end][what.replicas[do == "send"]]
        route = self.routes.of.get((what.target, name_of(what, self.wires)))
        return RankMessage(what, key_of(what, self.wires), peer, dtype, form.shape, form.number, route)

    def size(self, wire: RankMessage, known: tuple[int, ...]) -> Size:
        """The type and shape of what a message carries, for these sizes of its micro-batch."""
        key = wire.message.value, known
        if key not in self._sizes:
            if len(self._sizes) > 10_000:
                self._sizes.clear()  # a program whose shapes never repeat
            sizes = dict(zip((name for name, _, _ in self.wires.sizes), known, strict=False))
            self._sizes[key] = wire.dtype, tuple([dim_size(dim, sizes) for dim in wire.shape])
        return self._sizes[key]

    def coming(self, last: int) -> dict[int, list[RankMessage]]:
        """What each other rank sends to this one in a step whose last micro-batch has this number, in order."""
        if last not in self._coming:
            coming: dict[int, list[RankMessage]] = {peer: [] for peer in self.world.others}
            for do, what in self.program:
                if do == "receive" and isinstance(what, RankMessage):
                    i = what.message.micro_batch
                    coming[what.peer] += [what] if i is None or i <= last else []
            self._coming[last] = coming
        return self._coming[last]

    def here(self, j: int) -> bool:
        """Whether stage j is on this rank."""
        return self.world.rank in self._ranks[j]

    def workers(self) -> set[str]:
        return set()  # beside the calling thread

    def lend(self, m: Batches) -> None:
        assert isinstance(m, RankStep)
        if not m.broken:
            m.lend_all()

    def run(
        self,
        batch: Sequence[Any],
        chunks: int,
        scale: Scale = None,
        seed: int = 0,
        error: BaseException | None = None,
    ) -> tuple[Any, ...]:
        """The outputs, on every rank, for the inputs, of which those must be here that stages of this rank use; each
        rank gets the gradients of its own stages, and those of the inputs that it has. `seed` is what random numbers
        begin with. With an `error`, this rank only takes part, and fails by it."""
        return self.take(RankStep, batch, chunks, scale, seed, error)[0]

    def take(
        self,
        kind: type[R],
        batch: Sequence[Any],
        chunks: int,
        scale: Scale = None,
        seed: int = 0,
        error: BaseException | None = None,
    ) -> tuple[tuple[Any, ...], R]:
        """`run`, by a step of some kind, which is returned too."""
        self.world.begin()

        def begin(sizes: tuple[int, ...], place: Any, draws: bool) -> R:
            m = kind(sizes, place, False)
            m.place_in(self.world, self.wires, seed, error or self._check(batch))
            return m

        seen = [self._seen(name, value) for (name, _), value in zip(self.inputs, batch, strict=True)]
        with nullcontext(error) if self.parallel is None else self.parallel.held(self, error) as error:
            try:
                self._even_out()  # what other calls have made of the buffers
                m = self.attempt(seen, chunks, scale, begin, {self.devices[-1]: ()})  # one thread has the only box
                self._commit()
            except Lost as lost:
                raise RankError(str(lost)) from None
            outputs, pairs = self.outcome(m, batch)
            if self.parallel is None or not m.grad:
                commit_gradients(pairs)
            else:
                self.parallel.add(pairs)
        return outputs, m

    def share_values(self) -> None:
        """Let all replicas of a stage begin with the values that the first one has. Raises Lost."""
        if len(self.replica_group) > 1:
            own = [stage.tensor(path) for stage in self.stages for path in stage.states]
            broadcast_values(self.world, self.replica_group, own)

    def _even_out(self) -> None:
        """The buffers that forward writes are those of the first replica. Raises Lost."""
        if len(self.replica_group) > 1 and self._mutating:
            broadcast_values(self.world, self.replica_group, written(self._mutating))

    def _commit(self) -> None:
        """The mini-batch is over. Raises Lost."""
        if len(self.replica_group) > 1 and self._mutating:
            commit_statistics(self.world, self.replica_group, self._mutating)
        else:
            commit(self._mutating)

    def scatter(self, batch: Sequence[Any], chunks: int, kind: Callable[..., Any]) -> Any:
        whole = super().scatter(batch, chunks, kind)
        m: RankStep = whole
        if len(self.replica_group) > 1:
            sizes, slices = sliced(self, whole, len(self.replica_group))[self.replica]
            m = kind(sizes, self.place, False)
            m[:], m.whole = slices, whole
        m.slice_of(whole, self.replica, self.routes)
        return m

    def _check(self, batch: Sequence[Any]) -> InputError | None:
        """What is wrong with the inputs, as far as they are used here."""
        missing = [n for (n, _), x in zip(self.inputs, batch, strict=True) if n in self._used and is_meta(x)]
        if not missing:
            return None
        return InputError(
            f"{', '.join(missing)}: not given on rank {self.world.rank}, whose stages use it; pass it there, too"
        )

    def _seen(self, name: str, value: Any) -> Any:
        """An input as this rank needs it: only its shape, where none of its stages takes it."""
        if not isinstance(value, Tensor):
            return value
        if name not in self._used:
            return torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
        return value.cpu() if self.world.device.type == "cpu" and not value.is_meta else value

    def compute_totals(self, batch: Sequence[Any]) -> dict[str, Any]:
        taken = (value for (name, _), value in zip(self.inputs, batch, strict=True) if name in self.totals[1])
        return super().compute_totals(batch) if self._summing and not any(map(is_meta, taken)) else {}

    # The program ------------------------------------------------------------------------------------------------------

    def _run(self, m: Step) -> None:
        """All of this rank's program; back when everyone is done and the verdict is known."""
        assert isinstance(m, RankStep)
        for do, what in self.program:
            i = what.message.micro_batch if isinstance(what, RankMessage) else what.micro_batch
            if i is not None and i > m.last:
                continue
            if isinstance(what, Action):
                self._act(m, what)
            elif isinstance(what, RankMessage):
                m.expect(what) if do == "receive" else m.dispatch(what)
            elif not m.broken:
                self._guarded(m, None, m.reduce, do, what)
        for key in list(m.posted):  # a rank that has failed takes what comes, all the same
            self._guarded(m, None, m.open_message, key)
        self._conclude(m)

    def _act(self, m: RankStep, action: Action) -> None:
        """One action, if nothing has failed yet. What is computed again is so by the backward that needs it."""
        if action.kind == "R" or m.broken:
            return
        self._guarded(m, action, self._compute, m, action)

    def _compute(self, m: RankStep, action: Action) -> None:
        with use_stream(m.compute[action.stage]):
            if m.awaited:
                m.borrow(action.stage)
            self.methods[action](self, m, action.micro_batch)

    def _guarded(self, m: RankStep, action: Action | None, do: Any, *args: Any) -> None:
        """Do something, and fail with what it raises."""
        try:
            do(*args)
        except FailedElsewhere:
            m.fail(None)
        except Lost as error:
            m.fail(RankError(str(error)))
        except BaseException as error:
            if action is not None and not isinstance(error, RankError):
                self.add_notes(error, m, action.stage, action.micro_batch, m.replica, action.kind != "F")
            m.fail(error)

    def _conclude(self, m: RankStep) -> None:
        """Wait for what was sent, and hear how it went. What this rank raises goes to `failed`."""
        for peer, works in m.sent.items():
            for work, _ in works:
                self._guarded(m, None, self.world.finish, work, peer)
        if not m.broken:
            self._guarded(m, None, self._settle, m)
        try:
            found = consensus(self.world, Failure.of(m.error) if m.broken else m.numbers)
        except Lost as error:
            found = str(error)
        if isinstance(found, str):
            m.fail(None)
            m.failed.append(m.error or RankError(found))
        else:
            m.numbers = found
        if not self.world.leads and self.world.lost is None:
            self._guarded(m, None, self.world.listen, LEADER)  # for the next call

    # Results ----------------------------------------------------------------------------------------------------------

    def gather(self, m: Batches) -> tuple[Any, ...]:
        """The outputs, from who makes them, on all ranks."""
        assert isinstance(m, RankStep)
        whole = []
        for at in range(len(self.outputs)):
            if at in m.numbers:
                number, dtype = m.numbers[at]
                whole.append(torch.tensor(number, dtype=dtype, device=self.world.device))
            else:
                whole.append(self._shared(m, at))
        return tuple(whole)

    def _home(self, at: int) -> tuple[int, ...]:
        """The ranks that have output number `at`, each a slice of it."""
        maker = self.wires.makers[at]
        return (LEADER,) if maker < 0 else self._ranks[maker]

    def _values(self, m: RankStep, at: int) -> list[Any]:
        """What this rank has of an output, for each micro-batch."""
        source = m.whole if self.wires.makers[at] < 0 and m.whole is not None else m
        return [getattr(micro_batch, self.outputs[at][0]) for micro_batch in source]

    def _shared(self, m: RankStep, at: int) -> Any:
        """An output, from the ranks that have it, on all of them. Raises Lost."""
        first, *others = replica_group = self._home(at)
        found = None
        if self.world.rank in others:
            values = [value.detach().cpu() if isinstance(value, Tensor) else value for value in self._values(m, at)]
            self.world.tell(first, pickle.dumps(values))
        elif self.world.rank == first:
            views = [self._values(m, at), *(pickle.loads(self.world.hear(peer)) for peer in others)]
            rows = [split_sizes(whole, len(replica_group)) for whole in m.rows_of]
            values = [views[k][i] for i, some in enumerate(rows) for k in range(len(some))]
            if others:
                values = [value.to(self.world.device) if isinstance(value, Tensor) else value for value in values]
            found = gather(values, *self.outputs[at][1:], [size for some in rows for size in some])
        return share_value(self.world, found, first)

    def _settle(self, m: RankStep) -> None:
        """Find the outputs of this rank that are tensors of one number, as the loss is; of several replicas each has
        its share of the number."""
        for at, (_, dim, reduce) in enumerate(self.outputs):
            replica_group = self._home(at)
            if dim is not None or self.world.rank not in replica_group or not (values := self._values(m, at)):
                continue
            if isinstance(values[0], Tensor) and values[0].dim() == 0 and not values[0].is_complex():
                sizes = m.sizes if m.whole is None or len(replica_group) > 1 else m.whole.sizes
                value = gather(values, dim, reduce, sizes)
                number = value.item()
                if reduce == "mean":
                    number *= sum(sizes) / m.total
                if reduce != "same" or self.world.rank == replica_group[0]:
                    m.numbers[at] = number, value.dtype

    def outcome(self, m: Step, batch: Sequence[Any]) -> tuple[tuple[Any, ...], list[Pair]]:
        assert isinstance(m, RankStep)
        if m.whole is not None:
            m.leaves = self._all_leaves(m, m.whole)
        try:
            outputs, pairs = super().outcome(m, batch)
            m.report()
        except Lost as error:
            raise RankError(str(error)) from None
        return outputs, pairs if m.grad else []

    def _all_leaves(self, m: RankStep, whole: Batches) -> dict[str, list[list[Tensor]]]:
        """The pieces of inputs that need a gradient, with those of the other replicas in their places, without one."""
        dims, found = dict(self.inputs), {}
        for name, own in m.leaves.items():
            found[name] = all_pieces = list[list[Tensor]]()
            for i, rows in enumerate(m.rows_of):
                counts = split_sizes(rows, len(self.replica_group))
                pieces = scatter(getattr(whole[i], name).detach(), dims[name], counts)
                all_pieces += [own[i] if k == self.replica else [piece] for k, piece in enumerate(pieces)]
        return found

    def _inputs(self, leaves: Leaves, batch: Sequence[Any]) -> list[Pair]:
        """The inputs that need a gradient, with the sum of what the stages of all ranks have for them."""
        named = {name: value for (name, _), value in zip(self.inputs, batch, strict=True) if isinstance(value, Tensor)}
        wanted = {name: value for name, value in named.items() if value.requires_grad and name not in self.detached}
        if not wanted or not torch.is_grad_enabled():
            return []
        ours = {id(value): whole.grad for value, whole in super()._inputs(leaves, batch)}
        mine = {name: ours[id(value)] for name, value in wanted.items() if id(value) in ours}
        parts = self.world.collect({name: None if grad is None else grad.cpu() for name, grad in mine.items()})
        pairs = []
        for name, value in wanted.items():
            grads = [part[name] for part in parts if part.get(name) is not None]
            if grads and not value.is_meta:
                whole = alias(value)
                whole.grad = torch.stack(grads).sum(0).to(value.device)
                pairs.append((value, whole))
        return pairs


def on_rank(
    kind: type[StepScheduler], stages: Sequence[Stage | None], whole: Stage | None, world: World, wires: Wires
) -> RankScheduler:
    """The scheduler of a generated package for one rank, with `RankScheduler` as its base. `stages`, followed
    by their further replicas, are None where another rank runs them."""
    own = {name: value for name, value in vars(kind).items() if name not in ("lend", "__dict__", "__weakref__")}
    made: Any = type("Scheduler", (RankScheduler,), {**own, "replicas": ()})
    further, empty = iter(stages[len(kind.devices) :]), Stage({}, {}, world.device)
    groups = [(stages[j], *(next(further) for _ in labels[1:])) for j, labels in enumerate(wires.replica_groups)]
    own_stages = [next((stage for stage in group if stage is not None), empty) for group in groups]
    scheduler: RankScheduler = made(own_stages, whole, world, wires)
    return scheduler


def is_meta(value: Any) -> bool:
    """Whether it stands for a tensor that other ranks have, and only has its shape."""
    return isinstance(value, Tensor) and value.is_meta
