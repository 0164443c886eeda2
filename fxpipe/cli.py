"""The command: `fxpipe demo` and `fxpipe show model.py:make_model`."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .compile import compile
from .errors import FxpipeError
from .ir.types import ITEMSIZE
from .progress import progress

DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
DTYPES |= {"i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8}
DTYPES |= {"bool": torch.bool}


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
    show.add_argument("model", help="file and function: model.py:make_model, which returns a model or (model, inputs)")
    show.add_argument("inputs", nargs="*", help="inputs, if the function returns none: f32[8,3,32,32] i64[8,128]")
    demo_or_show = (demo, show)
    for command in demo_or_show:
        command.add_argument(
            "--devices", type=parse_devices, default=4, help="how many, or one for each stage: cuda:0,cuda:0,cpu"
        )
        command.add_argument("--chunks", type=int, default=8, help="micro-batches")
    show.add_argument("--save", type=Path, help="write the package to this folder instead of printing it")
    show.set_defaults(run=run_show)
    return top


def run_demo(options: argparse.Namespace) -> None:
    from .demo.run import demo

    demo(options.devices, options.chunks, options.steps, options.out, options.schedule)


def run_show(options: argparse.Namespace) -> None:
    made = load_function(options.model)()
    model, inputs = made if isinstance(made, tuple) else (made, tuple(parse_input(text) for text in options.inputs))
    if not isinstance(model, nn.Module):
        raise FxpipeError(f"{options.model} returned a {type(model).__name__}, not an nn.Module or (nn.Module, inputs)")
    if not inputs:
        raise FxpipeError(f"{options.model} returned no inputs: give them as types, as in 'f32[8,3,32,32]'")
    with progress("compiling"):
        pipe = compile(model, devices=options.devices, chunks=options.chunks, example_inputs=inputs)
    print(pipe.explain())
    if options.save:
        pipe.save(options.save, overwrite=True)
        print(f"\nthe package: {options.save}")
    else:
        for name, text in pipe.files.items():
            print(f"\n----- {name} " + "-" * (100 - len(name)) + f"\n{text}")
    pipe.close()


def load_function(path: str) -> Callable[[], Any]:
    """The function that `model.py:make_model` names."""
    file, _, name = path.rpartition(":")
    if not file:
        raise FxpipeError(f"{path!r} names no function: write file and function, as in model.py:make_model")
    if not Path(file).is_file():
        raise FxpipeError(f"there is no file {file!r}")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(file).resolve().parent))
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise FxpipeError(f"{file} has no function {name!r}")
    function: Callable[[], Any] = getattr(module, name)
    return function


def parse_devices(text: str) -> int | list[str]:
    """A count, or devices.

    >>> parse_devices("4"), parse_devices("cuda:0,cuda:0,cpu")
    (4, ['cuda:0', 'cuda:0', 'cpu'])
    """
    return int(text) if text.strip().isdecimal() else [name.strip() for name in text.split(",")]


def parse_input(text: str) -> torch.Tensor:
    """A tensor of zeros from its type.

    >>> parse_input("f32[8, 3]").shape
    torch.Size([8, 3])
    """
    match = re.fullmatch(r"(\w+)\[([\d,\s]*)\]", text)
    if not match or match[1] not in DTYPES:
        known = ", ".join(sorted(DTYPES.keys() & ITEMSIZE.keys()))
        raise FxpipeError(
            f"{text!r} is not an input: write element type and shape, as in f32[8,3,32,32]; types: {known}"
        )
    shape = [int(size) for size in match[2].split(",") if size.strip()]
    return torch.zeros(shape, dtype=DTYPES[match[1]])
