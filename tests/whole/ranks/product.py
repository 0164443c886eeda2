"""One model under every schedule over ranks, at little cost: all that ranks would each do in the same way is done once.

    a process that has imported everything
      └─ fork ─▶ the model's: captures it, asks the plain model, writes and loads a package for each schedule
                   └─ fork ─▶ ranks 0 to 3, which have all that: they bind their stages and step

That ranks which capture by themselves arrive at the same is for the tests of the whole way (`cases.pipe_is_the_model`).
"""

from __future__ import annotations

import gc
import pickle
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

from fxpipe.codegen.package.load_package import load_package
from fxpipe.codegen.package.package_files import write
from fxpipe.ir.graph.graph import Graph
from fxpipe.pipe.build import build as whole_build
from fxpipe.pipe.build.call_binding import match, micro_batch_sizes
from fxpipe.pipe.build.local_cluster import local_cluster
from fxpipe.pipe.options.compile_options import Options, every_device, stage_devices
from fxpipe.profiling import estimate
from tests.helpers.models import MODELS
from tests.helpers.transparency import Result, build, inputs
from tests.whole.ranks.cases import Config, compare, owner, step_of, step_over, ways
from tests.whole.ranks.pool import PATIENCE, WARM, Pool, RankFailed
from tests.whole.test_steps import captured, reference, stepped

CHUNKS, BATCHES = 4, (7, 2)  # micro-batches of 2, 2, 2, 1 samples, and of 1, 1
ALL, PAIRS = (0, 1, 2, 3), ((0, 1), (2, 3))
Over = Mapping[int, Sequence[Config]]  # the configurations over 2, and over 4 ranks


def check(name: str, over: Over) -> int:
    """The model in these configurations, in a process of its own: how many of them it has ops enough for. Raises
    RankFailed."""
    context = get_context("forkserver")
    context.set_forkserver_preload(WARM)
    ours, theirs = context.Pipe()
    process = context.Process(target=report, args=(theirs, name, over))
    process.start()
    theirs.close()
    try:
        fault, ran = ours.recv() if ours.poll(PATIENCE) else (f"{name} takes longer than {PATIENCE} s", 0)
    except EOFError:
        fault, ran = f"the process of {name} has ended", 0
    finally:
        process.kill()
        process.join()
    if fault:
        raise RankFailed(fault)
    return int(ran)


def report(end: Connection, name: str, over: Over) -> None:
    try:
        answer = "", run(name, over)
    except BaseException:
        answer = traceback.format_exc(), 0
    end.send(answer)


def run(name: str, over: Over) -> int:
    """Forks ranks once everything is built: two pairs at the same time, which share the configurations, then all."""
    references(name)
    over = {count: [config for config in over[count] if built(name, count, config)] for count in (2, 4)}
    gc.freeze()  # what is there is not written to by the collector, so that forks go on sharing it
    pool = Pool(how="fork")
    try:
        for turn, pair in enumerate(PAIRS):
            pool.start(step_each, name, over[2][turn::2], ranks=pair)
        for pair in PAIRS:
            pool.results(pair)
        pool.run(step_each, name, over[4], ranks=ALL)
    finally:
        pool.close()
    return len(over[2]) + len(over[4])


def step_each(group: Any, name: str, configs: Sequence[Config]) -> None:
    """Steps in each configuration, on one rank of the group, which reaches the others in one way or another."""
    case, worlds = stepped(MODELS[name]), ways(group)
    for config, world in zip(configs, cycle(worlds)):
        twin, ready = build(case), built(name, len(world.labels), config)
        assert ready is not None
        made, package = ready
        try:
            own, step = owner(made, twin, world), step_of(made, package, twin, world)
            for batch in BATCHES:
                got = step_over(group, twin, own, inputs(case, batch), batch, step)
                compare(group, got, lambda batch=batch: references(name)[batch], case.tol)
        except BaseException as error:
            error.add_note(f"{name}, {len(world.labels)} ranks, {config}")
            raise


# Made before the ranks are, which only look it up ---------------------------------------------------------------------


@cache
def references(name: str) -> dict[int, Result]:
    """What the plain model gives, step after step, by batch size. In a process of its own: with torch's CUDA builds one
    that has gone backward, after a capture, cannot be forked."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=refer, args=(theirs, name))
    process.start()
    theirs.close()
    found: dict[int, Result] = pickle.loads(ours.recv_bytes())
    process.join()
    return found


def refer(end: Connection, name: str) -> None:
    case = stepped(MODELS[name])
    model = build(case)
    end.send_bytes(pickle.dumps({batch: reference(case, model, batch, CHUNKS) for batch in BATCHES}))


@cache
def graph_of(name: str) -> Graph:
    case = stepped(MODELS[name])
    return captured(case, build(case), BATCHES[0], CHUNKS)


@cache
def built(name: str, count: int, config: Config) -> tuple[whole_build.Build, Any] | None:
    """What there is to run over so many ranks, and its package, loaded; None if there is not an op for each stage."""
    case, graph, (schedule, checkpoint) = stepped(MODELS[name]), graph_of(name), config
    given: dict[str, Any] = {}
    match(graph.call, inputs(case, BATCHES[0]), given)
    sizes = micro_batch_sizes(graph, [given[item.name] for item in graph.inputs if item.path], CHUNKS)
    labels = stage_devices(tuple(f"cpu:{rank}" for rank in range(count)), schedule, None)
    if len(labels) > len(graph.ops):
        return None
    options = Options(labels, CHUNKS, schedule=schedule, checkpoint=checkpoint, ranks=True)
    cluster = local_cluster(every_device(options))
    made = whole_build.build(
        graph, estimate(graph, sizes, cluster.device(labels[0])), sizes, cluster, options, None, {}
    )
    with TemporaryDirectory() as folder:
        write(made.files, folder)
        return made, load_package(folder)
