"""The commands for plans: `fxpipe plan` makes one, `fxpipe simulate` shows its step, `fxpipe compare` several."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from fxpipe.api.plan import plan
from fxpipe.api.profile import profile
from fxpipe.ir.drawable import Drawable
from fxpipe.pipe.build.call_binding import as_call
from fxpipe.pipe.options.option_table import PLAN
from fxpipe.pipe.progress import working
from fxpipe.pipe.results.planned import compare, load
from fxpipe.viz import chrome_trace as trace
from fxpipe.viz.picture_file import FORMATS
from fxpipe.viz.text_timeline import bars

from .launch.launch_folder import check_folder, launch_files, write_folder
from .launch.model_import import model_import
from .model_argument import add_cluster, model_for_cluster, read_cluster
from .option_arguments import add_batch, add_options, given

DRAWN = f"a file that ends with {', '.join(FORMATS)}"


def add_plan(make: argparse.ArgumentParser) -> None:
    add_cluster(make)
    add_batch(make, PLAN, required=True)
    make.add_argument("--out", type=Path, help="write the plan to this JSON file")
    make.add_argument(
        "--launch", type=Path, help="write a training script over ranks, and what starts it, to this folder"
    )
    add_options(make, PLAN, *(name for name in PLAN if name not in ("cluster", "batch_size")))
    make.add_argument("--explain", action="store_true", help="also other plans, and what more hardware would be worth")
    make.set_defaults(run=run_plan)


def add_simulate(show: argparse.ArgumentParser) -> None:
    show.add_argument("plan", type=Path, help="the file that `fxpipe plan` wrote")
    show.add_argument("--schedule", help="the order of another schedule: a name, or a grid")
    show.add_argument("--draw", type=Path, help=f"draw the timeline: {DRAWN}")
    show.add_argument("--trace", type=Path, help="the timeline for ui.perfetto.dev")
    show.add_argument("--width", type=int, default=80, help="characters for the step")
    show.set_defaults(run=run_simulate)


def add_compare(several: argparse.ArgumentParser) -> None:
    several.add_argument("plans", nargs="+", type=Path, help="files that `fxpipe plan` wrote")
    several.add_argument("--draw", type=Path, help=f"draw the timelines: {DRAWN}")
    several.set_defaults(run=run_compare)


def run_plan(options: argparse.Namespace) -> None:
    named = None
    if options.launch:
        check_folder(options.launch)
        named = model_import(options.model)
    model, inputs = model_for_cluster(options)
    cluster, asked = read_cluster(options.cluster), given(options, PLAN)
    args, kwargs = as_call(inputs)
    dtype = asked.pop("dtype", None)
    known = profile(model, *args, device=cluster, dtype=dtype, **kwargs)
    found = plan(known, cluster, **asked)
    files = launch_files(found, known, model, inputs, named, options.meta, dtype, options.launch) if named else {}
    if options.explain:
        with working("trying other plans, and other hardware", 30):
            text = found.explain()
        print(text)
    else:
        print(found)
    if options.out:
        found.save(options.out)
        print(f"\nthe plan: {options.out}")
    if options.launch:
        print(f"\n{write_folder(options.launch, files, found)}")


def write(path: Path | None, make: Callable[[], str]) -> None:
    """Write the text of `make` to `path`, unless it is None."""
    if path is not None:
        path.write_text(make())
        print(f"\nwrote {path}")


def draw(path: Path | None, value: Drawable) -> None:
    """Draw the value into `path`, unless it is None."""
    if path is not None:
        print(f"\nwrote {value.draw(path)}")


def run_simulate(options: argparse.Namespace) -> None:
    found = load(options.plan)
    timeline = found.simulate(options.schedule)
    table = str(timeline).partition("\n")[2]  # its first line is that of the bars, too
    print(f"{bars(timeline, options.width)}\n\n{table}")
    draw(options.draw, found if options.schedule is None else timeline)
    write(options.trace, lambda: trace.trace(timeline))


def run_compare(options: argparse.Namespace) -> None:
    found = compare([path.name for path in options.plans], [load(path) for path in options.plans])
    print(found)
    draw(options.draw, found)
