"""How each public method of a library's model is called in own_methods.py, and which are not tried, with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.whole.ranks.generating import texts

IDS = texts()
SEQUENCES = IDS[:2, :5]


class Given(NamedTuple):
    """What calls are given besides the model: a folder of their own, one of a saved model, and a state to load."""

    folder: Path
    saved: Path
    state: dict[str, Any]


Call = Callable[[Any, Given], Any]


def alone(*names: str) -> dict[str, Call]:
    """Methods that need no arguments."""

    def call(name: str, run: Any, given: Given) -> Any:
        return getattr(run, name)()

    return {name: partial(call, name) for name in names}


def hook(*_: Any) -> None: ...


def removed(*names: str) -> dict[str, Call]:
    """Methods that register a hook, which is removed."""
    return {name: lambda run, given, name=name: getattr(run, name)(hook).remove() for name in names}  # type: ignore[misc]


def seeded(module: type[nn.Module], *sizes: int, **options: Any) -> nn.Module:
    torch.manual_seed(5)
    return module(*sizes, **options)


def last(given: Given) -> str:
    """The name of a tensor of the last stage."""
    return [*given.state][-1]


def whole(run: Any) -> Any:
    """The model itself."""
    return vars(run).get("model", run)


def named(run: Any, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by their names in the model."""
    names = {id(x): key for key, x in (*whole(run).named_parameters(), *whole(run).named_buffers())}
    return {names[id(x)]: x for x in tensors if id(x) in names}


def emptied(run: Any, state: dict[str, Any]) -> Any:
    """All tensors without values, and then with values again."""
    found = run.to_empty(device="cpu")
    run.load_state_dict(state)
    for key, buffer in run.named_buffers():
        if key not in state:
            buffer.fill_(0.5)
    return found


def registered(run: Any) -> None:
    """Register the class of the model, and forget it again: it is a fact of the class."""
    run.register_for_auto_class()
    type(whole(run))._auto_class = None


MODULE: dict[str, Call] = {
    **alone("children", "modules", "named_children", "named_modules", "state_dict", "eval", "train", "zero_grad"),
    **alone("cpu", "cuda", "ipu", "mtia", "xpu", "get_extra_state", "share_memory"),
    **removed("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
    **removed("register_full_backward_pre_hook", "register_state_dict_pre_hook", "register_state_dict_post_hook"),
    **removed("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook", "register_backward_hook"),
    "add_module": lambda run, given: run.add_module("extra", nn.Identity()),
    "apply": lambda run, given: run.apply(hook),
    "bfloat16": lambda run, given: run.bfloat16().float(),
    "buffers": lambda run, given: named(run, run.buffers()),
    "compile": lambda run, given: run.compile(backend="eager"),
    "double": lambda run, given: run.double().float(),
    "float": lambda run, given: run.double().float(),
    "get_buffer": lambda run, given: run.get_buffer(*[key for key, _ in whole(run).named_buffers()][-1:] or ["no"]),
    "get_parameter": lambda run, given: run.get_parameter(last(given)),
    "get_submodule": lambda run, given: run.get_submodule(last(given).rpartition(".")[0]),
    "half": lambda run, given: run.half().float(),
    "load_state_dict": lambda run, given: run.load_state_dict(given.state),
    "named_buffers": lambda run, given: dict(run.named_buffers()),
    "named_parameters": lambda run, given: dict(run.named_parameters()),
    "parameters": lambda run, given: named(run, run.parameters()),
    "register_buffer": lambda run, given: run.register_buffer("extra", torch.ones(2), persistent=False),
    "register_module": lambda run, given: run.register_module("extra", nn.Identity()),
    "register_parameter": lambda run, given: run.register_parameter("extra", None),
    "requires_grad_": lambda run, given: run.requires_grad_(False),
    "set_extra_state": lambda run, given: run.set_extra_state(None),
    "set_submodule": lambda run, given: run.set_submodule("extra", nn.Identity()),
    "to": lambda run, given: run.to(torch.float64).to("cpu").to(torch.float32),
    "to_empty": lambda run, given: emptied(run, given.state),
    "type": lambda run, given: run.type(torch.float64).float(),
}  # fmt: skip
MODULE_UNTRIED = {
    "extra_repr": "a pipe prints itself",
    "smart_apply": "a function inside of transformers, which it puts on all modules",
}

LANGUAGE: dict[str, Call] = {
    **alone("activation_checkpointing_disable", "activation_checkpointing_enable", "active_adapters", "can_generate"),
    **alone("dequantize", "destroy_cached_continuous_batching_manager", "disable_adapters", "enable_adapters"),
    **alone("disable_input_require_grads", "enable_peft_hotswap", "get_adapter_state_dict", "get_decoder"),
    **alone("get_encoder", "get_expanded_tied_weights_keys", "get_experts_implementation", "get_input_embeddings"),
    **alone("get_memory_footprint", "get_output_embeddings", "get_position_embeddings", "tie_weights"),
    **alone("gradient_checkpointing_enable", "init_parallel_plans", "init_weights", "initialize_weights"),
    **alone("is_backend_compatible", "is_custom_code", "is_remote_code"),
    **alone("num_parameters", "post_init", "load_custom_generate"),
    **alone("gradient_checkpointing_disable", "named_non_persistent_buffers"),
    "add_adapter": lambda run, given: run.add_adapter(lora()),
    "add_model_tags": lambda run, given: run.add_model_tags(["tag"]),
    "barrier_after_gathered_checkpoint_save": lambda run, given: run.barrier_after_gathered_checkpoint_save(None),
    "compute_transition_scores": lambda run, given: run.compute_transition_scores(SEQUENCES, (torch.ones(2, 64),) * 3),
    "delete_adapter": lambda run, given: run.delete_adapter("a"),
    "enable_input_require_grads": lambda run, given: (
        run.enable_input_require_grads(), run.disable_input_require_grads()
    ),
    "forward": lambda run, given: under_no_grad(run.forward, **language()),
    "from_pretrained": lambda run, given: run.from_pretrained(given.saved),
    "gather_sharded_state_dict_for_save": lambda run, given: run.gather_sharded_state_dict_for_save(run, {}, None),
    "generate": lambda run, given: run.generate(SEQUENCES, max_new_tokens=2, do_sample=False, pad_token_id=0),
    "get_compiled_call": lambda run, given: under_no_grad(run.get_compiled_call(eager()), **language()),
    "get_correct_attn_implementation": lambda run, given: run.get_correct_attn_implementation("sdpa"),
    "get_correct_experts_implementation": lambda run, given: run.get_correct_experts_implementation("eager"),
    "get_parameter_or_buffer": lambda run, given: run.get_parameter_or_buffer("lm_head.weight"),
    "maybe_distribute_model": lambda run, given: run.maybe_distribute_model(run, None, None),
    "prepare_distribute_model": lambda run, given: run.prepare_distribute_model(None),
    "prepare_inputs_for_generation": lambda run, given: run.prepare_inputs_for_generation(SEQUENCES),
    "resize_position_embeddings": lambda run, given: run.resize_position_embeddings(8),
    "retrieve_modules_from_names": lambda run, given: run.retrieve_modules_from_names(["lm_head.weight"]),
    "save_distributed_checkpoint": lambda run, given: run.save_distributed_checkpoint(run, given.folder),
    "save_pretrained": lambda run, given: run.save_pretrained(given.folder),
    "register_for_auto_class": lambda run, given: registered(run),
    "set_adapter": lambda run, given: run.set_adapter("a"),
    "set_attn_implementation": lambda run, given: run.set_attn_implementation("eager"),
    "set_decoder": lambda run, given: run.set_decoder(run.get_decoder()),
    "set_encoder": lambda run, given: run.set_encoder(run.get_encoder()),
    "set_experts_implementation": lambda run, given: run.set_experts_implementation("grouped_mm"),
    "set_input_embeddings": lambda run, given: run.set_input_embeddings(seeded(nn.Embedding, 64, 32)),
    "set_output_embeddings": lambda run, given: run.set_output_embeddings(seeded(nn.Linear, 32, 64)),
    "set_use_kernels": lambda run, given: run.set_use_kernels(False),
    "should_save_on_this_rank": lambda run, given: run.should_save_on_this_rank(True),
    "warn_if_padding_and_no_attention_mask": lambda run, given: run.warn_if_padding_and_no_attention_mask(
        SEQUENCES, None
    ),
}  # fmt: skip
T5: dict[str, Call] = {
    "prepare_decoder_input_ids_from_labels": lambda run, given: run.prepare_decoder_input_ids_from_labels(IDS),
    "forward": lambda run, given: under_no_grad(run.forward, **both_texts()),
    "get_compiled_call": lambda run, given: under_no_grad(run.get_compiled_call(eager()), **both_texts()),
}
LANGUAGE_REFUSED: dict[str, Call] = {
    **alone("init_continuous_batching", "load_adapter"),
    "continuous_batching_context_manager": lambda run, given: run.continuous_batching_context_manager().__enter__(),
    "generate_batch": lambda run, given: run.generate_batch([[1, 2]]),
    "push_to_hub": lambda run, given: run.push_to_hub("a/b"),
    "resize_token_embeddings": lambda run, given: run.resize_token_embeddings(66, mean_resizing=False),
}
INSIDE = "a part of from_pretrained"
LANGUAGE_UNTRIED = {
    "adjust_generation_fn": INSIDE,
    "get_init_context": INSIDE,
    "mark_tied_weights_as_initialized": INSIDE,
    "heal_tokens": "needs a tokenizer, and no model",
}


def under_no_grad(function: Callable[..., Any], **kwargs: Any) -> Any:
    with torch.no_grad():
        return function(**kwargs)


def language() -> dict[str, Any]:
    return {"input_ids": IDS, "use_cache": False}


def both_texts() -> dict[str, Any]:
    return {"input_ids": IDS, "labels": IDS, "use_cache": False}


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"])


def eager() -> Any:
    from transformers import CompileConfig

    return CompileConfig(backend="eager", fullgraph=False)
