"""The commands for models: `fxpipe demo` trains two, `fxpipe show` shows what one becomes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fxpipe.api.compile import compile
from fxpipe.pipe.options.compile_table import COMPILE, GROUPS

from .model_argument import add_model, make_model
from .option_arguments import NOT_SHOWN, add_options, given

DEFAULTS: dict[str, Any] = {"devices": 4, "chunks": 8}


def add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--steps", type=int, default=60, help="training steps for each model")
    demo.add_argument("--out", type=Path, default=Path("fxpipe-demo"), help="folder for generated files and pictures")
    add_options(demo, COMPILE, "devices", "chunks", "schedule", defaults=DEFAULTS)
    demo.set_defaults(run=run_demo)


def add_show(show: argparse.ArgumentParser) -> None:
    show.usage = "fxpipe show [options] model [inputs ...]"
    add_model(show)
    for name, group in GROUPS.items():
        names = [option.name for option in group.options]
        hidden = ", ".join(name for name in names if name in NOT_SHOWN)
        about = group.about + (f"; only in Python: {hidden}" if hidden else "")
        shown = (name for name in names if name not in NOT_SHOWN)
        add_options(show.add_argument_group(name, about), COMPILE, *shown, defaults=DEFAULTS)
    show.add_argument("--save", type=Path, help="write the package to this folder instead of printing it")
    show.set_defaults(run=run_show)


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
