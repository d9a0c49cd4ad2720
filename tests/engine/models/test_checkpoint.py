"""One precise error for every folder, index or safetensors file that cannot be loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'hf'")

from core.engine.models.loading import build_model  # noqa: E402
from core.errors import ModelError  # noqa: E402
from tests.engine.models.folders import (  # noqa: E402
    CPU,
    edit_json,
    error_of,
    family,
    load,
    make_llama,
)


def test_a_missing_folder_suggests_the_closest_sibling(folder: Path) -> None:
    error = error_of(folder.parent / "tiny-lama")
    assert "no such folder" in error.found
    assert error.remedy == f"did you mean {str(folder)!r}?"


def test_a_missing_folder_without_a_similar_sibling(tmp_path: Path) -> None:
    assert error_of(tmp_path / "zzz").remedy == "pass the folder that holds config.json"


def test_the_name_of_a_hub_model_says_that_nothing_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    error = error_of(Path("some-org/some-model"))
    assert "'some-org' does not exist" in error.found
    assert "hf download some-org/some-model --local-dir" in error.remedy
    assert "hf download" not in error_of(tmp_path / "absent" / "model").remedy


def test_a_file_is_not_a_folder(folder: Path) -> None:
    error = error_of(folder / "model.safetensors")
    assert "it is a file" in error.found
    assert str(folder) in error.remedy


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert error_of(folder).found == "no config.json in the folder"
    error = error_of(folder.parent)
    assert error.found == "no config.json in the folder"
    assert error.remedy == "pass the folder that holds config.json"


def test_the_folder_above_the_right_one_is_named(folder: Path) -> None:
    assert error_of(folder.parent).remedy == "did you mean its folder 'tiny-llama'?"


def test_an_empty_folder(tmp_path: Path) -> None:
    assert error_of(tmp_path).found == "the folder is empty"


def test_an_adapter_is_not_applied(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    error = error_of(folder)
    assert "adapter" in error.found
    assert "merge" in error.remedy


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "found"), [(b"{not json", "is not JSON"), (b"\xff\xfe{}", "is not JSON"), (b"[1]", "holds a JSON list")]
)
def test_configuration_that_is_not_a_json_object(folder: Path, name: str, content: bytes, found: str) -> None:
    (folder / name).write_bytes(content)
    error = error_of(folder)
    assert f"{name} {found}" in error.found
    assert name in error.remedy


def test_configuration_that_the_architecture_rejects(folder: Path) -> None:
    edit_json(folder / "config.json", rms_norm_eps="small")
    assert "transformers rejects config.json" in error_of(folder).found


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert error_of(folder).found == "no weights in the folder"


def test_weights_in_pickle_files_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = error_of(folder)
    assert error.found == "no safetensors weights, only 'pytorch_model.bin'"
    assert "convert the weights to safetensors" in error.remedy


def test_safetensors_under_another_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    error = error_of(folder)
    assert "only 'consolidated.safetensors'" in error.found
    assert "'model.safetensors'" in error.remedy


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_llama().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    shards[1].unlink()
    error = error_of(sharded)
    assert error.found == (
        f"1 of the {len(shards)} shards named in model.safetensors.index.json are missing: {shards[1].name!r}"
    )


def test_a_shard_without_the_promised_tensor(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    first = sorted(sharded.glob("*.safetensors"))[0].name
    index["weight_map"]["model.extra.weight"] = first
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    error = error_of(sharded)
    assert first in error.found
    assert "'model.extra.weight'" in error.found


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_an_index_without_a_weight_map(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "has no 'weight_map'" in error_of(sharded).found


def header_and_data(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_safetensors(file: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def change_first(key: str, value: object) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        header, data = header_and_data(file)
        first = min((name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"])
        header[first][key] = value
        write_safetensors(file, header, data)

    return damage


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda file: file.write_bytes(b""), "0 bytes are too few"),
        (lambda file: file.write_bytes(b"abc"), "3 bytes are too few"),
        (lambda file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
        (lambda file: file.write_bytes(file.read_bytes()[:100]), "bytes, the file has 100"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes of data, the file has"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "bytes of data, the file has"),
        (lambda file: file.write_bytes(b"PK\x03\x04" * 1000), "its header claims"),
        (lambda file: write_safetensors(file, b"{broken", b""), "its header is not JSON"),
        (lambda file: write_safetensors(file, b"\xff\xff", b""), "its header is not JSON"),
        (lambda file: write_safetensors(file, [], b""), "its header is a JSON list"),
        (lambda file: write_safetensors(file, {"a": {"dtype": "F32"}}, b""), "tensor 'a' is malformed"),
        (lambda file: write_safetensors(file, {"a": 3}, b""), "tensor 'a' is malformed"),
        (change_first("shape", [3, 3]), "of dtype F32 and shape [3, 3] does not fill its"),
        (change_first("dtype", "F16"), "of dtype F16"),
        (change_first("data_offsets", [4, 8]), "does not fill its 4 bytes"),
        (
            lambda file: write_safetensors(
                file, {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, bytes(12)
            ),
            "tensor 'a' begins at byte 4 of the data, not at 0",
        ),
    ],
)
def test_a_damaged_safetensors_file_is_named(folder: Path, damage: Callable[[Path], None], found: str) -> None:
    damage(folder / "model.safetensors")
    error = error_of(folder)
    assert error.found.startswith("model.safetensors is damaged: ")
    assert found in error.found
    assert "model.safetensors" in error.remedy


def resave(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_weights_are_an_error_that_names_the_first(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def remove(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "layers.1." in name]:
            del weights[name]

    resave(folder, remove)
    error = error_of(folder)
    assert error.found == (
        "9 weights are missing: model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight and 6 more"
    )
    assert capfd.readouterr().err == "", "the one error is enough"


def test_unexpected_weights_are_a_warning(folder: Path) -> None:
    resave(folder, lambda weights: weights.update({"model.extra.weight": torch.zeros(3)}))
    loaded = load(folder)
    assert loaded.warnings == ("1 weights that the model has no place for were not read: model.extra.weight",)


def test_weights_of_another_shape_are_an_error(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=40)
    found = error_of(folder).found
    assert found.startswith("6 weights have another shape: model.layers.0.mlp.down_proj.weight: ")
    assert "(32, 48) in the file, (32, 40) in the model" in found


def test_weights_that_cannot_be_converted_are_an_error(tmp_path: Path) -> None:
    built = build_model(family("mixtral"), torch_device=CPU, dtype=torch.float32)
    built.model.save_pretrained(tmp_path)  # type: ignore[operator]
    # Experts are merged into one tensor while loading; one of another size cannot be.
    resave(tmp_path, lambda w: w.update({k: v[:3].clone() for k, v in w.items() if "experts.2.w1" in k}))
    assert error_of(tmp_path).found == (
        "transformers could not load it: conversion of model.layers.{0, 1}.mlp.experts.gate_up_proj failed: "
        "RuntimeError: stack expects each tensor to be equal size, but got [48, 32] at entry 0 and [3, 32] at entry 2"
    )


@pytest.mark.parametrize(
    ("file", "field", "value", "found"),
    [
        ("config.json", "hidden_size", "wide", 'hidden_size="wide", not a whole number'),
        ("config.json", "vocab_size", 10**18, "vocab_size=1000000000000000000, not a whole number"),
        ("config.json", "eos_token_id", ["x"], 'eos_token_id=["x"], not a token id'),
        ("generation_config.json", "eos_token_id", [None], "eos_token_id=[null], not a token id"),
        ("config.json", "tie_word_embeddings", "yes", "not true or false"),
        ("config.json", "num_hidden_layers", 10**9, "num_hidden_layers=1000000000, and the weights are"),
        ("config.json", "vocab_size", 10**9, "describes a model of many more weights"),
        ("generation_config.json", "eos_token_id", "x", 'generation_config.json states eos_token_id="x"'),
    ],
)
def test_a_field_of_the_wrong_kind_or_size(folder: Path, file: str, field: str, value: Any, found: str) -> None:
    edit_json(folder / file, **{field: value})
    assert found in error_of(folder).found


@pytest.mark.parametrize(
    ("content", "found"),
    [("[" * 100_000, "nested more than 100 deep"), ('{"a":' + "9" * 5000 + "}", "a number of 5000 digits")],
)
def test_json_beyond_all_bounds(folder: Path, content: str, found: str) -> None:
    (folder / "config.json").write_text(content)
    assert found in error_of(folder).found


def test_a_model_too_large_for_the_machine_is_not_built(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 10**9, "hidden_size": 2**20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="of this machine"):
        build_model(tmp_path, torch_device=CPU)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(ModelError, match="num_hidden_layers=1000000000; 10000 layers are the most"):
        build_model(tmp_path, torch_device=CPU)


def test_weights_that_are_not_finite_are_named(folder: Path) -> None:
    model = make_llama()
    model.model.norm.weight.data[3] = float("nan")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("inf")
    model.save_pretrained(folder)
    error = error_of(folder)
    assert error.found == "2 weights hold NaN or infinity: model.layers.0.mlp.up_proj.weight, model.norm.weight"
