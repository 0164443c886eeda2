"""Whatever fails in a step, wherever: the caller gets it soon, no gradient has changed, and the next step is exact.

Faults are injected into a model whose every activation and every weight goes through `Bomb`, an autograd Function that
looks up what its thread is doing, and fails if that is what was chosen.
"""

from __future__ import annotations

import _thread
import faulthandler
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.engines.common.step import Step
from fxpipe.engines.local.thread_autotune import ThreadAutotune
from fxpipe.ir.schedule.schedule import Action
from fxpipe.runtime import worker
from fxpipe.runtime.random import seeded
from tests.campaign.faults import Trap, watched

CHUNKS = 5
SOON = 20.0  # seconds: at once, on a machine that is busy
KINDS = {
    "F": ("forward", "forward_to_recompute"),
    "R": ("recompute",),
    "B": ("backward",),
    "I": ("input_gradient",),
    "W": ("weight_gradient",),
}
generator = torch.Generator().manual_seed(1)
X = torch.randn(9, 6, dtype=torch.float64, generator=generator)
Y = torch.randn(9, 6, dtype=torch.float64, generator=generator)


pytestmark = pytest.mark.usefixtures("ctrl_c")


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """A test that hangs ends everything, and says where each thread is."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whether the workers share a step is not left to what was faster."""
    monkeypatch.setattr(ThreadAutotune, "choose", lambda pace: fuse.alone)
    yield
    fuse.alone = False


# Bombs ----------------------------------------------------------------------------------------------------------------


class OwnError(Exception):
    """One that cannot be made anew from its text."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


def interrupt() -> None:
    """Ctrl-C: the calling thread gets a KeyboardInterrupt, whoever fails."""
    _thread.interrupt_main()


def throw(make: Callable[[], BaseException]) -> None:
    raise make()


ERRORS: dict[str, tuple[type[BaseException], Callable[[], None]]] = {
    "own": (OwnError, partial(throw, partial(OwnError, 3, "boom"))),
    "value": (ValueError, partial(throw, partial(ValueError, "boom"))),
    "memory": (MemoryError, partial(throw, MemoryError)),
    "interrupt": (KeyboardInterrupt, partial(throw, KeyboardInterrupt)),
    "exit": (SystemExit, partial(throw, partial(SystemExit, 1))),
    "out of memory": (torch.OutOfMemoryError, partial(throw, partial(torch.OutOfMemoryError, "boom"))),
    "Ctrl-C": (KeyboardInterrupt, interrupt),
}


@dataclass
class Fuse:
    """What is to fail, how, and when it did. `alone`: one thread runs the step."""

    action: Action | None = None
    place: str = "stage"
    go_off: Callable[[], None] | None = None
    at: float | None = None
    alone: bool = False


fuse = Fuse()
doing = threading.local()


def reach(place: str) -> None:
    if fuse.action is not None and fuse.place == place and getattr(doing, "action", None) == fuse.action:
        fuse.action, fuse.at = None, time.perf_counter()
        assert fuse.go_off is not None
        fuse.go_off()


class Bomb(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: str) -> Tensor:
        ctx.place = place
        reach(place)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        reach(ctx.place)
        return grad.clone(), None


@torch.compiler.allow_in_graph  # as it is, not what it computes
def bomb(x: Tensor, place: str) -> Tensor:
    found: Tensor = Bomb.apply(x, place)
    return found


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(bomb(x, "stage"), bomb(self.weight, "stage"), self.bias))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(bomb(output, "loss"), target)


def noted(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def run(m: Step, j: int, i: int, *args: Any) -> Any:
        before, doing.action = getattr(doing, "action", None), Action(kind, j, i)
        try:
            return method(m, j, i, *args)
        finally:
            doing.action = before

    return run


@pytest.fixture(autouse=True)
def note_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads know what they are doing. The weight's Bomb is in the second half of backward, the rest in the first."""
    for kind, names in KINDS.items():
        for name in names:
            monkeypatch.setattr(Step, name, noted(getattr(Step, name), kind))
    fuse.action = None


# Pipes ----------------------------------------------------------------------------------------------------------------

CONFIGS = [
    ("gpipe", 4, "never"),
    ("1f1b", 4, "except_last"),
    ("1f1b", 8, "except_last"),  # two replicas of each stage
    ("zb-h1", 4, "never"),
    ("zb-h2", 4, "always"),
    ("interleaved", 2, "always"),
    ("zb-v", 2, "except_last"),
]
SOME = [pytest.param(config, marks=pytest.mark.slow if place % 3 == 0 else ()) for place, config in enumerate(CONFIGS)]


@dataclass
class Subject:
    pipe: fxpipe.Pipe
    wanted: list[Tensor]
    actions: list[Action]  # those that can fail

    def step(self) -> Tensor:
        return self.pipe.step(X, target=Y, loss_fn=squares)


@pytest.fixture(scope="module")
def subjects() -> Iterator[Callable[..., Subject]]:
    made: dict[Any, Subject] = {}

    def subject(schedule: str, devices: int, checkpoint: str) -> Subject:
        config = schedule, devices, checkpoint
        if config not in made:
            torch.manual_seed(0)
            model = nn.Sequential(*(Layer(6, 6) for _ in range(4))).double()
            squares(model(X), Y).backward()
            wanted = [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
            cut = [f"{j}" for j in (1, 2, 3)]
            options: Any = {"schedule": schedule, "checkpoint": checkpoint, "cut": cut}
            options |= {"replicas": (2, 2, 2, 2)} if devices == 8 else {}
            made[config] = Subject(fxpipe.compile(model, devices, CHUNKS, **options), wanted, [])
            made[config].pipe.step(X, target=Y, loss_fn=squares)
            made[config].actions = actions_of(made[config])
        return made[config]

    yield subject
    for one in made.values():
        one.pipe.close()


def actions_of(subject: Subject) -> list[Action]:
    """All that a step does; the first stage has no gradient to send, and so no first half of backward."""
    seen: list[Action] = []
    subject.pipe.step(X, target=Y, loss_fn=squares, timeline=True)
    for span in subject.pipe.timeline.spans:
        action = Action(span.kind, span.stage, span.micro_batch)
        if action[:2] != ("I", 0):
            seen.append(action)
    return sorted(seen)


def fail(subject: Subject, action: Action, place: str, go_off: Callable[[], None]) -> BaseException:
    """What the caller gets, in time; nothing has changed."""
    before = [None if p.grad is None else p.grad.clone() for p in subject.pipe.parameters()]
    fuse.action, fuse.place, fuse.go_off, fuse.at = action, place, go_off, None
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        subject.step()
    late = time.perf_counter()
    assert fuse.at is not None, f"{action} did not fail, but {caught.value!r}"
    assert late - fuse.at < SOON
    after = [p.grad for p in subject.pipe.parameters()]
    assert all((a is None) if b is None else torch.equal(a, b) for a, b in zip(after, before, strict=True))
    return caught.value


def check_exact(subject: Subject) -> None:
    subject.pipe.zero_grad()
    subject.step()
    for parameter, wanted in zip(subject.pipe.parameters(), subject.wanted, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-12)


# Tests ----------------------------------------------------------------------------------------------------------------


def inject(subject: Subject, dice: random.Random) -> None:
    """One random fault, with or without gradients from before."""
    if dice.random() < 0.5:
        subject.pipe.zero_grad()
    fuse.alone = dice.random() < 0.3
    name = dice.choice(list(ERRORS))
    kind, go_off = ERRORS[name]
    action = dice.choice(subject.actions)
    in_loss = action.stage == 3 and action.kind in "FRBI" and dice.random() < 0.5
    error = fail(subject, action, "loss" if in_loss else "stage", go_off)
    assert type(error) is kind, f"{error!r}"
    if name == "own":
        assert isinstance(error, OwnError)
        assert (error.code, error.args) == (3, ("boom",))
    if name != "Ctrl-C":  # that strikes the calling thread, whatever it is doing
        assert any(note.startswith(f"stage {action.stage}, micro-batch {action.micro_batch}") for note in notes(error))
    if dice.random() < 0.7:  # or another fault first
        check_exact(subject)


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize("seed", range(40))
def test_a_fault(subjects: Callable[..., Subject], seed: int) -> None:
    inject(subjects(*CONFIGS[seed % len(CONFIGS)]), random.Random(seed))


@pytest.mark.slow
def test_many_faults(subjects: Callable[..., Subject]) -> None:
    dice = random.Random(0)
    for _ in range(200):
        inject(subjects(*dice.choice(CONFIGS)), dice)
        faulthandler.dump_traceback_later(60, exit=True)


def test_every_kind_of_action_can_fail(subjects: Callable[..., Subject]) -> None:
    kinds = {action.kind for config in CONFIGS for action in subjects(*config).actions}
    assert kinds == set("FRBIW")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_note_names_the_line(subjects: Callable[..., Subject], config: Any) -> None:
    subject = subjects(*config)
    for place, line in (("stage", "F.linear(bomb"), ("loss", "F.mse_loss(bomb(output")):
        error = fail(subject, Action("F", 3, 2), place, ERRORS["value"][1])
        (note,) = notes(error)
        assert note.replace(", replica 1", "").startswith("stage 3, micro-batch 2, at test_engine_faults.py:")
        assert line in note
    check_exact(subject)


def test_the_error_lets_go_of_the_step(subjects: Callable[..., Subject]) -> None:
    """An error that is dealt with leaves no activations behind, waiting for the garbage collector."""
    subject = subjects(*CONFIGS[1])
    subject.step()
    gc.collect()
    # Held, so that tensors of models that earlier tests have captured do not become garbage just now.
    others = [one for one in gc.get_objects() if type(one) is Tensor]
    gc.disable()
    try:
        for stage in range(4):
            fuse.action, fuse.place, fuse.go_off = Action("B", stage, 1), "stage", ERRORS["value"][1]
            with suppress(ValueError):
                subject.step()
            assert fuse.action is None
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [type(one).__name__ for one in gc.garbage if type(one) is Tensor or isinstance(one, Step)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == [], f"beside {len(others)} tensors from before"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("config", SOME, ids=str)
def test_an_interrupt_at_any_time(subjects: Callable[..., Subject], config: Any) -> None:
    """Ctrl-C from outside, a little later each time: the step is done, or it is as if it had not been."""
    subject = subjects(*config)
    check_exact(subject)
    began = time.perf_counter()
    subject.step()
    takes = time.perf_counter() - began
    interrupted = 0
    for attempt in range(20):
        subject.pipe.zero_grad()
        fuse.alone = attempt % 4 == 3
        timer = threading.Timer(takes * attempt / 20, os.kill, (os.getpid(), signal.SIGINT))
        try:
            try:
                timer.start()
                subject.step()
            finally:
                timer.join()
                time.sleep(0.01)  # for an interrupt that comes after the step
        except KeyboardInterrupt:
            interrupted += 1
        found = [parameter.grad for parameter in subject.pipe.parameters()]
        assert all(grad is None for grad in found) or all(grad is not None for grad in found)
    assert interrupted > 10  # Python drops one that comes in a `__del__`
    check_exact(subject)


def test_an_interrupt_while_a_lock_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The action that draws random numbers ends before Ctrl-C is raised; else the next one would wait for ever."""
    pressed: list[bool] = []

    @contextmanager
    def pressing(seed: int, device: torch.device) -> Iterator[None]:
        with seeded(seed, device):
            if not pressed:
                pressed.append(True)
                _thread.interrupt_main()
            yield

    monkeypatch.setattr("fxpipe.runtime.random.seeded", pressing)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double()
    pipe = fxpipe.compile(model, ["cpu"], 3)
    for run in (lambda: pipe.step(X, target=Y, loss_fn=F.mse_loss), lambda: pipe(X)):
        pressed.clear()
        with pytest.raises(KeyboardInterrupt):
            run()
        assert all(parameter.grad is None for parameter in model.parameters())
        run()
        model.zero_grad()
    pipe.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("busy", [False, True], ids=["before the step", "in the step"])
@pytest.mark.parametrize("config", SOME, ids=str)
def test_a_worker_that_is_gone(
    subjects: Callable[..., Subject], config: Any, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step it is missed soon; the next step starts another."""
    subject = subjects(*config)
    check_exact(subject)
    workers = subject.pipe.scheduler._workers
    for label, gone in workers.items():
        thread = gone.thread
        if busy:
            attempt = worker.attempt

            def die(compute: Any, *args: Any, thread: Any = thread, attempt: Any = attempt) -> Any:
                if threading.current_thread() is thread:
                    raise SystemExit  # past all that would report it
                return attempt(compute, *args)

            monkeypatch.setattr(worker, "attempt", die)
            subject.pipe.zero_grad()
            began = time.perf_counter()
            with pytest.raises(RuntimeError, match=f"the worker thread of {label} is gone; the next run starts"):
                subject.step()
            assert time.perf_counter() - began < SOON
            assert all(parameter.grad is None for parameter in subject.pipe.parameters())
        else:
            gone.close()
        thread.join(60)
        assert not thread.is_alive()
        check_exact(subject)
        assert workers[label].thread.is_alive()
    assert len({one.thread for one in workers.values()}) == len(workers)


def test_a_closed_pipe_stays_closed() -> None:
    pipe = fxpipe.compile(nn.Sequential(Layer(6, 6), Layer(6, 6)).double(), 2, 2)
    pipe.step(X, target=Y, loss_fn=squares)
    scheduler = pipe.scheduler
    pipe.close()
    with pytest.raises(RuntimeError, match="it was closed"):
        scheduler.run((X, Y), 2)
    with pytest.raises(fxpipe.errors.FxpipeError, match="closed"):
        pipe.step(X, target=Y, loss_fn=squares)


# Inside of a vmap -----------------------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Mapped(nn.Module):
    """A vmap behind a function of its own, with a region inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(6, dtype=torch.float64)), nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        x = Scaled.apply(torch.tanh(x))

        def row(x: Tensor) -> Tensor:
            with torch.no_grad():
                shift = torch.amax(torch.abs(x))
            return torch.sin(x * self.scale) + shift

        return self.head(torch.vmap(row)(x))


def test_what_fails_inside_of_a_vmap_leaves_it() -> None:
    """Else the thread of that stage stays in it, where the autograd functions of recomputation fail."""
    model, twin = Mapped(), Mapped()
    twin.load_state_dict(model.state_dict())
    pipe = fxpipe.compile(twin, devices=2, chunks=2, cut=["head"])
    model(X).square().sum().backward()

    def check() -> None:
        twin.zero_grad()
        pipe(X).square().sum().backward()
        torch.testing.assert_close(twin.scale.grad, model.scale.grad)

    check()
    with watched(pipe, counter := Trap()):
        check()
    for at in range(1, counter.calls + 1):
        with watched(pipe, Trap(at, error=ValueError("boom"))), pytest.raises(ValueError, match="boom"):
            check()
        check()
    pipe.close()
