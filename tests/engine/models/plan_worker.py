"""One of several processes that shard tiny models of many types: the logits of each are judged against the whole's."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch

from core.common.numerics import Fp64Mode, judge
from core.engine.models.distributed import initialize
from core.engine.models.loading import build_model
from core.engine.models.sharding import ExpertCut, Planned, plan_of, planned, shard_model
from core.engine.models.tiny import causal_lm_types, tiny_config
from core.engine.parallel.trial import try_plan
from core.errors import CoreError

IDS = torch.randint(0, 160, (4, 12), generator=torch.Generator().manual_seed(3))


def judged(name: str, dtype: torch.dtype, size: int, changes: dict[str, Any], experts: ExpertCut) -> dict[str, Any]:
    """Return what became of one model, as JSON."""
    try:
        whole = build_model(tiny_config(name, **changes), torch_device=torch.device("cpu"), dtype=dtype).model
    except Exception as error:  # of types that can't be made tiny
        return {"unmade": f"{type(error).__name__}: {error}"}
    plan = planned(whole, size, experts)
    try:
        sharded = shard_model(copy.deepcopy(whole), plan_of(whole, size, experts))
    except CoreError as error:
        return {"refused": str(error.found)}
    try:
        return _compared(whole, sharded, plan)
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {str(error)[:200]}"}


def _compared(whole: Any, sharded: Any, plan: Planned) -> dict[str, Any]:
    with torch.no_grad():
        eager = whole(input_ids=IDS, use_cache=False).logits
        wide = copy.deepcopy(whole).double()
        wide.set_experts_implementation("eager")  # grouped products know no fp64
        with Fp64Mode():
            exact = wide(input_ids=IDS, use_cache=False).logits
        found = sharded(input_ids=IDS, use_cache=False).logits
    verdict = judge(found, eager, exact)
    held, all_of_it = (sum(each.numel() for each in model.parameters()) for model in (sharded, whole))
    return {
        "passed": verdict.passed,
        "reason": verdict.reason,
        "share": held / all_of_it,
        "added": sorted(plan.added),
        "whole": dict(plan.whole),
    }


def tried(name: str) -> str:
    """Return what the trial of a type's plan says."""
    try:
        return try_plan(name, torch.device("cpu"))
    except CoreError as error:
        return f"{type(error).__name__}: {error.found}"


if __name__ == "__main__":
    place = initialize("gloo", timeout_s=120)
    asked = json.loads(sys.argv[1])
    results: dict[str, Any] = {
        f"{name} {dtype}": judged(
            name, getattr(torch, dtype), place.size, asked.get("changes", {}), asked.get("experts", "width")
        )
        for name in asked.get("models", causal_lm_types())
        for dtype in asked["dtypes"]
    }
    results |= {f"trial of {name}": tried(name) for name in asked.get("tried", ())}
    sys.stdout.write(f"{json.dumps(results)}\n")
    torch.distributed.destroy_process_group()
