"""Tiny random models that nobody registered, by `torch.compile(backend="core")`: what matched, and criterion T1.

The recording device has implementations of canonical ops and captures, so that the rewritten graph is what runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import core
from core.common.numerics import MIN_ELEMENTS, Fp64Mode, judge
from tests.recording import acme

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"vocab_size": 128}
VISION = {"image_size": 32, "patch_size": 8, **SIZES}
TEXT = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **IDS, **SIZES}
WHISPER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 50,
    "num_mel_bins": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, **IDS,
}  # fmt: skip
WAV2VEC2 = {
    "conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 32, **SIZES,
}  # fmt: skip
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, **IDS}


class Case(NamedTuple):
    """A model class, what its tiny configuration says, its inputs, and what has to match."""

    model: str
    config: str
    changes: Mapping[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    matched: Mapping[str, int]


def ids(name: str = "input_ids", length: int = 24) -> dict[str, Tensor]:
    return {name: torch.randint(3, 100, (2, length))}


def floats(name: str, *shape: int) -> dict[str, Tensor]:
    return {name: torch.randn(*shape)}


CASES = [
    Case("BertModel", "BertConfig", {**IDS, **SIZES}, ids, {"lift_layer_norm": 5, "lift_attention": 2}),
    Case("RobertaModel", "RobertaConfig", {**IDS, **SIZES}, ids, {"lift_layer_norm": 5, "lift_attention": 2}),
    Case(
        "ViTModel",
        "ViTConfig",
        VISION,
        lambda: floats("pixel_values", 2, 3, 32, 32),
        {"lift_layer_norm": 5, "lift_attention": 2},
    ),
    Case(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": VISION, "projection_dim": 64},
        lambda: {**ids(), **floats("pixel_values", 2, 3, 32, 32)},
        {"lift_layer_norm": 11, "lift_attention": 4},
    ),
    Case(
        "WhisperModel",
        "WhisperConfig",
        WHISPER,
        lambda: {**floats("input_features", 2, 16, 100), **ids("decoder_input_ids")},
        {"lift_layer_norm": 12, "lift_attention": 6},
    ),
    Case(
        "T5Model",
        "T5Config",
        T5,
        lambda: {**ids(), **ids("decoder_input_ids", 8)},
        {"lift_rms_norm": 12, "lift_attention": 6},
    ),
    Case(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        WAV2VEC2,
        lambda: floats("input_values", 2, 1600),
        {"lift_layer_norm": 6, "lift_attention": 2},
    ),
    Case(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**IDS, **SIZES, "num_key_value_heads": 2},
        ids,
        {"lift_rms_norm": 5, "lift_attention": 2, "lift_rotary": 2, "lift_gated_activation": 2},
    ),
]


def build(case: Case, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    """Return the model, with norms that are not all 1, and its inputs."""
    torch.manual_seed(0)
    model = getattr(transformers, case.model)(getattr(transformers, case.config)(**case.changes)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype), cast(case.inputs(), dtype)


def cast(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def outputs(result: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(result.to_tuple())
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def check(case: Case, dtype: torch.dtype, **options: Any) -> None:
    """Compile, compare with eager by T1 at two calls, and assert what matched."""
    model, inputs = build(case, dtype)
    with torch.inference_mode():
        eager = outputs(model(**inputs))
        with Fp64Mode():
            exact = outputs(copy.deepcopy(model).double()(**cast(inputs, torch.float64)))
        run = torch.compile(model, backend="core", fullgraph=True, options=options)
        for _ in range(2):
            found = outputs(run(**inputs))
            assert len(found) == len(eager) == len(exact)
            verdicts = [
                judge(*each) for each in zip(found, eager, exact, strict=True) if each[0].numel() >= MIN_ELEMENTS
            ]
            assert verdicts
            assert all(verdict.passed for verdict in verdicts), [verdict.reason for verdict in verdicts]
    (graph,) = core.backend_report().graphs
    assert (graph.calls, graph.original, dict(graph.originals)) == (2, "", {})
    assert {name: graph.matched.get(name, 0) for name in case.matched} == case.matched
    assert not [each.error for each in graph.passes if each.error]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_a_model_keeps_its_numbers(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, device=acme())
    (graph,) = core.backend_report().graphs
    assert graph.num_captured == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_language_model_keeps_its_numbers(dtype: torch.dtype) -> None:
    check(CASES[-1], dtype, lowering="inline")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=lambda case: case.model)
def test_a_model_keeps_its_numbers_compiled(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, device="cpu", lowering="inductor")


@pytest.mark.slow
@torch.inference_mode()
def test_generation_grows_a_cache() -> None:
    model, inputs = build(CASES[-1], torch.float32)
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(inputs["input_ids"], **asked)
    core.optimize(model, lowering="inline")
    assert torch.equal(model.generate(inputs["input_ids"], **asked), expected)
    assert core.backend_report().calls >= 12
