"""One model under all its settings: what each run has come to."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

import fxpipe
from fxpipe.errors import FxpipeError, InputError, PackageError, PlanError

from . import faults
from .ranks import Ranks
from .setting import Run, Setting, arguments
from .subject import PartlyWhole, Subject, load, quiet

GOOD = ("same", "fault", "own error", "refused", "option", "partly whole")
LINE = re.compile(r"\.py:\d+")


@dataclass(frozen=True)
class Outcome:
    """`what`: "same", or "fault" where one was planned and all was right afterwards; "own error" where model and pipe
    both raise it; "partly whole" where nothing can be compared with it; "refused" with a line, "option" where options
    make no sense; what must not be: "wrong", "no line", "internal"."""

    what: str
    setting: int
    run: Run
    text: str = ""

    @property
    def bad(self) -> bool:
        return self.what not in GOOD


class NotAModel(Exception):
    """The plain model fails: it is none."""


def trial(path: Path, settings: Sequence[Setting], half: bool, ranks: Ranks) -> Iterator[Outcome]:
    """Each run of each setting, in order. Raises NotAModel. What is captured is shared by pipes with the same number of
    micro-batches, as it takes longer than all else."""
    torch._dynamo.reset()
    subject = Subject(load(path), half)
    with quiet():
        try:
            for what in ("call", "eval", "step"):
                subject.plain(Run(what, 4), 2)
        except Exception as error:
            raise NotAModel(f"{type(error).__name__}: {error}") from error
        shared: dict[Any, fxpipe.Pipe] = {}
        refused: set[Any] = set()
        for index, setting in enumerate(settings):
            whole = setting.chunks == 1 and "replicas" not in setting.options  # is captured in another way
            family = (setting.chunks, whole, str(setting.options.get("reduce")), setting.step)
            if family in refused:
                continue
            if setting.runs[0].what == "ranks":
                yield from over_ranks(index, setting, path, subject, ranks)
                continue
            try:
                pipe = fxpipe.compile(subject.twin, **arguments(setting.options))
            except Exception as error:
                yield failed(index, setting.runs[0], error)
                continue
            first = shared.setdefault(family, pipe)
            cache, known = pipe._state.cache, first._state.cache
            cache.call_capture, cache.step_capture = known.call_capture, known.step_capture
            with suppress(AttributeError):
                subject.module.FUSE["left"] = 0
            for run in setting.runs:
                outcome = attempt(index, run, setting, subject, pipe)
                yield outcome
                if outcome.what in ("refused", "no line", "internal") and "PlanError" not in outcome.text[:20]:
                    refused |= {family} if outcome.run.what in ("call", "step") else set()
                    break
                if outcome.what == "option":
                    break
            pipe.close()


def attempt(index: int, run: Run, setting: Setting, subject: Subject, pipe: fxpipe.Pipe) -> Outcome:
    """One run, compared with the plain model's."""
    try:
        subject.wanted(run, setting)
    except Exception as own:
        return same_error(index, run, own, lambda: subject.run(run, caller(run, subject, pipe)))
    try:
        if run.what.startswith("faulty"):
            return fault(index, run, setting, subject, pipe)
        found = subject.differences(run, setting, pipe, subject.run(run, caller(run, subject, pipe)))
    except PartlyWhole:
        return Outcome("partly whole", index, run)
    except Exception as error:
        own = subject.raised(run)
        if type(error) is type(own) and str(error).startswith(str(own)):
            return Outcome("own error", index, run, str(own))
        return failed(index, run, error)
    return Outcome("wrong", index, run, "; ".join(found)) if found else Outcome("same", index, run)


def caller(run: Run, subject: Subject, pipe: fxpipe.Pipe) -> Callable[[Any, Any, Any], Any]:
    def call(args: Any, kwargs: Any, target: Any) -> Any:
        with torch.set_grad_enabled(run.backward):
            if not run.step:
                return pipe(*args, **kwargs)
            target = {} if target is None else {"target": target}
            return pipe.step(*args, loss_fn=subject.module.loss_fn, outputs=True, **target, **kwargs)

    return call


def fault(index: int, run: Run, setting: Setting, subject: Subject, pipe: fxpipe.Pipe) -> Outcome:
    """A run in which something fails: the error is that one, and of a step no gradient is left; then one in which
    nothing does."""
    rng = Random(run.seed)
    whole = replace(run, what=run.what.removeprefix("faulty "))
    counter = faults.Trap()
    call = caller(whole, subject, pipe)
    subject.run(whole, call)  # compiled now, if it was not
    with faults.watched(pipe, counter):
        found = subject.differences(whole, setting, pipe, subject.run(whole, call))
    if found:
        return Outcome("wrong", index, run, "; ".join(found))
    trap, fuse = faults.planned(rng, counter.calls), getattr(subject.module, "FUSE", {})
    burns = "burn()" in Path(str(subject.module.__file__)).read_text().split("class Random")[0].split("def burn")[1]
    if burns and rng.random() < 0.4:
        trap.at, fuse["left"] = 0, rng.randint(1, 2 * setting.chunks)
    raised: BaseException | None = None
    armed = bool(fuse.get("left"))
    try:
        with faults.watched(pipe, trap):
            subject.run(whole, call)
    except Exception as error:
        raised = error
    sprung = trap.sprung or (armed and not fuse["left"])
    fuse["left"] = 0
    if sprung:
        kinds = (RuntimeError,) if armed and not trap.sprung else (type(trap.error),)
        if raised is None or not isinstance(raised, kinds):
            return Outcome("internal", index, run, f"a planned {kinds[0].__name__} came as {raised!r}\n{trace(raised)}")
        gradients = [name for name, p in subject.twin.named_parameters() if p.grad is not None]
        if whole.step and gradients:
            return Outcome("wrong", index, run, f"a step that failed has left gradients of {', '.join(gradients)}")
    elif raised is not None:
        return failed(index, run, raised)
    found = subject.differences(whole, setting, pipe, subject.run(whole, call))
    if found:
        return Outcome("wrong", index, run, f"after a fault ({raised!r}): " + "; ".join(found))
    return Outcome("fault" if sprung else "same", index, run)


def same_error(index: int, run: Run, own: Exception, call: Callable[[], Any]) -> Outcome:
    """What the plain model raises, the pipe raises, too."""
    try:
        call()
    except Exception as error:
        if isinstance(error, (type(own), FxpipeError)):
            return Outcome("own error", index, run, f"{type(own).__name__}: {own}")
        return failed(index, run, error)
    return Outcome("wrong", index, run, f"the plain model raises {own!r}, and the pipe nothing")


def failed(index: int, run: Run, error: BaseException) -> Outcome:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, FxpipeError) and not isinstance(error, PackageError):  # it cannot import what it has written
        if LINE.search(str(error)):
            return Outcome("refused", index, run, text)
        return Outcome("option" if isinstance(error, (PlanError, InputError)) else "no line", index, run, text)
    return Outcome("internal", index, run, f"{text}\n{trace(error)}")


def trace(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)) if error is not None else ""


def over_ranks(index: int, setting: Setting, path: Path, subject: Subject, ranks: Ranks) -> Iterator[Outcome]:
    if subject.half:
        return
    start = time.monotonic()
    said = ranks.run(path, setting)
    for run, (what, text) in zip(setting.runs, said, strict=False):
        yield Outcome(what, index, run, text or f"{time.monotonic() - start:.1f} s")
