"""core_conformance/inputs/large_sizes.py: implementations that are right on small shapes alone are rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.ops.arguments import Draw
from core.common.ops.attention.paged import ATTENTION, reference
from core.common.ops.canonical import OPS
from core.common.ops.implementation import OpImplementation
from core.common.ops.mlp.activation import gated_activation
from core.common.ops.moe.experts import grouped_mlp
from core.common.ops.moe.route import moe_route
from core.common.ops.norm.norms import rms_norm
from core.common.ops.rotary.rotation import rotary
from core_conformance.cases.ops import collect as ops
from core_conformance.inputs.large_sizes import SIZES
from core_conformance.trial import Trial
from tests.support import cpu

CPU = torch.device("cpu")


def forgets_beyond_128(*args: Any, window: int, **options: Any) -> Tensor:
    return reference(*args, window=min(window or 128, 128), **options)


def mixes_the_ninth_sequence(*args: Any, **options: Any) -> Tensor:
    table = args[5].clone()
    table[8:] = table[:1]
    reference(*args, **options)
    return reference(*args[:5], table, *args[6:], **options)


def drops_sinks_in_decode(*args: Any, max_query_len: int = 0, sinks: Tensor | None = None, **options: Any) -> Tensor:
    kept = None if max_query_len == 1 else sinks
    return reference(*args, sinks=kept, max_query_len=max_query_len, **options)


def norms_64_rows(x: Tensor, *args: Any, **options: Any) -> Tensor:
    result = rms_norm(x, *args, **options)
    result.view(-1, result.shape[-1])[64:] = 0
    return result


def gates_whole_vectors(gate: Tensor, up: Tensor, **options: Any) -> Tensor:
    result = gated_activation(gate, up, **options)
    result[..., result.shape[-1] // 8 * 8 :] = 0
    return result


def rotates_8_heads(query: Tensor, key: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    first, second = rotary(query, key, *args, **options)
    first[:, 8:] = query[:, 8:]
    return first, second


def ranks_64_experts(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    kept = logits.clone()
    kept[:, 64:] = -1e4
    return moe_route(kept, top_k, **options)


def multiplies_33_tokens(x: Tensor, *args: Any, **options: Any) -> Tensor:
    result = grouped_mlp(x, *args, **options)
    result[33:] = 0
    return result


WRONG: dict[str, tuple[Callable[..., Any], ...]] = {
    "attention": (forgets_beyond_128, mixes_the_ninth_sequence, drops_sinks_in_decode),
    "rms_norm": (norms_64_rows,),
    "gated_activation": (gates_whole_vectors,),
    "rotary": (rotates_8_heads,),
    "moe_route": (ranks_64_experts,),
    "grouped_mlp": (multiplies_33_tokens,),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fn"), [(name, fn) for name, fns in WRONG.items() for fn in fns])
def test_what_is_right_on_small_shapes_alone_is_rejected(name: str, fn: Callable[..., Any]) -> None:
    opened = (cpu(ops=(OpImplementation(op=f"core::{name}", name="small", fn=fn),)), ConformanceProfile())
    trial = Trial("cpu", lambda: opened)
    (case,) = (each for each in ops.collect(*opened) if each.id == f"ops/{name}/small/bfloat16")
    case.run(trial)
    names = [sample.name for sample in SIZES[name](Draw(torch.bfloat16, CPU))]
    assert any(failure.startswith(each) for failure in trial.failures for each in names), trial.failures


def test_every_op_but_collectives_has_sizes() -> None:
    assert set(SIZES) == {op.name for op in OPS if not op.is_collective}


def test_caches_hold_nan_where_nothing_may_be_read() -> None:
    for sample in SIZES["attention"](Draw(torch.float32, CPU)):
        cache, slots = sample.kwargs["key_cache"], sample.kwargs["slot_mapping"]
        assert cache[0].isnan().all() and cache.flatten(0, 1)[slots].isnan().all()
        assert not ATTENTION.reference(**sample.kwargs).isnan().any()
