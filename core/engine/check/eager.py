"""The reference of an engine: eager generation by the model's own forward and cache, and its fp64 logits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.common.numerics import Fp64Mode
from core.engine.inspect.attention import implementation
from core.engine.inspect.probe import Caching, forward_logits
from core.engine.models.forward import accepted_arguments, adds_tokens, whole_logits


def eager_generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    positions: bool,
    caching: Caching | None = None,
    given: Sequence[Sequence[int]] | None = None,
) -> tuple[list[list[int]], list[Tensor]]:
    """Generate greedily by the model's own forward and cache, prompts padded on the left, nothing of `core` involved.

    Whatever the forward returns and also takes under the same name is its cache; a model without a cache computes all
    tokens anew. Returns tokens and logits (num_tokens, vocabulary) on the host, per prompt.

    - positions: pass position ids, as `generate` does; `counts_from_zero` tells which models take them as 0, 1, 2, ….
    - caching: makes the first cache; None leaves that to the model.
    - given: num_tokens tokens per prompt to go on with, in place of the likeliest.
    """
    if caching is None and adds_tokens(model):
        return _generate_whole(model, prompts, num_tokens, given)
    torch_device = next(model.parameters()).device
    longest = max(map(len, prompts))
    padded = longest != min(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=torch_device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=torch_device)
    chosen = None if given is None else torch.tensor(list(map(list, given)), device=torch_device)
    accepted = accepted_arguments(model)
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    arguments: dict[str, Any] = {"use_cache": True} if caching is None else caching()
    steps, tokens = [], []
    for step in range(num_tokens):
        if padded:
            arguments["attention_mask"] = mask
        if positions:
            arguments["position_ids"] = counted[:, -ids.shape[1] :]
        output = model(input_ids=ids, return_dict=True, **arguments)
        cache = {name: output[name] for name in accepted & output.keys() if output[name] is not None}
        arguments |= cache
        steps.append(output.logits[:, -1])
        tokens.append(steps[-1].argmax(-1, keepdim=True) if chosen is None else chosen[:, step : step + 1])
        ids = tokens[-1] if cache else torch.cat([ids, tokens[-1]], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        counted = torch.cat([counted, counted[:, -1:] + 1], dim=1)
    return torch.cat(tokens, dim=1).tolist(), list(torch.stack(steps, dim=1).cpu())


def _generate_whole(
    model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, given: Sequence[Sequence[int]] | None
) -> tuple[list[list[int]], list[Tensor]]:
    """Do what `eager_generate` does by a model that `adds_tokens`, each prompt alone: no mask tells its padding."""
    device = next(model.parameters()).device
    tokens, logits = [], []
    for index, prompt in enumerate(prompts):
        known, steps = list(prompt), []
        for step in range(num_tokens):
            steps.append(whole_logits(model, torch.tensor([known], device=device))[0])
            known.append(int(steps[-1].argmax()) if given is None else given[index][step])
        tokens.append(known[len(prompt) :])
        logits.append(torch.stack(steps).cpu())
    return tokens, logits


@torch.no_grad()
def fp64_logits(
    model: Any,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    attention: str,
    caching: Caching | None = None,
) -> list[Tensor]:
    """Return the fp64 logits (len(tokens[i]), vocabulary) that each token was to be chosen from, computed on the host.

    The model's weights keep the rounding of its dtype; all arithmetic is fp64, casts in the model's code included.
    """
    with Fp64Mode():  # also converted here: a plain cast to fp64 drops the imaginary part of complex buffers
        oracle = copy.deepcopy(model).to("cpu", torch.float64)
    if hasattr(oracle, "set_experts_implementation"):
        oracle.set_experts_implementation("eager")  # the other implementations use a grouped product without fp64
    with implementation(oracle, attention), Fp64Mode():
        return forward_logits_of(oracle, prompts, tokens, caching)


def forward_logits_of(
    model: Any, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], caching: Caching | None = None
) -> list[Tensor]:
    """Return the logits on the host that each token was to be chosen from, as `forward_logits` computes them."""
    return [
        forward_logits(model, [*prompt, *generated[:-1]], caching, first=len(prompt) - 1).cpu()
        for prompt, generated in zip(prompts, tokens, strict=True)
    ]
