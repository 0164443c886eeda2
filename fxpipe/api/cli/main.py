"""The command: `fxpipe demo`, `fxpipe show model.py:make_model`, and for plans `fxpipe plan`, `fxpipe simulate` and
`fxpipe compare`, for strategies `fxpipe search`; `fxpipe doctor` looks at the machine, `fxpipe completion` is for
shells."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxpipe.api.compile import compile
from fxpipe.pipe.options.compile_table import COMPILE, GROUPS
from fxpipe.pipe.verify.environment import versions

from . import completion_command as cli_completion
from . import doctor_command as cli_doctor
from . import plan_commands as cli_plans
from . import search_command as cli_search
from .model_argument import add_model, make_model
from .option_arguments import FAILED, NOT_SHOWN, Parser, add_options, given, refuse_unknown, told

DEFAULTS: dict[str, Any] = {"devices": 4, "chunks": 8}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors are one line, without a traceback, unless `--traceback` is given. Returns the exit
    status."""
    try:
        options, unknown = parser().parse_known_args(arguments)
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


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="fxpipe", description=(__doc__ or "").strip())
    top.add_argument("--version", action="version", version=versions())
    commands = top.add_subparsers(required=True, metavar="command", dest="command")
    demo = commands.add_parser("demo", help="train a U-Net and a transformer as pipelines, beside the plain models")
    demo.add_argument("--steps", type=int, default=60, help="training steps for each model")
    demo.add_argument("--out", type=Path, default=Path("fxpipe-demo"), help="folder for generated files and pictures")
    add_options(demo, COMPILE, "devices", "chunks", "schedule", defaults=DEFAULTS)
    demo.set_defaults(run=run_demo)
    show = commands.add_parser(
        "show", help="plan and generated code of any model", usage="fxpipe show [options] model [inputs ...]"
    )
    add_model(show)
    for name, group in GROUPS.items():
        names = [option.name for option in group.options]
        hidden = ", ".join(name for name in names if name in NOT_SHOWN)
        about = group.about + (f"; only in Python: {hidden}" if hidden else "")
        shown = (name for name in names if name not in NOT_SHOWN)
        add_options(show.add_argument_group(name, about), COMPILE, *shown, defaults=DEFAULTS)
    show.add_argument("--save", type=Path, help="write the package to this folder instead of printing it")
    show.set_defaults(run=run_show)
    cli_plans.add(commands)
    cli_search.add(commands)
    cli_doctor.add(commands)
    cli_completion.add(commands, top)
    for command in commands.choices.values():
        command.add_argument("--traceback", action="store_true", help="show the traceback of an error")
        command.set_defaults(parser=command)
    return top


def run_demo(options: argparse.Namespace) -> None:
    from fxpipe.demo.run import demo

    asked = DEFAULTS | given(options, COMPILE)
    demo(asked["devices"], asked["chunks"], options.steps, options.out, asked.get("schedule"))


def run_show(options: argparse.Namespace) -> None:
    model, inputs = make_model(options.model, options.inputs)
    asked = given(options, COMPILE)
    if "plan" not in asked:  # a plan has the number of devices and chunks
        asked = DEFAULTS | asked
    pipe = compile(model, example_inputs=inputs, **asked)
    print(pipe.explain())
    if options.save:
        pipe.save(options.save, overwrite=True)
        print(f"\nthe package: {options.save}")
    else:
        for name, text in pipe.files.items():
            print(f"\n----- {name} " + "-" * (100 - len(name)) + f"\n{text}")
    pipe.close()
