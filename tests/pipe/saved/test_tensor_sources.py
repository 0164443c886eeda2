"""Checkpoints in shards, as large models of Hugging Face are kept: only what is needed is opened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CheckpointError


class Base(nn.Module):
    base_model_prefix = "base"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return x


class WithHead(nn.Module):
    """Its head's weight is the embedding's, which a checkpoint has once."""

    base_model_prefix = "base"

    def __init__(self) -> None:
        super().__init__()
        self.base = Base()
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.base.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.base(ids))


IDS = torch.arange(12).reshape(4, 3) % 7


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())  # tied ones once


def write(tensors: Mapping[str, Tensor], file: Path) -> None:
    if file.suffix == ".bin":
        torch.save(dict(tensors), file)
    else:
        pytest.importorskip("safetensors.torch").save_file({k: x.detach() for k, x in tensors.items()}, file)


def write_shards(tensors: Mapping[str, Tensor], folder: Path, ending: str) -> Path:
    """One shard for each tensor, and the index."""
    stem = "model" if ending == "safetensors" else "pytorch_model"
    places = {key: f"{stem}-{i:05}-of-{len(tensors):05}.{ending}" for i, key in enumerate(tensors)}
    for key, name in places.items():
        write({key: tensors[key]}, folder / name)
    index = folder / f"{stem}.{ending}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
    return index


def on_meta(make: type[nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("ending", ["bin", "safetensors"])
@pytest.mark.parametrize("form", ["index", "folder", "one file", "folder of one"])
def test_each_form_gives_the_values(ending: str, form: str, tmp_path: Path) -> None:
    plain, model = WithHead(), on_meta(WithHead)
    if "one" in form:
        where = tmp_path / ("model.safetensors" if ending == "safetensors" else "pytorch_model.bin")
        write(tensors(plain), where)
    else:
        where = write_shards(tensors(plain), tmp_path, ending)
    (tmp_path / "config.json").write_text("{}")
    pipe = fxpipe.compile(model, devices=2, chunks=2, example_inputs=IDS)
    pipe.materialize(checkpoint=tmp_path if "folder" in form else where)
    torch.testing.assert_close(pipe(IDS), plain(IDS))
    assert model.head.weight is model.base.embed.weight
    pipe.close()


@pytest.mark.parametrize("ending", ["bin", "safetensors"])
def test_a_part_opens_its_own_shards_only(ending: str, tmp_path: Path) -> None:
    plain, model = Base(), on_meta(Base)
    write_shards(tensors(plain), tmp_path, ending)
    for file in tmp_path.glob(f"*.{ending}"):
        if not file.name.endswith(("-00003-of-00007." + ending, "-00004-of-00007." + ending)):
            file.unlink()
    fxpipe.materialize(model, checkpoint=tmp_path, only={"layers.1.weight", "layers.1.bias"})
    assert torch.equal(model.layers[1].weight, plain.layers[1].weight)
    assert model.embed.weight.is_meta
    with pytest.raises(CheckpointError, match=r"index.json names \w+-00000-of-00007.\w+, which is not there"):
        fxpipe.materialize(model, checkpoint=tmp_path)


def test_a_base_model_and_a_model_with_a_head_take_each_others_keys(tmp_path: Path) -> None:
    whole, base = WithHead(), on_meta(Base)
    write_shards(tensors(whole), tmp_path, "bin")
    fxpipe.materialize(base, checkpoint=tmp_path)
    assert torch.equal(base.layers[2].weight, whole.base.layers[2].weight)
    torch.save(base.state_dict(), tmp_path / "base.bin")
    other = on_meta(WithHead)
    fxpipe.materialize(other, checkpoint=tmp_path / "base.bin")
    torch.testing.assert_close(other(IDS), whole(IDS))


def test_values_are_cast_to_the_models_type(tmp_path: Path) -> None:
    plain, model = Base().bfloat16(), on_meta(Base)
    write_shards(tensors(plain), tmp_path, "bin")
    fxpipe.materialize(model, checkpoint=tmp_path)
    assert torch.equal(model.embed.weight, plain.embed.weight.float())


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("{", "is no index of shards"),
        ("[" * 100_000, "is no index of shards"),
        ('{"metadata": {}}', "is no index of shards"),
        ('{"weight_map": {"embed.weight": 3}}', "is no index of shards"),
        ('{"weight_map": {"embed.weight": "../other.bin"}}', "names ../other.bin, which is not in its folder"),
        ('{"weight_map": {"embed.weight": "/etc/passwd"}}', "names /etc/passwd, which is not in its folder"),
        ('{"weight_map": {"embed.weight": "pytorch_model.bin.index.json"}}', "which is an index"),
        ('{"weight_map": {"embed.weight": "there.bin"}}', "there.bin lacks embed.weight"),
    ],
)
def test_an_index_that_is_none(held: str, said: str, tmp_path: Path) -> None:
    torch.save({"other": torch.ones(2)}, tmp_path / "there.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(held)
    with pytest.raises(CheckpointError, match=said):
        fxpipe.materialize(on_meta(Base), checkpoint=tmp_path, only={"embed.weight"})


def test_files_that_are_none(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "a.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"a.safetensors is no file of safetensors"):
        fxpipe.materialize(on_meta(Base), checkpoint=tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"several files with tensors, a.safetensors, b.safetensors, and"):
        fxpipe.materialize(on_meta(Base), checkpoint=tmp_path)
