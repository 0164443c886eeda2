"""The command `fxpipe search`: the strategy of a model for a cluster, as a table, a file and pictures."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpipe.api.hardware_alternatives import explain
from fxpipe.api.search import search
from fxpipe.errors import FxpipeError, did_you_mean
from fxpipe.pipe.options.option_table import SEARCH
from fxpipe.planning.operators.models.published_models import MODELS

from .model_argument import add_cluster, model_for_cluster, read_cluster
from .option_arguments import add_batch, add_options, given
from .plan_commands import DRAWN, draw, write

BUDGET = 60  # seconds, if not given


def add(find: argparse.ArgumentParser) -> None:
    add_cluster(find)
    add_batch(find, SEARCH)
    add_options(find, SEARCH, *(name for name in SEARCH if name not in ("cluster", "batch_size", "progress")))
    find.add_argument(
        "--explain", action="store_true", help="search for changed clusters too: what would they be worth?"
    )
    find.add_argument("--out", type=Path, help="write the strategy to this JSON file")
    find.add_argument("--draw", type=Path, help=f"draw the strategy: {DRAWN}")
    find.add_argument("--timeline", type=Path, help=f"draw the simulated step: {DRAWN}")
    find.epilog = f"Published models can be named in place of a file: {', '.join(MODELS)}."
    find.set_defaults(run=run_search)


def run_search(options: argparse.Namespace) -> None:
    cluster, how = read_cluster(options.cluster), given(options, SEARCH)
    if ":" not in options.model and options.model not in MODELS:
        raise FxpipeError(
            f"{options.model!r} is no published model: there are {', '.join(MODELS)}; or write file and function, as "
            f"in model.py:make_model{did_you_mean(options.model, MODELS)}"
        )
    if options.model in MODELS:
        batch = {"batch": how.pop("batch_size")} if "batch_size" in how else {}
        found = search(MODELS[options.model](**batch), cluster, **how)
    else:
        model, inputs = model_for_cluster(options)
        found = search(model, cluster, example_inputs=inputs, **how)
    print(explain(found, getattr(options, "budget", BUDGET)) if options.explain else found)
    write(options.out, found.dump)
    draw(options.draw, found)
    draw(options.timeline, found.timeline)
