"""Every model family of mlx-lm, small and with random weights.

A family is a module of mlx_lm.models. Its arguments are ARGUMENTS, from which a class takes the
names that it knows, and its own entry in FAMILIES. Windows have 24 tokens, and the vocabulary
128.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import mlx.core as mx
import mlx.nn as nn

VOCABULARY = 128
WINDOW = 24
CHUNK = 256  # mlx-lm 0.31 wants a multiple of that
LAYERS = 4

ARGUMENTS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    # Attention. Two heads of K and V for four of Q.
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": False,
    "use_qkv_bias": False,
    "qk_norm": True,
    "use_qk_norm": True,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    # Multi-head latent attention.
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    # Norms, by their names.
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "post_norm": False,
    # Feed-forward layers and experts.
    "mlp_bias": False,
    "use_bias": False,
    "bias": False,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    # Linear attention and state spaces.
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "state_size": 8,
    "time_step_rank": 4,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    # Scales.
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "dim_model_base": 64,
    "scale_depth": 1.4,
    "scale_emb": 1.0,
}

_SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_CONV = ["conv", "full_attention"] * (LAYERS // 2)
_LINEAR = ["linear_attention", "full_attention"] * (LAYERS // 2)
_ROPES = {kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in set(_SLIDING)}
_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_ALL_HEADS = {"num_key_value_heads": 4}


def _text(model_type: str, **changes: Any) -> dict[str, Any]:
    """A family that wraps a text model."""
    return {"text_config": {**ARGUMENTS, "model_type": model_type, **changes}}


_GEMMA3N = {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "rope_local_base_freq": 1e4,
    "final_logit_softcapping": 30.0,
    "layer_types": _SLIDING,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
_GEMMA4 = {
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 32,
    "layer_types": _SLIDING * 2,
}
_HUNYUAN = {"rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0}}
_KIMI_LINEAR = {
    **_ALL_HEADS,
    "model_max_length": 4096,
    "num_experts_per_token": 2,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
}
_LFM2 = {
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": _CONV,
}
_LONGCAT = {
    "num_layers": 2,
    "attention_method": "MLA",
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_LONGROPE = {
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "short_mscale": 1.0,
    "long_mscale": 1.1,
}
_QWEN3_5 = _text("qwen3_5", full_attention_interval=2)

# What a family needs beside ARGUMENTS.
FAMILIES: dict[str, dict[str, Any]] = {
    "Klear": {},
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "afmoe": {"layer_types": _SLIDING, "num_dense_layers": 1},
    "apertus": {},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    "bailing_hybrid": {**_ALL_HEADS, "layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe": {},
    "bailing_moe_linear": {**_ALL_HEADS, "layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_v3": {},
    "cohere": {},
    "cohere2": {},
    "dbrx": {
        "d_model": 64,
        "n_layers": 4,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek": {},
    # K rows are 4 x (16 + 8) values, V rows 4 x 12.
    "deepseek_v2": {**_ALL_HEADS, "rope_scaling": _YARN, "topk_method": "greedy"},
    # One head: K is the latent (16 values), V the rotated key (8 values).
    "deepseek_v3": _ALL_HEADS,
    "deepseek_v32": {**_ALL_HEADS, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 2},
    "deepseek_v41": {},
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4},
    "exaone": {"num_layers": 4},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": _SLIDING, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    },
    "gear": {"layer_types": _SLIDING},
    "gemma": {},
    "gemma2": {},
    "gemma3": _text("gemma3_text"),
    "gemma3_text": {},
    "gemma3n": _text("gemma3n", **_GEMMA3N),
    "gemma4": _text("gemma4_text", **_GEMMA4),
    "gemma4_text": _GEMMA4,
    "glm": {},
    "glm4": {},
    "glm4_moe": {"rope_scaling": None},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 16,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "gpt2": {"n_ctx": 1024, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 1024},
    "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_inner": 96, "n_positions": 1024},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 1024, "rotary_dim": 8},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
    "helium": {},
    "hunyuan": {
        **_HUNYUAN,
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": False,
        "cla_share_factor": 1,
    },
    "hunyuan_v1_dense": _HUNYUAN,
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_k25": _text("deepseek_v3", **_ALL_HEADS),
    "kimi_k3": _text("kimi_k3", **_KIMI_LINEAR),
    "kimi_linear": _KIMI_LINEAR,
    "kimi_vl": _text("deepseek_v3", **_ALL_HEADS),
    "laguna": {},
    "lfm2": _LFM2,
    "lfm2-vl": _text("lfm2", **_LFM2),
    "lfm2_moe": {"layer_types": _CONV, "num_dense_layers": 1, "use_expert_bias": True},
    "lille-130m": {"block_size": 64, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 4},
    "llama": {},
    "llama4": _text(
        "llama4_text",
        attention_chunk_size=CHUNK,
        interleave_moe_layer_step=1,
        intermediate_size_mlp=96,
        rope_scaling=None,
        num_experts_per_tok=1,
    ),
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mamba": {},
    "mamba2": {
        "num_heads": 4,
        "head_dim": 32,
        "n_groups": 1,
        "time_step_limit": (0.001, 100.0),
    },
    "mellum": {"layer_types": _SLIDING, "rope_parameters": _ROPES},
    "mimo": {},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "swa_rope_theta": 1e4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 12,
    },
    "minicpm": {},
    "minicpm3": {
        **_ALL_HEADS,
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        },
    },
    "minimax": {"rotary_dim": 8},
    "minimax_m3_vl": _text(
        "minimax_m3",
        dense_intermediate_size=96,
        moe_layer_freq=[0, 1, 1, 1],
        rotary_dim=8,
        sparse_attention_freq=[0, 1, 1, 1],
        sparse_attention_config={
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 16,
            "sparse_block_size": 8,
            "sparse_topk_blocks": 2,
            "sparse_local_block": 1,
        },
    ),
    "ministral3": {"rope_parameters": _YARN, "layer_types": _SLIDING},
    "mistral3": _text("llama"),
    "mistral4": {**_ALL_HEADS, "rope_parameters": _YARN},
    "mixtral": {},
    "muse_glimmer": {},
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2"},
    # One layer without attention, one with a linear layer in its place.
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
        ]
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-E",
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "n_groups": 1,
        "time_step_limit": (0.001, 100.0),
    },
    "olmo2": {},
    "olmo3": {},
    "olmo_hybrid": {
        "layer_types": _LINEAR,
        "linear_num_key_heads": 4,
        "linear_allow_neg_eigval": True,
    },
    "olmoe": {},
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
        "num_query_heads": [4, 4, 4, 4],
        "num_kv_heads": [2, 2, 2, 2],
    },
    "phi": {},
    "phi3": {},
    "phimoe": {"rope_scaling": _LONGROPE},
    "phixtral": {
        "num_vocab": VOCABULARY,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 4,
        "rotary_dim": 8,
    },
    "pixtral": _text("llama"),
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": 16, "mamba_d_state": 8, "mamba_num_heads": 4},
    "plamo3": {"window_size": WINDOW},
    "qwen": {"kv_channels": 16},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen2_vl": _text("qwen2"),
    "qwen3": {},
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_moe": {},
    "qwen3_next": {"full_attention_interval": 2},
    "qwen3_vl": _text("qwen3"),
    "qwen3_vl_moe": _text("qwen3_moe"),
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "hidden_size": 128,
        "head_dim": 64,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "spark2_5": {"layer_types": _SLIDING, "rope_parameters": _ROPES},
    "stablelm": {},
    "starcoder2": {},
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": _SLIDING,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
    },
    "talkie": {},
    "telechat3": {},
    "youtu_llm": {},
}

# Modules of mlx_lm.models that are models and not in the survey, and why.
LEFT_OUT = {
    "bitnet": "its kernels exist for Metal only",
    "muse_spark": "its kernels exist for Metal only",
    "olmo": "needs the package ai2-olmo",
    "phi3small": "at this size mlx-lm 0.32.2 itself writes outside its buffers",
    "prism_hadamard_qwen35": "qwen3_5 with packed weights, which random ones cannot stand in for",
}


def ships(family: str) -> bool:
    """Whether this version of mlx-lm has the family: some came after 0.31."""
    return importlib.util.find_spec(f"mlx_lm.models.{family}") is not None


def build(family: str, dtype: mx.Dtype = mx.float32, **changes: Any) -> nn.Module:
    """A small model of random weights, the same at every call."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    arguments = {**ARGUMENTS, "model_type": family, **FAMILIES[family], **changes}
    mx.random.seed(7)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(arguments))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model
