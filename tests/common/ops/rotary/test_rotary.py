"""core/common/ops/rotary/rotation.py against transformers' own functions, bit by bit, and rotation by complex
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.ernie4_5 import modeling_ernie4_5 as ernie
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm import modeling_glm as glm
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.nanochat import modeling_nanochat as nanochat
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from core.common.ops.rotary.rotation import QK_NORM_ROTARY, ROTARY, ROTARY_SINGLE
from tests.common.ops.canonical_oracle import Call, assert_bitwise, assert_close, assert_raises, in_fp64, run, sample

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
TOKENS = pytest.mark.parametrize("tokens", [0, 1, 7])
SIZE = 16


def heads(tokens: int, dtype: torch.dtype, *, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    """Return query (3, 4, T, D) and key (3, K, T, D), strided as projections leave them."""
    generator = torch.Generator().manual_seed(tokens)
    query, key = (
        torch.randn(3, tokens, h, SIZE, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
        for h in (4, kv_heads)
    )
    return query, key


def angles(tokens: int, width: int = SIZE // 2) -> Tensor:
    """Return (3, T, width) angles of different positions per sequence."""
    positions = torch.arange(3)[:, None] * 100 + torch.arange(tokens)
    return positions[..., None].double() * 1000.0 ** (-torch.arange(width).double() / width)


def tables(tokens: int, dtype: torch.dtype, width: int = SIZE // 2) -> tuple[Tensor, Tensor]:
    return angles(tokens, width).cos().to(dtype), angles(tokens, width).sin().to(dtype)


def twice(table: Tensor) -> Tensor:
    return torch.cat((table, table), dim=-1)


def call_of(tokens: int, dtype: torch.dtype, cos: Tensor, sin: Tensor, **options: Any) -> Call:
    query, key = heads(tokens, dtype)
    return {"query": query, "key": key, "cos": cos.unsqueeze(1), "sin": sin.unsqueeze(1), **options}


@DTYPES
@TOKENS
@pytest.mark.parametrize("tables_dtype", [None, F32], ids=str)
def test_half_is_llamas_and_olmos(tokens: int, dtype: torch.dtype, tables_dtype: torch.dtype | None) -> None:
    cos, sin = map(twice, tables(tokens, tables_dtype or dtype))
    eager = olmo2.apply_rotary_pos_emb if tables_dtype else llama.apply_rotary_pos_emb
    call = call_of(tokens, dtype, cos, sin)
    assert_bitwise(ROTARY, call, lambda: eager(*heads(tokens, dtype), cos, sin))
    # A value per pair says the same as a value per feature.
    half = call | {"cos": cos[:, None, :, : SIZE // 2], "sin": sin[:, None, :, : SIZE // 2]}
    assert_bitwise(ROTARY, half, lambda: eager(*heads(tokens, dtype), cos, sin))


@DTYPES
@TOKENS
def test_half_is_gpt_osss(tokens: int, dtype: torch.dtype) -> None:
    cos, sin = tables(tokens, dtype)
    eager = gpt_oss.apply_rotary_pos_emb
    assert_bitwise(ROTARY, call_of(tokens, dtype, cos, sin), lambda: eager(*heads(tokens, dtype), cos, sin))


@DTYPES
@TOKENS
def test_interleaved_is_coheres_and_gptjs(tokens: int, dtype: torch.dtype) -> None:
    cos, sin = tables(tokens, dtype)
    wide = {"cos": cos.repeat_interleave(2, -1).unsqueeze(1), "sin": sin.repeat_interleave(2, -1).unsqueeze(1)}
    per_pair = call_of(tokens, dtype, cos, sin, style="interleaved")

    def coheres() -> Any:
        return cohere.apply_rotary_pos_emb(
            *heads(tokens, dtype), cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        )

    def gptjs() -> Any:
        parts = (x.transpose(1, 2) for x in heads(tokens, dtype))
        return tuple(gptj.apply_rotary_pos_emb(x, sin, cos).transpose(1, 2) for x in parts)

    for call in (per_pair, per_pair | wide):
        assert_bitwise(ROTARY, call | {"compute_dtype": F32}, coheres)
        assert_bitwise(ROTARY, call, gptjs)


@DTYPES
@pytest.mark.parametrize("width", [8, 16])
def test_interleaved_is_glms_and_ernies(width: int, dtype: torch.dtype) -> None:
    cos, sin = tables(7, dtype, width // 2)
    call = call_of(7, dtype, cos, sin, style="interleaved", rotary_dim=width)
    assert_bitwise(ROTARY, call, lambda: glm.apply_rotary_pos_emb(*heads(7, dtype), twice(cos), twice(sin)))
    if width == SIZE:
        eager = ernie.apply_rotary_pos_emb
        assert_bitwise(ROTARY, call | {"compute_dtype": F32}, lambda: eager(*heads(7, dtype), twice(cos), twice(sin)))


@DTYPES
@TOKENS
def test_deinterleave_is_deepseek_v3s(tokens: int, dtype: torch.dtype) -> None:
    cos, sin = map(twice, tables(tokens, dtype))
    eager = deepseek_v3.apply_rotary_pos_emb_interleave
    call = call_of(tokens, dtype, cos, sin, style="deinterleave")
    assert_bitwise(ROTARY, call, lambda: eager(*heads(tokens, dtype), cos, sin))


@DTYPES
@pytest.mark.parametrize("width", [2, 6, 14])
def test_partial_is_phis(width: int, dtype: torch.dtype) -> None:
    cos, sin = map(twice, tables(7, dtype, width // 2))

    def eager() -> tuple[Tensor, ...]:
        query, key = heads(7, dtype)
        turned = llama.apply_rotary_pos_emb(query[..., :width], key[..., :width], cos, sin)
        return tuple(torch.cat((t, x[..., width:]), dim=-1) for t, x in zip(turned, (query, key), strict=True))

    assert_bitwise(ROTARY, call_of(7, dtype, cos, sin, rotary_dim=width), eager)


def test_nanochats_rotates_the_other_way() -> None:
    cos, sin = map(twice, tables(7, F32))
    query, key = heads(7, F32)
    want = tuple(x * cos[:, None] + nanochat.rotate_half(x) * sin[:, None] for x in (query, key))
    assert_bitwise(ROTARY, call_of(7, F32, cos, -sin), lambda: want)


@DTYPES
def test_interleaved_is_complex_multiplication(dtype: torch.dtype) -> None:
    cos, sin = tables(7, F32)
    call = call_of(7, dtype, cos, sin, style="interleaved", compute_dtype=F32)
    eager = deepseek_v2.apply_rotary_emb
    query, key = (x.contiguous() for x in heads(7, dtype))
    turned = torch.polar(torch.ones_like(angles(7)), torch.atan2(sin.double(), cos.double())).unsqueeze(1)
    radius = torch.hypot(cos.double(), sin.double()).unsqueeze(1)
    truth = tuple(
        torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * turned * radius).flatten(-2)
        for x in (query, key)
    )
    assert_close(ROTARY, call, lambda: eager(query, key, torch.complex(cos, sin)), truth)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    style=st.sampled_from(["half", "interleaved", "deinterleave"]),
    pairs=st.integers(1, 8),
    tokens=st.integers(1, 4),
    per_pair=st.booleans(),
)
def test_every_pair_turns_by_its_angle(style: str, pairs: int, tokens: int, per_pair: bool) -> None:
    cos, sin = tables(tokens, torch.float64, pairs)
    call = call_of(tokens, torch.float64, cos, sin, style=style, rotary_dim=2 * pairs)
    if not per_pair:
        widen = (lambda t: t.repeat_interleave(2, -1)) if style == "interleaved" else twice
        call |= {"cos": widen(call["cos"]), "sin": widen(call["sin"])}
    for got, x in zip(run(ROTARY, call), (call["query"], call["key"]), strict=True):
        want = x.clone()
        for i in range(pairs):
            a, b = (i, i + pairs) if style == "half" else (2 * i, 2 * i + 1)
            to_a, to_b = (i, i + pairs) if style != "interleaved" else (2 * i, 2 * i + 1)
            c, s = cos[:, None, :, i], sin[:, None, :, i]
            want[..., to_a] = x[..., a] * c - x[..., b] * s
            want[..., to_b] = x[..., b] * c + x[..., a] * s
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_everything_is_cast_to_compute_dtype() -> None:
    cos, sin = map(twice, tables(7, F32))

    def eager() -> tuple[Tensor, ...]:
        query, key = (x.to(BF16) for x in heads(7, F32))
        return tuple(x.float() for x in llama.apply_rotary_pos_emb(query, key, cos.to(BF16), sin.to(BF16)))

    assert_bitwise(ROTARY, call_of(7, F32, cos, sin, compute_dtype=BF16), eager)


@DTYPES
@pytest.mark.parametrize("style", ["half", "interleaved", "deinterleave"])
@pytest.mark.parametrize("width", [6, 16])
def test_one_tensor_alone_is_as_in_a_pair(width: int, style: str, dtype: torch.dtype) -> None:
    options = {"style": style, "rotary_dim": width, "compute_dtype": F32}
    call = call_of(7, dtype, *tables(7, F32, width // 2), **options)
    rest = {name: value for name, value in call.items() if name not in ("query", "key")}
    for index, name in enumerate(("query", "key")):
        assert_bitwise(ROTARY_SINGLE, {"x": call[name], **rest}, lambda i=index: run(ROTARY, call)[i])


@pytest.mark.parametrize("width", [8, 16])
def test_the_result_has_out_dtype_without_a_rounding_before(width: int) -> None:
    cos, sin = tables(7, F32, width // 2)
    call = call_of(7, BF16, cos, sin, rotary_dim=width, out_dtype=F32)

    def codegens() -> tuple[Tensor, ...]:
        turned = (
            llama.apply_rotary_pos_emb(x[..., :width], x[..., :width], twice(cos), twice(sin))[0]
            for x in heads(7, BF16)
        )
        return tuple(torch.cat((t, x[..., width:]), dim=-1) for t, x in zip(turned, heads(7, BF16), strict=True))

    assert_bitwise(ROTARY, call, codegens)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_memory_order_is_kept(style: str) -> None:
    call = call_of(7, F32, *tables(7, F32), style=style)
    for got, x in zip(run(ROTARY, call), (call["query"], call["key"]), strict=True):
        assert got.stride() == x.stride() and not x.is_contiguous()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@TOKENS
@pytest.mark.parametrize(("norm", "eps"), [(Qwen3RMSNorm, 1e-6), (Gemma3RMSNorm, 3e-4), (None, 1.5625e-7)])
def test_qk_norm_rotary_is_the_models_own(norm: Any, eps: float, tokens: int, dtype: torch.dtype) -> None:
    cos, sin = map(twice, tables(tokens, dtype))
    modules: list[Callable[[Tensor], Tensor]] = [nanochat.NanoChatRMSNorm(eps=eps)] * 2
    weights: list[Tensor | None] = [None, None]
    if norm is not None:
        modules = [norm(SIZE, eps=eps) for _ in range(2)]
        for module, start in zip(modules, (0.3, 0.9), strict=True):
            module.weight.data = torch.linspace(start, 1.9, SIZE).to(dtype)
        weights = [module.weight.data for module in modules]
    options = {Qwen3RMSNorm: {"normed_dtype": dtype}, Gemma3RMSNorm: {"weight_dtype": F32, "offset": 1.0}, None: {}}
    call = call_of(tokens, dtype, cos, sin, query_weight=weights[0], key_weight=weights[1], eps=eps, **options[norm])

    def eager() -> tuple[Tensor, ...]:
        # Models norm before they transpose.
        query, key = (
            module(x.transpose(1, 2)).detach().transpose(1, 2)
            for module, x in zip(modules, heads(tokens, dtype), strict=True)
        )
        return llama.apply_rotary_pos_emb(query, key, cos, sin)

    assert_bitwise(QK_NORM_ROTARY, call, eager)


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("op", [ROTARY, ROTARY_SINGLE, QK_NORM_ROTARY], ids=lambda op: op.name)
def test_every_sample_has_errors_of_rounding_only(op: Any, dtype: torch.dtype) -> None:
    for one in op.samples(dtype, torch.device("cpu")):
        for result, truth in zip(run(op, one.kwargs), in_fp64(op, one.kwargs), strict=True):
            tolerance = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(result.double(), truth, rtol=tolerance, atol=4 * tolerance)


NEAR_MISSES: dict[str, tuple[Any, Call, str]] = {
    "style": (ROTARY, {"style": "neox"}, "style 'neox' is none of 'half', 'interleaved', 'deinterleave'"),
    "odd width": (ROTARY, {"rotary_dim": 5}, r"rotary_dim must be even and at most the head size 16.*not 5"),
    "too wide": (ROTARY, {"rotary_dim": 18}, "rotary_dim must be even and at most the head size 16.*not 18"),
    "odd head": (ROTARY, {"query": torch.ones(2, 4, 5, 15), "key": torch.ones(2, 4, 5, 15)}, "rotary_dim must be even"),
    "other head size": (ROTARY, {"key": torch.ones(2, 2, 5, 8)}, "query has head size 16, key 8"),
    "narrow tables": (ROTARY, {"cos": torch.ones(5, 4), "sin": torch.ones(5, 4)}, "must be 16 or 8 wide, not 4"),
    "partial tables": (ROTARY, {"rotary_dim": 6}, "must be 6 or 3 wide, not 8"),
    "sin differs": (ROTARY, {"sin": torch.ones(1, 1, 5, 16)}, "differ in shape"),
    "no head dimension": (
        ROTARY,
        {"cos": torch.ones(2, 5, 8), "sin": torch.ones(2, 5, 8)},
        r"cos \(2, 5, 8\) does not broadcast to query \(2, 4, 5, 16\)",
    ),
    "rank above": (
        ROTARY,
        {"cos": torch.ones(1, 1, 1, 5, 8), "sin": torch.ones(1, 1, 1, 5, 8)},
        "does not broadcast to query",
    ),
    "integers": (ROTARY, {"query": torch.ones(2, 4, 5, 16).int()}, "query must be floating-point"),
    "one odd width": (ROTARY_SINGLE, {"rotary_dim": 7}, r"rotary_single: rotary_dim must be even.*not 7"),
    "one without heads": (
        ROTARY_SINGLE,
        {"cos": torch.ones(2, 5, 8), "sin": torch.ones(2, 5, 8)},
        r"does not broadcast to x \(2, 4, 5, 16\)",
    ),
    "normed style": (QK_NORM_ROTARY, {"style": ""}, "style '' is none of"),
    "normed weight": (QK_NORM_ROTARY, {"key_weight": torch.ones(8)}, r"weight must have shape \(16,\)"),
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_raises(near_miss: str) -> None:
    op, change, message = NEAR_MISSES[near_miss]
    base = sample(op, "qwen3" if op is QK_NORM_ROTARY else "half, one value per pair")
    assert_raises(op, base | change, message)
