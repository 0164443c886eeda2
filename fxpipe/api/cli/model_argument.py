"""Arguments of commands: the model, as file and function (`model.py:make_model`); its inputs, by their types; and the
cluster that the model is planned for."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpipe.errors import FxpipeError, did_you_mean
from fxpipe.ir.cluster import cluster as clusters
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.published_clusters import PRESETS, preset
from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.pipe.build.local_cluster import detect

HERE = "here"
Inputs = tuple[Any, ...] | Mapping[str, Any]


def add_model(command: argparse.ArgumentParser) -> None:
    """The arguments that name a model and its inputs."""
    command.add_argument(
        "model", help="file and function: model.py:make_model, which returns a model or (model, inputs)"
    )
    command.add_argument("inputs", nargs="*", help="inputs, if the function returns none: f32[8,3,32,32] i64[8,128]")


def add_cluster(command: argparse.ArgumentParser) -> None:
    """The arguments of a command that plans a model for a cluster."""
    add_model(command)
    command.add_argument(
        "--cluster",
        required=True,
        help=f"{', '.join(PRESETS)} (k80:8: eight devices of it), a JSON file, or '{HERE}': this machine",
    )
    command.add_argument("--meta", action="store_true", help="make the model on the meta device: no memory for weights")


def read_cluster(text: str) -> Cluster:
    """A published cluster, the one in a file, or this machine."""
    if text == HERE:
        return detect()
    try:
        return clusters.load(Path(text).read_text()) if text.endswith(".json") else preset(text)
    except (OSError, ValueError) as error:
        where = f"no cluster can be read from {text!r}: " if text.endswith(".json") else ""
        raise FxpipeError(f"{where}{error}") from None


def model_for_cluster(options: argparse.Namespace) -> tuple[nn.Module, Inputs]:
    """The model and inputs that the command names, on the meta device if that is asked for."""
    with torch.device("meta" if options.meta else "cpu"):
        return make_model(options.model, options.inputs)


def make_model(path: str, inputs: Sequence[str]) -> tuple[nn.Module, Inputs]:
    """The model that the function at `path` returns, and its inputs: those it returns (a tuple, a dict for arguments by
    keyword, or one value), or zeros of the types in `inputs`. Raises FxpipeError if there is no model or there are no
    inputs."""
    made = load_function(path)()
    model, given = made if isinstance(made, tuple) else (made, tuple(parse_input(text) for text in inputs))
    if not isinstance(model, nn.Module):
        raise FxpipeError(f"{path} returned a {type(model).__name__}, not an nn.Module or (nn.Module, inputs)")
    given = given if isinstance(given, (tuple, Mapping)) else (given,)
    if not given:
        raise FxpipeError(f"{path} returned no inputs: give them as types, as in 'f32[8,3,32,32]'")
    return model, given


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
        functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise FxpipeError(f"{file} has no function {name!r}{did_you_mean(name, functions)}")
    function: Callable[[], Any] = getattr(module, name)
    return function


def parse_input(text: str) -> torch.Tensor:
    """A tensor of zeros from its type.

    >>> parse_input("f32[8, 3]").shape
    torch.Size([8, 3])
    """
    match = re.fullmatch(r"(\w+)\[([\d,\s]*)\]", text)
    if not match or match[1] not in DTYPES:
        known = ", ".join(sorted(DTYPES))
        raise FxpipeError(
            f"{text!r} is not an input: write element type and shape, as in f32[8,3,32,32]; types: {known}"
        )
    shape = [int(size) for size in match[2].split(",") if size.strip()]
    return torch.zeros(shape, dtype=getattr(torch, DTYPES[match[1]].torch))
