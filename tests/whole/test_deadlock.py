"""Every model under every schedule, with and without replicas: nothing that the devices send each other can deadlock,
also where nothing is buffered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from fxpipe.ir.program.device_programs import check
from fxpipe.ir.program.transfers import add_transfers
from fxpipe.pipe.build.build import draft
from fxpipe.pipe.build.call_binding import match, micro_batch_sizes
from fxpipe.pipe.build.local_cluster import local_cluster
from fxpipe.pipe.build.lowering import Lowering
from fxpipe.pipe.options.compile_options import Options, deal, device_labels, every_device, stage_devices
from fxpipe.profiling import estimate
from tests.helpers.marks import mostly_slow
from tests.helpers.models import MODELS
from tests.helpers.transparency import inputs
from tests.whole.test_steps import BATCHES, NAMES, PARTS, graph_of, stepped

REPLICAS = (None, (2, 1, 1), (1, 3, 2))
DEVICES = 3


@pytest.mark.parametrize("name", mostly_slow(MODELS, lambda name: name == "skip ladder", every=3))
def test_no_program_can_deadlock(name: str) -> None:
    graph, call = graph_of(name), inputs(stepped(MODELS[name]), BATCHES[0])
    given: dict[str, Any] = {}
    match(graph.call, call, given)
    sizes = micro_batch_sizes(graph, [given[item.name] for item in graph.inputs if item.path], PARTS)
    for schedule, replicas in product(NAMES, REPLICAS):
        options = asked(schedule, replicas)
        if len(options.devices) <= len(graph.ops):  # a stage has at least one
            cluster = local_cluster(every_device(options))
            profile = estimate(graph, sizes, cluster.device(options.devices[0]))
            made = draft(graph, profile, sizes, cluster, options, None, Lowering(graph, options, sizes, {}))
            check(add_transfers(made.schedule, made.program))


def asked(schedule: str, replicas: Sequence[int] | None) -> Options:
    groups = deal(device_labels(sum(replicas or [1] * DEVICES)), replicas)
    labels = stage_devices(tuple(groups), schedule, None)
    return Options(labels, PARTS, schedule=schedule, replicas=groups, ranks=True)
