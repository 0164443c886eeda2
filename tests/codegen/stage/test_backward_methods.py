"""Backward as code, as it is read: a U-Net, a transformer block with dropout, an LSTM."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
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
    golden(f"codegen/backward/{net.__name__.lower()}.py", numbered(source))


def numbered(source: str) -> str:
    """The source with its views numbered as they come: torch makes others, too, as many as its version likes."""
    names: dict[str, str] = {}
    return re.sub(r"\bview_\d+_\b", lambda found: names.setdefault(found[0], f"view_{len(names) + 1}_"), source)


def test_golden_selective(golden: Callable[[str, str], None], linted: Callable[[str], None]) -> None:
    """What is cheap is computed again, under the user's line; so is layer norm, whose results both halves need."""
    program = coded(Gated().double(), torch.randn(4, 8, dtype=torch.float64), 4, "selective")
    source = emit_stage(program, 1, kinds="FBIW")
    linted(source)
    golden("codegen/backward/selective.py", source)


class Shared(nn.Module):
    """Weights whose gradients are not simply added: `twice` is used twice, and `a` and `b` have one gradient, of which
    one of them gets a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(self.first(x)).tanh()) + (self.a + self.b)


def test_only_complete_gradients_are_added_up() -> None:
    source = emit_stage(coded(Shared().double(), torch.randn(8, 4, dtype=torch.float64)), 0, kinds="FB")
    added = sorted(line.strip() for line in source.splitlines() if "= accumulate" in line)
    assert [line.partition(",")[0] for line in added] == [
        "db_1 = accumulate(sums[5]",
        "dfirst_bias = accumulate(sums[1]",
        "dfirst_weight = accumulate_mm(sums[0]",
        "dtwice_bias = accumulate(sums[3]",
        "dtwice_weight = accumulate(sums[2]",
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_sums_are_autograds(schedule: str) -> None:
    """The same products, added in the same order; not each CPU adds a product to a matrix as it adds two matrices."""
    found = []
    for backward in ("autograd", "code"):
        torch.manual_seed(0)
        model, x = Shared().double(), torch.randn(24, 4, dtype=torch.float64)
        pipe = fxpipe.compile(model, 2, 4, schedule=schedule, backward=backward)
        for _ in range(2):  # the second step is added to the first one's gradients
            pipe.step(x, loss_fn=lambda y: y.square().mean())
        found.append([p.grad for p in model.parameters()])
        pipe.close()
    torch.testing.assert_close(*found, rtol=1e-14, atol=1e-16)
