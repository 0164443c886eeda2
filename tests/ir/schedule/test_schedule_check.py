"""Schedules that cannot run: each fault with its place in the grid."""

from __future__ import annotations

from textwrap import dedent

import pytest

from fxpipe.ir.schedule.schedule import parse
from fxpipe.ir.schedule.schedule_check import check

FAULTS = {
    "missing backward": """
        by hand: 2 stages, 2 micro-batches
        clock      0   1   2   3   4
        device 0  F0  F1      B0  B1
        device 1      F0  B0  F1
                                  ^^ micro-batch 1 of stage 1 has no backward, B1
    """,
    "missing forward": """
        by hand: 2 stages, 2 micro-batches
        clock      0   1   2   3   4
        device 0  F0          B0  B1
                                      ^^ micro-batch 1 of stage 0 has no forward, F1
        device 1      F0  B0  F1  B1
    """,
    "twice": """
        by hand: 1 stage, 1 micro-batch
        clock      0   1   2
        device 0  F0  F0  B0
                      ^^ F0 of stage 0 stands twice
    """,
    "backward first": """
        by hand: 1 stage, 1 micro-batch
        clock      0   1
        device 0  B0  F0
                  ^^ B0 of stage 0 stands before F0 of stage 0, which it needs
    """,
    "deadlock": """
        by hand: 2 stages, 2 micro-batches
        clock      0   1   2   3   4
        device 0  F0  B0  F1  B1
                      ^^ B0 of stage 0 waits for B0 of stage 1 on device 1, which never comes
        device 1      F0  F1  B0  B1
    """,
    "both": """
        by hand: 1 stage, 1 micro-batch
        clock      0   1   2   3
        device 0  F0  B0  I0  W0
                                  ^^ micro-batch 0 of stage 0 goes backward in one piece, B0, and in two, I0 and W0
    """,
    "half": """
        by hand: 1 stage, 1 micro-batch
        clock      0   1
        device 0  F0  I0
                          ^^ micro-batch 0 of stage 0 has no weight gradient, W0
    """,
    "two homes": """
        by hand: 1 stage, 2 micro-batches
        clock       0    1
        device 0  0F0  0B0
        device 1  0F1  0B1
                  ^^^ stage 0 is on device 0 already
    """,
}  # fmt: skip

BROKEN = {
    "missing backward": "F0 F1 B0 B1 \n F0 B0 F1",
    "missing forward": "F0 B0 B1 \n F0 B0 F1 B1",
    "twice": "F0 F0 B0",
    "backward first": "B0 F0",
    "deadlock": "F0 B0 F1 B1 \n F0 F1 B0 B1",
    "both": "F0 B0 I0 W0",
    "half": "F0 I0",
    "two homes": "0F0 0B0 \n 0F1 0B1",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_shown_in_the_grid(fault: str) -> None:
    with pytest.raises(ValueError, match="cannot run") as error:
        check(parse(BROKEN[fault]))
    head, grid = str(error.value).split("\n", 1)
    assert grid == dedent(FAULTS[fault]).strip()
    assert head.startswith("the schedule 'by hand' cannot run: device ")
    assert head.endswith(": " + grid[grid.rindex("^") + 2 :].splitlines()[0])
