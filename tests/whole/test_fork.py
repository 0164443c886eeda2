"""A process with pipes that forks: the parent's files are its own, the child's pipes work or say why they do not."""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import FxpipeError
from fxpipe.pipe.interpreter.fork_lock import Lock
from fxpipe.pipe.saved.temporary_folder import Folder
from tests.helpers.marks import mostly_slow

ROOT = Path(__file__).parents[2]
X = torch.randn(4, 6)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def forked(function: Callable[[], object], seconds: float = 60) -> int:
    """The exit code of a forked child that runs the function: 0 if it returned. A child that hangs is ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    timer = threading.Timer(seconds, os.kill, (child, 9))
    timer.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        timer.cancel()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))


def pipe_of(net: nn.Module, **options: object) -> fxpipe.Pipe:
    pipe = fxpipe.compile(net, devices=2, chunks=2, **options)
    pipe(X)
    return pipe


@pytest.mark.parametrize("end", mostly_slow(["collects", "closes"], lambda end: end == "closes"))
def test_a_child_leaves_the_parents_files_alone(end: str) -> None:
    pipes = [pipe_of(model())]
    file = Path(inspect.getfile(type(pipes[0].stages[0])))

    def child() -> None:
        if end == "closes":
            pipes[0].close()
        pipes.clear()
        gc.collect()

    assert forked(child) == 0
    assert file.is_file()
    pipes[0].close()
    assert not file.exists()


@pytest.mark.slow
def test_a_child_that_ends_leaves_them_too() -> None:
    """With all that Python does at the end of a process; the parent, at its own, removes them."""
    script = "\n".join((
        "import os, sys",
        "from fxpipe.pipe.saved.temporary_folder import Folder",
        "folder = Folder()",
        "path = folder.new()",
        "path.mkdir()",
        "child = os.fork()",
        "if child == 0:",
        "    sys.exit(0)",
        "os.waitpid(child, 0)",
        "print(path, path.is_dir())",
    ))  # fmt: skip
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    path, there = run.stdout.split()
    assert there == "True"
    assert not Path(path).exists()


def test_a_childs_files_are_its_own() -> None:
    folder = Folder()
    first = folder.new()

    def child() -> None:
        second = folder.new()
        assert second.parent != first.parent
        folder.remove()
        assert not second.parent.exists()
        assert first.parent.exists()

    assert forked(child) == 0
    assert first.parent.exists()
    folder.remove()
    assert not first.parent.exists()


def test_a_pipe_works_in_a_child() -> None:
    """Calls, steps, kinds that are new, in threads that are new. The parent is a new process: in one that has had the
    device for tests, autograd has threads, and torch itself refuses a backward in a child."""
    code = f"from {__name__} import works_in_a_child; works_in_a_child()"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def works_in_a_child() -> None:
    net = model().eval()
    pipe = pipe_of(net)
    wanted = net(X).detach()

    def child() -> None:
        torch.testing.assert_close(pipe(X), wanted)
        net.train()
        pipe.step(X, target=torch.zeros(4, 6), loss_fn=nn.functional.mse_loss)
        assert all(x.grad is not None for x in net.parameters())

    assert forked(child) == 0
    assert all(x.grad is None for x in net.parameters())
    torch.testing.assert_close(pipe(X), wanted)


class Waits(nn.Module):
    """Kept whole, it waits where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.pause = Pause()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pause(self.first(x)))


class Pause(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        PAUSE()
        return x


def PAUSE() -> object:
    """Replaced by the test."""


@pytest.mark.filterwarnings("ignore:.*is kept whole:UserWarning")
def test_a_child_of_a_pipe_in_use_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread runs the pipe when this one forks: no thread would ever give back its lock."""
    pipe = pipe_of(Waits())
    there, go = threading.Event(), threading.Event()
    monkeypatch.setitem(globals(), "PAUSE", lambda: (there.set(), go.wait(60)))
    thread = threading.Thread(target=pipe, args=(X,))
    thread.start()
    assert there.wait(60)

    def child() -> None:
        with pytest.raises(FxpipeError, match="was forked while another thread used this pipe"):
            pipe(X)
        pipe_of(model())  # others are not touched

    try:
        assert forked(child) == 0
    finally:
        go.set()
        thread.join()
    pipe(X)


def test_a_lock_that_this_thread_has_is_kept() -> None:
    lock = Lock()

    def child() -> None:
        with lock:
            pass

    with lock:
        assert forked(child) == 0


@pytest.mark.slow
def test_a_collected_pipe_is_silent() -> None:
    """It closes itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unraised: list[object] = []
        hook, sys.unraisablehook = sys.unraisablehook, unraised.append
        try:
            pipe = pipe_of(model())
            folder = pipe._state.cache.folder.name
            assert folder.is_dir()
            del pipe
            gc.collect()
        finally:
            sys.unraisablehook = hook
    assert not unraised
    assert not folder.exists()
