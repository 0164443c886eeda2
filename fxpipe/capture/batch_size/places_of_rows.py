"""Rows of samples that are put where a mask is true, as the features of images are put into a text:

    x = x.masked_scatter(ids == IMAGE, features)      the rows go to the places in order, whichever sample they are of

In a micro-batch each place gets the same row as in the whole batch if each sample has as many places as rows. Only a
run tells, so the mask is checked in each micro-batch:

    places = checked_places(ids == IMAGE, features, x)
    x = x.masked_scatter(places, features)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxpipe.batching.batch_dimension import follow
from fxpipe.batching.batch_facts import Mixes
from fxpipe.batching.data_sizes import mask_of
from fxpipe.batching.selected_rows import PUTS
from fxpipe.ir.graph.graph import Graph, Op, Ref, op_name
from fxpipe.ir.unique_names import Names
from fxpipe.runtime.microbatch import checked_places


def with_checked_places(graph: Graph) -> Graph:
    """The graph with a check before each op that puts rows where a mask is true that has not selected them."""
    while any(op_name(op) in PUTS for op in graph.ops):
        errors = [error for error in follow(graph).mixed.values() if isinstance(error, Mixes) and error.in_order]
        masks = {error.op.name: mask_of(error.op, graph.types) or "" for error in errors}
        found = next((op for op in graph.ops if op.name in masks and op.args[1:2] == (Ref(masks[op.name]),)), None)
        if found is None:
            return graph
        graph = replace(graph, ops=tuple(_with_check(graph, found)))
    return graph


def _with_check(graph: Graph, at: Op) -> Iterator[Op]:
    for op in graph.ops:
        if op is at:
            mask = mask_of(op, graph.types)
            assert mask is not None
            name = Names(graph.types)("places")
            whole = op.args[0] if op_name(op) == "masked_scatter" else None
            args = (Ref(mask), op.args[2], whole)
            yield Op(name, checked_places, args, {}, graph.types[mask], op.origin, op.regions)
            op = replace(op, args=(op.args[0], Ref(name), *op.args[2:]))
        yield op
