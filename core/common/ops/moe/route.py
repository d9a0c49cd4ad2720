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

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw, at_least_fp32, check, check_choice, check_floating
from core.common.ops.declaration import CanonicalOp, Sample, declare

SCORINGS = ("softmax", "sigmoid", "softmax_selected", "sqrtsoftplus")

ROUTE_SCHEMA = (
    'moe_route(Tensor logits, int top_k, *, str scoring="softmax", Tensor? bias=None, bool renormalize=False, '
    "float renormalize_eps=0.0, float scale=1.0, int num_groups=0, int top_groups=0, int scored_per_group=2, "
    "bool sorted=True, ScalarType? compute_dtype=None, ScalarType? out_dtype=None) -> (Tensor weights, Tensor indices)"
)


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
    _check_route(logits, top_k, scoring, bias, (num_groups, top_groups, scored_per_group))
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


def moe_route_fake(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Check the arguments; return (T, k) twice."""
    groups = (options.get("num_groups", 0), options.get("top_groups", 0), options.get("scored_per_group", 2))
    _check_route(logits, top_k, options.get("scoring", "softmax"), options.get("bias"), groups)
    shape = (logits.shape[0], top_k)
    dtype = options.get("out_dtype") or logits.dtype
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


def _check_route(logits: Tensor, top_k: int, scoring: str, bias: Tensor | None, groups: tuple[int, int, int]) -> None:
    op, (num_groups, top_groups, scored) = "moe_route", groups
    check_floating(op, logits=logits, bias=bias)
    check(logits.dim() == 2, op, f"logits must have rank 2, not {logits.dim()}")
    num_experts = logits.shape[1]
    check(1 <= top_k <= num_experts, op, f"top_k must be 1 to {num_experts}, the number of experts, not {top_k}")
    check_choice(op, "scoring", scoring, SCORINGS)
    if bias is not None:
        fits = bias.dim() == 1 and bias.shape[0] == num_experts
        check(fits, op, f"bias must have shape ({num_experts},), not {tuple(bias.shape)}")
    if num_groups:
        fits = num_groups > 0 and num_experts % num_groups == 0
        check(fits, op, f"{num_experts} experts do not divide into {num_groups} groups")
        size = num_experts // num_groups
        check(1 <= top_groups <= num_groups, op, f"top_groups must be 1 to {num_groups}, not {top_groups}")
        check(top_k <= top_groups * size, op, f"{top_groups} groups of {size} hold fewer than top_k={top_k} experts")
        check(1 <= scored <= size, op, f"scored_per_group must be 1 to {size}, not {scored}")


def route_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield the routers of the model families above; logits are spread so that no two scores tie in half precision."""
    draw = Draw(dtype, device, seed=8)
    grouped = {"num_groups": 4, "top_groups": 2}
    cases: dict[str, dict[str, Any]] = {
        "mixtral": {"top_k": 2, "renormalize": True, "out_dtype": at_least_fp32(dtype)},
        "qwen3": {"top_k": 3, "renormalize": True},
        "olmoe": {"top_k": 3},
        "deepseek-v2": {"top_k": 3, **grouped, "scored_per_group": 1, "scale": 1.6},
        "deepseek-v3": {"top_k": 3, "scoring": "sigmoid", "renormalize": True, "renormalize_eps": 1e-20, **grouped}
        | {"bias": draw(8, scale=0.5), "scale": 2.5},
        "gpt-oss": {"top_k": 4, "scoring": "softmax_selected", "compute_dtype": dtype},
        "deepseek-v4": {"top_k": 3, "scoring": "sqrtsoftplus", "bias": draw(8, scale=0.5), "renormalize": True},
        "one expert": {"top_k": 1, "scoring": "sigmoid"},
        "all experts": {"top_k": 8},
    }
    for name, options in cases.items():
        yield Sample(name=name, kwargs={"logits": _logits(draw, 21), **options})
    yield Sample(name="no tokens", kwargs={"logits": draw(0, 8), **cases["deepseek-v3"]})
    yield Sample(name="large values", kwargs={"logits": _logits(draw, 21) * 50, "top_k": 2, "renormalize": True})


def _logits(draw: Draw, num_tokens: int, num_experts: int = 8) -> Tensor:
    """Return distinct logits per token: equally spaced values, shuffled, with the token's own spacing."""
    order = draw(num_tokens, num_experts, dtype=torch.float64).argsort(-1)
    spacing = 0.2 + 0.05 * torch.arange(num_tokens, device=draw.device)[:, None] % 0.5
    return ((order - 3.3) * spacing).to(draw.dtype)


MOE_ROUTE = declare(
    CanonicalOp(name="moe_route", schema=ROUTE_SCHEMA, reference=moe_route, fake=moe_route_fake, samples=route_samples)
)
