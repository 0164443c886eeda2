"""Backward as code, as it is read: a U-Net, a transformer block with dropout, an LSTM."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxpipe.codegen.stage.stage_file import emit_stage
from tests.helpers.backward_nets import Block, Gated, Lstm, UNet
from tests.helpers.coded_programs import coded


@pytest.mark.parametrize(
    ("net", "x", "kinds"),
    [
        (UNet, torch.randn(4, 1, 8, 8, dtype=torch.float64), "FB"),
        (Block, torch.randn(4, 5, 8, dtype=torch.float64), "FB"),
        (Lstm, torch.randn(4, 3, 4, dtype=torch.float64), "FIW"),
    ],
)
def test_golden_backward(
    net: Callable[[], nn.Module],
    x: Tensor,
    kinds: str,
    golden: Callable[[str, str], None],
    linted: Callable[[str], None],
) -> None:
    source = emit_stage(coded(net().double(), x), 0, kinds=kinds)
    linted(source)
    golden(f"codegen/backward/{net.__name__.lower()}.py", source)


def test_golden_selective(golden: Callable[[str, str], None], linted: Callable[[str], None]) -> None:
    """What is cheap is computed again, under the user's line; so is layer norm, whose results both halves need."""
    program = coded(Gated().double(), torch.randn(4, 8, dtype=torch.float64), 4, "selective")
    source = emit_stage(program, 1, kinds="FBIW")
    linted(source)
    golden("codegen/backward/selective.py", source)
