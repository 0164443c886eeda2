"""A model that fails, made smaller, and as a script that shows it: fewer runs, fewer pieces, plainer outputs.

What still fails in the same way is kept. Each attempt is a trial in a process of its own, so that one that hangs is one
that fails by hanging.
"""

from __future__ import annotations

import faulthandler
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from pprint import pformat

from . import one, recipe
from .one import Subject
from .trial import Outcome

SECONDS = 150  # that shrinking may take
PATIENCE = 60  # seconds for one attempt


def smaller(subject: Subject, bad: Outcome) -> Subject:
    """A subject that fails as this one does, with as little as was found in time."""
    end = time.monotonic() + SECONDS
    with Attempts() as attempts:
        alone = replace(subject, settings=(replace(subject.settings[bad.setting], runs=(bad.run,)),))
        if attempts.fails(alone, bad.what):
            subject = alone
        elif not attempts.fails(subject, bad.what):
            return subject
        again = True
        while again and time.monotonic() < end:
            again = False
            for candidate in candidates(subject):
                if time.monotonic() > end:
                    break
                if attempts.fails(candidate, bad.what):
                    subject, again = candidate, True
                    break
    return subject


def candidates(subject: Subject) -> Iterator[Subject]:
    """The subject with something less: half of the pieces, a setting, a piece, an option."""
    pieces = subject.recipe.pieces
    for part in (len(pieces) // 2, len(pieces) // 4):
        for start in range(0, len(pieces) - part + 1, part) if part > 1 else ():
            yield replace(subject, recipe=replace(subject.recipe, pieces=pieces[:start] + pieces[start + part :]))
    if len(subject.settings) > 1:
        for index in range(len(subject.settings)):
            yield replace(subject, settings=subject.settings[:index] + subject.settings[index + 1 :])
    for index in reversed(range(len(pieces))):
        yield replace(subject, recipe=replace(subject.recipe, pieces=pieces[:index] + pieces[index + 1 :]))
    for change in ({"form": "tensor"}, {"loss": "total"}):
        if replace(subject.recipe, **change) != subject.recipe:
            yield replace(subject, recipe=replace(subject.recipe, **change))
    for at, setting in enumerate(subject.settings):
        plain = [
            {"checkpoint": "never"},
            {"schedule": "gpipe"},
            {"devices": 2},
            {"chunks": 2},
            {"chunks": 1},
            {"cut": "time"},
        ]
        for option in plain:
            said = option.keys() <= setting.options.keys() and dict(setting.options) | option != setting.options
            dealt = "replicas" in setting.options or isinstance(setting.options.get("schedule"), int)
            if said and not (dealt and "devices" in option):
                yield with_setting(subject, at, replace(setting, options=dict(setting.options) | option))
        if len(setting.runs) > 1:
            for run in setting.runs:
                yield with_setting(subject, at, replace(setting, runs=tuple(one for one in setting.runs if one != run)))


def with_setting(subject: Subject, at: int, setting: one.Setting) -> Subject:
    return replace(subject, settings=(*subject.settings[:at], setting, *subject.settings[at + 1 :]))


class Attempts:
    """A process that tries subjects, replaced where it hangs or dies."""

    def __enter__(self) -> Attempts:
        self.process = None
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = None

    def fails(self, subject: Subject, what: str) -> bool:
        """Whether this subject, too, ends so: in such an outcome, or in a "hang", or in that the process "died"."""
        if self.process is None:
            context = get_context("spawn")
            self.end, theirs = context.Pipe()
            self.process = context.Process(target=attempt, args=(theirs,))
            self.process.start()
            theirs.close()
        try:
            self.end.send(subject)
            if not self.end.poll(PATIENCE):
                self.stop()
                return what == "hang"
            return what in self.end.recv()
        except (EOFError, OSError):
            self.stop()
            return what == "died"


def attempt(end: Connection) -> None:
    """Sends back how the runs of each subject have ended."""
    from .ranks import Ranks

    faulthandler.enable()
    ranks, count = Ranks(), 0
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        while True:
            try:
                subject = end.recv()
            except EOFError:
                break
            found: set[str] = set()
            count += 1
            try:
                if one.tried(subject, Path(folder), f"attempt{count}", ranks, lambda o: found.add(o.what)) != subject:  # noqa: B023
                    found.clear()  # it was another one that was tried
            except Exception:
                found.clear()
            end.send(found)
    ranks.close()


def script(subject: Subject, bad: Outcome, title: str) -> str:
    """A file that shows the fault: the model, and a main part that tries it and exits with 1 while it fails."""
    said = "\n".join(line[:150] for line in bad.text.replace('"""', "'''").replace("\\", "/").splitlines()[:12])
    settings = pformat(
        [(dict(s.options), [(run.what, run.batch, run.seed) for run in s.runs]) for s in subject.settings], width=110
    )
    return (
        recipe.render(
            subject.recipe,
            f"{title}\n\n{bad.run}\n{said}\n\nIn the root of the repository: python -m tests.campaign --script FILE\n",
        )
        + f"""

HALF = {subject.half}  # in float32, under autocast
SETTINGS = {settings}

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.getcwd())
    from tests.campaign.script import main

    sys.exit(main(__file__))
"""
    )
