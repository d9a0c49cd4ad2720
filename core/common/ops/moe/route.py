"""`core::moe_route`: the choice of experts for each token, of a mixture of them.

Shapes: T tokens, E experts, k experts per token, G expert groups.

Sources: Shazeer et al., arXiv 1701.06538; groups and the bias that only selects: DeepSeek-V3, arXiv 2412.19437.
scoring turns logits into scores:

    softmax           over all experts                   Mixtral, Qwen MoE, OLMoE, DeepSeek-V2
    sigmoid           each for itself                    DeepSeek-V3, GLM 4, MiniMax M2
    softmax_selected  over the k selected logits alone   gpt-oss, Granite
    sqrtsoftplus      sqrt(log(1 + exp(logit)))          DeepSeek-V4
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, at_least_fp32, check, check_choice, check_floating, check_ranks, check_shape
from core.common.ops.declaration import CanonicalOp, declare

SCORINGS = ("softmax", "sigmoid", "softmax_selected", "sqrtsoftplus")


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    renormalize: bool = False,
    renormalize_eps: float = 0.0,
    scale: float = 1.0,
    num_groups: int = 0,
    top_groups: int = 0,
    scored_per_group: int = 2,
    sorted: bool = True,
    compute_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k experts of each token, best first unless sorted=False, as weights (T, k) and indices (T, k) int64.

    logits (T, E), cast to compute_dtype (by default fp32, fp64 for fp64) before scoring. bias (E,) is added to the
    scores to select, never to the weights. num_groups, unless 0: only experts of the top_groups best of G equal groups
    of neighbours are selected; a group's score is the sum of its scored_per_group best (DeepSeek-V3: 2, V2: 1).
    renormalize: weights are divided by their sum plus renormalize_eps; then scale multiplies them, and they are cast to
    out_dtype, by default the dtype of logits. Which of equal scores is selected is not promised, nor any order of a
    token's experts where sorted is False, as with `torch.topk`.
    """
    scores = _score(logits.to(compute_dtype or at_least_fp32(logits.dtype)), scoring)
    ranking = scores if bias is None else scores + bias
    if num_groups:
        ranking = _hide_groups(ranking, num_groups, top_groups, scored_per_group)
    indices = ranking.topk(top_k, dim=-1, sorted=sorted).indices
    weights = scores.gather(-1, indices)
    if scoring == "softmax_selected":
        weights = weights.softmax(-1)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + renormalize_eps if renormalize_eps else total)
    if scale != 1.0:
        weights = weights * scale
    return weights.to(out_dtype or logits.dtype), indices


def _score(logits: Tensor, scoring: str) -> Tensor:
    if scoring == "softmax":
        return logits.softmax(-1)
    if scoring == "sigmoid":
        return logits.sigmoid()
    if scoring == "sqrtsoftplus":
        return torch.sqrt(functional.softplus(logits))
    return logits


def _hide_groups(ranking: Tensor, num_groups: int, top_groups: int, scored_per_group: int) -> Tensor:
    """Set the ranking (T, E) of experts outside the best groups to minus infinity."""
    groups: Tensor = ranking.unflatten(-1, (num_groups, -1))
    best = groups.topk(scored_per_group, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    kept = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=ranking.device).scatter(-1, best, True)
    return groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


def _fake(logits: Tensor, top_k: int, *, out_dtype: torch.dtype | None = None, **_: Any) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=out_dtype or logits.dtype), logits.new_empty(shape, dtype=torch.int64)


def _check(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 0,
    top_groups: int = 0,
    scored_per_group: int = 2,
    **_: Any,
) -> None:
    op = "moe_route"
    check_floating(op, logits=logits, bias=bias)
    check_ranks(op, 2, logits=logits)
    num_experts = logits.shape[1]
    check(1 <= top_k <= num_experts, op, f"top_k must be 1 to {num_experts}, the number of experts, not {top_k}")
    check_choice(op, "scoring", scoring, SCORINGS)
    check_shape(op, (num_experts,), bias=bias)
    if num_groups:
        fits = num_groups > 0 and num_experts % num_groups == 0
        check(fits, op, f"{num_experts} experts do not divide into {num_groups} groups")
        size = num_experts // num_groups
        check(1 <= top_groups <= num_groups, op, f"top_groups must be 1 to {num_groups}, not {top_groups}")
        check(top_k <= top_groups * size, op, f"{top_groups} groups of {size} hold fewer than top_k={top_k} experts")
        fits = 1 <= scored_per_group <= size
        check(fits, op, f"scored_per_group must be 1 to {size}, not {scored_per_group}")


def _calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return the routers of the model families above; logits are spread so that no two scores tie in half precision."""
    grouped = {"num_groups": 4, "top_groups": 2}
    routers: dict[str, dict[str, Any]] = {
        "mixtral": {"top_k": 2, "renormalize": True, "out_dtype": draw.wide},
        "qwen3": {"top_k": 3, "renormalize": True},
        "olmoe": {"top_k": 3},
        "deepseek-v2": {"top_k": 3, **grouped, "scored_per_group": 1, "scale": 1.6},
        "deepseek-v3": {"top_k": 3, "scoring": "sigmoid", "renormalize": True, "renormalize_eps": 1e-20, **grouped}
        | {"bias": draw(8, scale=0.5), "scale": 2.5},
        "gpt-oss": {"top_k": 4, "scoring": "softmax_selected", "compute_dtype": draw.dtype},
        "deepseek-v4": {"top_k": 3, "scoring": "sqrtsoftplus", "bias": draw(8, scale=0.5), "renormalize": True},
        "one expert": {"top_k": 1, "scoring": "sigmoid"},
        "all experts": {"top_k": 8},
    }
    return {name: {"logits": _logits(draw, 21), **options} for name, options in routers.items()} | {
        "no tokens": {"logits": draw(0, 8), **routers["deepseek-v3"]},
        "large values": {"logits": _logits(draw, 21) * 50, "top_k": 2, "renormalize": True},
    }


def _logits(draw: Draw, num_tokens: int, num_experts: int = 8) -> Tensor:
    """Return distinct logits per token: equally spaced values, shuffled, with the token's own spacing."""
    order = draw(num_tokens, num_experts, dtype=torch.float64).argsort(-1)
    spacing = 0.2 + 0.05 * torch.arange(num_tokens, device=draw.device)[:, None] % 0.5
    return ((order - 3.3) * spacing).to(draw.dtype)


MOE_ROUTE = declare(
    CanonicalOp(
        schema='moe_route(Tensor logits, int top_k, *, str scoring="softmax", Tensor? bias=None, '
        "bool renormalize=False, float renormalize_eps=0.0, float scale=1.0, int num_groups=0, int top_groups=0, "
        "int scored_per_group=2, bool sorted=True, ScalarType? compute_dtype=None, ScalarType? out_dtype=None) "
        "-> (Tensor weights, Tensor indices)",
        reference=moe_route,
        fake=_fake,
        check=_check,
        calls=_calls,
        seed=8,
    )
)
