"""A step of one rank under way: its program, line by line, the verdict of all ranks, and the results."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from fxpipe.engines.common.gradient_scale import Scale
from fxpipe.engines.common.profiler_ranges import show_ranges
from fxpipe.engines.common.scheduler_base import MiniBatch, Place
from fxpipe.engines.common.step import Observer, Step, wrap
from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.engines.common.step_messages import Progress
from fxpipe.engines.common.step_plan import StepPlan
from fxpipe.engines.transports.message_format import FailedElsewhere
from fxpipe.errors import RankError
from fxpipe.ir.program.device_programs import Message
from fxpipe.ir.schedule.schedule import Action
from fxpipe.runtime.autograd.gradient_aliases import Pair, alias, put_together, standing_in
from fxpipe.runtime.interrupts import InterruptShield
from fxpipe.runtime.microbatch import gather, scatter, split_sizes
from fxpipe.runtime.streams import use_stream

from .failure_attribution import Lost
from .input_checksums import Unread
from .rank_program import Batch, RankProgram
from .rank_transport import RankTransport
from .rendezvous import LEADER
from .replicas.shard_exchange import ShardExchange
from .step_consensus import Failure, Numbers, broadcast_value, consensus
from .weight_exchange import WeightExchange, WholeLoans


class RankObserver(Observer, Protocol):
    """Observes a step of one rank."""

    def watch(self, run: RankRun) -> None:
        """Called after `begin`; may `wrap` methods of the run and of its transport."""

    def report(self) -> None:
        """Called on all ranks when the step has succeeded, to exchange what was seen. Raises Lost."""


@dataclass(frozen=True)
class RankPlan:
    """What is decided before a step of one rank.

    - `place`: where the stages run, of `steps`; `program`: the lines of this rank.
    - `whole`: the whole micro-batches; `slices`: the rank's slices of them.
    - `scale`: what the gradients are multiplied by, or None.
    - `error`: an earlier failure of this rank; then it only takes part in the messages.
    - `given`: computes the checksums of this rank's arguments, on their devices.
    - `shards`: the exchange of parameters between replicas that each have a part of them, or None.
    - `lent`: the lent tensors of which this rank has a part, whole.
    """

    steps: StepScheduler
    place: Place
    program: RankProgram
    whole: MiniBatch
    slices: MiniBatch
    scale: Scale | None
    error: BaseException | None
    given: Callable[[], Unread]
    shards: ShardExchange | None
    lent: WholeLoans


def take(plan: RankPlan, observer: RankObserver | None, interrupts: InterruptShield) -> RankRun:
    """Run a step of one rank under an observer. Raises its first error; Ctrl-C counts as one between two lines."""
    steps, program, broken = plan.steps, plan.program, plan.error is not None
    if plan.shards is not None:
        plan.shards.begin(broken)
    given, rows_of = cache(plan.given), plan.whole.sizes  # checksums are computed when the rank first waits
    transport = RankTransport(program, plan.slices, rows_of, plan.error, given, plan.shards)
    boxes, own = [transport] * len(steps.stages), [] if broken else program.own
    replica, routes = program.replica, program.routes
    step = StepPlan(steps, plan.place, plan.slices, own, {}, boxes, plan.scale, replica, routes, rows_of)
    nothing: list[list[Pair]] = [[] for _ in steps.stages]  # a rank that has failed may not have its tensors
    with nullcontext(nothing) if broken else standing_in(steps.stages) as pairs:
        m = Step(step, pairs, Progress(()))
        run = RankRun(plan, m, transport, given)
        if not m.grad:
            wrap(m, dict.fromkeys(("forward", "forward_to_recompute"), keep_nothing))
        m.begin(observer)
        show_ranges(m)
        if observer is not None:
            observer.watch(run)
        if not broken:
            run.weights.lend()
        run.take(interrupts)
    steps.check(m)
    return run


class RankRun:
    """A step of one rank.

    - `m`: the step, with the rank's slices; `whole`: the whole micro-batches.
    - `given`: the checksums of this rank's arguments; `inputs`: the same, read.
    - `numbers`: the outputs that are one number, by index.
    """

    def __init__(self, plan: RankPlan, m: Step, transport: RankTransport, given: Callable[[], Unread]) -> None:
        self.plan, self.m, self.transport, self.given = plan, m, transport, given
        self.steps, self.program, self.world, self.whole = plan.steps, plan.program, plan.program.world, plan.whole
        self.weights = WeightExchange(m, transport, plan.lent)
        self.numbers: Numbers = {}
        self.inputs: dict[str, int] = {}
        transport.freed += [m.kept, m.pending_by_autograd, m.pending_by_code]

    # The program ------------------------------------------------------------------------------------------------------

    def take(self, interrupts: InterruptShield) -> None:
        """Run all of this rank's program, until all ranks are done and the verdict is known."""
        m, transport, weights = self.m, self.transport, self.weights
        for do, what in self.program.lines:
            if interrupts.error is not None:
                transport.fail(interrupts.error)
            if do == "batch":
                self._exchange(what)
            elif (
                do == "collective" and what.micro_batch <= m.last
            ):  # also if this rank has failed: the others wait for it
                self._guarded(None, transport.share, what)
            elif do == "collective" or transport.broken or (what.micro_batch is not None and what.micro_batch > m.last):
                continue
            elif isinstance(what, Message):
                self._guarded(None, weights.reduce, do, what)
            elif what.kind != "R":  # the methods of backward recompute by themselves
                self._guarded(what, self._act, what)
        self._receive_rest()
        if self.plan.shards is not None:
            self._guarded(None, self.plan.shards.end)
        self._conclude()

    def _receive_rest(self) -> None:
        """Receive the messages that no action has taken: a rank that has failed still receives all messages to it."""
        for key in list(self.transport.pending_receives):
            self._guarded(None, self.transport.open_message, key)

    def _exchange(self, batch: Batch) -> None:
        """Send and receive the messages of a batch."""
        transport, last = self.transport, self.m.last
        for send, entry in batch:
            i = entry.message.micro_batch
            if i is not None and i > last:
                continue
            if not send:
                self._guarded(None, transport.expect, entry)
                continue
            if i is None and entry.message.gradient and not transport.broken:
                self._guarded(None, self.weights.send, entry.message)
            self._guarded(None, transport.dispatch, entry)
        if transport.calls:
            self._guarded(None, transport.issue)

    def _act(self, action: Action) -> None:
        """Run an action, after it has got the tensors that its stage borrows."""
        with use_stream(self.m.compute[action.stage]):
            if self.weights.awaited:
                self.weights.borrow(action.stage)
            self.steps.methods[action](self.steps, self.m, action.micro_batch)

    def _guarded(self, action: Action | None, do: Callable[..., object], *args: Any) -> None:
        """Call `do`; what it raises becomes this rank's failure."""
        try:
            do(*args)
        except FailedElsewhere:
            self.transport.fail(None)
        except Lost as error:
            self.transport.fail(RankError(str(error)))
        except BaseException as error:
            if action is not None and not isinstance(error, RankError):
                self.steps.add_notes(
                    error, self.m, action.stage, action.micro_batch, self.program.replica, action.kind != "F"
                )
            self.transport.fail(error)

    def _conclude(self) -> None:
        """Wait for the sends, and for the verdict of all ranks. The error that this rank will raise goes to the step's
        `progress`."""
        transport = self.transport
        for peer, works in transport.sent.items():
            for work, _ in works:
                self._guarded(None, self.world.finish, work, peer)
        for call in transport.issued:
            self._guarded(None, self.world.settle, call)
        if not transport.broken:
            self._guarded(None, self._settle)
        try:
            found = consensus(
                self.world, Failure.of(transport.error) if transport.broken else self.numbers, self.inputs
            )
        except Lost as error:
            found = str(error)
        if isinstance(found, str):
            transport.fail(None)
            self.m.progress.failed.append(transport.error or RankError(found))
        else:
            self.numbers = found

    # Results ----------------------------------------------------------------------------------------------------------

    def outputs(self) -> tuple[Any, ...]:
        """What the step returns, on all ranks. Raises Lost."""
        gives, takes = self.steps.epilogue
        found = [self._output(at) for at, (name, _, _) in enumerate(self.steps.outputs) if name not in takes]
        if gives:
            home = self.program.ranks[self.steps.epilogue_stage][0]
            values = self.m.epilogue.values if self.world.rank == home else [None] * len(gives)
            found += [broadcast_value(self.world, value, home) for value in values]
        return tuple(found)

    def _output(self, at: int) -> Any:
        """Output number `at`, on all ranks. Raises Lost."""
        if at in self.numbers:
            number, dtype = self.numbers[at]
            return torch.tensor(number, dtype=dtype, device=self.world.device)
        found = self._shared(at)
        return found.detach() if isinstance(found, Tensor) else found

    def _home(self, at: int) -> tuple[int, ...]:
        """The ranks that make output number `at`, each a slice of it."""
        maker = self.program.table.makers[at]  # the number of a stage; below 0: no stage, the output is an input
        return (LEADER,) if maker < 0 else self.program.ranks[maker]

    def _values(self, at: int) -> list[Any]:
        """This rank's values of an output, one for each micro-batch."""
        source = self.whole.micro_batches if self.program.table.makers[at] < 0 else self.m
        return [getattr(micro_batch, self.steps.outputs[at][0]) for micro_batch in source]

    def _shared(self, at: int) -> Any:
        """Gather an output from the ranks that make it, and share it with all ranks. Raises Lost."""
        first, *others = replica_group = self._home(at)
        found = None
        if self.world.rank in others:
            values = [value.detach().cpu() if isinstance(value, Tensor) else value for value in self._values(at)]
            self.world.tell(first, data=pickle.dumps(values))
        elif self.world.rank == first:
            views = [self._values(at), *(pickle.loads(self.world.hear(peer)) for peer in others)]
            rows = [split_sizes(whole, len(replica_group)) for whole in self.whole.sizes]
            values = [views[k][i] for i, some in enumerate(rows) for k in range(len(some))]
            if others:
                values = [value.to(self.world.device) if isinstance(value, Tensor) else value for value in values]
            found = gather(values, *self.steps.outputs[at][1:], [size for some in rows for size in some])
        return broadcast_value(self.world, found, first)

    def _settle(self) -> None:
        """Put this rank's outputs that are tensors of one number, such as the loss, into `numbers`; with replicas, its
        share of each; and read the checksums."""
        self.inputs = {name: int(value) for name, value in self.given().items()}
        gives, takes = self.steps.epilogue
        if gives and self.steps.last is not None:
            _ = self.m.epilogue  # that it fails is known before the verdict
        for at, (name, dim, reduce) in enumerate(self.steps.outputs):
            replica_group = self._home(at)
            if name in takes or dim is not None or self.world.rank not in replica_group:
                continue
            if not (values := self._values(at)):
                continue
            if isinstance(values[0], Tensor) and values[0].dim() == 0 and not values[0].is_complex():
                sizes = self.m.sizes if len(replica_group) > 1 else self.whole.sizes
                value = gather(values, dim, reduce, sizes)
                number = value.item()
                if reduce == "mean":
                    number *= sum(sizes) / self.whole.total
                if reduce != "same" or self.world.rank == replica_group[0]:
                    self.numbers[at] = number, value.dtype

    def pairs(self, batch: Sequence[Any]) -> list[Pair]:
        """The pairs of tensors and aliases with the gradients of this rank. Raises Lost."""
        own = put_together([pair for pairs in self.m.pairs for pair in pairs], self.steps.stages)
        inputs = self._input_pairs(batch)
        return [*own, *inputs] if self.m.grad else []

    def _all_leaves(self) -> dict[str, list[list[Tensor]]]:
        """The pieces of the inputs that need a gradient, by name; pieces of other replicas are there without one."""
        dims, found = dict(self.steps.inputs), {}
        for name, own in self.m.leaves.items():
            found[name] = all_pieces = list[list[Tensor]]()
            for i, rows in enumerate(self.whole.sizes):
                counts = split_sizes(rows, len(self.program.replica_group))
                pieces = scatter(getattr(self.whole.micro_batches[i], name).detach(), dims[name], counts)
                all_pieces += [own[i] if k == self.program.replica else [piece] for k, piece in enumerate(pieces)]
        return found

    def _input_pairs(self, batch: Sequence[Any]) -> list[Pair]:
        """The inputs that need a gradient, with the sum of their gradients from all ranks. Raises Lost."""
        inputs, detached = self.steps.inputs, self.steps.detached
        named = {name: value for (name, _), value in zip(inputs, batch, strict=True) if isinstance(value, Tensor)}
        wanted = {name: value for name, value in named.items() if value.requires_grad and name not in detached}
        if not wanted or not torch.is_grad_enabled():
            return []
        leaves = self._all_leaves() if self.plan.slices is not self.whole else self.m.leaves
        ours = {id(value): whole.grad for value, whole in self.steps.input_pairs(leaves, batch)}
        mine = {name: ours[id(value)] for name, value in wanted.items() if id(value) in ours}
        parts = self.world.all_gather_object(
            {name: None if grad is None else grad.cpu() for name, grad in mine.items()}
        )
        pairs = []
        for name, value in wanted.items():
            grads = [part[name] for part in parts if part.get(name) is not None]
            if grads and not value.is_meta:
                whole = alias(value)
                whole.grad = torch.stack(grads).sum(0).to(value.device)
                pairs.append((value, whole))
        return pairs


def keep_nothing(m: Step, _: Any, j: int, i: int, *args: Any) -> Any:
    """Run a forward that no backward follows, without keeping its arguments or graph."""
    return m.stages[j].forward(*args)
