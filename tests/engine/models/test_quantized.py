"""core/engine/models/quantized.py and the checkpoints it reads: round trips, files made by hand, what is not
quantised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")
pytest.importorskip("safetensors", reason="needs the extra 'hf'")

from safetensors.torch import load_file

import core
from core.common.ops.linear.weight_only import unpack
from core.engine.inspect.attention import inspect
from core.engine.inspect.cache_codes import layer_scales
from core.errors import ModelError, UsageError
from core.quantization.experts import QuantizedExperts
from core.quantization.layers import QuantizedLinear, WeightOnlyLinear
from core.quantization.report import report_of
from core.quantization.save import save
from core.quantization.targets import is_experts
from tests.engine.models.folders import IDS, load, logits_of, make_llama
from tests.engine.models.quantized_folders import (
    STATIC,
    Q,
    edit,
    edit_config,
    make_moe,
    make_nemotron,
    quantized_folder,
)

SCHEMES = (
    *("fp8", "fp8-static", "int8", "int8-static", "int8-asymmetric", "int8-static-asymmetric"),
    *("w8a16", "w8a16-g16", "w4a16-g16", "w4a16-asymmetric-g8"),
)


@pytest.mark.cases(2)
@pytest.mark.parametrize("make", [make_llama, make_moe, make_nemotron])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_saved_is_loaded_bit_by_bit(scheme: str, make: Callable[[], Any], tmp_path: Path) -> None:
    model = core.quantize(make(), scheme, calibration=[IDS])
    loaded = load(save(model, tmp_path))
    assert torch.equal(logits_of(loaded.model), logits_of(model))
    assert type(loaded.model) is type(model) and not any(p.requires_grad for p in loaded.model.parameters())
    assert [(n, p.dtype, p.shape) for n, p in loaded.model.named_parameters()] == [
        (n, p.dtype, p.shape) for n, p in model.named_parameters()
    ]
    report = report_of(loaded.model)
    assert report is not None and (report.scheme, report.source) == (scheme, "from the checkpoint")
    assert not [warning for warning in loaded.warnings if "tokenizer" not in warning]
    # Round again: what was loaded can be saved.
    assert (
        load_file(save(loaded.model, tmp_path / "again") / "model.safetensors").keys()
        == load_file(tmp_path / "model.safetensors").keys()
    )


def test_the_files_are_those_of_the_format(tmp_path: Path) -> None:
    folder = quantized_folder(tmp_path / "a", "fp8-static")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    assert tensors[f"{name}.weight"].dtype == torch.float8_e4m3fn and tensors[f"{name}.weight_scale"].shape == (32, 1)
    assert tensors[f"{name}.input_scale"].shape == (1,) and "lm_head.weight_scale" not in tensors
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (stated["quant_method"], stated["format"], stated["ignore"]) == (
        *("compressed-tensors", "float-quantized"),
        ["lm_head"],
    )
    folder = quantized_folder(tmp_path / "b", "w4a16-asymmetric-g8", make_moe)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj"
    shapes = {part: tuple(tensors[f"{name}.{part}"].shape) for part in ("weight_packed", "weight_zero_point")}
    assert shapes == {"weight_packed": (32, 2), "weight_zero_point": (4, 2)}
    assert tensors[f"{name}.weight_shape"].tolist() == [32, 16]
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert stated["format"] == "pack-quantized" and "model.layers.0.mlp.gate" in stated["ignore"]


def _by_hand(folder: Path) -> dict[str, Tensor]:
    """Write an int8 checkpoint as other tools do; return the dequantised weights by layer."""
    make_llama().to(torch.bfloat16).save_pretrained(folder)
    values: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [each for each in tensors if each.endswith("_proj.weight")]:
            layer, weight = name.removesuffix(".weight"), tensors[name].float()
            scale = (weight.abs().amax(1, keepdim=True) / 127.5).to(torch.bfloat16)
            tensors[name] = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
            # Of bf16, as a vector for one layer; zero points of symmetric codes; a scale of one number.
            tensors[f"{layer}.weight_scale"] = scale.flatten() if "q_proj" in name else scale
            tensors[f"{layer}.weight_zero_point"] = torch.zeros_like(scale, dtype=torch.int8)
            tensors[f"{layer}.input_scale"] = torch.tensor([0.05], dtype=torch.bfloat16)
            values[layer] = tensors[name].float() * scale.float()

    edit(folder, change)
    group = {"targets": ["re:.*_proj$"], "weights": {**STATIC, "strategy": "channel"}, "input_activations": STATIC}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["re:.*lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return values


def test_a_checkpoint_of_other_tools_is_read(tmp_path: Path) -> None:
    values = _by_hand(tmp_path)
    loaded = load(tmp_path)
    assert loaded.dtype == torch.bfloat16 and any("kv_cache_scheme" in warning for warning in loaded.warnings)
    for name, value in values.items():
        layer: Any = loaded.model.get_submodule(name)
        assert isinstance(layer, QuantizedLinear) and layer.weight_zero_point is None
        assert torch.equal(layer.values()[0], value)
        assert layer.input_scale.item() == torch.tensor(0.05, dtype=torch.bfloat16).item()
    attention: Any = loaded.model.get_submodule("model.layers.0.self_attn")
    assert attention.q_proj.input_scale is attention.k_proj.input_scale
    assert torch.isfinite(logits_of(loaded.model)).all()


K_SCALE = "model.layers.0.self_attn.k_scale"


def _with_cache_scales(folder: Path, numbers: Sequence[float]) -> Any:
    """Write an fp8 checkpoint whose attention layers have scales of keys and values; return the model."""
    model = core.quantize(make_llama(), "fp8")
    for layer in model.model.layers:
        layer.self_attn.k_scale = torch.tensor(numbers)
        layer.self_attn.v_scale = 0.25
    save(model, folder)
    return model


@pytest.mark.parametrize(("numbers", "strategy"), [([0.5], "tensor"), ([0.5, 0.125], "attn_head")])
def test_scales_of_a_quantised_cache_come_with_the_checkpoint(
    numbers: list[float], strategy: str, tmp_path: Path
) -> None:
    _with_cache_scales(tmp_path, numbers)
    stated = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stated["kv_cache_scheme"]["strategy"] == strategy
    loaded = load(tmp_path)
    assert any("kv_cache_dtype 'fp8'" in warning for warning in loaded.warnings)
    for layer in loaded.model.model.layers:
        assert layer.self_attn.k_scale.tolist() == numbers and layer.self_attn.v_scale.tolist() == [0.25]
    layers = inspect(loaded.model, max_len=16)
    scales = [layer_scales(module, layer, torch.device("cpu")) for module, layer in layers.items()]
    assert len(scales) == len(loaded.model.model.layers)
    assert all(k is not None and k.numel() == len(numbers) and v is not None and v.dim() == 0 for k, v in scales)
    assert K_SCALE in load_file(save(loaded.model, tmp_path / "again") / "model.safetensors")


def test_codes_without_a_statement_are_not_taken_for_weights(tmp_path: Path) -> None:
    folder = quantized_folder(tmp_path, "fp8")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"14 tensors of quantised layers .*states no quantization_config"):
        load(folder)


def test_a_quantised_cache_without_a_scale_is_said(tmp_path: Path) -> None:
    _with_cache_scales(tmp_path, [0.5])
    edit(tmp_path, lambda tensors: tensors.pop(K_SCALE))
    with pytest.raises(ModelError, match=f"'{K_SCALE}' is missing"):
        load(tmp_path)
    edit(
        tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(("k_scale", "v_scale"))]
    )
    loaded = load(tmp_path)
    assert any("without any scale" in warning for warning in loaded.warnings)
    assert not hasattr(loaded.model.model.layers[0].self_attn, "k_scale")


@pytest.mark.parametrize(
    ("change", "said"),
    [({"num_bits": 4}, "its num_bits is 4"), ({"type": "int"}, "its type is 'int'"), ({"dynamic": True}, "dynamic")],
)
def test_another_quantised_cache_is_told_and_left_aside(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    _with_cache_scales(tmp_path, [0.5])
    edit_config(tmp_path, lambda stated: stated["kv_cache_scheme"].update(change))
    loaded = load(tmp_path)
    assert any(said in warning for warning in loaded.warnings)
    assert not hasattr(loaded.model.model.layers[0].self_attn, "k_scale")


def test_a_scale_for_the_whole_weight_is_one_for_each_row(tmp_path: Path) -> None:
    folder = quantized_folder(tmp_path, "fp8")
    name = "model.layers.0.mlp.up_proj"
    edit(folder, lambda tensors: tensors.update({f"{name}.weight_scale": torch.tensor([0.5])}))
    layer: Any = load(folder).model.get_submodule(name)
    assert layer.weight_scale.shape == (48, 1) and (layer.weight_scale == 0.5).all()


def test_groups_of_layers_have_schemes_of_their_own(tmp_path: Path) -> None:
    folder = quantized_folder(tmp_path / "a", "int8", ignore=["re:.*mlp.*"])
    assert load(folder).num_parameters == sum(p.numel() for p in make_llama().parameters())
    other = load_file(quantized_folder(tmp_path / "b", "w4a16-g16") / "model.safetensors")

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".mlp." in name]:
            del tensors[name]
        tensors.update({name: tensor for name, tensor in other.items() if ".mlp." in name})

    edit(folder, change)
    mlp = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    edit_config(folder, lambda stated: stated["config_groups"].update(mlp={**mlp, "targets": ["re:.*mlp.*"]}))
    edit_config(folder, lambda stated: stated.update(ignore=["lm_head"], format="mixed-precision"))
    loaded = load(folder)
    kinds = {type(loaded.model.get_submodule(f"model.layers.0.{n}")) for n in ("mlp.up_proj", "self_attn.q_proj")}
    report = report_of(loaded.model)
    assert kinds == {QuantizedLinear, WeightOnlyLinear} and report is not None and report.scheme == "int8, w4a16-g16"
    again = load(save(loaded.model, tmp_path / "c"))
    assert torch.equal(logits_of(again.model), logits_of(loaded.model))


def test_experts_get_one_static_scale_that_reaches_all(tmp_path: Path) -> None:
    folder = quantized_folder(tmp_path, "int8-static", make_moe)
    name = "model.layers.0.mlp.experts"
    edit(folder, lambda tensors: tensors.update({f"{name}.2.up_proj.input_scale": torch.tensor([9.0])}))
    experts: Any = load(folder).model.get_submodule(name)
    assert experts.input_scale.item() == 9.0 and experts.hidden_scale.item() < 9.0


def test_experts_without_a_gate_are_stored_as_two_layers_each(tmp_path: Path) -> None:
    model = make_nemotron()
    path = "model.layers.1.mixer.experts"
    exact, rows = model.get_submodule(path), torch.randn(9, 32, generator=torch.Generator().manual_seed(2))
    choice = torch.arange(18).view(9, 2) % 4, torch.linspace(0.1, 1.0, 18).view(9, 2)
    with torch.no_grad():
        wanted = exact(rows, *choice)
        tensors = load_file(save(core.quantize(model, "w8a16"), tmp_path) / "model.safetensors")
        experts = model.get_submodule(path)
        off = float((experts(rows, *choice) - wanted).norm() / wanted.norm())
    assert type(experts) is QuantizedExperts and 1e-4 < off < 0.02
    assert [tuple(each.shape) for each in experts.values()] == [(4, 32, 32), (4, 32, 32)]
    stored = {name.split(".")[-2] for name in tensors if f"{path.replace('model', 'backbone', 1)}.3." in name}
    assert stored == {"up_proj", "down_proj"}


@pytest.mark.slow
def test_a_configuration_may_name_layers_as_the_files_do(tmp_path: Path) -> None:
    ignored = "model.layers.3.mixer.up_proj"
    model = core.quantize(make_nemotron(), "int8", ignore=[ignored])
    folder, wanted = save(model, tmp_path), logits_of(model)
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert ignored in stated["ignore"]
    paths = [f"backbone{path.removeprefix('model')}" if "." in path else path for path in stated["ignore"]]
    expressions = [f"re:{re.escape(path)}$" for path in paths]
    layers = [layer.name.replace("model", "backbone", 1) for layer in report_of(model).layers]  # type: ignore[union-attr]
    layers += [f"{name}.{e}.{each}" for name in layers for e in range(4) for each in ("up_proj", "down_proj")]

    def stating(ignore: list[str], targets: list[str]) -> Path:
        edit_config(folder, lambda stated: stated.update(ignore=ignore))
        edit_config(folder, lambda stated: stated["config_groups"]["group_0"].update(targets=targets))
        return folder

    named = ((paths, ["Linear"]), (expressions, ["Linear"]), (expressions, [r"re:backbone\..*"]), ([], layers))
    for ignore, targets in named:
        assert torch.equal(logits_of(load(stating(ignore, targets)).model), wanted)
    with pytest.raises(ModelError, match="names no layer of the model"):
        load(stating([], [r"re:backbones\..*"]))


def test_experts_that_are_no_plain_mlps_are_refused() -> None:
    for changed in ("has_post_expert_norm", "is_transposed"):
        model = make_nemotron()
        setattr(model.get_submodule("model.layers.1.mixer.experts"), changed, True)
        with pytest.raises(UsageError, match=r"(?s)layers\.1\.mixer\.experts.*there is no quantised form of that"):
            core.quantize(model, "int8")
    # An up projection beside a gate of its own: the module does not say that there is none.
    del model.get_submodule("model.layers.1.mixer.experts").has_gate
    assert not is_experts(model.get_submodule("model.layers.1.mixer.experts"))


def test_experts_may_be_left_as_they_are(tmp_path: Path) -> None:
    model = core.quantize(make_moe(), "int8", ignore=["re:.*experts$"])
    loaded = load(save(model, tmp_path))
    assert torch.equal(logits_of(loaded.model), logits_of(model))


def test_only_quantised_models_of_transformers_are_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it has no quantised layer"):
        save(make_llama(), tmp_path)
    with pytest.raises(UsageError, match="it is no transformers model"):
        save(core.quantize(torch.nn.Sequential(torch.nn.Linear(8, 8)), "int8"), tmp_path)


def test_packed_codes_of_both_widths_hold_what_was_quantised(tmp_path: Path) -> None:
    for scheme, num_bits in (("w8a16", 8), ("w4a16-g16", 4)):
        model = core.quantize(make_llama(), scheme)
        stored = load_file(save(model, tmp_path / scheme) / "model.safetensors")
        layer: Any = model.get_submodule(Q)
        codes = unpack(stored[f"{Q}.weight_packed"], num_bits, 32)
        held = layer.weight if num_bits == 8 else unpack(layer.weight, 4, 32)
        assert torch.equal(codes, held)
