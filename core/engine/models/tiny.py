"""Tiny configurations of every causal language model that transformers knows, for tests and sweeps.

A configuration class states its fields and their defaults. Rules on the fields' names scale all sizes down together,
and of the default's layers those are kept that show every kind of layer it has.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from core.engine.models.hf import driven
from core.errors import CoreError, ModelError

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
        r"(sliding|attention|local_attention)_window(_size|_len)?|window_size|local_attention|attention_chunk_size",
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
_SIZES = tuple((re.compile(pattern), value) for pattern, value in _RULES)
_POSITIONS = re.compile(
    r"(original_)?max_position_embeddings|max_(source|target)_positions|n_positions|n_ctx|max_seq_len|context_length"
    r"|model_max_length"
)
_VOCABULARY = re.compile(r"(.*_)?vocab_size(_per_layer_input)?")
_TOKEN = re.compile(r".*token_(id|index)")
_NUM_LAYERS = re.compile(r"num_(hidden_|encoder_|decoder_)?layers|n_layers?|(en|de)coder_layers|num_blocks|depth")
_INDICES = re.compile(r".*_(layers|idxs|indices|layer_ids)")
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

# Set even where the class leaves them open, since not every class fills them in.
_REQUIRED = re.compile(
    r".*num_(key_value|kv)_heads|head_dim|.*experts_per_tok|n_routed_experts|n_shared_experts|indexer_.*"
)

# What shows more of an architecture than its default does, and what makes a decoder of a model that can be one.
_SWITCHES = {
    "use_sliding_window": True,
    "max_window_layers": 1,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "causal": True,
}

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SWA_SIZES = {"head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32}
# Only what the rules can't know, each with its reason.
_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
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


def causal_lm_types() -> tuple[str, ...]:
    """Return every model type that transformers maps to a causal language model, in alphabetical order."""
    with driven(None):
        auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    return tuple(sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def tiny_config(model_type: str, *, max_positions: int = 256, vocab_size: int = 160, **changes: Any) -> Any:
    """Return a tiny configuration (`PreTrainedConfig`) of an architecture.

    changes: fields of the outermost configuration to set beside or instead of what the rules say. Raises `ModelError`
    with the reason where the rules don't lead to a valid one.
    """
    asked = f"a tiny configuration of {model_type!r}"
    if model_type not in causal_lm_types():
        raise ModelError(
            asked, found="transformers has no causal language model of that type", remedy="see causal_lm_types()"
        )
    with driven(None):
        known: Any = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
        try:
            overrides = _OVERRIDES.get(model_type, {})
            return _Shrink(known[model_type], max_positions, vocab_size, overrides=overrides).config(changes)
        except CoreError:
            raise
        except Exception as error:  # validators of any configuration class run in there
            raise ModelError(
                asked,
                found=f"{type(error).__name__}: {' '.join(str(error).split())}",
                remedy="add an override for this type",
            ) from error


class _Shrink:
    """The tiny form of one configuration class."""

    def __init__(
        self,
        config_class: Any,
        max_positions: int,
        vocab_size: int,
        *,
        default: Any = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Read the class's fields, their values in `default` (its own default), and the layers to keep."""
        self._class = config_class
        self._max_positions = max_positions
        self._vocab_size = vocab_size
        self._stated = {field.name: _stated(field) for field in dataclasses.fields(config_class)}
        self._overrides = dict(overrides or _OVERRIDES.get(config_class.model_type, {}))
        self._switches = {name: value for name, value in _SWITCHES.items() if name in self._stated}
        if "use_sliding_window" in self._switches:
            self._switches["sliding_window"] = WINDOW
        self._parts: dict[str, Any] = getattr(config_class, "sub_configs", {})
        nested = {name: self._overrides.pop(name) for name in self._parts if name in self._overrides}
        self._default = default if default is not None else config_class(**self._switches, **nested)
        self._nested_overrides = nested
        self._num_layers = self._count_layers()
        self._kept = self._keep()

    def config(self, changes: Mapping[str, Any]) -> Any:
        """Build it."""
        values: dict[str, Any] = dict(self._switches)
        for name, stated in self._stated.items():
            if _TOKEN.fullmatch(name):
                values[name] = self._token(name, self._value(name))
                continue
            changed = self._changed(name, self._value(name), derived=stated is None)
            if changed is not None:
                values[name] = changed
        kinds = values.get("layer_types") or []
        # Windows that the default leaves unused: the class can do both, so show both.
        if values.get("sliding_window") and set(kinds) == {"full_attention"}:
            values["layer_types"] = ["sliding_attention", *kinds[1:]]
        return self._class(**{**values, **self._nested(), **self._overrides, **changes})

    def _value(self, name: str) -> Any:
        stated = self._stated[name]
        try:
            value = getattr(self._default, name)
        except Exception:  # a class may refuse to name one value for what differs by layer
            return stated
        return stated if value is None else value

    def _changed(self, name: str, value: Any, *, derived: bool) -> Any:
        """Return the tiny value, or None to leave the field to the class. derived: the class computes it by default."""
        if name in self._switches or name in self._parts or isinstance(value, bool):
            return None
        if self._is_per_layer(value):
            return [self._element(name, value[index]) for index in self._kept]
        if isinstance(value, list) and value and _INDICES.fullmatch(name) and not derived:
            return [self._kept.index(index) for index in value if index in self._kept]
        if name == "num_kv_shared_layers" and value:
            return len(self._kept) if value >= self._num_layers else len(self._kept) // 2
        if derived and not _REQUIRED.fullmatch(name) and not (value and "window" in name):
            return None
        if isinstance(value, int) and _NUM_LAYERS.fullmatch(name):
            return len(self._kept)
        value = 1 if value is None and derived else value
        return self._element(name, value) if isinstance(value, int | float) else None

    def _element(self, name: str, value: Any) -> Any:
        # Zero means that the architecture does without.
        if isinstance(value, bool) or not isinstance(value, int | float) or value == 0:
            return value
        if _POSITIONS.fullmatch(name):
            return self._max_positions
        if _VOCABULARY.fullmatch(name):
            return self._vocab_size
        if "kv_lora_rank" in self._stated:
            # Latent attention has one key and value per query head, and calls the rotated part of a head `head_dim`.
            if name == "num_key_value_heads":
                return HEADS
            if name == "head_dim" and value in (1, self._value("qk_rope_head_dim")):
                return HEAD_SIZE // 2
        return next((tiny for pattern, tiny in _SIZES if pattern.fullmatch(name)), value)

    def _token(self, name: str, value: Any) -> Any:
        if name in _TOKEN_IDS:
            return _TOKEN_IDS[name]
        others = [other for other in self._stated if _TOKEN.fullmatch(other) and other not in _TOKEN_IDS]
        return self._vocab_size - 1 - others.index(name) if isinstance(value, int) else value

    def _nested(self) -> dict[str, Any]:
        parts = {name: getattr(self._default, name, None) for name in self._parts}
        return {
            name: _Shrink(type(part), self._max_positions, self._vocab_size, default=part).config(
                self._nested_overrides.get(name, {})
            )
            for name, part in parts.items()
            if dataclasses.is_dataclass(part)
        }

    def _count_layers(self) -> int:
        for name in self._stated:
            value = self._value(name)
            if _NUM_LAYERS.fullmatch(name) and isinstance(value, int):
                return value
        # Some state their kinds of layers instead of a number.
        return next((len(v) for n in self._stated if isinstance(v := self._value(n), list) and "layers" in n), 0)

    def _is_per_layer(self, value: Any) -> bool:
        return isinstance(value, list) and len(value) == self._num_layers > 0 and not _is_index_list(value)

    def _keep(self) -> list[int]:
        """Choose layers, in order, that show every value of every per-layer list; at least two."""
        values = {name: self._value(name) for name in self._stated}
        lists = {name: value for name, value in values.items() if self._is_per_layer(value)}
        wanted = {(name, repr(kind)) for name, kinds in lists.items() for kind in kinds}
        kept = set[int]()
        while wanted:
            shown = [{(n, repr(v[i])) for n, v in lists.items()} & wanted for i in range(self._num_layers)]
            best = max(range(self._num_layers), key=lambda i: len(shown[i]))
            kept.add(best)
            wanted -= shown[best]
        for index in range(self._num_layers):
            if len(kept) < LAYERS:
                kept.add(index)
        # Layers that reuse the keys and values of earlier ones need such earlier ones, of their own kind.
        shared = self._value("num_kv_shared_layers") if "num_kv_shared_layers" in self._stated else 0
        return sorted(kept) * (2 if 0 < shared < self._num_layers else 1)


def _stated(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _is_index_list(value: Sequence[Any]) -> bool:
    numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    return numbers and len(value) > 1 and all(a < b for a, b in pairwise(value))
