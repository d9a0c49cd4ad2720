"""EAGLE's heads against the formulas of their papers, and what is refused of a folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from core.engine.heads.head import Head
from core.engine.heads.loading import load_head
from core.engine.models.loading import LoadedModel
from core.errors import ModelError
from tests.engine.serve.drafted import VOCAB, tiny
from tests.engine.serve.headed import KNOWN, eagle

LENGTH = 9


@pytest.fixture(scope="module")
def served() -> LoadedModel:
    return tiny(num_hidden_layers=5)


def turned(x: Tensor, base: float) -> Tensor:
    """Rotate (T, heads, D) by position: Su et al., RoFormer (2021), features paired by halves."""
    length, _, size = x.shape
    angles = torch.arange(length)[:, None] * base ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, two = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def by_formula(config: Any, w: dict[str, Tensor], embedded: Tensor, states: Tensor, how: str) -> Tensor:
    """Return the output of the head's layer, (T, H)."""
    w = {name.removeprefix("layers.0.").removeprefix("midlayer."): value for name, value in w.items()}
    eps, heads, keys = config.rms_norm_eps, config.num_attention_heads, config.num_key_value_heads
    size = (config.hidden_size,)
    if how == "eagle":
        residual = given = torch.cat((embedded, states), dim=-1) @ w["fc.weight"].T
    else:
        normed = rms_norm(states, size, w["hidden_norm.weight"], eps)
        residual = normed if how == "normed" else states
        given = torch.cat((rms_norm(embedded, size, w["input_layernorm.weight"], eps), normed), dim=-1)
    query, key, value = (given @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    base = config.rope_parameters["rope_theta"]
    query, key = (turned(x.unflatten(1, (count, -1)), base) for x, count in ((query, heads), (key, keys)))
    all_heads = (x.transpose(0, 1) for x in (query, key, value.unflatten(1, (keys, -1))))
    attended = scaled_dot_product_attention(*all_heads, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)
    residual = residual + attended @ w["self_attn.o_proj.weight"].T
    normed = rms_norm(residual, size, w["post_attention_layernorm.weight"], eps)
    up = silu(normed @ w["mlp.gate_proj.weight"].T) * (normed @ w["mlp.up_proj.weight"].T)
    return residual + up @ w["mlp.down_proj.weight"].T


def loaded_head(folder: Path, served: LoadedModel) -> Head:
    loaded = load_head(folder, served)
    assert loaded is not None and isinstance(loaded.model, Head)
    assert loaded.path == folder and loaded.vocab_size == VOCAB
    return loaded.model


@pytest.mark.parametrize("how", ["eagle", "eagle3", "normed"])
def test_a_head_computes_what_its_paper_says(tmp_path: Path, served: LoadedModel, how: str) -> None:
    version = 1 if how == "eagle" else 3
    folder = eagle(tmp_path / "head", served, version)
    change(folder, lambda _: None, {"norm_before_residual": True} if how == "normed" else {})
    head, w = loaded_head(folder, served), load_file(folder / "model.safetensors")
    model: Any = served.model
    ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0))
    heard: list[Tensor] = []
    handles = head.listen(model, heard.append)
    with torch.no_grad():
        found = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    layers = [each[0] for each in found.hidden_states]  # what each layer is given, then what the last norm gives
    states = layers[-1] if version < 3 else torch.cat([layers[2], layers[2], layers[2]], dim=-1) @ w["fc.weight"].T
    torch.testing.assert_close(heard[0], states)
    embedded = model.get_input_embeddings()(ids)
    with torch.no_grad():
        expected = by_formula(served.config, w, embedded, states, how)
        hidden, following = head.compute(embedded[None], states[None], torch.arange(LENGTH)[None])
        logits = head.project(hidden)[0]
    torch.testing.assert_close(following[0], expected, atol=1e-4, rtol=1e-4)
    if version < 3:
        torch.testing.assert_close(logits, expected @ model.lm_head.weight.T, atol=1e-4, rtol=1e-4)
        return
    normed = rms_norm(expected, (expected.shape[1],), w["norm.weight"], served.config.rms_norm_eps)
    known = torch.arange(KNOWN) + w["d2t"]
    torch.testing.assert_close(logits[:, known], normed @ w["lm_head.weight"].T, atol=1e-3, rtol=1e-4)
    assert (logits.isinf().sum(-1) == VOCAB - KNOWN).all()


def test_what_the_served_model_has_already_is_not_held_twice(tmp_path: Path, served: LoadedModel) -> None:
    model: Any = served.model
    folder = eagle(tmp_path / "head", served)
    loaded = load_head(folder, served)
    assert loaded is not None and loaded.model.embedding is model.get_input_embeddings()
    assert loaded.num_parameters == sum(value.numel() for value in load_file(folder / "model.safetensors").values()) - (
        model.get_input_embeddings().weight.numel()
    )
    change(folder, lambda w: w.update({"embed_tokens.weight": w["embed_tokens.weight"] + 1}))
    head: Any = loaded_head(folder, served)
    torch.testing.assert_close(head.embedding.weight, model.get_input_embeddings().weight + 1)
    assert head.lm_head is model.lm_head


def test_a_folder_of_a_model_is_no_head(tmp_path: Path, served: LoadedModel) -> None:
    served.model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    assert load_head(tmp_path / "model", served) is None


def change(folder: Path, edit: Any, config: dict[str, Any] | None = None) -> None:
    """Change a head's tensors, and fields of its config.json."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))


BAD: dict[str, tuple[int, Any, dict[str, Any], str]] = {
    "missing": (1, lambda w: w.pop("layers.0.mlp.up_proj.weight"), {}, "1 weights of the head are missing: decoder.la"),
    "extra": (1, lambda w: w.update({"layers.0.input_layernorm.weight": torch.ones(64)}), {}, "have no place in it"),
    "shape": (
        1,
        lambda w: w.update({"fc.weight": torch.ones(65, 128)}),
        {},
        "have another shape: fc.weight: (65, 128)",
    ),
    "size": (1, lambda _: None, {"hidden_size": 32}, "its hidden states have 32 features, those of the served model"),
    "tokens": (1, lambda w: w.update({"embed_tokens.weight": torch.ones(7, 64)}), {}, "it has 7 tokens, the served"),
    "unknown": (3, lambda w: w.pop("d2t"), {}, f"it knows {KNOWN} tokens of {VOCAB}, and no 'd2t' says which"),
    "layers": (3, lambda _: None, {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "layers [1, 2, 9] of the served mo"),
    "infinite": (1, lambda w: w["fc.weight"].mul_(torch.inf), {}, "weights hold NaN or infinity: fc.weight"),
    "kind": (1, lambda _: None, {"model_type": "no_such"}, "transformers rejects config.json"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_head_that_does_not_fit_has_one_error_and_says_why(tmp_path: Path, served: LoadedModel, kind: str) -> None:
    version, edit, config, why = BAD[kind]
    folder = eagle(tmp_path / "head", served, version)
    change(folder, edit, config)
    with pytest.raises(ModelError, match=re.escape(why)) as caught:
        load_head(folder, served)
    assert str(folder) in caught.value.asked


def test_no_folder_and_one_without_weights_are_refused(tmp_path: Path, served: LoadedModel) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_head(tmp_path / "nowhere", served)
    served.config.save_pretrained(tmp_path / "empty")
    with pytest.raises(ModelError, match="no weights in the folder"):
        load_head(tmp_path / "empty", served)
