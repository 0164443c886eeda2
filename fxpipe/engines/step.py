"""Run generated stages in this process, forward and backward of a whole batch in one go, in the order of a schedule.

    cpu:0   F0  F1  F2          B0  F3  B1      B2      B3      every worker runs its own row. An action starts when
    cpu:1       F0  F1      B0  F2  B1  F3  B2      B3          the row comes to it and what it takes has arrived
    cpu:2           F0  B0  F1  B1  F2  B2  F3  B3

Autograd's graph ends at the borders of a stage: what arrives is a leaf, and its gradient is sent back to where it came
from. So backward of each stage and micro-batch is a run of autograd of its own, on the worker of the stage, and its
order is the schedule's.

Values travel as messages. To send puts one into the box of the worker that runs the target, and never waits; to receive
takes it from one's own box, and waits if it is not there. A generated scheduler is a `Stepper` with `forward_j`,
`backward_j` and so on for each stage j.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxpipe.ir.schedule import Action, parse
from fxpipe.runtime import Stage
from fxpipe.runtime.aliases import Pair, alias, commit_gradients, standing_in
from fxpipe.runtime.batchnorm import commit, discard
from fxpipe.runtime.buffers import instead, keep, scratch
from fxpipe.runtime.context import Context
from fxpipe.runtime.note import add_note
from fxpipe.runtime.offload import Offload, offload
from fxpipe.runtime.parcel import Parcel, pack, unpack
from fxpipe.runtime.saved import Saved
from fxpipe.runtime.split import Weights, input_gradient, weight_gradient
from fxpipe.runtime.stream import use_stream
from fxpipe.runtime.unshare import unshare
from fxpipe.runtime.worker import Report

from .engine import Batches, Engine

METHODS = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}
LOST = 0.25  # seconds without a message after which a worker asks whether the others are alive
HERE = Context(grad=True, inference=False, autocasts=())  # the modes that a worker is in
Method = Callable[["Stepper", "Step", int], None]
Row = tuple[tuple[Action, Method], ...]
Key = tuple[int, int, str]  # stage, micro-batch, name


class Stopped(BaseException):
    """Another worker has failed. Never leaves this file."""


class Box:
    """What has arrived for a worker."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Key, Any] | None] = SimpleQueue()
        self.arrived: dict[Key, Any] = {}

    def wait(self, check: Callable[[], None]) -> None:
        """Until one more message is there."""
        while True:
            try:
                message = self.queue.get(timeout=LOST)
            except Empty:
                check()
                continue
            if message is None:
                raise Stopped
            self.arrived[message[0]] = message[1]
            return


class Step(Batches):
    """One step under way: the micro-batches, the messages, and what forward keeps for backward.

    `kept`: by stage and micro-batch, the arguments and results of a forward run; `weights`: what is left of a backward
    whose first half is done; `pairs`: of each stage, what the model holds, and the aliases that collect its gradients;
    `fresh`: those that have none yet; `done`: the workers at the end of their rows; `failed`: the errors, in the order
    in which they happened.
    """

    def begin(self, engine: Stepper, pairs: list[list[Pair]], scale: Tensor | None) -> None:
        """Make ready: boxes, and in them the pieces of the batch."""
        self.engine, self.stages, self.pairs, self.scale = engine, engine.stages, pairs, scale
        boxes = {label: Box() for label in engine.devices}
        self.boxes = tuple([boxes[label] for label in engine.devices])
        self.kept: dict[tuple[int, int], Kept] = {}
        self.weights: dict[tuple[int, int], Weights] = {}
        self.done: list[str] = []
        self.failed: list[BaseException] = []
        self.fresh: list[list[Tensor]] = [[] for _ in self.stages]
        self.leaves: dict[str, list[list[Tensor]]] = {}
        total = max(1, sum(self.sizes))
        self.shares = tuple([size / total for size in self.sizes])
        self.hooks = self.make_hooks()
        for name, j in engine.feeds:
            self.feed(name, j)
        engine.lend(self)
        for fresh, own in zip(self.fresh, pairs, strict=True):
            fresh += [stand_in for _, stand_in in own]

    def make_hooks(self) -> list[Saved | Offload | None]:
        """What looks after the tensors that autograd keeps, for each stage: moves them to the host, or, where backward
        has two halves, lets go of those that the second has no use for."""

        def hooks(j: int, stage: Stage) -> Saved | Offload | None:
            held = [stand_in for _, stand_in in self.pairs[j]]
            if j in self.engine.offloaded:
                return offload(stage.device, held)
            return Saved(held) if self.engine.splits else None

        return [hooks(j, stage) for j, stage in enumerate(self.stages)]

    # Messages ---------------------------------------------------------------------------------------------------------

    def feed(self, name: str, j: int) -> None:
        """The pieces of an input, for stage j."""
        arrived = self.boxes[j].arrived
        for i, micro_batch in enumerate(self):
            piece = getattr(micro_batch, name)
            if isinstance(piece, Tensor):
                wanted, piece = piece.requires_grad, piece.detach()
                if piece.device != self.stages[j].device:
                    source, target = None, self.engine.streams[j, i]
                    parcel = pack(piece, source, target, self.stages[j].device, self.compute[j], False)
                    piece = unpack(parcel, self.compute[j])
                if wanted:
                    piece = piece.requires_grad_()
                    self.leaves.setdefault(name, [[] for _ in self])[i].append(piece)
            arrived[j, i, name] = piece

    def receive(self, j: int, i: int, *names: str) -> Any:
        """What has been sent to stage j for micro-batch i under these names, one by itself, else a tuple."""
        box = self.boxes[j]
        arrived, values = box.arrived, []
        for name in names:
            key = (j, i, name)
            while key not in arrived:
                box.wait(self.engine.check_alive)
            value = arrived.pop(key)
            values.append(self.open(value, j, i, name) if isinstance(value, Parcel) else value)
        return values[0] if len(values) == 1 else values

    def open(self, parcel: Parcel, j: int, i: int, name: str) -> Tensor:
        """What comes from another device, for stage j."""
        return unpack(parcel, self.compute[j])

    def send(self, j: int, i: int, target: int, name: str, value: Any) -> None:
        """A result of stage j, as a leaf of the stage that takes it."""
        grad = isinstance(value, Tensor) and value.requires_grad
        if isinstance(value, Tensor):
            value = value.detach()
        self._post(j, i, target, name, value, grad)

    def send_gradient(self, j: int, i: int, target: int, name: str, value: Any) -> None:
        """A gradient, or None where there is none, back to the stage that sent the value."""
        self._post(j, i, target, name, value, False)

    def _post(self, j: int, i: int, target: int, name: str, value: Any, grad: bool) -> None:
        """Put a message into the box of the target's worker, on the way to its device if that is another."""
        if isinstance(value, Tensor) and self.stages[j].device != self.stages[target].device:
            value = self.pack(value, j, i, target, name, grad)
        elif grad:
            value.requires_grad_()
        box = self.boxes[target]
        if box is self.boxes[j]:
            box.arrived[target, i, name] = value
        else:
            box.queue.put(((target, i, name), value))

    def pack(self, value: Tensor, j: int, i: int, target: int, name: str, grad: bool) -> Parcel:
        """A tensor of stage j on its way to the device of the target."""
        streams, there = self.engine.streams, self.stages[target].device
        return pack(value, streams[j, i], streams[target, i], there, self.compute[target], grad)

    def lend(self, j: int, tensor: Tensor) -> Tensor:
        """A tensor that another stage owns, for stage j, with a gradient of its own."""
        device = self.stages[j].device
        if not tensor.requires_grad:
            return tensor.to(device)
        lent = tensor.detach().to(device).requires_grad_()
        owner = next((held for pairs in self.pairs for held, stand_in in pairs if stand_in is tensor), tensor)
        self.pairs[j].append((owner, lent))
        return lent

    def add(self, *grads: Tensor | None) -> Tensor | None:
        """The sum of the gradients that are there, in this order, whichever came first."""
        found = [grad for grad in grads if grad is not None]
        return sum(found[1:], start=found[0]) if found else None

    def stop(self, error: BaseException) -> None:
        """Something failed: nobody starts anything more."""
        self.failed.append(error)
        for box in set(self.boxes):
            box.queue.put(None)

    # What an action computes ------------------------------------------------------------------------------------------

    def forward(self, j: int, i: int, *args: Any) -> Any:
        """Run stage j on micro-batch i; its graph is kept for backward."""
        results = self._with_graph(j, args)
        self.kept[j, i] = Kept(args, results if isinstance(results, tuple) else (results,))
        return results

    def _with_graph(self, j: int, args: tuple[Any, ...]) -> Any:
        """Run stage j, with whatever looks after what autograd keeps."""
        hooks = self.hooks[j]
        if hooks is None:
            return self.stages[j].forward(*args)
        with hooks:
            return self.stages[j].forward(*args)

    def forward_to_recompute(self, j: int, i: int, *args: Any) -> Any:
        """Run stage j on micro-batch i and keep what it takes alone; unless its backward follows at once."""
        if (j, i) in self.engine.at_once:
            return self.forward(j, i, *args)
        stage = self.stages[j]
        kept = Kept(args, None, keep(stage) if stage.rereads else {})
        with torch.no_grad():
            results = stage.forward(*args)
        self.kept[j, i] = kept
        takes, gives = self.engine.gradients[j]
        if not (any(args[place].requires_grad for place in takes) or stage.trainable()):
            return results
        several = results if isinstance(results, tuple) else (results,)
        marked = tuple([alias(y) if place in gives else y for place, y in enumerate(several)])
        return marked if isinstance(results, tuple) else marked[0]

    def recompute(self, j: int, i: int) -> None:
        """Run stage j on micro-batch i again, with its graph, and without counting twice in its buffers."""
        stage, kept = self.stages[j], self.kept[j, i]
        if kept.results is not None:
            return
        if stage.mutates:
            with instead(stage, scratch(stage, kept.buffers)):
                results = self._with_graph(j, kept.args)
        else:
            results = self._with_graph(j, kept.args)
        kept.results = results if isinstance(results, tuple) else (results,)

    def root(self, j: int, i: int, place: int) -> Tensor:
        """The gradient that backward begins with, for the loss, result number `place` of stage j."""
        results = self.kept[j, i].results
        assert results is not None
        loss = results[place].detach()
        share = 1.0 if self.engine.loss_reduce in ("sum", None) else self.shares[i]
        root = torch.full_like(loss, share)
        return root if self.scale is None else root * self.scale.to(root.device)

    def backward(self, j: int, i: int, *grads: Tensor | None) -> Any:
        """Backward of stage j and micro-batch i, given the gradients of its results: those of what it takes."""
        kept = self.kept.pop((j, i))
        roots, given = kept.roots(grads, self.engine.gradients[j][1])
        if roots:
            # torch.autograd.backward without its checks, which take as long as the rest for a small stage.
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward(roots, given, False, False, (), allow_unreachable=True, accumulate_grad=True)
        if self.fresh[j]:
            self.settle(j)
        found = [kept.args[place].grad for place in self.engine.gradients[j][0]]
        return found[0] if len(found) == 1 else found

    def input_gradient(self, j: int, i: int, *grads: Tensor | None) -> Any:
        """The half of backward that other stages wait for: the gradients of what stage j takes."""
        kept, (takes, gives) = self.kept.pop((j, i)), self.engine.gradients[j]
        assert kept.results is not None
        results = [kept.results[place] for place in gives]
        leaves = [kept.args[place] for place in takes]
        hooks = self.hooks[j]
        saved = hooks if isinstance(hooks, Saved) else None
        found, self.weights[j, i] = input_gradient(results, grads, leaves, saved)
        if self.leaves:  # inputs with a gradient
            for leaf, grad in zip(leaves, found, strict=True):
                leaf.grad = grad
        return found[0] if len(found) == 1 else found

    def weight_gradient(self, j: int, i: int) -> None:
        """The other half: the gradients of the parameters of stage j."""
        weight_gradient(self.weights.pop((j, i)))
        if self.fresh[j]:
            self.settle(j)

    def settle(self, j: int) -> None:
        """The first gradients of parameters of stage j are there: more will be added to them in place."""
        unshare(self.fresh[j])
        self.fresh[j] = [stand_in for stand_in in self.fresh[j] if stand_in.grad is None]


S = TypeVar("S", bound=Step)


class Kept:
    """What forward of one stage and micro-batch keeps: its arguments, its results with their graph (None: to be
    computed again), and what its buffers held."""

    __slots__ = ("args", "buffers", "results")

    def __init__(
        self, args: tuple[Any, ...], results: tuple[Any, ...] | None, buffers: dict[str, Tensor] | None = None
    ) -> None:
        self.args, self.results, self.buffers = args, results, buffers or {}

    def roots(
        self, grads: Sequence[Tensor | None], places: Sequence[int]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The results that have a gradient to pass on, and it."""
        results = self.results
        assert results is not None
        pairs = [
            (results[place], grad)
            for place, grad in zip(places, grads, strict=True)
            if grad is not None and results[place].requires_grad
        ]
        return tuple([y for y, _ in pairs]), tuple([grad for _, grad in pairs])


class Stepper(Engine):
    """The base of schedulers that run forward and backward.

    `schedule`: its name; `rows`: all of it, for each worker its label and then its actions; `feeds`: the inputs and the
    stages that take them; `gradients`: for each stage, the places of its arguments and of its results that have one;
    `offloaded`: the stages whose activations wait in host memory; `loss_reduce`: how the losses of micro-batches become
    that of the batch, as in `outputs`.
    """

    schedule: str = ""
    rows: str = ""
    feeds: tuple[tuple[str, int], ...] = ()
    gradients: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    offloaded: tuple[int, ...] = ()
    loss_reduce: str | None = None

    def __init__(self, stages: Sequence[Stage], whole: Stage | None = None) -> None:
        super().__init__(stages, whole)
        self._rows = {
            label: tuple((action, getattr(type(self), f"{METHODS[action.kind]}_{action.stage}")) for action in row)
            for label, row in read_rows(self.rows).items()
        }
        self.at_once = set(_followed(self._rows.values()))
        self.splits = any(action.kind == "W" for row in self._rows.values() for action, _ in row)

    def run(self, batch: Sequence[Any], chunks: int, scale: Tensor | None = None) -> tuple[Any, ...]:
        """The outputs, in order, for the inputs, in order, in at most `chunks` micro-batches; gradients, multiplied by
        `scale`, are added to those of the model and of the inputs. If anything fails, none are."""
        return self.step(batch, chunks, scale, Step)[0]

    def step(self, batch: Sequence[Any], chunks: int, scale: Tensor | None, kind: type[S]) -> tuple[tuple[Any, ...], S]:
        """`run`, by a step of some kind, which is returned too."""
        self.wake()
        for stage in self._copying:
            stage.refresh()
        m = self.scatter(batch, chunks, kind)
        with standing_in(self.stages) as pairs:
            m.begin(self, pairs, scale)
            self._run(m)
        if m.failed:
            discard(self._mutating)
            error = m.failed[0]
            m.failed.clear()
            try:
                raise error
            finally:
                del error  # else the error holds this frame, this frame the error, and both what stages keep
        commit(self._mutating)
        outputs = tuple([x.detach() if isinstance(x, Tensor) else x for x in self.gather(m)])
        commit_gradients([*(pair for pairs in m.pairs for pair in pairs), *self._inputs(m, batch)])
        return outputs, m

    def _run(self, m: Step) -> None:
        """Every worker its row; back when all are done or have stopped."""
        reports: SimpleQueue[Report] = SimpleQueue()
        *others, ours = [*self._workers, self.devices[-1]]
        home = {label: j for j, label in enumerate(self.devices)}
        begun: list[str] = []
        try:
            for label in others:
                j = home[label]
                self._workers[label].orders.put((self._work, m, (j, j), HERE, None, reports))
                begun.append(label)
            self._row(m, home[ours])
        except BaseException as error:  # Ctrl-C between two actions
            m.stop(error)
        self._await(begun, reports, m)
        if len(m.done) < len(begun):
            try:
                self.check_alive()
            except RuntimeError as error:
                m.stop(error)

    def _await(self, workers: Sequence[str], reports: SimpleQueue[Report], m: Step) -> None:
        """Until all these workers are done, or gone. Ctrl-C may come when a report is out of the queue and not yet
        here, so a report only says that there is something to see."""
        while True:
            try:
                if all(label in m.done or not self._workers[label].thread.is_alive() for label in workers):
                    return
                reports.get(timeout=LOST)
            except Empty:
                continue
            except BaseException as error:  # Ctrl-C
                m.stop(error)

    def _work(self, m: Step, j: int) -> None:
        """The row of the worker of stage j, in the caller's modes."""
        try:
            with m.context.enter():
                self._row(m, j)
        except BaseException as error:
            m.stop(error)
        finally:
            m.done.append(self.devices[j])

    def _row(self, m: Step, j: int) -> None:
        """The row of the worker of stage j."""
        row, last, failed = self._rows[self.devices[j]], m.last, m.failed
        action = None
        try:
            with use_stream(m.compute[j]):
                for action, method in row:
                    if action.micro_batch <= last:
                        if failed:
                            return
                        method(self, m, action.micro_batch)
        except Stopped:
            return
        except BaseException as error:
            if action is not None:
                add_note(error, self.stages[action.stage], action.stage, action.micro_batch)
            m.stop(error)

    def _inputs(self, m: Step, batch: Sequence[Any]) -> list[Pair]:
        """The inputs that need a gradient, with leaves that hold it."""
        pairs = []
        for value, (name, dim) in zip(batch, self.inputs, strict=True):
            if name in m.leaves:
                pieces = [_sum([leaf.grad for leaf in leaves], leaves[0]) for leaves in m.leaves[name]]
                whole = alias(value)
                found = torch.stack(pieces).sum(0) if dim is None else torch.cat(pieces, dim)
                whole.grad = found.to(value.device)
                pairs.append((value, whole))
        return pairs


def _followed(rows: Iterable[Row]) -> Iterator[tuple[int, int]]:
    """The stage and micro-batch of forwards that their backward follows without anything between."""
    for row in rows:
        for (action, _), (follower, _) in pairwise(row):
            if action.kind == "F" and follower.kind in "BI" and action[1:] == follower[1:]:
                yield action.stage, action.micro_batch


def _sum(grads: Sequence[Tensor | None], like: Tensor) -> Tensor:
    found = [grad for grad in grads if grad is not None]
    return torch.stack(found).sum(0) if found else torch.zeros_like(like)


def read_rows(text: str) -> dict[str, tuple[Action, ...]]:
    """The actions of each worker.

    >>> rows = read_rows("cpu:0  0F0 0F1\\n       0B0 0B1\\ncpu:1  1F0 1B0 1F1 1B1")
    >>> {label: [str(action) for action in row] for label, row in rows.items()}
    {'cpu:0': ['0F0', '0F1', '0B0', '0B1'], 'cpu:1': ['1F0', '1B0', '1F1', '1B1']}
    """
    words: dict[str, list[str]] = {}
    for word in text.split():
        if re.fullmatch(r"\d*[A-Z]\d+", word):
            words[next(reversed(words))].append(word)
        else:
            words[word] = []
    schedule = parse("\n".join(" ".join(row) for row in words.values()))
    return dict(zip(words, schedule.devices, strict=True))
