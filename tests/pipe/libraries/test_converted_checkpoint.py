"""Models of transformers on the meta device are made from the files that `save_pretrained` writes for the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe.errors import CheckpointError
from fxpipe.pipe.libraries.converted_checkpoint import converted
from fxpipe.pipe.saved.tensor_sources import open_source

hf = pytest.importorskip("transformers")
files = pytest.importorskip("safetensors.torch")
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8,
}  # fmt: skip
MIXED = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_local_experts": 12}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": MIXED,
    "qwen3_moe": MIXED | {"shared_expert_intermediate_size": 8, "decoder_sparse_step": 1},
    "olmoe": MIXED,
    "bert": {},
}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    auto = hf.AutoModelForMaskedLM if family == "bert" else hf.AutoModelForCausalLM
    return auto.from_config(config)


def on_meta(family: str) -> Any:
    with torch.device("meta"):
        return model_of(family)


def assert_same(made: Any, model: Any) -> None:
    wanted = model.state_dict()
    assert made.state_dict().keys() == wanted.keys()
    for key, tensor in made.state_dict().items():
        assert torch.equal(tensor, wanted[key]), key


def rotary(module: Any, path: str) -> None:
    """Frequencies, which no file has."""
    if hasattr(module, "inv_freq"):
        module.inv_freq.fill_(1)
        module.original_inv_freq = module.inv_freq
    if hasattr(module, "position_ids"):
        module.position_ids.copy_(torch.arange(32)[None])
        module.token_type_ids.zero_()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_the_hub(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    made = on_meta(family)
    fxpipe.materialize(made, checkpoint=tmp_path, init=rotary)
    assert_same(made, model)


def test_the_models_own_keys(tmp_path: Path) -> None:
    model, made = model_of("mixtral"), on_meta("mixtral")
    files.save_file(model.state_dict(), tmp_path / "model.safetensors")
    fxpipe.materialize(made, checkpoint=tmp_path, init=rotary)
    assert_same(made, model)


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mixtral")
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    read: list[str] = []

    def fill(tensors: Mapping[str, Tensor]) -> None:
        read.extend(tensors)
        source.fill(tensors)

    found = converted(source.__class__(source.name, source.keys, source.shape, fill), model, model.state_dict())
    key = "model.layers.1.mlp.experts.gate_up_proj"
    wanted = model.state_dict()[key]
    assert found.shape(key) == tuple(wanted.shape)
    made = torch.zeros_like(wanted)
    found.fill({key: made})
    assert torch.equal(made, wanted)
    assert read == [f"model.layers.1.block_sparse_moe.experts.{n}.{w}.weight" for n in range(12) for w in ("w1", "w3")]


def test_an_expert_that_is_not_there(tmp_path: Path) -> None:
    model_of("mixtral").save_pretrained(tmp_path)
    held = files.load_file(tmp_path / "model.safetensors")
    del held["model.layers.0.block_sparse_moe.experts.3.w3.weight"]
    files.save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="experts"):
        fxpipe.materialize(on_meta("mixtral"), checkpoint=tmp_path, init=rotary)
