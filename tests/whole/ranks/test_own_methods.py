"""All public methods of models of libraries, called through a pipe over ranks: the trained model's, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.whole.ranks import own_methods
from tests.whole.ranks.pool import Pool

PAIR = (0, 1)
LIBRARIES = {"llama": "transformers", "mixtral": "transformers", "t5": "transformers"}
# What each rank refuses, of the methods that no table says are.
ALSO = {"peft": {"save_pretrained"}, "diffusers": {"save_pretrained"}}
ALSO |= {"pytorch_lightning": {"test_step", "training_step"}}


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5", "peft", "diffusers", "pytorch_lightning"])
def test_no_method_is_forgotten(name: str) -> None:
    pytest.importorskip(LIBRARIES.get(name, name))
    forgotten, gone = own_methods.unknown(name)
    assert not forgotten, f"neither called nor left out with a reason: {forgotten}"
    assert not gone, f"no methods: {gone}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5", "peft", "diffusers", "pytorch_lightning"])
def test_each_method(pool: Pool, name: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES.get(name, name))
    pool.start(own_methods.each_method, name, tmp_path, ranks=PAIR, patience=900)
    refused = pool.results(PAIR, patience=900)
    assert refused[0] == refused[1] == sorted({*own_methods.REFUSED[name]} | ALSO.get(name, set()))
