"""Rows of samples that are put where a mask is true, as the features of images are put into a text:

    x = x.masked_scatter(ids == IMAGE, features)      the rows go to the places in order, whichever sample they are of

In a micro-batch each place gets the same row as in the whole batch if each sample has as many places as rows. Only a
run tells, so the mask is checked in each micro-batch:

    places = checked_places(ids == IMAGE, features, x)
    x = x.masked_scatter(places, features)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fxpipe.batching.batch_dimension import follow
from fxpipe.batching.batch_facts import Mixes
from fxpipe.batching.data_sizes import mask_of
from fxpipe.batching.selected_rows import PUTS
from fxpipe.ir.graph.graph import Graph, Op, Ref, op_name
from fxpipe.ir.unique_names import Names
from fxpipe.runtime.microbatch import checked_places


def with_checked_places(graph: Graph) -> Graph:
    """The graph with a runtime check before each masked write whose mask is not the one that the rows were selected
    with."""
    types = graph.types
    if not any(op_name(op) in PUTS and mask_of(op, types) is not None for op in graph.ops):
        return graph
    ops = [error.op for error in follow(graph).mixed.values() if isinstance(error, Mixes) and error.in_order]
    masks = {op.name: mask for op in ops if (mask := mask_of(op, types)) and op.args[1:2] == (Ref(mask),)}
    if not masks:
        return graph
    checked = tuple(_with_checks(graph, masks))
    return with_checked_places(replace(graph, ops=checked))  # what reads these was taken to be mixed as they were


def _with_checks(graph: Graph, masks: Mapping[str, str]) -> Iterator[Op]:
    names = Names(graph.types)
    for op in graph.ops:
        if op.name in masks:
            mask, name = masks[op.name], names("places")
            whole = op.args[0] if op_name(op) == "masked_scatter" else None
            args = (Ref(mask), op.args[2], whole)
            yield Op(name, checked_places, args, {}, graph.types[mask], op.origin, op.regions)
            op = replace(op, args=(op.args[0], Ref(name), *op.args[2:]))
        yield op
