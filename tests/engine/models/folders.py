"""Tiny model folders and helpers that the tests of loading share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'hf'")

from core.engine.models.loading import LoadedModel, build_model, load_model  # noqa: E402
from core.errors import ModelError  # noqa: E402

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA: dict[str, Any] = {**SIZES, **SPECIAL_IDS, "num_key_value_heads": 2, "intermediate_size": 48}
IDS = torch.tensor([[3, 17, 99, 4, 5, 64]])

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**LLAMA, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**LLAMA, "head_dim": 8}),
    "gpt2": (
        "GPT2Config",
        {**SPECIAL_IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64},
    ),
    "gpt_neox": ("GPTNeoXConfig", {**SIZES, **SPECIAL_IDS, "intermediate_size": 48}),
    "mixtral": ("MixtralConfig", {**LLAMA, "num_local_experts": 4}),
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 4}),
}


def save_tokenizer(folder: Path) -> None:
    alphabet = [*map(chr, range(33, 127)), "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"]  # printable ASCII and the space
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder)


def make_llama(seed: int = 0, **changes: Any) -> Any:
    return build_model(transformers.LlamaConfig(**{**LLAMA, **changes}), torch_device=CPU, seed=seed).model


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, torch_device=CPU, **options)


def error_of(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(path)
    assert caught.value.asked == f"load model {str(path)!r}"
    return caught.value


def edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


def family(name: str) -> Any:
    """Return a small configuration with some trait of its own: tied weights, merged or fused weights, recurrence."""
    config_class, options = FAMILIES[name]
    return getattr(transformers, config_class)(**options)
