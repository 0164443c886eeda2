"""Models of transformers over ranks: `generate` and `save_pretrained` are those of the trained model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.whole.ranks import generating
from tests.whole.ranks.pool import Pool

pytest.importorskip("transformers")
PAIR, ALL = (0, 1), (0, 1, 2, 3)


def test_generate(pool: Pool) -> None:
    pool.run(generating.generates, "llama", ("greedy", "sampled", "beams"), ranks=PAIR)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5", "lora"])
@pytest.mark.parametrize("ranks", [PAIR, ALL], ids=len)
def test_generate_in_all_ways(pool: Pool, name: str, ranks: tuple[int, ...]) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    pool.start(generating.generates, name, tuple(generating.WAYS), ranks=ranks, patience=900)
    pool.results(ranks, patience=900)  # each way is captured twice or more


def test_save_pretrained(pool: Pool, tmp_path: Path) -> None:
    """Tied weights; then three stages read what two have written."""
    pool.run(generating.saved, "llama", tmp_path, ranks=PAIR)
    pool.run(generating.read_again, "llama", tmp_path, ranks=(0, 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
@pytest.mark.parametrize(("wrote", "read"), [(PAIR, ALL), (ALL, (0, 1, 2))], ids=lambda ranks: str(len(ranks)))
def test_save_pretrained_and_read(
    pool: Pool, name: str, wrote: tuple[int, ...], read: tuple[int, ...], tmp_path: Path
) -> None:
    pool.run(generating.saved, name, tmp_path, ranks=wrote)
    pool.run(generating.read_again, name, tmp_path, ranks=read)
