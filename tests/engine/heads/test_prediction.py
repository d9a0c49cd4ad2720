"""The prediction layers of a checkpoint: read, compared with transformers' own use of them, and refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.engine.config import OWN_HEADS
from core.engine.heads import prediction
from core.engine.heads.loading import load_head
from core.engine.heads.prediction import Prediction
from core.engine.models.loading import LoadedModel
from core.errors import ModelError
from tests.engine.serve.drafted import VOCAB, tiny
from tests.engine.serve.headed import load, with_own_heads

LENGTH = 9


def own(served: LoadedModel) -> LoadedModel:
    loaded = load_head(OWN_HEADS, served)
    assert loaded is not None and isinstance(loaded.model, Prediction)
    return loaded


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3"])
def test_the_first_draft_is_the_one_that_transformers_makes(tmp_path: Path, model_type: str) -> None:
    served = load(with_own_heads(tmp_path / "model", model_type))
    model: Any = served.model
    loaded = own(served)
    head: Any = loaded.model
    ids = torch.randint(VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    heard: list[Tensor] = []
    handles = head.listen(model, heard.append)
    with torch.no_grad():
        states = model(input_ids=ids[:, :-1], use_cache=False, output_hidden_states=-1).hidden_states[-1]
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(heard[0], states[0], atol=0, rtol=0)
        places = torch.arange(LENGTH)[None]
        how: dict[str, Any] = {"attention_mask": None, "mtp_cache": None}
        drafts, logits, _ = head.mtp(ids[:, 1:], states, position_ids=places + 1, **how)
        hidden, following = head.compute(head.embedding(ids[:, 1:]), states, places)
        found = head.project(hidden[:, -1:])
    torch.testing.assert_close(found, logits)
    assert found.argmax() == drafts[0, 0] and hidden is following


def test_the_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    served = load(with_own_heads(tmp_path / "model", "glm4_moe", num_heads=2))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    count = served.config.num_hidden_layers
    ignored = copy.copy(vars(served.model)["_keys_to_ignore_on_load_unexpected"])
    loaded = own(served)
    head: Any = loaded.model
    (layer,) = head.mtp.layers
    for name, value in {
        "eh_proj": layer.eh_proj,
        "enorm": layer.enorm,
        "hnorm": layer.hnorm,
        "shared_head.norm": layer.post_norm,
        "self_attn.q_proj": layer.mtp_block.self_attn.q_proj,
    }.items():
        assert torch.equal(value.weight, saved[f"model.layers.{count}.{name}.weight"]), name
    model: Any = served.model
    assert head.embedding is model.get_input_embeddings() and head.mtp.shared_head is model.lm_head
    assert loaded.num_parameters == sum(p.numel() for p in layer.parameters())
    told = "of the checkpoint's 2 multi-token prediction layers the first drafts alone"
    assert told in loaded.warnings
    assert vars(model)["_keys_to_ignore_on_load_unexpected"] == ignored


def test_a_checkpoint_without_them_is_refused(tmp_path: Path) -> None:
    built = tiny()
    with pytest.raises(ModelError, match="the model was built, and not read from a folder"):
        load_head(OWN_HEADS, built)
    built.model.save_pretrained(tmp_path / "llama")  # type: ignore[operator]
    with pytest.raises(ModelError, match="transformers knows no such layers of this 'llama' checkpoint") as caught:
        load_head(OWN_HEADS, load(tmp_path / "llama"))
    assert caught.value.asked == "draft by the model's own heads"


@pytest.mark.parametrize(("edit", "why"), [("drop", "weights are missing"), ("nan", "weights hold NaN")])
def test_a_checkpoint_whose_layers_are_damaged_is_refused(tmp_path: Path, edit: str, why: str) -> None:
    folder = with_own_heads(tmp_path / "model", "glm4_moe")
    served = load(folder)
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.{served.config.num_hidden_layers}.eh_proj.weight"
    tensors[name] = tensors[name] * torch.nan
    if edit == "drop":
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=why):
        load_head(OWN_HEADS, served)


def test_a_transformers_without_them_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = load(with_own_heads(tmp_path / "model", "glm4_moe"))
    monkeypatch.setattr("transformers.modeling_layers.MtpModel", object)
    version = prediction.import_transformers().__version__
    with pytest.raises(ModelError, match=f"transformers {version} can't run them"):
        load_head(OWN_HEADS, served)
