"""Writes a Llama or Qwen3 of transformers as a GGUF file, by the `gguf` package: the same weights in the same dtype, or
those of linear layers in a format of blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import ModelError

_NAMES = {"llama": "llama", "qwen3": "qwen3"}
"""model_type of transformers -> architecture of llama.cpp."""
_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_file(folder: Path, weights: str = "") -> Path:
    """Return the file of the folder's model, written if it is not there.

    weights: the format of the layers' matrices, "q8_0" or "q4_0"; "" for their dtype. Embedding and head keep theirs,
    as `core` leaves them when it quantises. Raises `ModelError` for a model of another type, and for one that has a
    tensor which is not known here, or whose rows are no whole number of the format's blocks.
    """
    path = folder / f"model{weights and f'-{weights}'}.gguf"
    if not path.is_file():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _check(config)
        partial = path.with_suffix(".part")
        _write(config, folder, partial, weights)
        partial.rename(path)
    return path


def _check(config: dict[str, Any]) -> None:
    kind, rope = config["model_type"], config.get("rope_parameters") or {}
    if kind not in _NAMES or rope.get("rope_type") != "default":
        raise ModelError(
            f"a GGUF file of model type {kind!r} with rotary embeddings {rope.get('rope_type')!r}",
            found=f"written here are {', '.join(_NAMES)}, with rotary embeddings 'default'",
            remedy="leave llama.cpp out of --subjects",
        )


def _write(config: dict[str, Any], folder: Path, path: Path, weights: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, _NAMES[config["model_type"]])
    heads, size = config["num_attention_heads"], config["head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in _tensors(folder):
        known = _name(name)
        data, kind = _data(name, _permuted(config, name, tensor), weights if known.startswith("blk.") else "")
        writer.add_tensor(known, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, the file is no mapping
                yield name, file.get_tensor(name)


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{kind}"
    _, layers, index, part = (*stem.split(".", 3), "", "", "")[:4]
    if layers != "layers" or part not in _TENSORS:
        raise ModelError(
            f"tensor {name!r} in a GGUF file", found="no name for it is known", remedy="leave llama.cpp out"
        )
    return f"blk.{index}.{_TENSORS[part]}.{kind}"


def _permuted(config: dict[str, Any], name: str, tensor: Tensor) -> Tensor:
    """Return the rows of a Llama's query or key in the order in which llama.cpp rotates them: pairs side by side."""
    part = next((part for part in ("q_proj", "k_proj") if f".{part}." in name), None)
    if part is None or config["model_type"] != "llama":
        return tensor
    heads = config["num_attention_heads" if part == "q_proj" else "num_key_value_heads"]
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _data(name: str, tensor: Tensor, weights: str) -> tuple[Any, Any]:
    """Return the array and its type in the file; norms are fp32, as llama.cpp asks for."""
    from gguf import GGML_QUANT_SIZES, quants
    from gguf import GGMLQuantizationType as Kind

    if weights and tensor.dim() == 2:
        kind = Kind[weights.upper()]
        block = GGML_QUANT_SIZES[kind][0]
        if tensor.shape[1] % block:
            raise ModelError(
                f"tensor {name!r} in a GGUF file as {weights}",
                found=f"its rows have {tensor.shape[1]} numbers, and {weights} has blocks of {block}",
                remedy="leave llama.cpp out of --subjects, or take a model whose sizes are multiples of that",
            )
        return quants.quantize(tensor.float().numpy(), kind), kind
    tensor = tensor.float() if tensor.dim() < 2 else tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint8).numpy(), Kind.BF16
    return tensor.numpy(), {torch.float32: Kind.F32, torch.float16: Kind.F16}[tensor.dtype]
