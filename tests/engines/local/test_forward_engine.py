"""The local engine with a scheduler by hand, in the shape of the generated ones.

stage 0 ── x1 ──▶ stage 1 ── x2 ──▶ stage 2 ── x3 ──▶       xj arrives at stage j
   └────────────── skip ──────────────▲
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.engines.common.scheduler_base import MiniBatch
from fxpipe.engines.local.forward_engine import Batches, Pipeline, clock
from fxpipe.runtime import Draws, Stage, checkpoint, fork, join
from fxpipe.runtime.autograd.activation_checkpoint import Task

CPU = torch.device("cpu")
MODES = ["never", "except_last", "always"]
LOG: list[str] = []


class Log(torch.autograd.Function):
    """Writes down that the backward of a task has come to the task's beginning."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        LOG.append(ctx.name)
        return grad, None


class Net(Stage):
    """A linear layer that counts its runs in a buffer. `hook` may do anything to the input."""

    states = ("fc.weight", "count")
    mutates = ("count",)
    index = 0
    hook: Callable[[Tensor, int], Tensor] | None = None

    def forward(self, x: Tensor, i: int) -> Tensor:
        self.count.add_(1)
        # net.py:7  fc  h = self.fc(x)
        h = x @ self.fc.weight
        if self.hook is not None:
            # net.py:8  h = hook(h)
            h = self.hook(h, i)
        return torch.tanh(h)


class First(Net):
    def forward(self, ids: Tensor, i: int) -> tuple[Tensor, Tensor]:
        h = super().forward(F.embedding(ids, self.fc.weight), i)
        return h, h * 2


class Last(Net):
    def forward(self, x: Tensor, skip: Tensor, i: int) -> Tensor:
        return super().forward(x + skip, i)


class Scheduler(Pipeline):
    devices: tuple[str, ...] = ("cpu:0", "cpu:1", "cpu:2")
    inputs = (("ids", 0),)
    outputs = (("x3", 0, None),)
    random = True
    mode = "never"

    def again(self, m: Batches, i: int) -> bool:
        return m.grad and (self.mode == "always" or (self.mode == "except_last" and i < m.last))

    def compute_0(self, m: Batches, i: int) -> None:
        stage = self.stages[0]
        if self.again(m, i):
            m[i].x1, m[i].skip, m.after[0] = checkpoint(stage, (0, i), m.context, m.after[0], m[i].ids, i)
        else:
            m[i].x1, m[i].skip = stage.forward(m[i].ids, i)
            m[i].x1, m[i].skip = join(m.after[0], m[i].x1, m[i].skip)
        del m[i].ids

    def ready_1(self, m: Batches, i: int) -> None:
        if m.grad and i > 0 and self.mode == "never":
            m[i - 1].x2, token = fork(m[i - 1].x2)
            m[i].x1 = join(token, m[i].x1)
        elif m.grad and not self.again(m, i):
            m[i].x1 = join(m.after[1], m[i].x1)

    def compute_1(self, m: Batches, i: int) -> None:
        if self.again(m, i):
            m[i].x2, m.after[1] = checkpoint(self.stages[1], (1, i), m.context, m.after[1], m[i].x1, i)
        else:
            m[i].x2 = self.stages[1].forward(m[i].x1, i)
        del m[i].x1

    def ready_2(self, m: Batches, i: int) -> None:
        if m.grad and i > 0 and self.mode == "never":
            m[i - 1].x3, token = fork(m[i - 1].x3)
            m[i].x2, m[i].skip = join(token, m[i].x2, m[i].skip)
        elif m.grad and not self.again(m, i):
            m[i].x2, m[i].skip = join(m.after[2], m[i].x2, m[i].skip)

    def compute_2(self, m: Batches, i: int) -> None:
        if self.again(m, i):
            m[i].x3, m.after[2] = checkpoint(self.stages[2], (2, i), m.context, m.after[2], m[i].x2, m[i].skip, i)
        else:
            m[i].x3 = self.stages[2].forward(m[i].x2, m[i].skip, i)
        del m[i].x2, m[i].skip

    def gather(self, m: Batches) -> tuple[Any, ...]:
        if self.mode == "always":
            for after in m.after:
                m[m.last].x3 = join(after, m[m.last].x3)
        return super().gather(m)


def make_stage(kind: type[Net], index: int) -> Net:
    torch.manual_seed(index)
    stage = kind({"fc.weight": nn.Parameter(torch.randn(5, 5).double()), "count": torch.zeros(())}, {}, CPU)
    stage.index = index
    return stage


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Scheduler]]:
    """A pipe for a checkpoint mode and worker labels; closed at the end."""
    made: list[Pipeline] = []

    def pipe(mode: str = "never", devices: tuple[str, ...] = ("cpu:0", "cpu:1", "cpu:2")) -> Scheduler:
        kind = type("Made", (Scheduler,), {"mode": mode, "devices": devices})
        made.append(kind([make_stage(kind, j) for j, kind in enumerate((First, Net, Last))]))
        return made[-1]

    yield pipe
    for one in made:
        one.close()
    del LOG[:]


def plain(pipe: Pipeline, ids: Tensor, chunks: int) -> Tensor:
    outputs = []
    for piece in ids.tensor_split(min(chunks, len(ids))):
        x, skip = pipe.stages[0].forward(piece, 0)
        outputs.append(pipe.stages[2].forward(pipe.stages[1].forward(x, 0), skip, 0))
    return torch.cat(outputs)


def weights(pipe: Pipeline) -> list[Tensor]:
    return [stage.fc.weight for stage in pipe.stages]


def ids(batch: int = 7) -> Tensor:
    return torch.arange(batch) % 5


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [("cpu:0", "cpu:1", "cpu:2"), ("cpu:0", "cpu:1", "cpu:0"), ("cpu:0",) * 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 3, 9])
def test_outputs_and_gradients(
    make: Callable[..., Scheduler], mode: str, devices: tuple[str, ...], chunks: int
) -> None:
    pipe = make(mode, devices)
    expected = plain(pipe, ids(), chunks)
    (y,) = pipe.run((ids(),), chunks)
    torch.testing.assert_close(y, expected)
    loss, wanted = y.square().sum(), expected.square().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, weights(pipe)), torch.autograd.grad(wanted, weights(pipe)))
    assert all(weight.grad is None for weight in weights(pipe))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_accumulate_over_calls(make: Callable[..., Scheduler], mode: str) -> None:
    pipe = make(mode)
    first, second = pipe.run((ids(),), 3)[0], pipe.run((ids(4),), 2)[0]
    (first.sum() + second.sum()).backward()
    got = [weight.grad.clone() for weight in weights(pipe)]
    for weight in weights(pipe):
        weight.grad = None
    (plain(pipe, ids(), 3).sum() + plain(pipe, ids(4), 2).sum()).backward()
    torch.testing.assert_close(got, [weight.grad for weight in weights(pipe)])


@pytest.mark.parametrize("mode", MODES)
def test_buffers_change_once_per_micro_batch(make: Callable[..., Scheduler], mode: str) -> None:
    pipe = make(mode)
    pipe.run((ids(),), 3)[0].sum().backward()
    assert [stage.count.item() for stage in pipe.stages] == [3, 3, 3]


def test_inputs_without_a_common_batch_size(make: Callable[..., Scheduler]) -> None:
    pipe = make()
    pipe.inputs = (("ids", 0), ("more", 1))
    with pytest.raises(ValueError, match=r"common batch size, but \[2, 3\]"):
        pipe.run((torch.zeros(2), torch.zeros(1, 3)), 2)


# The order of backward ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [("cpu:0", "cpu:1", "cpu:2"), ("cpu:0", "cpu:0", "cpu:1")])
@pytest.mark.parametrize("mode", MODES)
def test_later_micro_batches_go_first_on_each_stage(
    make: Callable[..., Scheduler], mode: str, devices: tuple[str, ...]
) -> None:
    pipe = make(mode, devices)
    for stage in pipe.stages:
        stage.hook = lambda h, i, j=stage.index: Log.apply(h, f"B({i}, {j})")
    for _ in range(3):  # the first run's threads have made no functions yet
        (y,) = pipe.run((ids(8),), 4)
        del LOG[:]
        y.sum().backward()
        for j in range(3):
            assert [name for name in LOG if name.endswith(f"{j})")] == [f"B({i}, {j})" for i in (3, 2, 1, 0)]
        for i in range(4):
            assert [name for name in LOG if name.startswith(f"B({i}")] == [f"B({i}, {j})" for j in (2, 1, 0)]


@pytest.mark.parametrize("mode", ["except_last", "always"])
def test_every_recomputation_starts_before_its_backward_and_once(
    make: Callable[..., Scheduler], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Recompute(i, j) runs F(i, j) again, not Checkpoint(i, j) when its gradient is there; and after B(i + 1, j).
    def recompute(task: Task, saved: tuple[Tensor, ...]) -> Any:
        j, i = task.where
        early = sys._getframe(1).f_code.co_qualname == "Recompute.backward"
        LOG.append(f"F({i}, {j}) again" if early else f"F({i}, {j}) late")
        return original(task, saved)

    original = Task.recompute
    monkeypatch.setattr(Task, "recompute", recompute)
    pipe = make(mode)
    for stage in pipe.stages:
        stage.hook = lambda h, i, j=stage.index: Log.apply(h, f"B({i}, {j})")
    m = 4
    (y,) = pipe.run((ids(8),), m)
    y.sum().backward()
    again = [name for name in LOG if name.startswith("F")]
    assert sorted(again) == [f"F({i}, {j}) again" for i in range(m if mode == "always" else m - 1) for j in range(3)]
    for i in range(m - 1):
        for j in range(3):
            order = [LOG.index(name) for name in (f"B({i + 1}, {j})", f"F({i}, {j}) again", f"B({i}, {j})")]
            assert order == sorted(order)


def test_clock() -> None:
    assert list(clock(3, 3)) == [
        ((0, 0),),
        ((1, 0), (0, 1)),
        ((2, 0), (1, 1), (0, 2)),
        ((2, 1), (1, 2)),
        ((2, 2),),
    ]


# Modes of the caller --------------------------------------------------------------------------------------------------


def test_grad_inference_and_autocast_travel(make: Callable[..., Scheduler]) -> None:
    pipe, seen = make(), []

    def look(h: Tensor, i: int) -> Tensor:
        seen.append((
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"), threading.current_thread().name,
        ))  # fmt: skip
        return h

    for stage in pipe.stages:
        stage.hook = look

    def modes() -> set[Any]:
        del seen[:]
        pipe.run((ids(),), 3)
        assert len({name for *_, name in seen}) == 3  # a worker for each device, the caller being the last's
        return {tuple(rest) for *rest, _ in seen}

    assert modes() == {(True, False, False)}
    with torch.no_grad():
        assert modes() == {(False, False, False)}
    with torch.inference_mode():
        assert modes() == {(False, True, False)}
    with torch.autocast("cpu", torch.bfloat16):
        assert modes() == {(True, False, torch.bfloat16)}
    assert modes() == {(True, False, False)}


@pytest.mark.parametrize("mode", MODES)
def test_without_grad_nothing_is_drawn(make: Callable[..., Scheduler], mode: str) -> None:
    pipe = make(mode)
    with torch.no_grad():
        (y,) = pipe.run((ids(),), 3)
    assert y.grad_fn is None
    with torch.inference_mode():
        assert pipe.run((ids(),), 3)[0].is_inference()


# Errors ---------------------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


@pytest.mark.parametrize("devices", [("cpu:0", "cpu:1", "cpu:2"), ("cpu:0",) * 3])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_is_the_original_with_a_note(
    make: Callable[..., Scheduler], failing: int, devices: tuple[str, ...]
) -> None:
    pipe, error = make("never", devices), Boom("from the user")

    def fail(h: Tensor, i: int) -> Tensor:
        if i == 1:
            raise error
        return h

    pipe.stages[failing].hook = fail
    with pytest.raises(Boom) as caught:
        pipe.run((ids(),), 3)
    assert caught.value is error
    assert caught.value.__notes__[0].startswith(f"stage {failing}, micro-batch 1")
    assert any(entry.name == "fail" for entry in caught.traceback)
    pipe.stages[failing].hook = None
    torch.testing.assert_close(pipe.run((ids(),), 3)[0], plain(pipe, ids(), 3))


def test_the_note_names_the_users_line(make: Callable[..., Scheduler]) -> None:
    pipe = make()
    pipe.stages[1].hook = lambda h, i: 1 / 0
    with pytest.raises(ZeroDivisionError) as caught:
        pipe.run((ids(),), 3)
    assert caught.value.__notes__ == ["stage 1, micro-batch 0, at net.py:8  h = hook(h)"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_is_gone_is_missed_soon(make: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make()
    pipe.run((ids(),), 3)
    with monkeypatch.context() as patch:

        def die(*args: Any) -> Any:
            raise SystemExit  # past all that would report it

        patch.setattr("fxpipe.runtime.worker.attempt", die)
        with pytest.raises(RuntimeError, match="is gone; the next run starts another"):
            pipe.run((ids(),), 3)
    torch.testing.assert_close(pipe.run((ids(),), 3)[0], plain(pipe, ids(), 3))


def test_the_lowest_stage_of_a_tick_wins_and_no_tick_follows(make: Callable[..., Scheduler]) -> None:
    pipe, ran = make(), []

    def fail(h: Tensor, i: int, j: int) -> Tensor:
        ran.append((i, j))
        if i + j == 2:
            raise Boom(j)
        return h

    for stage in pipe.stages:
        stage.hook = lambda h, i, j=stage.index: fail(h, i, j)
    with pytest.raises(Boom, match="0"):
        pipe.run((ids(),), 7)
    assert sorted(ran) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]


def test_an_error_in_recomputation(make: Callable[..., Scheduler]) -> None:
    pipe = make("always")
    (y,) = pipe.run((ids(),), 3)
    pipe.stages[1].hook = lambda h, i: 1 / 0
    with pytest.raises(ZeroDivisionError) as caught:
        y.sum().backward()
    assert caught.value.__notes__[0].startswith("stage 1, micro-batch 2, at net.py:8")
    pipe.stages[1].hook = None
    pipe.run((ids(),), 3)[0].sum().backward()


# Threads and memory ---------------------------------------------------------------------------------------------------


def test_threads_stay_and_end_with_the_pipe() -> None:
    before = set(threading.enumerate())
    pipe = Scheduler([make_stage(kind, j) for j, kind in enumerate((First, Net, Last))])
    for _ in range(200):
        pipe.run((ids(),), 3)
    workers = set(threading.enumerate()) - before
    assert sorted(thread.name for thread in workers) == ["fxpipe cpu:0", "fxpipe cpu:1"]
    gc.disable()  # nothing of a pipe is in a cycle
    try:
        del pipe
        for thread in workers:
            thread.join(60)
        assert not any(thread.is_alive() for thread in workers)
    finally:
        gc.enable()


def test_stages_of_a_tick_run_at_once(make: Callable[..., Scheduler]) -> None:
    pipe, meeting = make(), threading.Barrier(2)

    def meet(h: Tensor, i: int, j: int) -> Tensor:
        if (i, j) in ((1, 0), (0, 1)):
            meeting.wait(timeout=60)  # each waits for the other: one after the other would not do
        return h

    for stage in pipe.stages:
        stage.hook = lambda h, i, j=stage.index: meet(h, i, j)
    pipe.run((ids(),), 3)


def test_a_device_is_one_worker_wherever_its_stages_are(make: Callable[..., Scheduler]) -> None:
    """Stages 0 and 2 are never at work at once, and within a tick the earlier stage goes first."""
    pipe, seen = make(devices=("cpu:0", "cpu:1", "cpu:0")), list[tuple[str, int, int]]()

    def note(h: Tensor, i: int, j: int) -> Tensor:
        seen.append((threading.current_thread().name, j, i))
        return h

    for stage in pipe.stages:
        stage.hook = lambda h, i, j=stage.index: note(h, i, j)
    pipe.run((ids(),), 4)
    workers = {j: {name for name, stage, _ in seen if stage == j} for j in range(3)}
    assert workers[0] == workers[2] != workers[1]
    assert [f"{j}F{i}" for _, j, i in seen if j != 1] == ["0F0", "0F1", "0F2", "2F0", "0F3", "2F1", "2F2", "2F3"]


def test_a_closed_pipe_says_so(make: Callable[..., Scheduler]) -> None:
    pipe = make()
    pipe.close()
    with pytest.raises(RuntimeError, match="closed"):
        pipe.run((ids(),), 3)


def test_two_pipes_and_two_callers(make: Callable[..., Scheduler]) -> None:
    pipes = [make("except_last"), make("never")]
    expected = plain(pipes[0], ids(), 3)
    results: list[Tensor] = []

    def call(pipe: Pipeline) -> None:
        for _ in range(20):
            results.append(pipe.run((ids(),), 3)[0])
            results[-1].sum().backward()

    threads = [threading.Thread(target=call, args=(pipe,)) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    for y in results:
        torch.testing.assert_close(y, expected)


def test_a_skip_is_freed_at_its_last_use(make: Callable[..., Scheduler]) -> None:
    pipe = make()
    skips: list[Any] = []
    alive: list[int] = []

    class Watched(First):
        def forward(self, ids: Tensor, i: int) -> tuple[Tensor, Tensor]:
            h, skip = super().forward(ids, i)
            skips.append(weakref.ref(skip))
            return h, skip

    pipe.stages = (make_stage(Watched, 0), *pipe.stages[1:])
    pipe.stages[2].hook = lambda h, i: (alive.append(sum(skip() is not None for skip in skips)), h)[1]
    gc.disable()
    try:
        with torch.no_grad():
            pipe.run((ids(8),), 8)
    finally:
        gc.enable()
    # in tick t, stage 2 has micro-batch t - 2, stage 0 may have made that of t: never more than three are there
    assert len(skips) == 8
    assert max(alive) <= 3
    assert all(skip() is None for skip in skips)


def test_nothing_of_a_run_stays(make: Callable[..., Scheduler]) -> None:
    pipe = make("except_last")
    made: list[Any] = []
    pipe.stages[0].hook = lambda h, i: (made.append(weakref.ref(h)), h)[1]
    gc.disable()
    try:
        (y,) = pipe.run((ids(),), 3)
        y.sum().backward()
        del y
        assert len(made) > 3
        assert all(h() is None for h in made)
    finally:
        gc.enable()


# Random numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [("cpu:0", "cpu:1", "cpu:2"), ("cpu:0",) * 3])
def test_dropout_is_the_same_for_all_modes_and_devices(
    make: Callable[..., Scheduler], devices: tuple[str, ...]
) -> None:
    results = []
    for mode in MODES:
        pipe = make(mode, devices)
        seeds: list[int] = []
        scatter = pipe.scatter

        def noted(batch: Any, chunks: int, scatter: Any = scatter, seeds: list[int] = seeds) -> MiniBatch:
            found: MiniBatch = scatter(batch, chunks)
            seeds.append(found.seed)
            return found

        pipe.scatter = noted
        for stage in pipe.stages:

            def drop(h: Tensor, i: int, j: int = stage.index, seeds: list[int] = seeds) -> Tensor:
                with Draws(seeds[-1], i, CPU)(j):
                    return F.dropout(h, 0.5, True)

            stage.hook = drop
        torch.manual_seed(7)
        (y,) = pipe.run((ids(),), 3)
        torch.rand(5)
        results.append((y, torch.autograd.grad(y.sum(), weights(pipe)), torch.initial_seed()))
    for other in results[1:]:
        torch.testing.assert_close(other[:2], results[0][:2])


def test_no_seed_is_drawn_without_random_ops(make: Callable[..., Scheduler]) -> None:
    pipe = make()
    pipe.random = False
    before = torch.get_rng_state()
    pipe.run((ids(),), 3)
    assert torch.equal(torch.get_rng_state(), before)
