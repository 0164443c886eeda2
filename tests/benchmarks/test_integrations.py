"""Training loops that users have already: the loss goes down. Skipped where the library is not installed."""

from __future__ import annotations

from importlib import import_module

import pytest

SCRIPTS = {
    "plain": "torch",
    "language_model": "transformers",
    "diffusion": "diffusers",
    "vision": "timm",
    "lightning_loop": "lightning",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loop_trains(name: str) -> None:
    pytest.importorskip(SCRIPTS[name])
    losses = import_module(f"benchmarks.integrations.{name}").losses()
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_trainer_trains_a_pipe_as_the_plain_model() -> None:
    pytest.importorskip("transformers")
    trainer = import_module("benchmarks.integrations.language_model").trainer
    assert trainer() == pytest.approx(trainer(pipeline=False), rel=1e-4)
