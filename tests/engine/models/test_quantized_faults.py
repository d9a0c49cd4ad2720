"""Quantised checkpoints with a fault in tensors, statements or files: one clear error for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")
pytest.importorskip("safetensors", reason="needs the extra 'hf'")

import core
from core.quantization.save import save
from tests.engine.models.folders import IDS, edit_json, error_of, load, logits_of, make_llama
from tests.engine.models.quantized_folders import MOE, STATIC, Q, edit, edit_config, make_moe, quantized_folder

Change = Callable[[dict[str, Any]], object]


def _set(name: str, value: Tensor) -> Change:
    return lambda tensors: tensors.update({name: value})


def _with(name: str, value: float, *rows: int) -> Change:
    """Put a number into rows of a tensor."""

    def change(tensors: dict[str, Any]) -> None:
        tensors[name][list(rows)] = value

    return change


def _rename(old: str, new: str) -> Change:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


TENSORS: dict[str, tuple[str, Change, str]] = {
    "missing scale": ("int8", lambda t: t.pop(f"{Q}.weight_scale"), f"tensor '{Q}.weight_scale' is missing"),
    "missing input scale": ("fp8-static", lambda t: t.pop(f"{Q}.input_scale"), f"'{Q}.input_scale' is missing"),
    "missing zero point": (
        "int8-static-asymmetric", lambda t: t.pop(f"{Q}.input_zero_point"), f"'{Q}.input_zero_point' is missing",
    ),
    "missing words": ("w4a16-g16", lambda t: t.pop(f"{Q}.weight_packed"), f"'{Q}.weight_packed' is missing"),
    "not a number": (
        "int8", _with(f"{Q}.weight_scale", torch.nan, 3, 5), f"{Q}.weight_scale holds NaN or infinity: 2 of its 32 val",
    ),
    "infinite": (
        "w4a16-g16", _with(f"{Q}.weight_scale", torch.inf, 3), f"{Q}.weight_scale holds NaN or infinity: 2 of its 64",
    ),
    "negative scales": (
        "fp8", _with(f"{Q}.weight_scale", -0.5, 3, 5), f"{Q}.weight_scale is negative in 2 of its 32 values",
    ),
    "negative for all": ("int8", _set(f"{Q}.weight_scale", torch.tensor([-1.0])), "is negative in 1 of its 1 values"),
    "negative of groups": (
        "w4a16-asymmetric-g8", _with(f"{Q}.weight_scale", -1.0, 0), f"{Q}.weight_scale is negative in 4 of its 128 val",
    ),
    "zero scales": (
        "int8", _with(f"{Q}.weight_scale", 0.0, 3, 5), f"{Q}.weight_scale is 0 for 2 of 32 channels whose codes",
    ),
    "zero of fp8": ("fp8", _with(f"{Q}.weight_scale", 0.0, 3), "is 0 for 1 of 32 channels"),
    "zero of groups": ("w4a16-g16", _with(f"{Q}.weight_scale", 0.0, 3), "is 0 for 2 of 64 groups"),
    "zero of zero points": ("w4a16-asymmetric-g8", _with(f"{Q}.weight_scale", 0.0, 3), "is 0 for 4 of 128 groups"),
    "negative": ("int8-static", _set(f"{Q}.input_scale", torch.tensor([-1.0])), "input_scale is -1, not positive"),
    "scale's shape": ("int8", _set(f"{Q}.weight_scale", torch.ones(31, 1)), r"shape \(31, 1\), not \(32, 1\) or"),
    "codes' dtype": ("int8", _set(f"{Q}.weight", torch.ones(32, 32)), f"{Q}.weight is float32, not int8"),
    "codes' shape": ("int8", _set(f"{Q}.weight", torch.ones(32, 31).to(torch.int8)), r"shape \(32, 31\), not"),
    "stated shape": ("w4a16-g16", _set(f"{Q}.weight_shape", torch.tensor([32, 64])), r"weight_shape is \(32, 64\)"),
    "reordered": ("w4a16-g16", _set(f"{Q}.weight_g_idx", torch.arange(32)), "groups of reordered columns"),
    "left over": ("int8", _set("lm_head.weight_scale", torch.ones(128, 1)), "lm_head.weight_scale, of layers that"),
    "stray codes": (
        "fp8", _set("model.norm.weight", torch.ones(32).to(torch.float8_e4m3fn)), "model.norm.weight holds codes",
    ),
    "asymmetric": (
        "int8", _set(f"{Q}.weight_zero_point", torch.ones(32, 1, dtype=torch.int8)), "says symmetric",
    ),
    "another weight": ("int8", lambda t: t.pop("model.norm.weight"), "1 weights are missing: model.norm.weight"),
}  # fmt: skip


@pytest.mark.cases(5)
@pytest.mark.parametrize("fault", TENSORS)
def test_a_faulty_tensor_is_one_clear_error(fault: str, tmp_path: Path) -> None:
    scheme, change, message = TENSORS[fault]
    folder = quantized_folder(tmp_path, scheme)
    edit(folder, change)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error_of(folder).found)


@pytest.mark.cases(3)
@pytest.mark.parametrize("make", [make_llama, make_moe])
@pytest.mark.parametrize("scheme", ["fp8", "int8-static", "w4a16-g16", "w8a16", "w4a16-asymmetric-g8"])
def test_a_scale_of_zero_serves_where_all_codes_stand_for_zero(
    scheme: str, make: Callable[[], Any], tmp_path: Path
) -> None:
    """Tools that do not keep scales from 0 write this for channels of a weight that are 0."""
    whole = make()
    for name, weight in whole.named_parameters():
        if name.endswith(("v_proj.weight", "experts.down_proj")):
            weight.data[..., 3, :] = 0
    folder = save(core.quantize(whole, scheme, calibration=[IDS]), tmp_path)
    expected = logits_of(load(folder).model)
    changed = []

    def change(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith(("v_proj.weight_scale", "down_proj.weight_scale")) and tensors[name][3].max() < 1e-30:
                tensors[name][3] = 0
                changed.append(name)

    edit(folder, change)
    assert len(changed) == (2 if make is make_llama else 2 + 2 * MOE["num_experts"])
    assert torch.equal(logits_of(load(folder).model), expected)


def _group(**changes: Any) -> Change:
    return lambda stated: stated["config_groups"]["group_0"].update(changes)


def _weights(**changes: Any) -> Change:
    return lambda stated: stated["config_groups"]["group_0"]["weights"].update(changes)


def _inputs(**changes: Any) -> Change:
    return lambda stated: stated["config_groups"]["group_0"]["input_activations"].update(changes)


CONFIGS: dict[str, tuple[str, Change, str]] = {
    "group size": ("w4a16-g16", _weights(group_size=32), r"shape \(32, 2\), not \(32, 1\) \(groups of 32 of 32"),
    "ragged groups": ("w4a16-g16", _weights(group_size=20), "32 inputs, which do not divide into groups of 20"),
    "no group size": ("w4a16-g16", _weights(group_size=0), "group_size is 0, no positive"),
    "scheme": ("int8", _weights(num_bits=6), "weights is int of 6 bits; known here are float of 8 bits, int of 8 bits"),
    "strategy": ("int8", _weights(strategy="block"), "strategy is 'block'; known here are tensor, channel"),
    "reordered": ("w4a16-g16", _weights(actorder="group"), "groups of reordered columns are not supported"),
    "static by token": ("int8", _inputs(dynamic=False), "strategy is 'token'; static scales are by tensor"),
    "dynamic": ("int8", _inputs(dynamic="local"), "dynamic is 'local'"),
    "fp8 zero points": ("fp8", _weights(symmetric=False), "symmetric is False; zero points go with integers"),
    "mixed": ("int8", _weights(type="float"), "weights and activations differ in type"),
    "outputs": ("int8", _group(output_activations=STATIC), "quantised outputs are not supported"),
    "targets": ("int8", _group(targets=[]), r"targets is \[\], no list of layers"),
    "no weights": ("int8", _group(weights=None), "states no weights"),
    "format": ("int8", _group(format="int-quantised"), "'int-quantised'; the formats .*did you mean 'int-quantized'"),
    "no groups": ("int8", lambda stated: stated.update(config_groups={}), r"config_groups is \{\}"),
    "sparse": ("int8", lambda stated: stated.update(sparsity_config={"format": "sparse-24"}), "sparse weights"),
    "no layer": ("int8", lambda stated: stated.update(ignore=["re:.*"]), "of layers that|names no layer"),
    "expression": ("int8", _group(targets=["re:(("]), "no regular expression"),
}  # fmt: skip


@pytest.mark.cases(5)
@pytest.mark.parametrize("fault", CONFIGS)
def test_a_faulty_configuration_is_one_clear_error(fault: str, tmp_path: Path) -> None:
    scheme, change, message = CONFIGS[fault]
    folder = quantized_folder(tmp_path, scheme)
    edit_config(folder, change)
    with pytest.raises(core.CoreError, match=message):
        load(folder)


METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, r"'gptq' \(4 bits, groups of 128\)"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, r"'awq' \(4 bits, groups of 64\)"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"'bitsandbytes' \(4 bits\)"),
    "unnamed": ({"load_in_8bit": True}, r"'bitsandbytes' \(8 bits\), a format that is not read"),
    "no bits": ({"quant_method": "gptq"}, "'gptq', a format"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_in_another_format_is_named_with_what_to_do(name: str, tmp_path: Path) -> None:
    stated, said = METHODS[name]
    make_llama().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=stated)
    error = error_of(tmp_path)
    with pytest.raises(AssertionError, match=f"quantization_config: quant_method is {said}"):
        raise AssertionError(error.found)
    assert "llm-compressor" in error.remedy and "compressed-tensors" in error.remedy and "dequantise" in error.remedy


def test_a_format_that_transformers_refuses_is_named_too(tmp_path: Path) -> None:
    make_llama().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "hqq"})
    error = error_of(tmp_path)
    assert "'hqq'" in error.found and "transformers" in error.found and "compressed-tensors" in error.remedy


def test_a_truncated_file_is_one_clear_error(tmp_path: Path) -> None:
    file = quantized_folder(tmp_path, "int8") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors is damaged: its tensors need" in error_of(tmp_path).found


def test_experts_that_differ_are_one_clear_error(tmp_path: Path) -> None:
    folder = quantized_folder(tmp_path, "int8", make_moe)
    edit_config(folder, lambda stated: stated["ignore"].append("model.layers.0.mlp.experts.1.up_proj"))
    assert "experts of model.layers.0.mlp.experts are not quantised alike" in error_of(folder).found
