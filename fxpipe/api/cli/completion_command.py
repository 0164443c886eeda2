"""The command `fxpipe completion`: what makes a shell complete commands, options and files of `fxpipe`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from fxpipe.errors import FxpipeError

SHELLS = ("bash", "zsh", "tcsh")
FILES = ("model", "cluster", "plan")  # arguments that may name files, though their type is another


def add(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=SHELLS, help=", ".join(SHELLS))
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from .main import COMMANDS, parser  # late: it imports this file

    top = parser(*COMMANDS)
    try:
        import shtab
    except ImportError:
        raise FxpipeError("fxpipe completion needs shtab: pip install 'fxpipe[completion]'") from None
    for action in _actions(top):
        if action.type is Path or action.dest in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(top, options.shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
