"""The command `fxpipe search`: the strategy of a model for a cluster, as a table, a file and pictures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from .cli_model import add_model, make_model
from .cli_plans import HERE, read_cluster, write
from .errors import FxpipeError
from .ir.clusters import PRESETS
from .search import search
from .searched import Searched
from .searched_why import explain
from .soap.models import MODELS


def add(commands: Any) -> None:
    """The command, among those of `fxpipe`."""
    find = commands.add_parser("search", help="how to cut and place each operator of a model")
    add_model(find)
    find.add_argument(
        "--cluster", required=True, help=f"{', '.join(PRESETS)} (k80:8: eight of it), a JSON file, or '{HERE}'"
    )
    find.add_argument("--batch", type=int, help="samples in a training step, those of the inputs if not given")
    find.add_argument("--budget", type=float, default=60, help="seconds that the search may take")
    find.add_argument("--seed", type=int, default=0, help="of what the search draws")
    find.add_argument("--method", choices=("leaps", "mcmc"), default="leaps", help="mcmc is the published search")
    find.add_argument(
        "--explain", action="store_true", help="search for changed clusters too: what would they be worth?"
    )
    find.add_argument("--out", type=Path, help="write the strategy to this JSON file")
    find.add_argument("--svg", type=Path, help="draw the strategy")
    find.add_argument("--timeline", type=Path, help="draw the simulated step")
    find.add_argument("--meta", action="store_true", help="make the model on the meta device: no memory for weights")
    find.epilog = f"Published models can be named in place of a file: {', '.join(MODELS)}."
    find.set_defaults(run=run_search)


def run_search(options: argparse.Namespace) -> None:
    found = _found(options)
    print(explain(found, options.budget) if options.explain else found)
    write(options.out, found.dump)
    write(options.svg, found.picture)
    write(options.timeline, found.svg)


def _found(options: argparse.Namespace) -> Searched:
    cluster = read_cluster(options.cluster)
    how: dict[str, Any] = {"budget": options.budget, "seed": options.seed, "method": options.method}
    how["progress"] = sys.stderr.isatty()
    if options.model in MODELS:
        if options.batch is not None and options.batch < 1:
            raise FxpipeError(f"batch is {options.batch}: a step has at least one sample")
        return search(MODELS[options.model](**({"batch": options.batch} if options.batch else {})), cluster, **how)
    with torch.device("meta" if options.meta else "cpu"):
        model, inputs = make_model(options.model, options.inputs)
    return search(model, cluster, example_inputs=inputs, batch=options.batch, **how)
