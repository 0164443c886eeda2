"""A parser of command lines: errors are one line, with the nearest word that it knows. It does not import torch."""

from __future__ import annotations

import argparse
import re
from itertools import takewhile
from typing import Any, NoReturn

from fxpipe.errors import did_you_mean

FAILED = 2  # the exit status of a command that did not work


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but an unknown option is told before one that is missing, as it may be meant."""
        if self._subparsers is None and args is not None:
            known = tuple(self._option_string_actions)
            flags = [text.partition("=")[0] for text in takewhile("--".__ne__, args) if text.startswith("--")]
            # argparse also takes the beginning of a name
            refuse_unknown(self, [flag for flag in flags if not any(name.startswith(flag) for name in known)])
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]))
        self.exit(FAILED, f"{self.prog}: {message}; see {self.prog} --help\n")


def refuse_unknown(command: argparse.ArgumentParser, unknown: list[str]) -> None:
    """Exit with an error at the first unknown argument; for an option, the error names the most similar one."""
    for text in unknown:
        known = [flag for flag in command._option_string_actions if flag.startswith("--")]
        near = did_you_mean(text.partition("=")[0], known) if text.startswith("-") else ""
        command.error(f"there is no {'option' if text.startswith('-') else 'argument'} {text!r} here{near}")
