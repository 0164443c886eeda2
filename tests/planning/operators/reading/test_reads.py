"""What a part reads is enough: with all else of its inputs spoilt, it puts out the same."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from fxpipe.ir.operators.strategy import Region, regions
from fxpipe.planning.operators.input_regions import reads
from tests.helpers.random_operator_graphs import VOCAB, module, network, strategy


def where(region: Region) -> tuple[slice, ...]:
    return tuple(slice(first, after) for first, after in region)


def spoilt(x: Tensor, kept: Region) -> Tensor:
    """The tensor with nothing sensible outside of what is kept."""
    out = (x + 1) % VOCAB if x.dtype == torch.int64 else torch.full_like(x, torch.nan)
    out[where(kept)] = x[where(kept)]
    return out


@pytest.mark.parametrize("seed", range(40))
def test_a_part_is_made_of_what_it_reads(seed: int) -> None:
    made, random = network(seed), Random(seed)
    model = module(made)
    cells: dict[str, Tensor] = {}
    values = model.run(*made.inputs(), cells)
    configs = dict(zip(made.graph.positions, strategy(made.graph, 4, random).configs, strict=True))
    for step in made.steps:
        operator = made.graph.operator(step.name)
        for region in regions(operator, configs[step.name]):
            kept = dict(zip(operator.inputs, reads(made.graph, operator, region), strict=True))
            read = {name: spoilt(values[name], kept[name]) for name in step.inputs}
            memory = {name: spoilt(cells[name], kept[name]) for name in step.inputs if name in cells}
            got, wanted = model.step(step, read, memory), values[step.name]
            torch.testing.assert_close(got[where(region)], wanted[where(region)], rtol=1e-12, atol=1e-12)
