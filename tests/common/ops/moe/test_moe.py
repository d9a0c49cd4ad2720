"""core/common/ops/moe/{route,experts}.py against transformers' own routers and experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts, DeepseekV4TopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from core.common.numerics import Fp64Mode, judge
from core.common.ops.moe import experts as moe
from core.common.ops.moe.experts import GROUPED_MLP
from core.common.ops.moe.route import MOE_ROUTE
from tests.common.ops.canonical_oracle import Call, assert_bitwise, assert_close, assert_raises, in_fp64, run, sample
from tests.installed import TRANSFORMERS, skip_where

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
EXPERTS, TOP_K, TOKENS = 8, 3, 29


def config(**fields: Any) -> SimpleNamespace:
    sizes = {"num_experts_per_tok": TOP_K, "hidden_size": EXPERTS, "n_group": 4, "topk_group": 2}
    counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS)
    return SimpleNamespace(**sizes, **counts, **fields)


def router(cls: type[nn.Module], dtype: torch.dtype, **fields: Any) -> nn.Module:
    """Return the router with unit weights, so that its input is its logits, exactly."""
    module = cls(config(**fields))
    module.weight.data = torch.eye(EXPERTS, dtype=dtype)
    if hasattr(module, "bias"):
        module.bias.data = torch.zeros(EXPERTS, dtype=dtype)
    if hasattr(module, "e_score_correction_bias"):
        module.e_score_correction_bias.copy_(selection_bias())
    return module


def selection_bias() -> Tensor:
    return torch.linspace(-0.6, 0.9, EXPERTS)[torch.tensor([3, 7, 0, 5, 1, 6, 2, 4])]


def logits(dtype: torch.dtype, tokens: int = TOKENS) -> Tensor:
    """Return distinct logits per token, apart also once scored in half precision."""
    generator = torch.Generator().manual_seed(tokens)
    order = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)
    return ((order - 3.3) * (0.2 + 0.3 * torch.rand(tokens, 1, generator=generator))).to(dtype)


def by_index(weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Order each token's experts by number: some models leave the order of their top k open."""
    order = indices.argsort(-1)
    return weights.gather(-1, order), indices.gather(-1, order)


SORTED: dict[str, tuple[type[nn.Module], Call, Call]] = {
    "mixtral": (MixtralTopKRouter, {}, {"renormalize": True, "out_dtype": F32}),
    "qwen3": (Qwen3MoeTopKRouter, {"norm_topk_prob": True}, {"renormalize": True}),
    "qwen3, not normalised": (Qwen3MoeTopKRouter, {"norm_topk_prob": False}, {}),
    "gpt-oss": (GptOssTopKRouter, {}, {"scoring": "softmax_selected", "compute_dtype": "own"}),
    "granite": (GraniteMoeTopKRouter, {}, {"scoring": "softmax_selected"}),
    "lfm2": (
        Lfm2MoeTopKRouter,
        {"norm_topk_prob": True, "routed_scaling_factor": 1.7, "use_expert_bias": False},
        {"scoring": "sigmoid", "renormalize": True, "renormalize_eps": 1e-6, "scale": 1.7, "compute_dtype": "own"},
    ),
}


@DTYPES
@pytest.mark.parametrize("model", SORTED)
def test_routing_is_the_models_own(model: str, dtype: torch.dtype) -> None:
    # The op states which dtype of the weights it means.
    older = Version(TRANSFORMERS) < Version("5.18")
    skip_where(model == "granite" and older, "hands out the router's weights in another dtype than the op is told")
    cls, fields, options = SORTED[model]
    options = {name: dtype if value == "own" else value for name, value in options.items()}
    module = router(cls, dtype, **fields)
    for tokens in (TOKENS, 1, 0):
        x = logits(dtype, tokens)
        call = {"logits": x, "top_k": TOP_K, **options}
        assert_bitwise(MOE_ROUTE, call, lambda x=x: tuple(t.detach() for t in module(x)[1:]))


V3: Call = {"scoring": "sigmoid", "renormalize": True, "renormalize_eps": 1e-20, "scale": 2.5}
GROUPS: Call = {"num_groups": 4, "top_groups": 2}
UNSORTED: dict[str, tuple[type[nn.Module], Call, Call]] = {
    "deepseek-v3": (DeepseekV3TopkRouter, {"norm_topk_prob": True}, {**V3, **GROUPS, "bias": selection_bias()}),
    "deepseek-v3, not normalised": (
        DeepseekV3TopkRouter,
        {"norm_topk_prob": False},
        {"scoring": "sigmoid", "scale": 2.5, **GROUPS, "bias": selection_bias()},
    ),
    "deepseek-v2": (DeepseekV2TopkRouter, {"topk_method": "greedy"}, {"scale": 2.5}),
    "deepseek-v2, groups": (
        DeepseekV2TopkRouter,
        {"topk_method": "group_limited_greedy"},
        {"scale": 2.5, **GROUPS, "scored_per_group": 1},
    ),
    "deepseek-v4": (
        DeepseekV4TopKRouter,
        {"scoring_func": "sqrtsoftplus"},
        {**V3, "scoring": "sqrtsoftplus", "bias": selection_bias()},
    ),
}


@pytest.mark.parametrize("model", UNSORTED)
def test_routing_in_groups_and_with_bias_is_the_models_own(model: str) -> None:
    cls, fields, options = UNSORTED[model]
    module = router(cls, F32, routed_scaling_factor=2.5, **fields)
    x = logits(F32)
    weights, indices = run(MOE_ROUTE, {"logits": x, "top_k": TOP_K, **options})
    got, want = by_index(weights, indices), by_index(*(t.detach() for t in module(x)[1:]))
    assert torch.equal(got[1], want[1])
    # The sum to normalise by depends on the order in the last bit.
    torch.testing.assert_close(got[0], want[0], rtol=3e-7, atol=0)
    assert (indices != indices[0]).any(0).all()


def test_minimax_routing() -> None:
    module, x = router(MiniMaxM2TopKRouter, BF16), logits(BF16)
    call: Call = {"logits": x, "top_k": TOP_K, "scoring": "sigmoid", "renormalize": True, "out_dtype": F32}
    weights, indices = by_index(*run(MOE_ROUTE, call | {"bias": selection_bias()}))
    want = by_index(*(t.detach() for t in module(x, selection_bias())[1:]))
    assert torch.equal(indices, want[1])
    torch.testing.assert_close(weights, want[0], rtol=3e-7, atol=0)


def test_the_bias_selects_but_does_not_weigh() -> None:
    call: Call = {"logits": logits(F32), "top_k": EXPERTS, "scoring": "sigmoid"}
    plain, biased = run(MOE_ROUTE, call), run(MOE_ROUTE, call | {"bias": selection_bias()})
    assert not torch.equal(plain[1], biased[1])
    assert torch.equal(by_index(*plain)[0], by_index(*biased)[0])
    ranking = call["logits"].sigmoid() + selection_bias()
    assert (ranking.gather(-1, biased[1]).diff() <= 0).all()


def test_experts_in_any_order_are_the_same_experts() -> None:
    call: Call = {"logits": logits(F32), "top_k": TOP_K, "scoring": "sigmoid", "bias": selection_bias()}
    best_first, any_order = run(MOE_ROUTE, call), run(MOE_ROUTE, call | {"sorted": False})
    for one, other in zip(by_index(*best_first), by_index(*any_order), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "experts elsewhere", "wide weights", "no gate, biases"])
def test_products_by_group_are_those_of_every_expert(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = sample(GROUPED_MLP, name, BF16)
    grouped: list[bool] = []
    by_group = moe._sorted_by_expert
    monkeypatch.setattr(moe, "_sorted_by_expert", lambda *args: (grouped.append(True), by_group(*args))[1])
    (got,) = run(GROUPED_MLP, call)
    assert grouped
    monkeypatch.setattr(moe, "can_group", lambda *_: False)
    (every,) = run(GROUPED_MLP, call)
    truth = in_fp64(GROUPED_MLP, call)[0]
    assert judge(got, every, truth).passed and judge(every, got, truth).passed


def test_products_go_by_group_where_no_kernel_waits_for_the_device() -> None:
    def grouped(device: str) -> bool:
        # Not every build of torch makes fake tensors of a device that it lacks.
        rows: Any = SimpleNamespace(device=torch.device(device), dtype=BF16)
        return moe.can_group(rows, torch.empty(5, 16, 48, dtype=BF16))

    assert grouped("cpu") and grouped("cpu:0")
    assert not grouped("xpu:1")  # torch's own for any device reads where the groups end
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_grouped_mm", lambda *_: None, "XPU")
        assert grouped("xpu:1")


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    groups=st.sampled_from([(1, 1, 1), (2, 1, 2), (3, 2, 2), (4, 2, 1), (6, 3, 2), (12, 4, 1)]),
    top_k=st.integers(1, 4),
    scoring=st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]),
    seed=st.integers(0, 999),
)
def test_any_groups_by_plain_python(groups: tuple[int, int, int], top_k: int, scoring: str, seed: int) -> None:
    num_groups, top_groups, scored = groups
    generator = torch.Generator().manual_seed(seed)
    x, bias = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 12), (12,)))
    call = {"logits": x, "top_k": top_k, "scoring": scoring, "bias": bias, "renormalize": True, "scale": 1.5}
    names = {"num_groups": num_groups, "top_groups": top_groups, "scored_per_group": scored}
    weights, indices = run(MOE_ROUTE, call | names)
    score = {
        "softmax": lambda v: v.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda v: v.exp().log1p().sqrt(),
    }
    for row, got, chosen in zip(x, weights, indices.tolist(), strict=True):
        scores = score[scoring](row)
        ranking = (scores + bias).tolist()
        size = 12 // num_groups
        members = [range(g * size, (g + 1) * size) for g in range(num_groups)]
        best = sorted(members, key=lambda m: -sum(sorted((ranking[e] for e in m), reverse=True)[:scored]))[:top_groups]
        want = sorted((e for m in best for e in m), key=lambda e: -ranking[e])[:top_k]
        assert chosen == want
        torch.testing.assert_close(got, scores[want] / scores[want].sum() * 1.5, rtol=1e-12, atol=0)


def test_underflown_scores_need_an_eps() -> None:
    call: Call = {"logits": torch.full((2, 4), -120.0) - torch.arange(4.0), "top_k": 2, "scoring": "sigmoid"}
    assert run(MOE_ROUTE, call | {"renormalize": True})[0].isnan().all()
    (weights, _) = run(MOE_ROUTE, call | {"renormalize": True, "renormalize_eps": 1e-20})
    assert torch.equal(weights, torch.zeros(2, 2))


def experts(cls: type[nn.Module], dtype: torch.dtype, inner: int = 24, **fields: Any) -> nn.Module:
    sizes = {"num_local_experts": 5, "num_experts": 5, "hidden_size": 16, "intermediate_size": inner}
    sizes |= {"moe_intermediate_size": inner, "_experts_implementation": "eager", "hidden_act": "silu"}
    sizes |= {"n_routed_experts": 5, "moe_latent_size": None}
    module = cls(SimpleNamespace(**sizes, **fields))
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).mul(0.4).to(dtype)
    return module


MODELS: dict[str, tuple[type[nn.Module], Call, Call]] = {
    "mixtral": (MixtralExperts, {}, {"kind": "silu"}),
    "qwen3": (Qwen3MoeExperts, {}, {"kind": "silu"}),
    "deepseek-v4": (DeepseekV4Experts, {"swiglu_limit": 0.5}, {"kind": "silu", "limit": 0.5}),
    "gpt-oss": (
        GptOssExperts,
        {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        {"kind": "quick_gelu", "limit": 7.0, "up_offset": 1.0, "interleaved": True, "transposed": True},
    ),
    "nemotron-h": (NemotronHExperts, {"mlp_hidden_act": "relu2"}, {"kind": "relu2", "gated": False}),
    "nemotron-h, silu": (NemotronHExperts, {"mlp_hidden_act": "silu"}, {"kind": "silu", "gated": False}),
}


def routed(dtype: torch.dtype, tokens: int = 23) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weights and indices; expert 3 gets nothing."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, 16, generator=generator, dtype=torch.float64).to(dtype)
    picks = torch.tensor([0, 1, 2, 4])[torch.rand(tokens, 4, generator=generator).argsort(-1)[:, :2]]
    return x, torch.rand(tokens, 2, generator=generator, dtype=torch.float64).to(dtype), picks


@pytest.mark.parametrize("wide_weights", [False, True])
@DTYPES
@pytest.mark.parametrize("model", MODELS)
def test_grouped_mlp_is_the_models_own(model: str, dtype: torch.dtype, wide_weights: bool) -> None:
    cls, fields, options = MODELS[model]
    x, weights, indices = routed(dtype)
    weights = weights.float() if wide_weights else weights
    module, exact = (experts(cls, kind, **fields) for kind in (dtype, torch.float64))
    exact.load_state_dict({name: tensor.double() for name, tensor in module.state_dict().items()})
    parameters = dict(module.named_parameters())
    biases = {f"{n}_bias": parameters[f"{n}_proj_bias"].data for n in ("gate_up", "down") if model == "gpt-oss"}
    call = {"x": x, "weights": weights, "indices": indices, **options, **biases}
    first = "gate_up_proj" if options.get("gated", True) else "up_proj"
    call |= {"gate_up": parameters[first].data, "down": module.down_proj.data}
    with torch.no_grad(), Fp64Mode():
        truth = exact(x.double(), indices, weights.double())
    torch.testing.assert_close(in_fp64(GROUPED_MLP, call)[0], truth, rtol=1e-12, atol=1e-12)
    assert_close(GROUPED_MLP, call, lambda: module(x, indices, weights).detach(), truth)


def test_an_expert_nobody_chose_may_hold_anything() -> None:
    call = sample(GROUPED_MLP, "qwen3")
    call["indices"] = torch.where(call["indices"] == 4, 3, call["indices"])
    poisoned = {name: call[name].clone() for name in ("gate_up", "down")}
    for parameter in poisoned.values():
        parameter[4] = torch.nan
    assert torch.equal(run(GROUPED_MLP, call | poisoned)[0], run(GROUPED_MLP, call)[0])


def test_experts_elsewhere_add_nothing() -> None:
    call = sample(GROUPED_MLP, "experts elsewhere", torch.float64)
    elsewhere = (call["indices"] < 0) | (call["indices"] > 4)
    assert elsewhere.any() and not elsewhere.all()
    here = {"indices": call["indices"].clamp(0, 4), "weights": call["weights"].masked_fill(elsewhere, 0.0)}
    torch.testing.assert_close(run(GROUPED_MLP, call), run(GROUPED_MLP, call | here), rtol=0, atol=1e-13)


def test_an_expert_chosen_twice_counts_twice() -> None:
    call = sample(GROUPED_MLP, "one token", torch.float64)
    twice = {"indices": torch.tensor([[2, 2]]), "weights": torch.tensor([[0.25, 0.5]]).double()}
    once = {"indices": torch.tensor([[2]]), "weights": torch.tensor([[0.75]]).double()}
    torch.testing.assert_close(run(GROUPED_MLP, call | twice), run(GROUPED_MLP, call | once), rtol=0, atol=1e-13)


NEAR_MISSES: dict[str, tuple[Any, str, Call, str]] = {
    "scoring": (MOE_ROUTE, "olmoe", {"scoring": "tanh"}, "scoring 'tanh' is none of 'softmax', 'sigmoid'"),
    "no expert": (MOE_ROUTE, "olmoe", {"top_k": 0}, "top_k must be 1 to 8, the number of experts, not 0"),
    "too many": (MOE_ROUTE, "olmoe", {"top_k": 9}, "top_k must be 1 to 8, the number of experts, not 9"),
    "rank": (MOE_ROUTE, "olmoe", {"logits": torch.ones(2, 3, 8)}, "logits must have rank 2, not 3"),
    "integers": (MOE_ROUTE, "olmoe", {"logits": torch.ones(2, 8).int()}, "logits must be floating-point"),
    "bias": (MOE_ROUTE, "deepseek-v3", {"bias": torch.ones(7)}, r"bias must have shape \(8,\), not \(7,\)"),
    "groups": (MOE_ROUTE, "deepseek-v3", {"num_groups": 3}, "8 experts do not divide into 3 groups"),
    "no group": (MOE_ROUTE, "deepseek-v3", {"top_groups": 0}, "top_groups must be 1 to 4, not 0"),
    "small groups": (MOE_ROUTE, "deepseek-v3", {"top_k": 5}, "2 groups of 2 hold fewer than top_k=5 experts"),
    "scored": (MOE_ROUTE, "deepseek-v3", {"scored_per_group": 3}, "scored_per_group must be 1 to 2, not 3"),
    "order": (
        GROUPED_MLP,
        "qwen3",
        {"transposed": True},
        r"gate_up \(5, 48, 16\) and .* for gated=True and transposed=True",
    ),
    "sizes": (GROUPED_MLP, "qwen3", {"down": torch.ones(5, 16, 13)}, r"must be \(5, 26, 16\) and \(5, 16, 13\)"),
    "experts": (GROUPED_MLP, "qwen3", {"down": torch.ones(4, 16, 24)}, r"must be \(5, 48, 16\) and \(5, 16, 24\)"),
    "weights": (GROUPED_MLP, "qwen3", {"weights": torch.ones(9, 3)}, r"weights \(9, 3\) and indices \(9, 2\) must be"),
    "floating indices": (GROUPED_MLP, "qwen3", {"indices": torch.ones(9, 2)}, "indices must be torch.int32 or"),
    "rank of x": (GROUPED_MLP, "qwen3", {"x": torch.ones(1, 9, 16)}, "x must have rank 2, not 3"),
    "kind": (GROUPED_MLP, "qwen3", {"kind": "glu"}, "kind 'glu' is none of"),
    "limit": (GROUPED_MLP, "qwen3", {"limit": -1.0}, "limit must be positive, or 0 for none, not -1.0"),
    "half a gate": (GROUPED_MLP, "qwen3", {"gated": False}, r"be \(5, 24, 16\) and \(5, 16, 24\) for gated=False"),
    "a gate": (GROUPED_MLP, "nemotron-h", {"gated": True}, r"must be \(5, 48, 16\) and \(5, 16, 24\) for gated=True"),
    "limit of no gate": (GROUPED_MLP, "nemotron-h", {"limit": 1.0}, "limit and up_offset are of a gate"),
    "pairs of no gate": (GROUPED_MLP, "nemotron-h", {"interleaved": True}, "are of a gate, and gated is False"),
    "offset of no gate": (GROUPED_MLP, "nemotron-h", {"up_offset": 1.0}, "are of a gate, and gated is False"),
    "bias of no gate": (GROUPED_MLP, "nemotron-h", {"gate_up_bias": torch.ones(5, 48)}, r"have shape \(5, 24\)"),
    "expert bias": (GROUPED_MLP, "qwen3", {"down_bias": torch.ones(16)}, r"down_bias must have shape \(5, 16\)"),
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_raises(near_miss: str) -> None:
    op, name, change, message = NEAR_MISSES[near_miss]
    assert_raises(op, sample(op, name) | change, message)
