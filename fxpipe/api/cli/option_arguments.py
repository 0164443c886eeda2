"""Options of the functions as options of the commands, and errors of the command line in one line."""

from __future__ import annotations

import argparse
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from fxpipe.errors import FxpipeError, PlanError, did_you_mean
from fxpipe.pipe.options.option_forms import Option, as_text

FAILED = 2  # the exit status of a command that did not work
PACKAGES = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]))
        self.exit(FAILED, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_options(command: argparse.ArgumentParser, options: Mapping[str, Option], *names: str) -> None:
    """Options of a function, by name. Those that are not written are not in what is parsed."""
    for name in names:
        option = options[name]
        only_flag = all(form.text == "True or False" for form in option.forms)
        how: dict[str, Any] = {"action": "store_true"} if only_flag else {"type": reader(option), "metavar": "..."}
        if not only_flag and any(form.text == "True or False" for form in option.forms):
            how |= {"nargs": "?", "const": True}
        example = "" if only_flag else f": {as_text(option.example)}"
        command.add_argument(option.flag, default=argparse.SUPPRESS, help=f"{option.about}{example}", **how)


def reader(option: Option) -> Callable[[str], Any]:
    """What makes a value of the text of an option."""

    def read(text: str) -> Any:
        try:
            return option.read(text)
        except PlanError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def given(parsed: argparse.Namespace, options: Mapping[str, Option]) -> dict[str, Any]:
    """The options that were written, by name, but the cluster, which may be a file here."""
    return {name: value for name, value in vars(parsed).items() if name in options and name != "cluster"}


def refuse_unknown(command: argparse.ArgumentParser, unknown: list[str]) -> None:
    """Exit where there is something that the command does not have, with the nearest option."""
    for text in unknown:
        known = [flag for flag in command._option_string_actions if flag.startswith("--")]
        near = did_you_mean(text.partition("=")[0], known) if text.startswith("-") else ""
        command.error(f"there is no {'option' if text.startswith('-') else 'argument'} {text!r} here{near}")


def told(error: BaseException) -> str:
    """An error in a line: as it is if it is one of fxpipe, else by its type, with the line of the user's file."""
    if isinstance(error, FxpipeError):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(PACKAGES)]
    users = [frame for frame in frames if not frame.filename.startswith("<")]
    place = f"{Path(users[-1].filename).name}:{users[-1].lineno}  " if users else ""
    return f"{place}{type(error).__name__}: {error}; --traceback shows more"
