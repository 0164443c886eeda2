"""The methods of overlapped pairs, as they are read: the lines of a forward and a backward in turns."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from fxpipe.codegen.stage.stage_file import emit_stage
from tests.helpers.backward_nets import Block, Gated
from tests.helpers.coded_programs import coded


def test_golden_pair(golden: Callable[[str, str], None], linted: Callable[[str], None]) -> None:
    program = coded(Gated().double(), torch.randn(4, 8, dtype=torch.float64), 3)
    source = emit_stage(program, 0, kinds="FB", beside=[1])
    linted(source)
    golden("codegen/backward/pair.py", source)


def method(source: str, name: str) -> list[str]:
    """The lines of a method, without empty ones and comments."""
    text = re.split(rf"    def {name}\(", source)[1].partition("\n    def ")[0]
    body = text.partition(":\n")[2]
    return [line for line in body.splitlines() if line.strip() and not line.lstrip().startswith(("#", '"""'))]


@pytest.mark.slow
def test_a_pair_has_all_lines_of_both_in_their_order(linted: Callable[[str], None]) -> None:
    program = coded(Block().double(), torch.randn(4, 5, 8, dtype=torch.float64), 9)
    source = emit_stage(program, 0, kinds="FB", beside=[0, 1])
    linted(source)
    forward, backward, pair = (
        [line for line in method(source, name) if re.match(r"\s+[\w, ]+ = |\s+with |\s+\w+\.\w+_\(", line)]
        for name in ("forward", "backward", "forward_beside_backward_0")
    )
    rest = iter(pair)
    assert all(line in rest for line in forward)
    assert len(pair) == len(forward) + len(backward)
