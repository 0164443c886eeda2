"""The options of the public functions as command-line options, and their errors in one line."""

from __future__ import annotations

import argparse
import ast
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fxpipe.errors import FxpipeError, PlanError
from fxpipe.pipe.options.compile_table import COMPILE
from fxpipe.pipe.options.option_forms import Option, as_text, either, words_text
from fxpipe.pipe.options.option_table import PLAN, SEARCH

# Options of ranks, and those that are functions or tensors.
NOT_SHOWN = ("example_inputs", "group", "timeout", "check_inputs", "transforms", "passes")
OPTIONS = {
    name: one for name, one in (SEARCH | PLAN | COMPILE).items() if name not in (*NOT_SHOWN, "batch_size", "progress")
}
PACKAGES = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


def add_options(
    command: argparse._ActionsContainer,
    options: Mapping[str, Option],
    *names: str,
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Add options of a function, by name, to a command. An option that is not written has no entry in the parsed
    namespace. `defaults`: what the command takes then, if that is not what the function does."""
    for name in names:
        option = options[name]
        only_flag = all(form.text in ("True or False", "'auto'") for form in option.forms)
        how: dict[str, Any] = {"type": reader(option), "metavar": "..."}
        if only_flag:  # --no-... says False where that is not the default
            how = {"action": "store_true" if option.default is False else argparse.BooleanOptionalAction}
        if not only_flag and any(form.text == "True or False" for form in option.forms):
            how |= {"nargs": "?", "const": True}
        default = f"Default {defaults[name]}." if name in defaults else option.default_text if option.why else ""
        about = f"{option.about}{_values(option)}" + (f". {default}" if default else "")
        command.add_argument(option.flag, default=argparse.SUPPRESS, help=about, **how)


def add_batch(command: argparse.ArgumentParser, options: Mapping[str, Option], required: bool = False) -> None:
    """Add the option `batch_size` of a function to its command, by a shorter name."""
    option = options["batch_size"]
    command.add_argument(
        "--batch",
        dest="batch_size",
        metavar="...",
        type=reader(option),
        required=required,
        default=argparse.SUPPRESS,
        help=option.about,
    )


def _values(option: Option) -> str:
    """What follows the line of an option in the help: the words that it may be, and an example of another form."""
    readable = [form for form in option.forms if form.read is not None and form.text != "True or False"]
    named = [form for form in readable if form.text == words_text(form.words())]
    words = list(dict.fromkeys(word for form in named for word in form.words()))
    others = [form.text for form in readable if form not in named]
    if others:
        example = as_text(option.example)
        words.append(others[0] if example in words else f"as in {example}")
    return f" ({either(words)})" if words else ""


def reader(option: Option) -> Callable[[str], Any]:
    """A function that parses the text of an option into its value."""

    def read(text: str) -> Any:
        try:
            return option.read(text)
        except PlanError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def given(parsed: argparse.Namespace, options: Mapping[str, Option]) -> dict[str, Any]:
    """The options that were written, by name, without the cluster, which `read_cluster` reads (it may be a file)."""
    return {name: value for name, value in vars(parsed).items() if name in options and name != "cluster"}


def by_flags(message: str) -> str:
    """An error with options as the command line writes them; calls of functions stay as they are.

    >>> by_flags("say which devices stand for them, as in devices=4; or fxpipe.compile(model, chunks=8)")
    'say which devices stand for them, as in --devices 4; or fxpipe.compile(model, chunks=8)'
    """

    def flag(match: re.Match[str]) -> str:
        option = OPTIONS.get(match[1])
        try:
            value = ast.literal_eval(match[2])
        except (SyntaxError, ValueError):
            return match[0]
        if option is None or value is None or value is False:
            return match[0]
        return option.flag if value is True else f"{option.flag} {as_text(value)}"

    return re.sub(r"(?<![\w.(])(?<!, )(\w+)=(\[[^]]*\]|\([^)]*\)|\{[^}]*\}|'[^']*'|\"[^\"]*\"|\w+)", flag, message)


def told(error: BaseException) -> str:
    """The text of an error: an FxpipeError's own message; for others the first line of theirs, with the type and the
    line of the user's file."""
    if isinstance(error, FxpipeError):
        return by_flags(str(error))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(PACKAGES)]
    users = [frame for frame in frames if not frame.filename.startswith("<")]
    place = f"{Path(users[-1].filename).name}:{users[-1].lineno}  " if users else ""
    message = str(error).partition("\n")[0]
    return f"{place}{type(error).__name__}: {message}; --traceback shows more"
