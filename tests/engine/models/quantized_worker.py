"""One of several processes that share quantised tiny models: codes and logits are judged against the whole model's."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
from torch import Tensor

import core
from core.common.numerics import Fp64Mode, judge
from core.engine.check.quantized import widened
from core.engine.models.distributed import initialize
from core.engine.models.loading import build_model
from core.engine.models.sharding import ExpertCut, plan_of, quantize_in_parts, shard_model
from core.engine.models.tiny import tiny_config
from core.quantization.layers import QuantizedModule

IDS = torch.randint(0, 160, (4, 12), generator=torch.Generator().manual_seed(3))
WIDTHS = {"intermediate_size": 128, "moe_intermediate_size": 64}
"""Sizes of which four processes have whole words of 4-bit codes, and whole groups of 16."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4}
"""All are chosen: a choice between two that are nearly equal would hang on the last bit of a sum."""


def judged(name: str, scheme: str, dtype: torch.dtype, size: int, experts: ExpertCut) -> dict[str, Any]:
    """Return what became of one model that was quantised before it was cut, and after."""
    changes = {**WIDTHS, **EXPERTS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    made = build_model(tiny_config(name, **changes), torch_device=torch.device("cpu"), dtype=dtype).model
    whole = core.quantize(copy.deepcopy(made), scheme, calibration=[IDS])
    before = shard_model(copy.deepcopy(whole), plan_of(whole, size, experts))
    after = core.quantize(shard_model(made, plan_of(made, size, experts)), scheme, calibration=[IDS])
    num_bytes = held(whole)
    eager = logits(quantize_in_parts(whole, size, experts))
    exact = wide(whole)
    wider = widened(whole, [eager], [exact], lambda: [wide(whole)])[0]
    verdict = judge(logits(before), wider, exact)
    layers = [module for module in before.modules() if isinstance(module, QuantizedModule)]
    return {
        "passed": verdict.passed,
        "reason": verdict.reason,
        "layers": len(layers),
        "differ": differing(before, after),
        "share": held(before) / num_bytes,
    }


def differing(one: Any, other: Any) -> list[str]:
    """Return which codes, scales and zero points differ: of inputs, by more than another order of sums does."""
    found = []
    others = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        close = name.endswith(("input_scale", "hidden_scale", "input_zero_point", "hidden_zero_point"))
        pair = [each.float() for each in (parameter, others[name])]
        if not (torch.allclose(*pair, rtol=1e-2, atol=1) if close else torch.equal(*pair)):
            found.append(name)
    return found + sorted(others.keys() ^ dict(one.named_parameters()).keys())


def held(model: Any) -> int:
    """Return the bytes of a model's quantised layers."""
    layers = (module for module in model.modules() if isinstance(module, QuantizedModule))
    return sum(each.nbytes for layer in layers for each in layer.parameters())


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Return the logits of the prompts."""
    found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def wide(model: Any) -> Tensor:
    """Return the logits of the prompts in fp64."""
    copied = copy.deepcopy(model).double()
    copied.set_experts_implementation("eager")  # grouped products know no fp64
    with Fp64Mode():
        return logits(copied)


if __name__ == "__main__":
    place = initialize("gloo", timeout_s=200)
    asked = json.loads(sys.argv[1])
    results = {
        f"{name} {scheme} {dtype}": judged(
            name, scheme, getattr(torch, dtype), place.size, asked.get("experts", "width")
        )
        for name in asked["models"]
        for scheme in asked["schemes"]
        for dtype in asked["dtypes"]
    }
    sys.stdout.write(f"{json.dumps(results)}\n")
    torch.distributed.destroy_process_group()
