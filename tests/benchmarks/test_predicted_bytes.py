"""The bytes that are predicted for backward as code are those of a step."""

from __future__ import annotations

import pytest

from benchmarks import predicted_bytes
from benchmarks.predicted_bytes import MODELS, SCHEDULES, beside
from tests.helpers.marks import mostly_slow


def test_the_highest_point_of_each_worker_counts() -> None:
    assert predicted_bytes.total({"a": predicted_bytes.torch.ones(2, 2)}).item() == 4


@pytest.mark.parametrize(
    ("name", "schedule", "checkpoint"),
    mostly_slow(
        [
            ("perceptron", *SCHEDULES[2]),
            ("transformer, dropout", *SCHEDULES[1]),
            ("text classifier, LSTM", *SCHEDULES[0]),
            ("perceptron", *SCHEDULES[3]),
            ("U-Net", *SCHEDULES[4]),
        ],
        lambda one: one[:2] == ("perceptron", "zb-h1"),
    ),
)
def test_predicted_bytes_are_measured_bytes(name: str, schedule: str, checkpoint: str) -> None:
    assert name in MODELS
    predicted, measured, coded = beside(name, schedule, checkpoint)
    assert coded == ("4 of 4" if schedule in ("zb-v", "interleaved") else "2 of 2")
    assert min(measured) > 0
    assert predicted == measured
