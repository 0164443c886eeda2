"""Caches of transformers that are given to a pipe are filled as by the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe

transformers = pytest.importorskip("transformers")

MAKERS = {
    "dynamic": lambda config: transformers.DynamicCache(config=config),
    "without_config": lambda config: transformers.DynamicCache(),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=16),
}


def tiny() -> Any:
    """A decoder of four layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def decode(pipe: nn.Module, plain: Any, kind: str) -> None:
    """Four calls, each with what the one before has put into the cache; all attributes of all its layers are those
    that the plain model leaves there."""
    mine, theirs = MAKERS[kind](plain.config), MAKERS[kind](plain.config)
    ids = torch.randint(64, (2, 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for _ in range(4):
            wanted = plain(input_ids=ids, past_key_values=theirs, use_cache=True).logits
            got = pipe(input_ids=ids, past_key_values=mine, use_cache=True)
            torch.testing.assert_close(got.logits, wanted)
            assert got.past_key_values is mine
            for layer, other in zip(mine.layers, theirs.layers, strict=True):
                assert {key: type(value) for key, value in vars(layer).items()} == {
                    key: type(value) for key, value in vars(other).items()
                }
                for key, value in vars(layer).items():
                    torch.testing.assert_close(value, vars(other)[key]) if isinstance(value, torch.Tensor) else None
                    assert isinstance(value, torch.Tensor) or value == vars(other)[key], key
            ids = wanted[:, -1:].argmax(-1)


@pytest.mark.parametrize("kind", MAKERS)
def test_caches_are_filled(kind: str) -> None:
    plain = tiny()
    pipe = fxpipe.compile(copy.deepcopy(plain), devices=2, chunks=2)
    decode(pipe, plain, kind)
    pipe.close()
