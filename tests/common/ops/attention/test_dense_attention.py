"""core/common/ops/attention/dense.py against an oracle of its own, one token, head and position at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.numerics import Verdict, judge
from core.common.ops.attention.dense import DENSE_ATTENTION, reference
from tests.common.ops.canonical_oracle import Call, assert_raises, every_sample, faked, in_fp64, outputs, run, sample

OP = DENSE_ATTENTION
NAMES = [one.name for one in every_sample(OP)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
CACHED = ["decode", "prefill", "chunk, causal", "window 4 with a cache", "one kv head"]


def copied(call: Call) -> Call:
    """Copy the tensors with their strides: the op writes into the caches."""
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in call.items()}


def attended(call: Call) -> tuple[Tensor, Tensor]:
    """Return keys and values after the write, one token at a time."""
    if call.get("key_cache") is None:
        return call["key"], call["value"]
    keys, values = call["key_cache"].clone(), call["value_cache"].clone()
    for token, position in enumerate(call["positions"].tolist()):
        keys[:, :, position], values[:, :, position] = call["key"][:, :, token], call["value"][:, :, token]
    return keys, values


def visible(call: Call, place: tuple[int, int, int], length: int, mask: Tensor | None) -> list[int]:
    batch, head, token = place
    own = token if call.get("positions") is None else int(call["positions"][token])
    seen = [p for p in range(length) if not call.get("causal") or p <= own]
    seen = [p for p in seen if not call.get("window") or p > own - call["window"]]
    boolean = mask is not None and mask.dtype == torch.bool
    return [p for p in seen if mask is None or not boolean or mask[batch, head, token, p]]


def oracle(call: Call) -> Tensor:
    """Return the output in fp64."""
    query, (keys, values) = call["query"].double(), (each.double() for each in attended(call))
    (batch, heads, tokens, _), length = query.shape, keys.shape[2]
    mask, cap, sinks = call.get("mask"), call.get("softcap", 0.0), call.get("sinks")
    mask = None if mask is None else mask.expand(batch, heads, tokens, length)
    out = torch.zeros(batch, heads, tokens, values.shape[3], dtype=torch.float64)
    for place in ((b, h, t) for b in range(batch) for h in range(heads) for t in range(tokens)):
        head = place[1] // (heads // keys.shape[1])
        logits = {p: float(query[place] @ keys[place[0], head, p]) for p in visible(call, place, length, mask)}
        logits = {p: x * call["scale"] for p, x in logits.items()}
        logits = {p: cap * math.tanh(x / cap) if cap else x for p, x in logits.items()}
        if mask is not None and mask.dtype != torch.bool:
            logits = {p: x + float(mask[(*place, p)].double()) for p, x in logits.items()}
        sink = [] if sinks is None else [float(sinks[place[1]] if sinks.dim() == 1 else sinks[place][0])]
        top = max([*logits.values(), *sink], default=0.0)
        total = sum(math.exp(x - top) for x in [*logits.values(), *sink])
        for p, x in logits.items():
            out[place] += math.exp(x - top) / total * values[place[0], head, p]
    return out


def eager(call: Call) -> Tensor:
    """Return what a model computes: repeated heads, softmax in fp32, a column of sinks dropped again."""
    query, (keys, values) = call["query"], attended(call)
    group, tokens = query.shape[1] // keys.shape[1], query.shape[2]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = (query @ keys.transpose(2, 3)).float() * call["scale"]
    if call.get("softcap"):
        scores = torch.tanh(scores / call["softcap"]) * call["softcap"]
    mask, sinks = call.get("mask"), call.get("sinks")
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    own = call.get("positions", torch.arange(tokens))[:, None]
    positions = torch.arange(keys.shape[2])
    if call.get("causal"):
        scores = scores.masked_fill(positions > own, -math.inf)
    if call.get("window"):
        scores = scores.masked_fill(positions <= own - call["window"], -math.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1) if sinks.dim() == 1 else sinks
        scores = torch.cat((scores, column.float().expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., : keys.shape[2]]
    return (weights.to(values.dtype) @ values).to(call.get("out_dtype") or values.dtype)


def verdict(call: Call, **wrong: Any) -> Verdict:
    """Judge the op on `call`, its arguments changed by `wrong`, against eager and oracle on `call` as it is."""
    return judge(run(OP, copied(call) | wrong)[0], eager(call), oracle(call))


@DTYPES
@pytest.mark.parametrize("name", [name for name in NAMES if name != "no tokens"])
def test_each_sample_agrees_with_the_oracle(name: str, dtype: torch.dtype) -> None:
    result = verdict(sample(OP, name, dtype))
    assert result.passed, result


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("prefill", {"scale": 0.25 * 1.02}),
        ("decode", {"mask": None}),
        ("decode", {"positions": torch.tensor([7])}),
        ("chunk, causal", {"causal": False}),
        ("window 3", {"window": 4}),
        ("window 4 with a cache", {"window": 3}),
        ("soft-cap", {"softcap": 2.4}),
        ("sinks", {"sinks": None}),
        ("sinks per token", {"sinks": None}),
        ("additive mask per head", {"mask": None}),
        ("row hidden by the lowest number", {"mask": torch.ones(5, 11, dtype=torch.bool).tril(-2)}),
    ],
)
def test_the_oracle_sees_a_wrong_argument(name: str, wrong: Call) -> None:
    assert not verdict(sample(OP, name), **wrong).passed


@DTYPES
@pytest.mark.parametrize("name", CACHED)
def test_the_caches_are_written_exactly(name: str, dtype: torch.dtype) -> None:
    call, before = copied(sample(OP, name, dtype)), sample(OP, name, dtype)
    run(OP, call)
    assert OP.mutates == ("key_cache", "value_cache")
    for cache, written in zip(OP.mutates, attended(before), strict=True):
        assert torch.equal(call[cache], written) and not torch.equal(call[cache], before[cache])
    untouched = {k: v for k, v in call.items() if isinstance(v, Tensor) and k not in OP.mutates}
    assert all(torch.equal(v, before[k]) for k, v in untouched.items())


@pytest.mark.parametrize("name", ["decode", "prefill", "one kv head"])
def test_caches_and_their_contents_give_the_same(name: str) -> None:
    call = sample(OP, name)
    keys, values = attended(call)
    caches = ("key_cache", "value_cache", "positions")
    alone = {k: v for k, v in call.items() if k not in caches} | {"key": keys, "value": values}
    assert torch.equal(run(OP, copied(call))[0], run(OP, alone)[0])


def test_a_row_hidden_for_good_is_zero_and_one_hidden_by_the_lowest_number_is_the_mean() -> None:
    out = run(OP, sample(OP, "row hidden by false"))[0]
    assert torch.equal(out[:, :, :2], torch.zeros_like(out[:, :, :2])) and (out[:, :, 2:] != 0).all()
    call = sample(OP, "row hidden by the lowest number")
    mean = call["value"].mean(2).repeat_interleave(2, 1)
    torch.testing.assert_close(run(OP, call)[0][:, :, 0], mean)


def test_no_mask_is_a_mask_that_hides_nothing() -> None:
    call = sample(OP, "no cache, no mask")
    assert torch.equal(run(OP, call | {"mask": torch.ones(11, dtype=torch.bool)})[0], run(OP, call)[0])


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_torch_accepts_the_registration(name: str) -> None:
    torch.library.opcheck(OP.overload, (), sample(OP, name))


@DTYPES
@pytest.mark.parametrize("name", NAMES)
def test_the_fake_gives_the_metadata_of_the_real_one(name: str, dtype: torch.dtype) -> None:
    (real,), (mode, fakes) = run(OP, copied(sample(OP, name, dtype))), faked(sample(OP, name, dtype))
    with mode:
        (fake,) = run(OP, fakes)
    assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (real.shape, real.dtype, real.device, real.stride())
    assert real.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_the_op_is_its_reference_and_fp64_stays_fp64(name: str) -> None:
    call = sample(OP, name, torch.float64) | {"out_dtype": None}
    assert torch.equal(run(OP, copied(call))[0], reference(**copied(call)))
    (wide,) = in_fp64(OP, copied(call))
    assert wide.dtype == torch.float64 and torch.equal(run(OP, copied(call))[0], wide)


@pytest.mark.parametrize("name", ["decode", "sinks per token", "additive mask"])
def test_the_reference_is_traceable(name: str) -> None:
    compiled = torch.compile(reference, backend="eager", fullgraph=True, dynamic=False)
    (eagerly,) = outputs(compiled(**copied(sample(OP, name))))
    assert torch.equal(eagerly, run(OP, copied(sample(OP, name)))[0])


@DTYPES
def test_samples_are_deterministic_and_never_constant(dtype: torch.dtype) -> None:
    for one, two in zip(every_sample(OP, dtype), every_sample(OP, dtype), strict=True):
        for key, value in one.kwargs.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, two.kwargs[key]), (one.name, key)
                assert value.numel() < 2 or value.double().unique().numel() > 1, (one.name, key)


ONES = torch.ones
NEAR_MISSES: dict[str, tuple[Call, str]] = {
    "query of rank 3": ({"query": ONES(4, 7, 16)}, "query must have rank 4"),
    "heads no multiple": ({"query": ONES(2, 3, 7, 16)}, "3 query heads are no multiple of 2"),
    "heads of key and value": ({"value": ONES(2, 1, 7, 16)}, "2 key heads and 1 value heads differ"),
    "another head size": ({"query": ONES(2, 4, 7, 8)}, "query and key differ in head size"),
    "another batch size": ({"query": ONES(1, 4, 7, 16)}, "differ in batch size"),
    "another length": ({"value": ONES(2, 2, 6, 16)}, "key and value differ in length"),
    "integer query": ({"query": ONES(2, 4, 7, 16, dtype=torch.int64)}, "query must be floating-point"),
    "one cache alone": ({"value_cache": None}, "come together or not at all"),
    "no positions": ({"positions": None}, "come together or not at all"),
    "int32 positions": ({"positions": torch.arange(7, dtype=torch.int32)}, "positions must be torch.int64"),
    "too many positions": ({"positions": torch.arange(8)}, "positions must be one for each new key"),
    "caches of two lengths": ({"value_cache": ONES(2, 2, 12, 16)}, "the caches differ in length"),
    "cache of other heads": ({"key_cache": ONES(2, 4, 13, 16)}, "cache and key/value differ"),
    "mask of rank 5": ({"mask": ONES(1, 1, 1, 7, 13)}, "mask must have at most rank 4"),
    "mask of integers": ({"mask": ONES(7, 13, dtype=torch.int64)}, "mask must be boolean or floating-point"),
    "sinks of rank 2": ({"sinks": ONES(4, 1)}, "sinks must have rank 1 or 4"),
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_raises(near_miss: str) -> None:
    change, message = NEAR_MISSES[near_miss]
    assert_raises(OP, copied(sample(OP, "prefill")) | change, message)
