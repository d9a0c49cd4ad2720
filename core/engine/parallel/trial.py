"""A trial of a type's plan before its weights are read: in parts, a tiny model has to give what it gives whole.

A plan that is wrong raises nothing: a layer that takes a mean over its width takes it over a part, and the text is
merely bad. So all ranks make a tiny model of the type with equal random weights, and compare.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from core.common.numerics import Fp64Mode, judge
from core.common.ops.collective.collectives import group_size
from core.engine.models.loading import build_model
from core.engine.models.sharding import ExpertCut, plan_of, shard_model
from core.engine.models.tiny import tiny_config
from core.engine.models.vocabulary import vocab_size_of
from core.errors import CoreError, UsageError

_NUM_TOKENS = 12


def try_plan(model_type: str, torch_device: torch.device, experts: ExpertCut = "width") -> str:
    """Compare a tiny model of a type, whole and in parts, on all ranks of the default group, in fp32.

    torch_device: where it is made; a group may have no collectives for the host. experts: as of `planned`. Return why
    it was not tried, "" where it was and is right or where there is one rank. Raises `UsageError` where the logits
    differ by more than rounding explains (criterion T1), or where the parts don't run.
    """
    if group_size("") == 1:
        return ""
    try:
        whole: Any = build_model(tiny_config(model_type), torch_device=torch_device, dtype=torch.float32).model
        parts = shard_model(copy.deepcopy(whole), plan_of(whole, group_size(""), experts))
    except CoreError as error:
        return f"the plan for {model_type} was not tried: no tiny model of the type can be cut so: {error.found}"
    ids = torch.arange(4 * _NUM_TOKENS, device=torch_device).remainder(vocab_size_of(whole)).view(4, -1)
    asked = f"sharding a model of type {model_type} for tensor parallelism"
    remedy = "run on one rank, or cut it in a script by `shard_model` with a plan that leaves such modules whole"
    try:
        found = _logits(parts, ids)
    except Exception as error:
        reason = f"in parts, a tiny model of the type raises {type(error).__name__}: {error}"
        raise UsageError(asked, found=reason, remedy=remedy) from error
    verdict = judge(found, _logits(whole, ids), _exact(whole, ids))
    if not verdict.passed:
        reason = f"in parts, a tiny model of the type gives other logits than whole: {verdict.reason}"
        raise UsageError(asked, found=reason, remedy=remedy)
    return ""


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return logits on the host."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.cpu()


def _exact(model: Any, ids: Tensor) -> Tensor:
    wide = copy.deepcopy(model).cpu().double()  # a device may have no fp64
    wide.set_experts_implementation("eager")  # grouped products know no fp64
    with Fp64Mode():
        return _logits(wide, ids.cpu())
