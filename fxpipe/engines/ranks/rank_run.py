"""A step of one rank under way: its program line by line, how it went everywhere, and what comes of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.engines.common.scheduler_base import Batches
from fxpipe.engines.common.step import Scale, Step, wrap
from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.engines.transports.message_format import FailedElsewhere
from fxpipe.errors import RankError
from fxpipe.ir.program.device_programs import Message
from fxpipe.ir.schedule.schedule import Action
from fxpipe.runtime.gradient_aliases import Pair, alias, put_together, standing_in
from fxpipe.runtime.microbatch import gather, scatter, split_sizes
from fxpipe.runtime.streams import use_stream

from .rank_group import LEADER, Lost
from .rank_program import RankMessage, RankProgram
from .rank_timer import RankTimer
from .rank_transport import RankTransport
from .step_consensus import Failure, Numbers, consensus, share_value
from .weight_exchange import WeightExchange


class RankRun:
    """A step `m` of one rank, of its slices of the batch, which is `whole`. With an `error` the rank only takes part.
    `numbers`: the outputs that are one number."""

    def __init__(
        self, steps: StepScheduler, program: RankProgram, m: Step, whole: Batches, error: BaseException | None
    ) -> None:
        self.steps, self.program, self.world, self.m, self.whole = steps, program, program.world, m, whole
        self.transport = RankTransport(program, m, error)
        self.weights = WeightExchange(m, self.transport)
        self.numbers: Numbers = {}

    def take(self, scale: Scale, timer: RankTimer | None) -> None:
        """Run it, while `timer` looks on. Raises what has failed."""
        m, stages, broken = self.m, self.steps.stages, self.transport.broken
        if not m.grad:
            wrap(m, dict.fromkeys(("forward", "forward_to_recompute"), keep_nothing))
        with standing_in(stages) as pairs:
            m.begin(
                self.steps, pairs, scale, {}, [self.transport] * len(stages), [] if broken else self.program.own, timer
            )
            if timer is not None:
                timer.watch(self.transport)
            if not broken:
                self.weights.lend()
            self._run()
        self.steps.check(m)

    # The program ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """All of this rank's program; back when everyone is done and the verdict is known."""
        m, transport, weights = self.m, self.transport, self.weights
        for do, what in self.program.lines:
            i = what.message.micro_batch if isinstance(what, RankMessage) else what.micro_batch
            if i is not None and i > m.last:
                continue
            if isinstance(what, RankMessage):
                if do == "receive":
                    transport.expect(what)
                    continue
                if i is None and what.message.gradient and not transport.broken:
                    self._guarded(None, weights.send, what.message)
                transport.dispatch(what)
            elif transport.broken:
                continue
            elif isinstance(what, Message):
                self._guarded(None, weights.reduce, do, what)
            elif what.kind != "R":  # the backward that needs it computes it again
                self._guarded(what, self._act, what)
        for key in list(transport.posted):  # a rank that has failed takes what comes, all the same
            self._guarded(None, transport.open_message, key)
        self._conclude()

    def _act(self, action: Action) -> None:
        """One action."""
        with use_stream(self.m.compute[action.stage]):
            if self.weights.awaited:
                self.weights.borrow(action.stage)
            self.steps.methods[action](self.steps, self.m, action.micro_batch)

    def _guarded(self, action: Action | None, do: Callable[..., object], *args: Any) -> None:
        """Do something, and fail with what it raises."""
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
        """Wait for what was sent, and hear how it went. What this rank raises goes to `failed`."""
        transport = self.transport
        for peer, works in transport.sent.items():
            for work, _ in works:
                self._guarded(None, self.world.finish, work, peer)
        if not transport.broken:
            self._guarded(None, self._settle)
        try:
            found = consensus(self.world, Failure.of(transport.error) if transport.broken else self.numbers)
        except Lost as error:
            found = str(error)
        if isinstance(found, str):
            transport.fail(None)
            self.m.failed.append(transport.error or RankError(found))
        else:
            self.numbers = found
        if not self.world.leads and self.world.lost is None:
            self._guarded(None, self.world.listen, LEADER)  # for the next call

    # Results ----------------------------------------------------------------------------------------------------------

    def outputs(self) -> tuple[Any, ...]:
        """The outputs of the batch, on all ranks. Raises Lost."""
        return tuple([self._output(at) for at in range(len(self.steps.outputs))])

    def _output(self, at: int) -> Any:
        """Output number `at`, from who makes it, on all ranks. Raises Lost."""
        if at in self.numbers:
            number, dtype = self.numbers[at]
            return torch.tensor(number, dtype=dtype, device=self.world.device)
        found = self._shared(at)
        return found.detach() if isinstance(found, Tensor) else found

    def _home(self, at: int) -> tuple[int, ...]:
        """The ranks that have output number `at`, each a slice of it."""
        maker = self.program.table.makers[at]
        return (LEADER,) if maker < 0 else self.program.ranks[maker]

    def _values(self, at: int) -> list[Any]:
        """What this rank has of an output, for each micro-batch."""
        source = self.whole if self.program.table.makers[at] < 0 else self.m
        return [getattr(micro_batch, self.steps.outputs[at][0]) for micro_batch in source]

    def _shared(self, at: int) -> Any:
        """An output, from the ranks that have it, on all of them. Raises Lost."""
        first, *others = replica_group = self._home(at)
        found = None
        if self.world.rank in others:
            values = [value.detach().cpu() if isinstance(value, Tensor) else value for value in self._values(at)]
            self.world.tell(first, pickle.dumps(values))
        elif self.world.rank == first:
            views = [self._values(at), *(pickle.loads(self.world.hear(peer)) for peer in others)]
            rows = [split_sizes(whole, len(replica_group)) for whole in self.m.rows_of]
            values = [views[k][i] for i, some in enumerate(rows) for k in range(len(some))]
            if others:
                values = [value.to(self.world.device) if isinstance(value, Tensor) else value for value in values]
            found = gather(values, *self.steps.outputs[at][1:], [size for some in rows for size in some])
        return share_value(self.world, found, first)

    def _settle(self) -> None:
        """Find the outputs of this rank that are tensors of one number, as the loss is; of several replicas each has
        its share of the number."""
        for at, (_, dim, reduce) in enumerate(self.steps.outputs):
            replica_group = self._home(at)
            if dim is not None or self.world.rank not in replica_group or not (values := self._values(at)):
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
        """The gradients of this rank, with what they are for. Raises Lost."""
        own = put_together([pair for pairs in self.m.pairs for pair in pairs], self.steps.stages)
        inputs = self._input_pairs(batch)
        return [*own, *inputs] if self.m.grad else []

    def _all_leaves(self) -> dict[str, list[list[Tensor]]]:
        """The pieces of inputs that need a gradient, with those of the other replicas in their places, without one."""
        dims, found = dict(self.steps.inputs), {}
        for name, own in self.m.leaves.items():
            found[name] = all_pieces = list[list[Tensor]]()
            for i, rows in enumerate(self.whole.sizes):
                counts = split_sizes(rows, len(self.program.replica_group))
                pieces = scatter(getattr(self.whole[i], name).detach(), dims[name], counts)
                all_pieces += [own[i] if k == self.program.replica else [piece] for k, piece in enumerate(pieces)]
        return found

    def _input_pairs(self, batch: Sequence[Any]) -> list[Pair]:
        """The inputs that need a gradient, with the sum of what the stages of all ranks have for them. Raises Lost."""
        inputs, detached = self.steps.inputs, self.steps.detached
        named = {name: value for (name, _), value in zip(inputs, batch, strict=True) if isinstance(value, Tensor)}
        wanted = {name: value for name, value in named.items() if value.requires_grad and name not in detached}
        if not wanted or not torch.is_grad_enabled():
            return []
        leaves = self._all_leaves() if self.m is not self.whole else self.m.leaves
        ours = {id(value): whole.grad for value, whole in self.steps.input_pairs(leaves, batch)}
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


def keep_nothing(m: Step, _: Any, j: int, i: int, *args: Any) -> Any:
    """A forward that no backward follows."""
    return m.stages[j].forward(*args)
