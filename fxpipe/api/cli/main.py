"""The command: `fxpipe demo`, `fxpipe show model.py:make_model`, and for plans `fxpipe plan`, `fxpipe simulate` and
`fxpipe compare`, for strategies `fxpipe search`; `fxpipe doctor` looks at the machine, `fxpipe completion` is for
shells."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module

from fxpipe.pipe.verify.versions import versions

from .command_parser import FAILED, Parser, refuse_unknown

# For each command its line of help, and the function that adds its arguments, in a file of this folder. The file is
# imported if the command is used: most of them import torch, which takes seconds.
COMMANDS = {
    "demo": ("train a U-Net and a transformer as pipelines, beside the plain models", "model_commands.add_demo"),
    "show": ("plan and generated code of any model", "model_commands.add_show"),
    "plan": ("the fastest plan of a model for a cluster", "plan_commands.add_plan"),
    "simulate": ("the step of a plan, as simulated", "plan_commands.add_simulate"),
    "compare": ("plans beside each other, as simulated", "plan_commands.add_compare"),
    "search": ("how to cut and place each operator of a model", "search_command.add"),
    "doctor": ("what of this machine matters, what is slow and what to do about it", "doctor_command.add"),
    "completion": ("print what makes a shell complete fxpipe's commands and options", "completion_command.add"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors are one line, without a traceback, unless `--traceback` is given. Returns the exit
    status."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        options, unknown = parser(*given[:1]).parse_known_args(given)
        refuse_unknown(options.parser, unknown)
    except SystemExit as done:  # as argparse ends
        return int(done.code or 0)
    try:
        status = options.run(options)
        sys.stdout.flush()
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():  # as in `fxpipe show ... | head`
            return FAILED
        if options.traceback:
            raise
        from .option_arguments import told

        print(f"fxpipe: {told(error)}", file=sys.stderr)
        return FAILED
    return int(status or 0)


def _nobody_reads() -> bool:
    """Whether the reader of standard output has closed it. What is left to print is then dropped."""
    closed = select.poll()
    closed.register(sys.stdout.fileno(), 0)
    if not closed.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more as it ends
    return True


def parser(*names: str) -> argparse.ArgumentParser:
    """The parser of all commands; those of `names` have their arguments, which others do without."""
    top = Parser(prog="fxpipe", description=(__doc__ or "").strip())
    top.add_argument("--version", action="version", version=versions())
    commands = top.add_subparsers(required=True, metavar="command", dest="command")
    for name, (about, place) in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        if name in names:
            file, _, function = place.partition(".")
            getattr(import_module(f"fxpipe.api.cli.{file}"), function)(command)
        command.add_argument("--traceback", action="store_true", help="show the traceback of an error")
        command.set_defaults(parser=command)
    return top
