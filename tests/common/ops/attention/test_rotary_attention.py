"""core/common/ops/attention/rotary.py: bit by bit the ops that it is made of, cache included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from core.common.numerics import judge
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from tests.kernel_cases import sample_call

CPU = torch.device("cpu")
SAMPLES = [sample.name for sample in ROTARY_ATTENTION.samples(torch.float32, CPU)]
POSITIONAL = [a.name for a in ROTARY_ATTENTION.overload._schema.arguments if not a.kwarg_only]
PLACES = POSITIONAL[5:]
OF_ATTENTION = ("scale", "window", "chunked", "softcap", "sinks", "max_query_len", "k_scale", "v_scale")
OF_NORM = ("offset", "norm_compute_dtype", "normed_dtype", "weight_dtype")
TURNING = ("style", "rotary_dim", "compute_dtype", "out_dtype")
Call = dict[str, Any]

every_sample = pytest.mark.parametrize("name", SAMPLES)
half_and_full = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def sample(name: str, dtype: torch.dtype = torch.float32) -> Call:
    return sample_call(ROTARY_ATTENTION, name, dtype)


def copied(call: Call) -> Call:
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in call.items()}


def run(call: Call) -> Tensor:
    args = [call[name] for name in POSITIONAL]
    out: Tensor = torch.ops.core.rotary_attention(*args, **{n: v for n, v in call.items() if n not in POSITIONAL})
    return out


def composed(call: Call) -> Tensor:
    """Do what the op stands for by the ops that models and the engine call, laid out as these have it."""
    query, key = (call[name].transpose(0, 1)[None] for name in ("query", "key"))
    tables = [call[name][None, None] for name in ("cos", "sin")]
    turning = {name: call[name] for name in TURNING if name in call}
    if call.get("normalize"):
        options = {name: call[name] for name in OF_NORM if name in call}
        weights = (call.get("query_weight"), call.get("key_weight"))
        turned = torch.ops.core.qk_norm_rotary(query, key, *weights, *tables, call["eps"], **options, **turning)
    else:
        turned = torch.ops.core.rotary(query, key, *tables, **turning)
    rows = [x[0].transpose(0, 1) for x in turned]
    options = {name: call[name] for name in OF_ATTENTION if name in call}
    out: Tensor = torch.ops.core.attention(*rows, call["value"], *(call[name] for name in PLACES), **options)
    return out


@half_and_full
@every_sample
def test_it_is_a_rotation_and_an_attention_in_every_bit(name: str, dtype: torch.dtype) -> None:
    ours, theirs = copied(sample(name, dtype)), copied(sample(name, dtype))
    one, other = run(ours), composed(theirs)
    assert one.dtype == other.dtype and torch.equal(one, other)
    for cache in ROTARY_ATTENTION.mutates:
        assert torch.equal(ours[cache], theirs[cache]), cache
        assert not torch.equal(ours[cache], sample(name, dtype)[cache]), f"{cache} was not written"
    for key, value in ours.items():
        if isinstance(value, Tensor) and key not in ROTARY_ATTENTION.mutates:
            assert torch.equal(value, sample(name, dtype)[key]), key


@every_sample
def test_fp64_stays_fp64(name: str) -> None:
    assert run(sample(name, torch.float64)).dtype == torch.float64


@half_and_full
@every_sample
def test_between_graphs_each_sequence_attends_by_itself(name: str, dtype: torch.dtype) -> None:
    assert ROTARY_ATTENTION.eager is not None
    call, by_itself = copied(sample(name, dtype)), copied(sample(name, dtype))
    codes = torch.float8_e4m3fn
    exact = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() and v.dtype != codes else v
        for k, v in call.items()
    }
    dtypes = {k: torch.float64 for k, v in call.items() if isinstance(v, torch.dtype) and v != torch.bfloat16}
    truth = composed(copied(exact) | dtypes)
    eager, whole = ROTARY_ATTENTION.eager(**by_itself), run(call)
    real = int(call["query_starts"][-1])
    result = judge(eager[:real], whole[:real], truth[:real])
    assert result.passed and not eager[real:].any() and eager.dtype == whole.dtype, result
    for cache in ROTARY_ATTENTION.mutates:
        assert torch.equal(by_itself[cache][1:], call[cache][1:])  # block 0 is nobody's


@half_and_full
@every_sample
def test_the_fake_gives_the_metadata_of_the_real_one(name: str, dtype: torch.dtype) -> None:
    call = sample(name, dtype)
    real = run(copied(call))
    mode = FakeTensorMode()
    with mode:
        fake = run({k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.items()})
    assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (real.shape, real.dtype, real.device, real.stride())


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["decode padded", "going on wide", "gemma3", "sinks"])
def test_torch_accepts_the_registration(name: str) -> None:
    call = sample(name)
    torch.library.opcheck(ROTARY_ATTENTION.overload, tuple(call.pop(arg) for arg in POSITIONAL), call)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("half, partial", {"rotary_dim": 12, "cos": torch.ones(15, 12), "sin": torch.zeros(15, 12)}),
        ("half, one value per pair", {"style": "interleaved"}),
        ("prefill", {"scale": 0.3}),
        ("window 3", {"window": 0}),
        ("soft-cap", {"softcap": 0.0}),
        ("sinks", {"sinks": None}),
        ("qwen3", {"eps": 1e-1}),
        ("qwen3", {"key_weight": None}),
        ("codes, decode", {"k_scale": torch.tensor(0.05)}),
        ("codes, decode", {"v_scale": None}),
        ("gemma3", {"offset": 0.0}),
    ],
)
def test_every_option_counts(name: str, change: Call) -> None:
    call = sample(name)
    assert not torch.allclose(run(copied(call) | change), run(copied(call)), atol=1e-3)


def test_what_counts_is_the_angle_between_a_query_and_a_key() -> None:
    call = sample("prefill", torch.float64)
    angles = torch.outer(torch.arange(16.0, dtype=torch.float64), torch.linspace(0.1, 1.3, 8, dtype=torch.float64))

    def turned(further: Tensor) -> Tensor:
        return run(copied(call) | {"cos": (angles + further).cos(), "sin": (angles + further).sin()})

    # All tokens turned further by as much: the scores stay. Each by another angle: they do not.
    torch.testing.assert_close(turned(torch.linspace(0.2, 1.9, 8).double()), turned(torch.zeros(8)), rtol=0, atol=1e-12)
    assert not torch.allclose(turned(angles), turned(torch.zeros(8)), atol=1e-2)


NEAR_MISSES: dict[str, tuple[Call, str]] = {
    "query of rank 4": ({"query": torch.ones(1, 15, 4, 16)}, "query must have rank 3"),
    "tables per head": ({"cos": torch.ones(15, 1, 8)}, "cos must have rank 2"),
    "too few rows": ({"sin": torch.ones(14, 8)}, "sin must have a row for each of the 15 tokens, not 14"),
    "tables too wide": ({"cos": torch.ones(15, 32), "sin": torch.ones(15, 32)}, "must be 16 or 8 wide, not 32"),
    "unknown style": ({"style": "whole"}, "style 'whole' is none of"),
    "a norm that is off": ({"eps": 1e-6, "offset": 1.0}, "eps, offset given, and normalize is False"),
    "a weight without the norm": ({"key_weight": torch.ones(16)}, "key_weight given, and normalize is False"),
    "a weight of all heads": (
        {"normalize": True, "query_weight": torch.ones(64)},
        r"query_weight must have shape \(16,\)",
    ),
    "a scale of no codes": ({"k_scale": torch.ones(())}, "k_scale given, and key_cache is torch.float32, no cache of"),
    "int32 slots": ({"slot_mapping": torch.zeros(15, dtype=torch.int32)}, "slot_mapping must be torch.int64"),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_other_arguments_are_refused_by_kernel_and_fake(case: str) -> None:
    change, message = NEAR_MISSES[case]
    call = sample("half, one value per pair") | change
    with pytest.raises(RuntimeError, match=f"core::.*{message}"):
        run(copied(call))
    mode = FakeTensorMode()
    with mode, pytest.raises(RuntimeError, match=f"core::.*{message}"):
        run({k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.items()})


def test_samples_are_deterministic_and_never_constant() -> None:
    first, second = (list(ROTARY_ATTENTION.samples(torch.bfloat16, CPU)) for _ in range(2))
    assert len({one.name for one in first}) == len(first)
    for one, two in zip(first, second, strict=True):
        for name, value in one.kwargs.items():
            if isinstance(value, Tensor):
                assert torch.equal(value.double(), two.kwargs[name].double()), (one.name, name)
                small = value.numel() < 2 or not value.is_floating_point()
                assert small or value.double().unique().numel() > 1, (one.name, name)
