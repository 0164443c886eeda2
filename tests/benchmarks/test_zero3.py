"""What the benchmark of ZeRO-3 counts is what the two ways to shard parameters do, by their descriptions."""

from __future__ import annotations

import pytest

from benchmarks.zero3 import Task, answer

TASK = Task(ranks=2, chunks=3, width=64, depth=2, samples=12, length=4)
LAYER = 4 * (12 * 64**2 + 13 * 64)  # bytes: matrices, biases and norms
ALL = TASK.depth * LAYER


@pytest.mark.slow
def test_fully_shard_sends_parameters_once_a_step() -> None:
    """For each layer an all-gather, which sends a half, and an all-reduce, in two messages of a half each."""
    found = answer(TASK, "fully_shard")
    assert (found.messages, found.sent) == (3 * TASK.depth, 1.5 * ALL)
    assert found.kept == pytest.approx(3 * ALL / 2, rel=0.01)


@pytest.mark.slow
def test_a_plan_sends_them_with_each_micro_batch() -> None:
    """What backward needs twice, biases of matrices once, and gradients of all; before each, a word."""
    found = answer(TASK, "ZeRO-3 of a plan")
    saved, others = 4 + 4, 4  # of a layer: matrices and what norms have; biases of matrices
    exchanges = TASK.chunks * TASK.depth * (3 * saved + 2 * others)
    assert found.messages == 2 * exchanges + 1  # the word that ends the step
    assert found.sent == pytest.approx(TASK.chunks * 1.5 * ALL, rel=0.02)
    assert found.kept == pytest.approx(3 * ALL / 2, rel=0.01)


@pytest.mark.slow
def test_a_mesh_without_either_has_all() -> None:
    found = answer(TASK, "DistributedDataParallel")
    assert found.sent == ALL
    assert found.kept == pytest.approx(3 * ALL, rel=0.01)
