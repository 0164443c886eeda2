"""What ranks do in test_generating.py: models of transformers are trained, generate, and are saved and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import FxpipeError

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LENGTH = 6


def enough(ids: Tensor, scores: Any) -> Tensor:
    """A stopping criterion: each sample ends by what it has become."""
    return ids[:, 5:].sum(dim=1) > 60


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 10},
    "beams": {"do_sample": False, "num_beams": 3},
    "static": {"do_sample": False, "cache_implementation": "static"},
    "no_cache": {"do_sample": False, "use_cache": False},
    "criteria": {"do_sample": False, "stopping_criteria": [enough]},
}


def tiny(name: str) -> Any:
    """A small model of transformers; the same on every rank."""
    import transformers as T

    torch.manual_seed(0)
    if name == "llama":
        return T.LlamaForCausalLM(T.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **SIZES))
    if name == "lora":
        import peft

        options = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}  # so the adapters matter
        return peft.get_peft_model(tiny("llama"), peft.LoraConfig(task_type="CAUSAL_LM", **options))
    if name == "mixtral":
        return T.MixtralForCausalLM(T.MixtralConfig(vocab_size=64, num_local_experts=4, **SIZES))
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return T.T5ForConditionalGeneration(T.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


def texts() -> Tensor:
    return torch.arange(12).repeat(4, 1) % 7 + torch.tensor([[2], [5], [9], [13]])


def trained(group: Any, name: str) -> tuple[Any, Any]:
    """A pipe over ranks and the plain model, after the same three steps of SGD."""
    plain, pipe = tiny(name), fxpipe.compile(tiny(name), chunks=2, group=group, schedule="1f1b", timeout=120)
    kwargs = {"input_ids": texts(), "labels": texts()} | ({} if name == "t5" else {"use_cache": False})
    ours: Any = None
    theirs = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        plain(**kwargs).loss.backward()
        theirs.step()
        theirs.zero_grad()
        pipe.step(**kwargs)
        ours = ours or torch.optim.SGD(pipe.parameters(), 0.1)
        ours.step()
        ours.zero_grad()
    return pipe.eval(), plain.eval()


class Kept:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


def generates(group: Any, name: str, ways: tuple[str, ...]) -> None:
    """The text of the plain trained model, whatever the random state of this rank, which stays."""
    pipe, plain = trained(group, name)
    ids = texts()[:2, :5]
    for way in ways:
        options = dict(max_new_tokens=LENGTH, pad_token_id=0, **WAYS[way])
        torch.manual_seed(7)
        wanted = plain.generate(ids, **options)
        torch.manual_seed(7 if pipe.leads else 8)
        before, streamer = torch.get_rng_state(), Kept()
        streams = {} if way == "beams" else {"streamer": streamer}
        assert pipe.generate(ids, **options, **streams).tolist() == wanted.tolist(), way
        assert pipe.leads or torch.equal(torch.get_rng_state(), before)
        assert bool(streamer.got) == (pipe.leads and way != "beams")
    if name in ("llama", "lora"):
        embedded = plain.get_input_embeddings()(ids).detach()
        options = {"max_new_tokens": LENGTH, "pad_token_id": 0, "do_sample": False}
        assert (
            pipe.generate(inputs_embeds=embedded, **options).tolist()
            == plain.generate(inputs_embeds=embedded, **options).tolist()
        )
        for wrong in ({"max_time": 1.0}, {"cache_implementation": "paged"}):
            with pytest.raises(FxpipeError, match=next(iter(wrong))):
                pipe.generate(ids, max_new_tokens=LENGTH, **wrong)
    pipe.close()


def saved(group: Any, name: str, folder: Path) -> None:
    """In shards, without gathering; read by transformers, and by a pipe of another number of stages."""
    pipe, plain = trained(group, name)
    pipe.save_pretrained(folder, max_shard_size="20KB")
    with pytest.raises(FxpipeError, match="push_to_hub"):
        pipe.save_pretrained(folder, push_to_hub=True)
    pipe.collect(None)
    held = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {path.name for path in folder.glob("*.safetensors")} == set(held.values())
    assert len(set(held.values())) > 2
    assert {path.name for path in folder.iterdir()} == {
        *held.values(), "model.safetensors.index.json", "config.json", "generation_config.json"
    }  # fmt: skip
    back = type(plain).from_pretrained(folder).eval()
    for (key, tensor), (other, wanted) in zip(back.state_dict().items(), plain.state_dict().items(), strict=True):
        assert key == other
        torch.testing.assert_close(tensor, wanted, msg=key)
    pipe.close()


def read_again(group: Any, name: str, folder: Path) -> None:
    """A pipe of a model without memory reads what other stages have saved."""
    plain = type(tiny(name)).from_pretrained(folder).eval()
    with torch.device("meta"):
        model = tiny(name)
    kwargs = {"input_ids": texts(), "use_cache": False} | ({"decoder_input_ids": texts()} if name == "t5" else {})
    pipe = fxpipe.compile(model.eval(), chunks=2, group=group, timeout=120)
    pipe.prepare(**kwargs)
    pipe.materialize(checkpoint=folder, init=rotary)
    with torch.no_grad():
        wanted = plain(**kwargs).logits
    torch.testing.assert_close(pipe.forward_only(**kwargs).logits, wanted)
    tensors, keys = plain.state_dict(), pipe.collect([*pipe.state_dict()])
    assert {key for some in keys for key in some} == tensors.keys()
    for key, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, tensors[key]), key
    pipe.close()


def rotary(module: nn.Module, path: str) -> None:
    """The tables that transformers computes when a model is made."""
    if hasattr(module, "inv_freq"):
        module.inv_freq.copy_(type(module)(module.config).inv_freq)
        module.original_inv_freq.copy_(module.inv_freq)
