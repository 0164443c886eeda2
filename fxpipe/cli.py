"""The command: `fxpipe demo`, `fxpipe show model.py:make_model`, and for plans `fxpipe plan`, `fxpipe simulate` and
`fxpipe compare`, for strategies `fxpipe search`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import cli_plans, cli_search
from .cli_model import add_model, make_model
from .compile import compile
from .errors import FxpipeError
from .progress import progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors of fxpipe are shown without a traceback. Returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except FxpipeError as error:
        print(f"fxpipe: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="fxpipe", description=(__doc__ or "").strip())
    commands = top.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser("demo", help="train a U-Net and a transformer as pipelines, beside the plain models")
    demo.add_argument("--steps", type=int, default=60, help="training steps for each model")
    demo.add_argument("--out", type=Path, default=Path("fxpipe-demo"), help="folder for generated files and pictures")
    demo.add_argument("--schedule", help="train with step(), in this order: 1f1b, zb-h1, auto, ...")
    demo.set_defaults(run=run_demo)
    show = commands.add_parser("show", help="plan and generated code of any model")
    add_model(show)
    demo_or_show = (demo, show)
    for command in demo_or_show:
        command.add_argument(
            "--devices",
            type=parse_devices,
            default=4,
            help="how many, 4 if not given, or one for each stage: cuda:0,cuda:0,cpu",
        )
        command.add_argument("--chunks", type=int, default=8, help="micro-batches, 8 if not given")
    show.add_argument("--strategy", type=Path, help="cut the operators as this file of `fxpipe search` says")
    show.set_defaults(devices=None, chunks=None)  # a strategy says on how many devices
    show.add_argument("--save", type=Path, help="write the package to this folder instead of printing it")
    show.set_defaults(run=run_show)
    cli_plans.add(commands)
    cli_search.add(commands)
    return top


def run_demo(options: argparse.Namespace) -> None:
    from .demo.run import demo

    demo(options.devices, options.chunks, options.steps, options.out, options.schedule)


def run_show(options: argparse.Namespace) -> None:
    model, inputs = make_model(options.model, options.inputs)
    with progress("compiling"):
        if options.strategy:
            asked = {"strategy": options.strategy, "devices": options.devices, "chunks": options.chunks}
        else:
            asked = {"devices": options.devices or 4, "chunks": options.chunks or 8}
        pipe = compile(model, example_inputs=inputs, **asked)
    print(pipe.explain())
    if options.save:
        pipe.save(options.save, overwrite=True)
        print(f"\nthe package: {options.save}")
    else:
        for name, text in pipe.files.items():
            print(f"\n----- {name} " + "-" * (100 - len(name)) + f"\n{text}")
    pipe.close()


def parse_devices(text: str) -> int | list[str]:
    """A count, or devices.

    >>> parse_devices("4"), parse_devices("cuda:0,cuda:0,cpu")
    (4, ['cuda:0', 'cuda:0', 'cpu'])
    """
    return int(text) if text.strip().isdecimal() else [name.strip() for name in text.split(",")]
