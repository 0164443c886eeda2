"""Sends and receives of a schedule: two devices by hand, and random programs under every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.ir.program.device_programs import DevicePrograms, Message, Step, check, show
from fxpipe.ir.program.program import Loan, Move, Program
from fxpipe.ir.program.transfers import add_transfers, meetings
from fxpipe.ir.schedule.schedule import Action, Schedule, parse
from fxpipe.passes import lower
from fxpipe.runtime.microbatch import overlaps, split_sizes
from fxpipe.schedules.make_schedule import SCHEDULES, make, placement
from tests.helpers.pipes import EARLY, TENSOR, TWO, program, replicated
from tests.helpers.random_models import example_of

LISTING = """
    1f1b on 2 devices
    cuda:0
      send     w  0 -> 1
      run      0F0
      send     x[0]  0 -> 1
      send     mask[0]  0 -> 1
      run      0F1
      send     x[1]  0 -> 1
      send     mask[1]  0 -> 1
      receive  gradient of x[0]  1 -> 0
      run      0R0
      run      0B0
      receive  gradient of x[1]  1 -> 0
      receive  gradient of w  1 -> 0
      run      0B1
      reduce   gradient of w  1 -> 0
    cuda:1
      receive  w  0 -> 1
      receive  x[0]  0 -> 1
      receive  mask[0]  0 -> 1
      run      1F0
      receive  x[1]  0 -> 1
      receive  mask[1]  0 -> 1
      run      1R0
      run      1B0
      send     gradient of x[0]  1 -> 0
      run      1F1
      run      1B1
      send     gradient of x[1]  1 -> 0
      send     gradient of w  1 -> 0
"""


REPLICAS = """
    1f1b on 3 devices
    cuda:0
      send     w  0 -> 1
      send     w  0 -> 1.1
      run      0F0
      send     x[0]  0 -> 1
      send     x[0]  0 -> 1.1
      send     mask[0]  0 -> 1
      send     mask[0]  0 -> 1.1
"""


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2)])
def test_replicas_each_have_the_row_and_exchange_what_they_share(counts: tuple[int, int]) -> None:
    programs = add_transfers(EARLY, replicated(TWO, counts))
    check(programs)
    assert len(programs.devices) == sum(counts)
    sent = {
        m.replicas for row in programs.rows for do, m, _ in row if do == "send" and m.value == "x" and not m.gradient
    }
    assert sent == {(a, b) for a in range(counts[0]) for b in range(counts[1]) if meet(a, counts[0], b, counts[1])}
    if counts == (1, 2):
        assert show(programs).startswith(dedent(REPLICAS).strip())


SUMS = """
    gpipe on 3 devices
    a
      run      0F0
      send     x[0]  0 -> 1
      receive  gradient of x[0]  1 -> 0
      run      0B0
      receive  gradient of weights 0 of stage 0, part 0  0.1 -> 0
      send     gradient of weights 0 of stage 0, part 1  0 -> 0.1
      reduce   gradient of weights 0 of stage 0, part 0  0.1 -> 0
      receive  gradient of weights 0 of stage 0, part 1, summed  0.1 -> 0
      send     gradient of weights 0 of stage 0, part 0, summed  0 -> 0.1
      gather   gradient of weights 0 of stage 0, part 1, summed  0.1 -> 0
    a1
"""


def test_replicas_add_up_gradients_in_parts() -> None:
    two = replicated(program("ab", [Move("x", 0, 1)]), (2, 1))
    programs = add_transfers(make("gpipe", "ab", 1), two)
    assert show(programs).startswith(dedent(SUMS).strip())
    assert not [step for step in programs.rows[2] if "weights" in str(step)]


def test_sums_are_on_their_way_while_other_stages_go_backward() -> None:
    """Those of what is lent wait until the borrowers have sent their share."""
    devices = placement("interleaved", "ab")
    four = replicated(program(devices, [Move(f"x{s}", s, s + 1) for s in range(3)], [Loan("w", 2, 3)]), (2, 1, 2, 1))
    row = [str(step) for step in add_transfers(make("interleaved", devices, 2), four).rows[0]]
    sent = [line for line in row if line.startswith("send     gradient of w") and "summed" not in line]
    assert sent == [
        f"send     gradient of weights {n} of stage {s}, part 1  {s} -> {s}.1" for n, s in ((0, 2), (0, 0), (1, 2))
    ]
    assert row.index(sent[0]) < row.index("run      0B1") < row.index(sent[1])
    assert row.index(sent[1]) < row.index("reduce   gradient of w  3 -> 2") < row.index(sent[2])


@given(here=st.integers(1, 9), there=st.integers(1, 9), rows=st.integers(0, 500))
def test_all_replicas_that_share_samples_meet(here: int, there: int, rows: int) -> None:
    shared = overlaps(split_sizes(rows, here), split_sizes(rows, there))
    assert {(a, b) for a, b, _ in shared} <= set(meetings(here, there))


def meet(a: int, here: int, b: int, there: int) -> bool:
    """Whether slice a of so many and slice b of so many have samples in common."""
    return a * there < (b + 1) * here and b * here < (a + 1) * there


def test_listing() -> None:
    programs = add_transfers(EARLY, TWO)
    assert show(programs) == str(programs) == dedent(LISTING).strip()
    check(programs)


def test_nothing_moves_within_a_device() -> None:
    alone = replace(TWO, stages=tuple(replace(stage, device="cpu:0") for stage in TWO.stages))
    (row,) = add_transfers(make("1f1b", alone.devices, 1), alone).rows
    loan = Message("w", 1, 0, None, gradient=True)
    assert [str(step.what) for step in row] == ["0F0", "1F0", "1B0", "0B0", str(loan)]
    assert row[-1] == Step("reduce", loan)  # the gradient is there already; it has to be added all the same


def test_portals_go_straight_and_come_back_straight() -> None:
    skip = program("abc", [Move("x", 0, 1), Move("y", 1, 2), Move("skip", 0, 2)])
    a, b, c = add_transfers(make("gpipe", "abc", 1), skip).rows
    assert [str(step) for step in a] == [
        "run      0F0",
        "send     x[0]  0 -> 1",
        "send     skip[0]  0 -> 2",
        "receive  gradient of skip[0]  2 -> 0",  # made before that of x, by the device after next
        "receive  gradient of x[0]  1 -> 0",
        "run      0B0",
    ]
    assert not any("skip" in str(step) for step in b)
    assert sum("skip" in str(step) for step in c) == 2


def test_no_gradients_without_a_backward() -> None:
    programs = add_transfers(make("forward-only", ("cuda:0", "cuda:1"), 3), TWO)
    check(programs)
    assert "gradient" not in str(programs)
    assert "R" not in {step.what.kind for row in programs.rows for step in row if isinstance(step.what, Action)}


def test_gradients_leave_after_the_input_gradient() -> None:
    _, second = add_transfers(make("zb-h1", ("cuda:0", "cuda:1"), 1), TWO).rows
    assert [str(step) for step in second[-5:]] == [
        "run      1F0",
        "run      1I0",
        "send     gradient of x[0]  1 -> 0",
        "run      1W0",
        "send     gradient of w  1 -> 0",  # the last weight gradient is in it
    ]


# Every schedule -------------------------------------------------------------------------------------------------


@st.composite
def programs_of(draw: st.DrawFn, devices: Sequence[str]) -> Program:
    """A program of these devices whose values go from any stage to any later one, some without a gradient, with loans
    between any two stages."""
    n = len(devices)
    ends = st.tuples(st.integers(-1, n), st.integers(-1, n)).map(sorted).filter(lambda pair: pair[0] < pair[1])
    far = draw(st.lists(ends, max_size=6))
    moves = [Move(f"x{s}", s, s + 1) for s in range(-1, n)] + [Move(f"v{k}", *pair) for k, pair in enumerate(far)]
    borrowed = draw(
        st.lists(st.tuples(*[st.integers(0, n - 1)] * 2).filter(lambda pair: pair[0] != pair[1]), max_size=3)
    )
    loans = [Loan(f"w{k}", *pair) for k, pair in enumerate(borrowed if n > 1 else [])]
    masks = draw(st.lists(st.sampled_from([m.value for m in moves] + [loan.state for loan in loans]), max_size=4))
    return program(devices, moves, loans, masks, draw(st.sampled_from(["never", "except_last", "always"])))


@given(data=st.data(), name=st.sampled_from(sorted(SCHEDULES)), n=st.integers(1, 5), chunks=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_random_programs_under_every_schedule(data: st.DataObject, name: str, n: int, chunks: int) -> None:
    devices = placement(name, [f"cuda:{d}" for d in range(n)])
    schedule, of_devices = make(name, devices, chunks), data.draw(programs_of(devices))
    programs = add_transfers(schedule, of_devices)
    check(programs)
    _everything_arrives(programs, schedule, of_devices)


@given(data=st.data(), name=st.sampled_from(sorted(SCHEDULES)), n=st.integers(1, 3), chunks=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_any_replicas(data: st.DataObject, name: str, n: int, chunks: int) -> None:
    devices = placement(name, [f"cuda:{d}" for d in range(n)])
    counts = {device: data.draw(st.integers(1, 4)) for device in dict.fromkeys(devices)}
    several = replicated(data.draw(programs_of(devices)), [counts[device] for device in devices])
    check(add_transfers(make(name, devices, chunks), several))


@pytest.mark.slow
@given(data=st.data(), name=st.sampled_from(sorted(SCHEDULES)), n=st.integers(1, 4), chunks=st.integers(1, 8))
@settings(max_examples=300, deadline=None)
def test_more_programs_are_free_of_deadlock(data: st.DataObject, name: str, n: int, chunks: int) -> None:
    """`check` runs them where nothing is buffered, with one queue a device."""
    devices = placement(name, [f"cuda:{d}" for d in range(n)])
    counts = {device: data.draw(st.integers(1, 3)) for device in dict.fromkeys(devices)}
    several = replicated(data.draw(programs_of(devices)), [counts[device] for device in devices])
    check(add_transfers(make(name, devices, chunks), several))


@given(data=st.data(), name=st.sampled_from(["gpipe", "1f1b", "1f1b-late", "zb-h1", "zb-h2"]))
@settings(max_examples=30, deadline=None)
def test_any_placement(data: st.DataObject, name: str) -> None:
    devices = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
    schedule = make(name, devices, data.draw(st.integers(1, 5)))
    check(add_transfers(schedule, data.draw(programs_of(devices))))


@pytest.mark.parametrize("seed", range(12))
def test_real_programs(seed: int) -> None:
    example = example_of(seed)
    lowered = lower(example.graph, example.plan)
    for name in ("gpipe", "1f1b", "zb-h2"):
        schedule = make(name, lowered.devices, 3)
        programs = add_transfers(schedule, lowered)
        check(programs)
        _everything_arrives(programs, schedule, lowered)


def _everything_arrives(programs: DevicePrograms, schedule: Schedule, program: Program) -> None:
    """The actions are the schedule's, in its order, and before each stands a receive of all that it takes from
    elsewhere; recomputation is right before the backward."""
    device = [stage.device for stage in program.stages]
    for row, actions in zip(programs.rows, schedule.devices, strict=True):
        runs = [step.what for step in row if step.do == "run" and isinstance(step.what, Action)]
        assert tuple(run for run in runs if run.kind != "R") == actions
        here: set[object] = set()
        for step in row:
            if step.do == "receive":
                here.add(step.what)
            if step.do == "run" and isinstance(step.what, Action):
                kind, s, i = step.what
                for move in program.moves:
                    if min(move.source, move.target) < 0 or move.target == len(device):
                        continue
                    if device[move.source] == device[move.target]:
                        continue
                    if kind == "F" and move.target == s:
                        assert Message(move.value, move.source, s, i) in here
                    if kind in "BI" and move.source == s and program.types[move.value] == TENSOR:
                        assert Message(move.value, move.target, s, i, gradient=True) in here
        again = [(run.stage, run.micro_batch) for run in runs if run.kind == "R"]
        assert again == [
            (s, i)
            for kind, s, i in actions
            if kind in "BI"
            and program.stages[s].checkpoint in ("always", "except_last")
            and not (program.stages[s].checkpoint == "except_last" and i + 1 == schedule.chunks)
        ]


def test_another_programs_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of the stages \[\(0,\), \(1,\), \(2,\)\], but cuda:0 runs the stages"):
        add_transfers(make("gpipe", "abc", 2), TWO)
    with pytest.raises(ValueError, match="cannot run"):
        add_transfers(parse("F0 B0 \n B0 F0"), TWO)
