"""Tiny random models of transformers, one per architecture: the config fields that they need beside a common size."""

from __future__ import annotations

from typing import Any

import torch

WINDOW = 8
"""The size of windows and chunks, smaller than the sequences of the tests."""

GAIN = 6.0
"""The factor by which weights of queries and keys are multiplied, so that softmax is far from uniform."""

SIZE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {"sliding_window": WINDOW}
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "decoder_sparse_step": 1,
}
# Keys of 24 columns, values of 16.
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": None,
}
_CAPPED = {**_MIXED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}

DECODERS: dict[str, dict[str, Any]] = {
    "Afmoe": {**_WINDOW, **_EXPERTS},
    "Apertus": {},
    "Arcee": {},
    "BioGpt": {},
    "BitNet": {},
    "Cohere": {},
    "Cohere2": _MIXED,
    "Cwm": _WINDOW,
    "DeepseekV2": {**_EXPERTS, **_LATENT},
    "DeepseekV3": {**_EXPERTS, **_LATENT},
    "Dots1": _EXPERTS,
    "Ernie4_5": {},
    "Exaone4": _MIXED,
    "FlexOlmo": _EXPERTS,
    "GPTBigCode": {},
    "GPTNeoX": {},
    "Gemma": {},
    "Gemma2": _CAPPED,
    "Gemma3": {**_MIXED, "query_pre_attn_scalar": 16},
    # Its global layers have heads of 512 columns, half the key heads, and keys for values.
    "Gemma4": {
        **_MIXED,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": 99,
        "hidden_size_per_layer_input": 16,
    },
    "Glm": {},
    "Glm4": {},
    "Glm4Moe": _EXPERTS,
    "Glm4MoeLite": {**_EXPERTS, **_LATENT},
    "GptOss": {**_WINDOW, **_EXPERTS},
    "Granite": {},
    "GraniteMoe": _EXPERTS,
    "GraniteMoeShared": {**_EXPERTS, "shared_intermediate_size": 32},
    "Helium": {},
    "HunYuanDenseV1": {},
    "Jais2": {},
    "JetMoe": {"kv_channels": 16, "num_local_experts": 4},
    "Llama": {},
    "Llama4": {
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "no_rope_layers": [1, 0],
    },
    "MiMoV2Flash": {**_WINDOW, **_EXPERTS},
    "MiniMaxM2": _EXPERTS,
    "Ministral": _WINDOW,
    "Ministral3": _WINDOW,
    "Mistral": _WINDOW,
    "Mixtral": {**_WINDOW, **_EXPERTS},
    "NanoChat": {},
    "Nemotron": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": _MIXED,
    "Olmoe": _EXPERTS,
    "Persimmon": {},
    "Phi": {},
    "Phi3": _WINDOW,
    "Phimoe": {**_WINDOW, **_EXPERTS},
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Qwen2Moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3": {},
    "Qwen3Moe": _EXPERTS,
    "SeedOss": {},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": _WINDOW,
    "VaultGemma": _CAPPED,
}
"""Causal language models: the fields of their configs beside SIZE. None leaves a field of SIZE out."""

TEXT_CONFIGS = ("Gemma3", "Gemma4", "Llama4")
"""Models whose config is that of a language model with images. The config of the text part has another name."""


KEY_NORMS = {"Gemma4": 0.1}
"""Models that do not scale scores: the factor for the weights of their keys' norms. A score of two normed heads of 512
columns is so large that float32 rounds it by more than the tests allow."""


def decoder(name: str, **more: Any) -> Any:
    """A causal language model in float32 and eval mode, with eager attention and scores that reach caps and sinks."""
    import transformers

    config_name = f"{name}TextConfig" if name in TEXT_CONFIGS else f"{name}Config"
    given = {**SIZE, **DECODERS[name], **more}
    config = getattr(transformers, config_name)(**{key: value for key, value in given.items() if value is not None})
    built = _loud(getattr(transformers, f"{name}ForCausalLM"), config, GAIN)
    with torch.no_grad():
        for parameter_name, parameter in built.named_parameters():
            if parameter_name.endswith("k_norm.weight"):
                parameter.mul_(KEY_NORMS.get(name, 1.0))
    return built


def model(kind: str, config: str, gain: float = GAIN, **sizes: Any) -> Any:
    """Any other model, by the names of its classes. `gain`: the factor for the weights of queries and keys."""
    import transformers

    return _loud(getattr(transformers, kind), getattr(transformers, config)(**sizes), gain)


def _loud(kind: Any, config: Any, gain: float) -> Any:
    """A random model whose queries and keys are so large that a wrong score changes the result."""
    torch.manual_seed(0)
    built = kind._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if "sink" in name:
                parameter.normal_()
            elif any(part in name for part in ("q_proj", "k_proj", "qkv", "query", "key")) and parameter.dim() > 1:
                parameter.mul_(gain)
    return built
