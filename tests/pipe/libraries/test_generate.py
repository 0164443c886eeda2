"""`pipe.generate` in one process is that of the model, by the stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.errors import FxpipeError
from tests.whole.ranks.generating import LENGTH, WAYS, texts, tiny

pytest.importorskip("transformers")


def check(name: str, ways: tuple[str, ...]) -> None:
    plain = tiny(name).eval()
    pipe = fxpipe.compile(copy.deepcopy(plain), devices=2, chunks=1)
    for way in ways:
        options: dict[str, Any] = {"max_new_tokens": LENGTH, "pad_token_id": 0, **WAYS[way]}
        torch.manual_seed(7)
        wanted = plain.generate(texts()[:2, :5], **options)
        torch.manual_seed(7)
        assert pipe.generate(texts()[:2, :5], **options).tolist() == wanted.tolist(), way
    with pytest.raises(FxpipeError, match=r"generate_batch runs the modules of the model itself, .*without it"):
        pipe.generate(texts()[:2, :5], custom_generate=lambda model, *args, **kwargs: model.generate_batch([[1]]))
    pipe.close()


def test_generate() -> None:
    check("llama", ("greedy", "sampled", "beams"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
def test_generate_in_all_ways(name: str) -> None:
    check(name, tuple(WAYS))
