"""Small models of any class of transformers, from its config class alone.

A config's fields are known by their names: `hidden_size` is 32 in every model, `num_hidden_layers` is 2, and what says
how large a list's entries are is cut down entry by entry, so that a model with four stages keeps four. Ids of special
tokens lie at the end of the vocabulary, each its own. What a name does not tell is in `OWN`, by type of model.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

WORDS, TEXT_WORDS, HIDDEN, INNER, HEADS, CLASSES = 64, 36, 32, 48, 4, 4
IMAGE, LARGE_IMAGE = 32, 64  # of a model with patches, and of one that halves its image again and again

SAME = {
    HIDDEN: """
        hidden_size d_model n_embd embed_dim decoder_hidden_size projection_dim out_hidden_size
        encoder_hidden_dim hidden_dim text_hidden_size projector_hidden_size fusion_hidden_size
        reassemble_hidden_size output_dim feature_size mask_feature_size conv_dim_size classifier_proj_size
        projection_hidden_size embedding_size encoder_hidden_size cross_attention_dim vision_embed_dim
        head_hidden_size word_embed_proj_dim dim emb_dim bottleneck_features num_attn_features
        lqe_hidden_dim adapter_out_dim embed_size cross_hidden_size image_text_hidden_size aspp_out_channels
        auxiliary_channels latent_channels output_channels attention_hidden_size neck_out_channels
        decoder_input_hidden_size embedding_dim vision_output_dim downsample_hidden_size
        hidden_size_per_layer_input modulation_dim mm_hidden_size encoder_dim output_proj_dims
        projection_size conv_channels depth_hidden_size vision_hidden_size audio_hidden_size
        predictor_hidden_size lru_width subsampling_conv_channels linear_attn_hidden_size ssm_hidden_size
        text_embed_dim decoder_embed_dim base_channels
    """,
    INNER: """
        intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dim_feedforward encoder_feedforward_dim
        mlp_dim n_inner inner_dim feed_forward_size moe_intermediate_size shared_expert_intermediate_size d_inner
        shared_intermediate_size ffn_hidden_size moe_shared_expert_intermediate_size feedforward_dim
        intermediate_size_mlp expert_ffn_hidden_size dense_intermediate_size mlp_hidden_size
        speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim mamba_intermediate_size
        decoder_feed_forward_size vision_intermediate_size prefix_dense_intermediate_size
    """,
    WORDS: "vocab_size num_codevectors_per_group num_embeddings codebook_size n_words vocab_size_per_layer_input",
    2: """
        num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers depth
        num_decoder_layers layers vision_num_hidden_layers num_blocks_per_stage resampler_depth
        num_global_layers max_window_layers speech_encoder_layers t2u_encoder_layers t2u_decoder_layers
        num_key_value_heads n_kv_heads num_hidden_groups moe_topk num_experts_per_tok num_experts_per_token
        top_k moe_k num_head_groups linear_num_key_heads linear_num_value_heads swa_num_key_value_heads
        prediction_layers num_kv_heads index_n_heads num_global_key_value_heads lqe_layers attn_layers_num
        multi_query_group_num encoder_num_hidden_layers decoder_num_hidden_layers num_selected_experts
        global_num_key_value_heads num_vision_layers audio_num_hidden_layers
    """,
    HEADS: """
        num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads
        attention_heads num_local_experts n_routed_experts num_experts moe_num_experts resampler_n_heads
        swa_num_attention_heads speech_encoder_attention_heads t2u_encoder_attention_heads
        t2u_decoder_attention_heads linear_num_heads decoder_self_attention_heads
        decoder_cross_attention_heads encoder_num_attention_heads vision_num_attention_heads
        num_query_tokens resampler_n_latents ffn_num_experts decoder_num_attention_heads num_moe_experts
        num_conv_pos_embedding_groups num_query_groups mm_tokens_per_image
    """,
    8: """
        head_dim d_kv kv_channels attention_head_size qk_rope_head_dim qk_nope_head_dim v_head_dim
        index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim
        resampler_head_dim index_topk mamba_d_state mamba_d_head mamba_n_heads state_size ssm_state_size
        mamba_head_dim mamba_num_heads num_queries num_query query_pre_attn_scalar global_head_dim
        num_groups attention_window swa_v_head_dim rotary_dim mamba_headdim qk_head_dim dim_head
    """,
    16: """
        q_lora_rank kv_lora_rank patch_length context_length horizon_length num_conv_pos_embeddings
        num_mel_bins input_feat_per_channel feature_projection_input_dim mamba_chunk_size sliding_window
        sliding_window_size attention_chunk_size codebook_dim o_lora_rank stem_channels_size
        num_negatives n_mels codevector_dim proj_codevector_dim mm_patch mamba_dt_rank time_step_rank
        output_lora_rank context_size
    """,
    128: """
        max_position_embeddings n_positions max_source_positions max_target_positions
        max_2d_position_embeddings max_pos_emb max_seq_len max_sequence_length n_ctx seq_length
        position_embedding_size t2u_max_position_embeddings max_seq_length original_max_position_embeddings
        seq_len
    """,
    1: """
        n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace
        num_mtp_layers
    """,
    0: """
        encoder_layerdrop decoder_layerdrop layerdrop mask_time_prob mask_feature_prob num_denoising
        num_nextn_predict_layers
    """,
}  # fmt: skip
SIZES = {name: size for size, names in SAME.items() for name in names.split()}
PLACES = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")  # of what is not text
ENTRIES = {"hidden_sizes", "conv_dim", "embed_dims", "neck_hidden_sizes", "dims", "layer_channels", "tdnn_dim"}
TRUE, FALSE = ("ctc_zero_infinity",), ("use_cache", "apply_spec_augment", "use_mamba_kernels")
COUNTS = {name for size in (2, 128, WORDS, 0) for name in SAME[size].split()} - {"num_key_value_heads"} | {
    "num_queries"
}
WIDE = (
    "detection",
    "segmentation",
    "depth",
    "classification",
    "ctc",
)  # tasks of models that are not large at any width
OWN: dict[str, dict[str, Any]] = {
    "levit": {"patch_size": 16, "image_size": 64, "hidden_sizes": [32, 32, 32], "key_dim": [8, 8, 8]},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
                  "num_cross_attention_heads": 4, "max_position_embeddings": 64},
    "patchtst": {"patch_length": 4, "patch_stride": 4}, "patchtsmixer": {"patch_length": 4, "patch_stride": 4},
    "oneformer": {"text_encoder_n_ctx": 4, "num_queries": 12, "text_encoder_context_length": 16, "task_seq_len": 16,
                  "text_encoder_vocab_size": WORDS, "text_encoder_width": 32, "text_encoder_num_layers": 2},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "depth_pro": {"patch_size": 32, "image_size": 128},
    "eomt": {"num_blocks": 1}, "eomt_dinov3": {"num_blocks": 1}, "videomt": {"num_blocks": 1},
    "mllama_vision_model": {"vision_output_dim": 96}, "vipllava": {"vision_feature_layers": [-1, -2]},
    "esm": {"vocab_size": WORDS, "pad_token_id": 1, "mask_token_id": 3}, "esmc": {"num_key_value_heads": HEADS},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8], "attn_layers": ["local", "lsh"],
                 "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 4, "hash_seed": 0},
    "lw_detr_vit": {"image_size": 64},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "detr": {"encoder_attention_heads": 8, "decoder_attention_heads": 8,
             "backbone_config": {"out_features": ["stage1", "stage2", "stage3", "stage4"]}},
    "lw_detr": {"projector_scale_factors": [1.0], "group_detr": 2}, "rf_detr": {"group_detr": 2},
}  # fmt: skip


def small(config_class: Any, given: Mapping[str, Any], ids: dict[str, int], narrow: bool = True) -> Any:
    """A config of the class with small sizes, those of its parts too; `given` fields are as they are given. What is not
    `narrow` has few layers, but its own widths. `ids` are the special tokens so far."""
    known = _fields(config_class)
    fixed = {**OWN.get(config_class.model_type, {}), **given}
    base = {"use_timm_backbone": False} if "backbone_config" in known else {}
    whole = config_class(**base)
    fields = {**base, **fixed}
    for name in set(getattr(config_class, "sub_configs", None) or ()) | set(config_class.sub_configs_defaults or ()):
        part = getattr(whole, name, None)
        if hasattr(part, "model_type") and (name not in fixed or isinstance(fixed[name], dict)):
            fields[name] = small(type(part), {**_said(config_class, name, part), **fixed.get(name, {})}, ids, narrow)
    for name in known:
        if name not in fields and (value := _shrunk(name, _value(whole, name), whole, ids, narrow)) is not None:
            fields[name] = value
    return config_class(**fields)


def _fields(config_class: Any) -> list[str]:
    return sorted(field.name for field in dataclasses.fields(config_class))


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # it has one for each layer
        return type(config).__dataclass_fields__[name].default


def _said(config_class: Any, name: str, part: Any) -> dict[str, Any]:
    """What a config says of its part besides sizes. Where it wants outputs of layers, the part has as many layers."""
    spec = (config_class.sub_configs_defaults or {}).get(name)
    said = dict((spec.init_kwargs if spec is not None else None) or {})
    outputs = said.pop("out_indices", None) or said.pop("out_features", None)
    kept = {key: value for key, value in said.items() if isinstance(value, (bool, str)) and key != "model_type"}
    if not outputs:
        return kept
    if isinstance(getattr(part, "num_hidden_layers", None), int) and not hasattr(part, "depths"):
        return {**kept, "num_hidden_layers": len(outputs), "out_indices": list(range(1, 1 + len(outputs)))}
    return {**kept, "out_indices" if isinstance(outputs[0], int) else "out_features": list(outputs)}


def _shrunk(name: str, value: Any, whole: Any, ids: dict[str, int], narrow: bool) -> Any:
    """The small value of a field, or None if it stays as it is."""
    if name in FALSE or name in TRUE:
        return name in TRUE
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if isinstance(value, bool):
        return None
    if name.endswith(("_token_id", "_token_index", "_token_ids")):
        return _token(name, value, ids)
    if name == "image_grid_pinpoints":
        return [[IMAGE, IMAGE]]
    if name == "image_size":
        return _image_size(value, whole)
    if name == "patch_size" and isinstance(value, int) and value >= 8 and narrow:
        return 8
    if name == "rope_parameters" and isinstance(value, dict) and "rope_theta" in value:
        return _turned(value, type(whole))
    if isinstance(value, (list, tuple)):
        return _entries(name, value, getattr(whole, "num_hidden_layers", None), narrow)
    if name in SIZES and (isinstance(value, int) or name in ("head_dim", "num_key_value_heads")):
        return SIZES[name] if narrow or name in COUNTS else None
    return None


def _turned(rope: dict[str, Any], config_class: Any) -> dict[str, Any] | None:
    """Rotary embeddings by time, height and width have a part of a head's channels for each."""
    module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    if "mrope_section" not in inspect.getsource(module):
        return None
    half = int(SIZES["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
    return {**rope, "mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}


def _token(name: str, value: Any, ids: dict[str, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_token(name, one, ids) for one in value]
    if name not in PLACES and (not isinstance(value, int) or value < 4):
        return None
    return ids.setdefault(name.replace("_index", "_id"), WORDS - 1 - len(ids) % (WORDS - TEXT_WORDS))


def _image_size(value: Any, whole: Any) -> Any:
    patch = getattr(whole, "patch_size", None)
    size = IMAGE if isinstance(patch, int) and patch >= 8 else LARGE_IMAGE
    return [size] * len(value) if isinstance(value, (list, tuple)) else size


def _entries(name: str, value: Any, layers: Any, narrow: bool) -> Any:
    """A list with one entry for each layer is cut to the two layers; one with an entry for each stage keeps them."""
    if name in ("depths", "num_blocks", "stage_layers", "layer_repeat_num"):
        return [1] * len(value)
    if name.endswith(("_indices", "_indexes", "_idx")) and isinstance(layers, int) and name != "out_indices":
        return sorted({one % 2 for one in value if isinstance(one, int)})
    if narrow and name in ("num_heads", "num_attention_heads"):
        return [2] * len(value)
    if narrow and name in ENTRIES and all(isinstance(one, int) for one in value):
        return [HIDDEN if "hidden" in name else 16] * len(value)
    if isinstance(layers, int) and layers > 2 and len(value) == layers and "layer" in name:
        return list(value[:2])
    return None


def build(model_class: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """A model that draws no random numbers in training; batch norms keep their statistics. Floating tensors are of the
    dtype from now on where nothing else is said, since a loss makes some of its own."""
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    model: nn.Module = model_class(config).to(dtype).train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and getattr(module, "track_running_stats", False):
            module.eval()
        _without_dropout(module)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in _empty(model.parameters()):
            one.copy_(torch.randn(one.shape, generator=generator) * 0.02)
    return model


def _without_dropout(module: nn.Module) -> None:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = 0.0
    for name, value in vars(module).items():
        if isinstance(value, float) and "drop" in name:
            setattr(module, name, 0.0)


def _empty(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters that nothing has set: zeros would hide gradients, and memory as it was found may hold anything."""
    return [one for one in parameters if not one.isfinite().all() or (one.dim() > 1 and not one.any())]


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def configs(kind: str, task: str) -> Iterable[Callable[[], Any]]:
    """What makes the configs to try for a type of model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    given: dict[str, Any] = {"num_labels": CLASSES}
    if task == "causal" and "is_decoder" in _fields(config_class):
        given["is_decoder"] = True
    if task in ("seq2seq", "vision-language"):
        given |= {"decoder_start_token_id": 2, "pad_token_id": 0}
    if task == "ctc":
        given["vocab_size"] = WORDS
    if task == "series":
        given |= {"prediction_length": 4, "num_time_features": 1, "lags_sequence": [1, 2, 3]}
    yield lambda: small(config_class, given, {})
    if task in WIDE:
        yield lambda: small(config_class, given, {}, narrow=False)
