"""What a device reads for its part of an op is all that its part depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.capture import capture
from fxpipe.ir.graph.evaluate_graph import call, evaluate
from fxpipe.ir.graph.graph import Op, op_name
from fxpipe.ir.operators.group_layout import REPLICATED, Layout, OpCut, boxes
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.op_cuts import op_cuts
from tests.helpers.marks import mostly_slow
from tests.passes.sharding.test_rules import CASES, Calls, linears, sequence

# The statistics of a batch norm are of all parts; and values that are changed in place are gone afterwards.
CASES = {name: case for name, case in CASES.items() if "batch norm" not in name and name not in ("flat", "in place")}


def index(region: Region) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in region)


def only(value: Any, regions: tuple[Region, ...], outside: float) -> Any:
    """The tensor with another number outside of these regions."""
    kept = value.detach().clone() if value.is_floating_point() else value.clone()
    hidden = torch.ones_like(kept, dtype=torch.bool)
    for region in regions:
        hidden[index(region)] = False
    kept[hidden] = outside if kept.is_floating_point() else 0
    return kept


def part(op: Op, cut: OpCut, values: Mapping[str, Any], device: int, outside: float = torch.nan) -> Tensor:
    """The op's result, if a device knows nothing but what it reads."""
    seen = {name: only(values[name], regions[device], outside) for name, regions in cut.reads}
    result = call(op, {**values, **seen})
    assert isinstance(result, Tensor)
    return result


QUICK = {"conv, strides", "matmul", "attention, mask", "embedding", "concat", "layer", "views"}


@pytest.mark.parametrize("name", mostly_slow(CASES, QUICK.__contains__))
def test_a_part_depends_on_what_it_reads_and_on_nothing_else(name: str) -> None:
    model, inputs = CASES[name]
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    graph = capture(model.double(), inputs, reduce="mean")
    states = dict([*model.named_parameters(), *model.named_buffers()])
    sizes = {size.name: inputs[0].shape[size.dim] for size in graph.sizes}
    named = dict(zip([item.name for item in graph.inputs], inputs, strict=True))
    values = evaluate(graph, named, {s.name: states[s.path] for s in graph.states if s.kind != "constant"})
    for op in graph.ops:
        for cut in op_cuts(graph, sizes, 2)[op.name][1:]:
            if op.random or not isinstance(values[op.name], Tensor):
                continue
            whole = values[op.name]
            if cut.summed:
                biased = op_name(op) == "linear" and len(op.reads) > 2
                total = sum(part(op, cut, values, device, 0.0) for device in range(2))
                assert torch.allclose(total - (values[op.reads[2]] if biased else 0), whole)
                continue
            for device in range(2):
                found = part(op, cut, values, device)
                for region in boxes(cut.layout, tuple(whole.shape), 2, device):
                    assert torch.equal(found[index(region)], whole[index(region)]), f"{op.name}, {cut}"


def test_queries_keys_and_values_of_one_layer_are_cut_by_heads() -> None:
    def attend(join: Any, x: Tensor) -> Tensor:
        joined = join(x).view(x.shape[0], x.shape[1], 3, 4, 2).permute(2, 0, 3, 1, 4)
        return torch.softmax(joined[0] @ joined[1].transpose(2, 3), -1) @ joined[2]

    graph = capture(Calls(attend, *linears(1, 24)), (sequence,), reduce="mean")
    sizes = {size.name: sequence.shape[size.dim] for size in graph.sizes}
    cuts = op_cuts(graph, sizes, 2)
    at = {op_name(op): op for op in graph.ops}
    (view,) = (cut for cut in cuts[at["view"].name] if cut.layout == Layout(3))
    assert view.reads[0][1] == tuple(boxes(Layout(2, 3), (6, 5, 24), 2, device) for device in range(2))
    assert OpCut(REPLICATED) == cuts[at["linear"].name][0]
    assert Layout(2, 3) in [cut.layout for cut in cuts[at["linear"].name]]
