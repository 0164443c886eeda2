"""The benchmarks of training steps: every trainer computes what the plain loop does, and the tables say what they
should, at sizes that say nothing about speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import overhead, throughput
from benchmarks.trainers import BARE, PIPELINING, PLAIN, TORCHGPIPE, check, outcome, trainers
from benchmarks.workload import Trainer, Workload
from tests.helpers.marks import mostly_slow

SMALL = Workload(stages=3, chunks=4, rows=2, width=8, depth=2)
THREADS = [name for name in trainers(SMALL) if not name.startswith(PIPELINING)]
PROCESSES = [name for name in trainers(SMALL) if name.startswith(PIPELINING)]


@pytest.mark.parametrize("name", mostly_slow(THREADS, [*THREADS][::3].__contains__))
def test_a_trainer_computes_what_the_plain_loop_does(name: str) -> None:
    makers = trainers(SMALL)
    pair = {PLAIN: makers[PLAIN](), name: makers[name]()}
    try:
        check(pair)
        assert pair[name].run(3) == pytest.approx(pair[PLAIN].run(1))
        check(pair)
    finally:
        pair[name].close()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_processes_compute_what_the_plain_loop_does(name: str) -> None:
    work = replace(SMALL, stages=2)
    makers = trainers(work)
    theirs = makers[name]()
    try:
        check({PLAIN: makers[PLAIN](), name: theirs})
    finally:
        theirs.close()


@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_bare_threads_take_any_number_of_micro_batches(chunks: int) -> None:
    makers = trainers(replace(SMALL, chunks=chunks))
    check({PLAIN: makers[PLAIN](), BARE: makers[BARE]()})


def test_a_wrong_gradient_is_found() -> None:
    right = trainers(SMALL)[PLAIN]()
    loss, *gradients = outcome(right)
    gradients[1] = gradients[1] * (1 + 1e-4)
    with pytest.raises(ValueError, match=r"^forged does not compute what plain loop does: off by 1\.0e-04$"):
        check({PLAIN: right, "forged": Trainer(lambda steps: loss.item(), lambda: gradients)})
    with pytest.raises(ValueError, match="forged has 11 gradients, plain loop 12"):
        check({PLAIN: right, "forged": Trainer(lambda steps: loss.item(), lambda: gradients[1:])})


@pytest.mark.slow
def test_every_trainer_is_timed_in_steps() -> None:
    seconds = throughput.measure(SMALL, rounds=2, steps=3, only=[BARE])
    assert list(seconds) == [PLAIN, BARE]
    assert all(len(times) == 2 and min(times) > 0 for times in seconds.values())


def test_throughput_is_beside_the_ideal() -> None:
    work = replace(SMALL, stages=2, chunks=16)
    rows = throughput.table(work, {PLAIN: [0.64, 0.66, 0.64], BARE: [0.34, 0.35, 0.36]}).splitlines()
    assert rows[0].endswith("of the ideal 1.88")
    assert rows[2].split() == ["plain", "loop", "640.0", "1.00"]
    assert rows[3].split() == ["bare", "threads,", "1F1B", "350.0", "1.88", "100.0%"]


def test_step_overhead_is_beside_both_peers() -> None:
    seconds = {
        PLAIN: [12e-6, 12e-6],
        TORCHGPIPE: [60e-6, 60e-6],
        f"{PIPELINING}, GPipe": [240e-6, 240e-6],
        f"{PIPELINING}, 1F1B": [120e-6, 120e-6],
        "fxpipe, 1f1b": [30e-6, 30e-6],
    }
    rows = overhead.step_table(SMALL, seconds).splitlines()[2:]
    assert rows[0].split() == ["plain", "loop", "1.0"]
    assert rows[-1].split() == ["fxpipe,", "1f1b", "2.5", "1.5", "0.50", "0.25"]
