"""The rules of tiny.py: small sizes by the names of fields, and what single model types need besides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, WINDOW, EXPERTS, LAYERS = 64, 4, 2, 16, 8, 4, 2

# Whole field names and the tiny value; the first pattern that matches decides. Fields that hold no number stay.
_RULES: tuple[tuple[str, int | float], ...] = (
    (r"hidden_size_per_layer_input|embedding_size|ple_embed_dim|router_hidden_size", 16),
    # Twice the hidden size inside state-space layers, and the heads to fill it.
    (r"(mamba_)?expand", 2),
    (r"mamba_d_ssm|attention_hidden_size", 2 * HIDDEN),
    (r"mamba_(n|num)_heads", 2 * HEADS),
    (r"n_mamba_heads", 2),
    (r"mamba_headdim", HIDDEN),
    (r"attention_head_dim", 2 * HIDDEN // HEADS),
    (
        r".*hidden_size(_global)?|d_model|n_embd|lru_width|word_embed_proj_dim|emb(ed|edding)?_dim|hidden_dim|dim",
        HIDDEN,
    ),
    (r"adapter_(in_dim|input_size|out_dim)", HIDDEN),
    (r"(moe|shared_expert|shared_experts|shared|moe_shared_expert)_intermediate_size|expert_ffn_hidden_size", 32),
    (r".*intermediate_size.*|.*ffn_hidden_size|.*ffn_dim|dff|n_inner|dim_ff|feed_forward_size|d_inner", 96),
    # Sums over heads of what a ReLU leaves: with few heads many are exactly 0, and which of equals wins is arbitrary.
    (r"index(er)?_n_heads", 16),
    (r"linear_num_key_heads", 2),
    (r"indexer_kv_heads|index_local_blocks|split_ngram_parts", 1),
    (r".*(num_key_value|kv)_heads|num_query_groups|kv_n_heads", KV_HEADS),
    (r".*(attention_heads|num_heads|n_heads?)|linear_num_value_heads", HEADS),
    (r"qk_rope_head_dim|rotary_dim", HEAD_SIZE // 2),
    (r".*head_dim|dim_head|.*d_head|attention_head_size|kv_channels|d_rel", HEAD_SIZE),
    (r"indexer_compress_ratio", 2),
    (r"(q|kv|o)_lora_rank", 32),
    (r".*_rank|.*lowrank", 16),
    (r"mamba_d_state|(ssm_)?state_size", 8),
    (r"(mamba_)?n_?groups|n_group|num_expert_group|o_groups", 2),
    (r"topk_group|(num|n)_shared_experts|moe_num_shared_experts|zero_expert_num", 1),
    (r"(moe_)?num(_local)?_experts|n_routed_experts", EXPERTS),
    (r".*experts_per_tok(en)?|moe_(topk|k)|top_k_experts", 2),
    (
        r"(sliding|attention|local_attention)_window(_size|_len)?|window_size|local_attention|attention_chunk_size|"
        r"floor_scale",
        WINDOW,
    ),
    (r"(mamba_)?chunk_size|max_inference_chunksize|index_topk|indexer_budget", WINDOW),
    (r"query_pre_attn_scalar", HEAD_SIZE),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|.*_layer_offset", 1),
    (r".*_layer_period", 2),
    (r"num_nextn_predict_layers|num_mtp_layers", 0),
    # The spread that keeps the size of activations; with the usual 0.02 every attention would be nearly uniform.
    (r"initializer_range|init_std", HIDDEN**-0.5),
    (r"ngram_vocab_size_base|encoder_hash_byte_group_vocab", 128),
)
SIZES = tuple((re.compile(pattern), value) for pattern, value in _RULES)
POSITIONS = re.compile(
    r"(original_)?max_position_embeddings|max_(source|target)_positions|n_positions|n_ctx|max_seq_len|context_length"
    r"|model_max_length"
)
VOCABULARY = re.compile(r"(.*_)?vocab_size(_per_layer_input)?")
TOKEN = re.compile(r".*token_(id|index)")
NUM_LAYERS = re.compile(r"num_(hidden_|encoder_|decoder_)?layers|n_layers?|(en|de)coder_layers|num_blocks|depth")
INDICES = re.compile(r".*_(layers|idxs|indices|layer_ids)")
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

# Set even where the class leaves them open, since not every class fills them in.
REQUIRED = re.compile(
    r".*num_(key_value|kv)_heads|head_dim|.*experts_per_tok|n_routed_experts|n_shared_experts|indexer_.*"
)

# What shows more of an architecture than its default does, and what makes a decoder of a model that can be one.
SWITCHES = {
    "use_sliding_window": True,
    "max_window_layers": 1,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "causal": True,
}

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SWA_SIZES = {"head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32}
# Only what the rules can't know, each with its reason.
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    # The default has recurrent layers only; the architecture mixes them with attention.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    # Attention is the last of the three kinds that repeat, and the two first layers alone have none.
    "recurrent_gemma": {"num_hidden_layers": 3},
    # Shared layers are tied to the first of them, so there must be a second.
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    # The number of heads is not free: heads times head size is twice the hidden size.
    "mamba2": {"num_heads": 2 * HEADS},
    # Kinds of layers are a nested list with repeat counts.
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    # Keyword arguments that are no fields: sizes of the layers with windows, or of those without.
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "dots3_note_text": {
        f"swa_{k}": v for k, v in {**_SWA_SIZES, "num_attention_heads": 4, "num_key_value_heads": 4}.items()
    },
    # The code reads what the class's own default lacks.
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    # The default of the nested configuration is refused by the outer one.
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    # Half the hidden size is rounded up to 64 in one place and not in another; kernels run in bf16 by default.
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "autocast_kernel_dtype": "float32"},
    # The only number that the class accepts.
    "zaya": {"num_experts_per_tok": 1},
    # Attends to both sides unless told.
    "xlnet": {"attn_type": "uni"},
    # The code asks for a language before it runs.
    "xmod": {"default_language": "en_XX"},
    # Axial positions: the two widths add up to the hidden size, the shape multiplies to the positions.
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
}


@dataclass(frozen=True, kw_only=True)
class TinyRules:
    """What makes a configuration tiny; the defaults are those for causal language models.

    sizes: whole names of fields and the tiny value, the first that matches decides. switches: set where the class has
    the field. overrides: fields by model type, over all else.
    """

    max_positions: int = 256
    vocab_size: int = 160
    sizes: Sequence[tuple[re.Pattern[str], int | float]] = SIZES
    switches: Mapping[str, Any] = field(default_factory=lambda: SWITCHES)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: OVERRIDES)
