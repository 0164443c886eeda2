"""Training steps of one line of stages in every way that there is: the plain loop, fxpipe, and its peers.

    plain loop                    one micro-batch after another, on one thread
    no pipeline                   as many plain loops at once as there are stages, each with a part of the micro-batches
                                  and all of the model: what the machine gives where nobody waits for anybody
    torchgpipe                    forward as a pipeline of threads, then one backward; everything kept
    torch.distributed.pipelining  a process for each stage, gloo between them (see `processes`)
    bare threads                  1F1B by hand: a thread for each stage, queues between them, and nothing else
    fxpipe                        `pipe.step`, by schedule, with generated backward; "autograd": without; "compiled":
                                  stages by Inductor; "replicas": two of each stage, each with half of the rows

Each is a `Trainer`, on a model and batch of its own that are equal to all others': a step sets the gradients to None,
and computes the loss and the gradients of the whole batch. `check` says whether they agree; time is for those that do.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from benchmarks.processes import SCHEDULES, pipelining
from benchmarks.workload import Trainer, Workload

PLAIN = "plain loop"
LOOPS = "no pipeline"
TORCHGPIPE = "torchgpipe"
PIPELINING = "torch.distributed.pipelining"
BARE = "bare threads, 1F1B"
FXPIPE_SCHEDULES = ("gpipe", "1f1b", "1f1b-late", "zb-h1", "zb-h2")
OTHER_SCHEDULES = ("1f1b", "zb-h1")  # also by autograd, and with replicas
COMPILED_SCHEDULES = ("1f1b", "zb-h1", "zb-h2")
Feed = Sequence[tuple[Tensor, Tensor]]  # a sample and its target, or a micro-batch of both


def trainer(model: nn.Module, step: Callable[[], Tensor], close: Callable[[], object] = lambda: None) -> Trainer:
    """A trainer whose model is in this process; `step` returns the loss."""

    def run(steps: int) -> float:
        loss = torch.zeros(())
        for _ in range(steps):
            model.zero_grad()
            loss = step()
        return loss.item()

    return Trainer(run, lambda: [p.grad for p in model.parameters() if p.grad is not None], close)


def trainers(work: Workload) -> dict[str, Callable[[], Trainer]]:
    """A maker for each trainer that is installed."""
    found: dict[str, Callable[[], Trainer]] = {PLAIN: partial(plain, work), LOOPS: partial(plain_loops, work)}
    if importlib.util.find_spec("torchgpipe"):
        found[TORCHGPIPE] = partial(torchgpipe, work)
    if torch.distributed.is_available():
        found |= {f"{PIPELINING}, {name}": partial(pipelining, work, name) for name in SCHEDULES}
    found[BARE] = partial(bare_threads, work)
    found |= {f"fxpipe, {name}": partial(fxpipe_step, work, name) for name in FXPIPE_SCHEDULES}
    found |= {f"fxpipe, {name}, autograd": partial(fxpipe_step, work, name, "autograd") for name in OTHER_SCHEDULES}
    if work.chunks % 2 == 0:  # so that a task has as many rows as one of the plain loop
        found |= {f"fxpipe, {name}, replicas": partial(fxpipe_step, work, name, replicas=2) for name in OTHER_SCHEDULES}
    return found


def compiled_trainers(work: Workload) -> dict[str, Callable[[], Trainer]]:
    """A maker for each trainer whose stages go through torch.compile, which takes its time."""
    names = {f"fxpipe, {name}, compiled": name for name in COMPILED_SCHEDULES}
    return {label: partial(fxpipe_step, work, name, compiled=True) for label, name in names.items()}


def plain(work: Workload) -> Trainer:
    model = work.model()
    pieces = micro_batches(work)
    return trainer(model, lambda: loop(model, pieces, work.chunks))


def loop(model: nn.Module, pieces: Feed, chunks: int) -> Tensor:
    """Forward and backward of some of so many micro-batches."""
    losses = []
    for x, y in pieces:
        loss = F.mse_loss(model(x), y) / chunks
        loss.backward()
        losses.append(loss.detach())
    return sum_of(losses)


def plain_loops(work: Workload) -> Trainer:
    models = nn.ModuleList(work.model() for _ in range(work.stages))
    pieces = micro_batches(work)
    parts = [pieces[k :: work.stages] for k in range(work.stages)]
    pool = ThreadPoolExecutor(work.stages)

    def step() -> Tensor:
        return sum_of(list(pool.map(loop, models, parts, [work.chunks] * work.stages)))

    def gradients() -> list[Tensor]:
        copies = zip(*(model.parameters() for model in models), strict=True)
        return [sum_of([p.grad for p in copy if p.grad is not None]) for copy in copies]

    one = trainer(models, step, pool.shutdown)
    return Trainer(one.run, gradients, one.close)


def micro_batches(work: Workload) -> Feed:
    x, y = work.batch()
    return list(zip(x.split(work.rows), y.split(work.rows), strict=True))


def sum_of(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(losses)).sum(0)


def torchgpipe(work: Workload) -> Trainer:
    from torchgpipe import GPipe

    model = work.model()
    x, y = work.batch()
    pipe = GPipe(model, [1] * work.stages, devices=["cpu"] * work.stages, chunks=work.chunks, checkpoint="never")

    def step() -> Tensor:
        loss = F.mse_loss(pipe(x), y)
        loss.backward()
        return loss.detach()

    return trainer(model, step)


def bare_threads(work: Workload) -> Trainer:
    """The last stage runs on the calling thread."""
    model = work.model()
    pieces = micro_batches(work)
    there = [SimpleQueue[Tensor]() for _ in range(work.stages)]
    back = [SimpleQueue[Tensor]() for _ in range(work.stages)]
    pool = ThreadPoolExecutor(max(1, work.stages - 1))

    def row(s: int) -> list[Tensor]:
        """All of a step that stage s does: n - s forwards, then a backward and a forward in turns."""
        last = s + 1 == work.stages
        kept: deque[tuple[Tensor, Tensor]] = deque()
        losses = []

        def forward(i: int) -> None:
            x, target = pieces[i]
            x = there[s].get().requires_grad_() if s else x
            y = model[s](x)
            if last:
                y = F.mse_loss(y, target) / work.chunks
                losses.append(y.detach())
            else:
                there[s + 1].put(y.detach())
            kept.append((x, y))

        def backward() -> None:
            x, y = kept.popleft()
            y.backward(None if last else back[s].get())
            if x.grad is not None:
                back[s - 1].put(x.grad)

        ahead = min(work.stages - s, work.chunks)
        for i in range(ahead):
            forward(i)
        for i in range(ahead, work.chunks):
            backward()
            forward(i)
        for _ in range(ahead):
            backward()
        return losses

    def step() -> Tensor:
        others = [pool.submit(row, s) for s in range(work.stages - 1)]
        losses = row(work.stages - 1)
        for other in others:
            other.result()
        return sum_of(losses)

    return trainer(model, step, pool.shutdown)


def fxpipe_step(
    work: Workload, schedule: str, backward: str = "code", compiled: bool = False, replicas: int = 1
) -> Trainer:
    model = work.model()
    x, y = work.batch()
    pipe = fxpipe.compile(
        model,
        devices=[f"cpu:{s}" for s in range(work.stages * replicas)],
        chunks=work.chunks // replicas,
        replicas=[replicas] * work.stages,
        checkpoint="never",
        cut=[str(s) for s in range(1, work.stages)],
        schedule=schedule,
        backward=backward,
        compile_stages=compiled,
    )
    return trainer(model, lambda: pipe.step(x, target=y, loss_fn=F.mse_loss), pipe.close)


def check(found: Mapping[str, Trainer], tolerance: float = 1e-5) -> None:
    """Raise ValueError if a trainer's loss or gradients are not the first one's, to the accuracy of single floats."""
    (first, expected), *others = ((name, outcome(one)) for name, one in found.items())
    for name, tensors in others:
        if len(tensors) != len(expected):
            raise ValueError(f"{name} has {len(tensors) - 1} gradients, {first} {len(expected) - 1}")
        for ours, theirs in zip(tensors, expected, strict=True):
            off = (ours - theirs).abs().max() / theirs.abs().max()
            if not off <= tolerance:
                raise ValueError(f"{name} does not compute what {first} does: off by {off:.1e}")


def outcome(one: Trainer) -> list[Tensor]:
    return [torch.tensor(one.run(1)), *one.gradients()]
