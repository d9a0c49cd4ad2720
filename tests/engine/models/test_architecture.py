"""Architectures that an engine can and cannot run, told from the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'hf'")

from core.engine.models.architecture import max_position, num_positions  # noqa: E402
from core.engine.models.loading import build_model  # noqa: E402
from core.engine.models.tiny import tiny_config  # noqa: E402
from tests.engine.models.folders import (  # noqa: E402
    CPU,
    SIZES,
    edit_json,
    error_of,
    load,
    logits_of,
)


def test_an_unknown_architecture_names_the_closest(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="lama")
    error = error_of(folder)
    assert error.found == f"model_type 'lama' is unknown to transformers {transformers.__version__}"
    assert error.remedy.startswith("did you mean 'llama'?")


def test_a_missing_model_type(folder: Path) -> None:
    edit_json(folder / "config.json", model_type=None)
    assert error_of(folder).found == "config.json has no 'model_type'"


def test_custom_code_is_not_run(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text("raise SystemExit('custom code was run')")
    auto_map = {"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    edit_json(folder / "config.json", model_type="zyxw", auto_map=auto_map)
    error = error_of(folder)
    assert "the custom code named in its auto_map is not run" in error.found
    assert "did you mean" not in error.remedy
    # A known architecture is loaded by transformers' own code, and that is said.
    edit_json(folder / "config.json", model_type="llama")
    (warning,) = load(folder).warnings
    assert warning == "custom code named in auto_map is not run; transformers' own 'llama' is used"


def test_an_architecture_without_a_causal_model(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="t5", architectures=["T5ForConditionalGeneration"])
    found = error_of(folder).found
    assert found == "model_type 't5' (T5ForConditionalGeneration) has no causal language model in transformers"


@pytest.mark.parametrize(
    ("model_type", "found"), [("bert", "is an encoder (is_decoder is false)"), ("bart", "is an encoder-decoder")]
)
def test_a_model_that_does_not_attend_causally(folder: Path, model_type: str, found: str) -> None:
    # transformers has a causal class for both, and would load the weights.
    edit_json(folder / "config.json", model_type=model_type, architectures=None)
    assert found in error_of(folder).found


def test_a_decoder_of_an_encoder_family_is_causal(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES, intermediate_size=48, is_decoder=True)
    build_model(config, torch_device=CPU).model.save_pretrained(tmp_path)  # type: ignore[operator]
    logits = logits_of(load(tmp_path).model)
    assert logits.shape == (1, 6, 128)


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("roberta", {}, 255),  # the row of token 0 is padding's
        ("roberta", {"pad_token_id": 5}, 250),
        ("bert", {}, 256),
        ("bart", {}, 256),  # two rows more than stated
        ("llama", {"vocab_size": 256}, 256),
        ("whisper", {}, 256),
    ],
)
def test_positions_are_those_that_the_model_can_count(model_type: str, changes: dict[str, int], expected: int) -> None:
    loaded = build_model(tiny_config(model_type, **changes), torch_device=CPU)
    assert max_position(loaded.config) == 256 and loaded.max_position == expected
    assert num_positions(loaded.model, None) is None
