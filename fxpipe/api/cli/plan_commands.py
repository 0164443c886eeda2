"""The commands for plans: `fxpipe plan` makes one, `fxpipe simulate` shows its step, `fxpipe compare` several."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fxpipe.api.plan import plan
from fxpipe.pipe.options.option_table import PLAN
from fxpipe.pipe.progress import working
from fxpipe.pipe.results.planned import compare, load
from fxpipe.viz import chrome_trace as trace
from fxpipe.viz import html, svg
from fxpipe.viz.text_timeline import bars

from .model_argument import add_cluster, model_for_cluster, read_cluster
from .option_arguments import add_options, given, reader


def add(commands: Any) -> None:
    """The three commands, among those of `fxpipe`."""
    make = commands.add_parser("plan", help="the fastest plan of a model for a cluster")
    add_cluster(make)
    make.add_argument("--batch", type=reader(PLAN["batch_size"]), required=True, help="samples in a training step")
    make.add_argument("--out", type=Path, help="write the plan to this JSON file")
    add_options(make, PLAN, *(name for name in PLAN if name not in ("cluster", "batch_size")))
    make.add_argument("--explain", action="store_true", help="also other plans, and what more hardware would be worth")
    make.set_defaults(run=run_plan)

    show = commands.add_parser("simulate", help="the step of a plan, as simulated")
    show.add_argument("plan", type=Path, help="the file that `fxpipe plan` wrote")
    show.add_argument("--schedule", help="the order of another schedule: a name, or a grid")
    show.add_argument("--svg", type=Path, help="draw the timeline")
    show.add_argument("--html", type=Path, help="a page with the timeline and the figures of each device")
    show.add_argument("--trace", type=Path, help="the timeline for ui.perfetto.dev")
    show.add_argument("--width", type=int, default=80, help="characters for the step")
    show.set_defaults(run=run_simulate)

    several = commands.add_parser("compare", help="plans beside each other, as simulated")
    several.add_argument("plans", nargs="+", type=Path, help="files that `fxpipe plan` wrote")
    several.set_defaults(run=run_compare)


def run_plan(options: argparse.Namespace) -> None:
    model, inputs = model_for_cluster(options)
    cluster = read_cluster(options.cluster)
    found = plan(model, cluster, options.batch, example_inputs=inputs, **given(options, PLAN))
    if options.explain:
        with working("trying other plans, and other hardware", 30):
            text = found.explain()
        print(text)
    else:
        print(found)
        if found.certificate is not None:
            print(f"\n{found.certificate}")
    if options.out:
        found.save(options.out)
        print(f"\nthe plan: {options.out}")


def write(path: Path | None, make: Callable[[], str]) -> None:
    """Write the text of `make` to `path`, unless it is None."""
    if path is not None:
        path.write_text(make())
        print(f"\nwrote {path}")


def run_simulate(options: argparse.Namespace) -> None:
    found = load(options.plan)
    timeline = found.simulate(options.schedule)
    title = f"{found.plan.model}, {timeline.name}"
    print(f"{bars(timeline, options.width)}\n\n{timeline}")
    notes = str(found) if options.schedule is None else ""
    write(options.svg, lambda: svg.draw(timeline, title))
    write(options.html, lambda: html.draw(timeline, title, notes))
    write(options.trace, lambda: trace.trace(timeline))


def run_compare(options: argparse.Namespace) -> None:
    print(compare([path.name for path in options.plans], [load(path) for path in options.plans]))
