"""What a stage keeps of a micro-batch, in bytes, by the names of what it keeps."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fxpipe.ir.program.kept_bytes import kept_bytes, size
from fxpipe.ir.program.messages import HEAD
from tests.helpers.coded_programs import coded

ROW = 4 * 8  # bytes of a row of four numbers in double precision


class Chunks(nn.Module):
    """Keeps one half of what a layer gives, which is a view of all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.first(x).chunk(2, dim=-1)
        return self.second(torch.tanh(gate) * value)


def test_a_view_keeps_the_whole_of_its_memory() -> None:
    program = coded(Chunks().double(), torch.randn(6, 4, dtype=torch.float64))
    (found,) = kept_bytes(program, {"b": 3})
    backward = program.stages[0].backward
    assert found is not None
    assert backward is not None
    assert "value" in backward.keeps
    tanh_and_product, both_chunks, x, output, target = 2 * ROW, 2 * ROW, ROW, ROW, ROW
    assert size(found.saved) == 3 * (tanh_and_product + both_chunks + x + output + target)
    assert size(found.taken) == 3 * (x + target)
    assert found.taken.items() <= found.saved.items()  # it saves all that it takes


def test_what_comes_from_another_stage_is_the_memory_that_was_made_there() -> None:
    program = coded(Chunks().double(), torch.randn(6, 4, dtype=torch.float64), cut=4)
    assert {"gate", "value"} <= {*program.stages[1].takes}
    near, far = (kept_bytes(program, {"b": 1}, same)[1] for same in (True, False))
    assert near is not None
    assert far is not None
    assert (size(near.taken), size(far.taken)) == (
        3 * ROW,
        3 * ROW + 2 * HEAD,
    )  # two halves of one memory, or two messages


def test_where_autograd_computes_gradients_nothing_is_known() -> None:
    program = coded(Chunks().double(), torch.randn(6, 4, dtype=torch.float64))
    stage = replace(program.stages[0], backward=None)
    assert kept_bytes(replace(program, stages=(stage,)), {"b": 3}) == (None,)
