"""core/common/ops/recurrent: against transformers' own steps, over slots, and over thousands of steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import unwrap
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.numerics import MIN_ELEMENTS, Fp64Mode, judge
from core.common.ops.declaration import CanonicalOp
from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE
from tests.common.ops.canonical_oracle import Call, assert_raises, every_sample, faked, run, sample

OPS = (CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE)
CASES = [pytest.param(op, s.name, id=f"{op.name}-{s.name}") for op in OPS for s in every_sample(op)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
PER_ROW = ("x", "query", "key", "value", "decay", "beta", "dt", "B", "C", "bounded")
EACH = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def widened(call: Call) -> Call:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}


def rows_of(call: Call) -> Tensor:
    """Return the states that the sequences of a call have written."""
    places = call.get("kept") if call.get("kept") is not None else call.get("slots")
    states: Tensor = call["states"]
    return states if places is None else states[places]


def convolution(call: Call) -> Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update

    state, activation = _gathered(call), "silu" if call.get("silu") else None
    out = unwrap(causal_conv1d_update)(call["x"][..., None], state, call["weight"], call["bias"], activation)
    _scattered(call, state)
    return out[..., 0]


def delta_rule(call: Call) -> Tensor:
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    from tests.delta_rule import own_delta_rule

    by_feature = call["decay"].dim() == 3
    function: Any = unwrap(recurrent_kimi_delta_attention) if by_feature else own_delta_rule
    rest = {name: call[name][:, None] for name in ("query", "key", "value", "beta")}
    out, state = function(
        **rest,
        g=call["decay"][:, None],
        initial_state=_gathered(call),
        output_final_state=True,
        use_qk_l2norm_in_kernel=bool(call["norm_eps"]),
    )
    _scattered(call, state)
    return out[:, 0]


def state_space(call: Call) -> Tensor:
    from transformers.models.mamba.modeling_mamba import mamba_selective_state_update
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    state, (_, heads, features), size = _gathered(call), call["x"].shape, call["B"].shape[2]
    given, softplus = bounded(call), call["dt_softplus"] and not call.get("dt_min") and not call.get("dt_max")
    if call["A"].dim() == 3:  # of one head, as Zamba calls it for each of its heads
        update, outs, group = unwrap(mamba_selective_state_update), [], heads // call["B"].shape[1]
        for head, own in enumerate(state.view(-1, heads, features, size).unbind(1)):
            skip, bias = (None if given[name] is None else given[name][head] for name in ("D", "dt_bias"))
            B, C = call["B"][:, head // group], call["C"][:, head // group]
            x, dt = call["x"][:, head], given["dt"][:, head]
            outs.append(update(own, x, dt, call["A"][head], B, C, skip, dt_bias=bias, dt_softplus=softplus))
        _scattered(call, state)
        return torch.stack(outs, dim=1)
    spread = {
        name: None if given[name] is None else given[name][:, None].expand(-1, features) for name in ("D", "dt_bias")
    }
    out = unwrap(mamba2_selective_state_update)(
        state,
        call["x"],
        given["dt"][..., None].expand(-1, -1, features),
        call["A"][:, None, None].expand(heads, features, size),
        call["B"],
        call["C"],
        **spread,
        dt_softplus=softplus,
    )
    _scattered(call, state)
    return out


def bounded(call: Call) -> Call:
    """Return a call with bare steps, bounded as transformers' code for prompts does it, where any are."""
    least, most = call.get("dt_min") or 0.0, call.get("dt_max") or torch.inf
    if not least and most == torch.inf:
        return call
    step = call["dt"] if call["dt_bias"] is None else call["dt"] + call["dt_bias"].to(call["dt"].dtype)
    step = torch.nn.functional.softplus(step) if call["dt_softplus"] else step
    within, rows = torch.clamp(step, min=least, max=most), call.get("bounded")
    assert (within != step).any() or len(step) == 1
    shape = -1, *[1] * (step.dim() - 1)
    return {**call, "dt": within if rows is None else torch.where(rows.view(shape), within, step), "dt_bias": None}


def along(step: Callable[[Call], Tensor], call: Call) -> Tensor:
    """Compute packed sequences by a function for one token of one sequence."""
    starts, shape = call["query_starts"].tolist(), (call["x"] if "x" in call else call["value"]).shape
    slots = torch.arange(len(starts) - 1) if call.get("slots") is None else call["slots"]
    kept = slots if call.get("kept") is None else call["kept"]
    found = torch.zeros(shape, dtype=(call["x"] if "x" in call else call["value"]).dtype)
    for i, (first, last) in enumerate(pairwise(starts)):
        call["states"][kept[i]] = call["states"][slots[i]]
        own = {"slots": kept[i : i + 1], "kept": None, "query_starts": None}
        for row in range(first, last):
            rows = {name: call[name][row : row + 1] for name in PER_ROW if call.get(name) is not None}
            found[row] = step({**call, **rows, **own})[0]
    return found


def _gathered(call: Call) -> Tensor:
    slots = call.get("slots")
    return call["states"].clone() if slots is None else call["states"].index_select(0, slots)


def _scattered(call: Call, state: Tensor) -> None:
    places = call.get("kept") if call.get("kept") is not None else call.get("slots")
    call["states"][slice(None) if places is None else places] = state.to(call["states"].dtype)


EAGER: dict[str, Callable[[Call], Tensor]] = {
    "causal_conv1d_update": convolution,
    "gated_delta_rule": delta_rule,
    "selective_state_update": state_space,
}


def judged(op: CanonicalOp, call: Call) -> None:
    """Expect results and states with errors like those of transformers' own code."""
    mine, eager, exact = copy.deepcopy(call), copy.deepcopy(call), widened(copy.deepcopy(call))
    step = EAGER[op.name]
    out, theirs = run(op, mine)[0], step(eager) if call.get("query_starts") is None else along(step, eager)
    with Fp64Mode():
        true = op.reference(**exact)
    for one, other, truth in ((out, theirs, true), (rows_of(mine), rows_of(eager), rows_of(exact))):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.numel() >= MIN_ELEMENTS:
            verdict = judge(one, other, truth)
            assert verdict.passed, verdict


@pytest.mark.cases(3)
@DTYPES
@pytest.mark.parametrize(("op", "name"), CASES)
def test_each_sample_agrees_with_transformers(op: CanonicalOp, name: str, dtype: torch.dtype) -> None:
    call = sample(op, name, dtype)
    if "scale" not in call or call["scale"] == call["states"].shape[-2] ** -0.5:
        judged(op, call)


@DTYPES
@pytest.mark.parametrize(("op", "name"), CASES)
def test_other_slots_keep_every_bit(op: CanonicalOp, name: str, dtype: torch.dtype) -> None:
    call, before = sample(op, name, dtype), sample(op, name, dtype)
    run(op, call)
    written = torch.zeros(len(call["states"]), dtype=torch.bool)
    places = call.get("kept") if call.get("kept") is not None else call.get("slots")
    written[slice(None) if places is None else places] = True
    assert torch.equal(call["states"][~written], before["states"][~written])
    unmoved = torch.zeros_like(written)
    if call.get("query_starts") is not None and call.get("slots") is not None:
        same = call["slots"] == (call["slots"] if call.get("kept") is None else call["kept"])
        unmoved[call["slots"][same & (call["query_starts"].diff() == 0)]] = True
    assert torch.equal(call["states"][unmoved], before["states"][unmoved])
    for at in (written & ~unmoved).nonzero().flatten():
        assert (call["states"][at] != before["states"][at]).any()
    for key, value in call.items():
        assert key == "states" or not isinstance(value, Tensor) or torch.equal(value, before[key]), key


@EACH
def test_rows_are_independent(op: CanonicalOp) -> None:
    """A row alone gives what it gives among others, and NaN in slots that no row has does not leak."""
    call = sample(op, "slots")
    alone = copy.deepcopy(call)
    per_row = [
        k for k, v in call.items() if isinstance(v, Tensor) and k != "states" and v.shape[:1] == call["slots"].shape
    ]
    alone |= {name: call[name][2:3] for name in per_row if name not in ("A", "D", "dt_bias", "weight", "bias")}
    unused = torch.ones(len(call["states"]), dtype=torch.bool)
    unused[call["slots"][2]] = False
    alone["states"][unused] = torch.nan
    one, all_rows = run(op, alone)[0], run(op, call)[0]
    torch.testing.assert_close(one, all_rows[2:3])
    torch.testing.assert_close(rows_of(alone), rows_of(call)[2:3])


@pytest.mark.cases(3)
@pytest.mark.parametrize(("op", "name"), CASES)
def test_torch_accepts_the_registration(op: CanonicalOp, name: str) -> None:
    call = sample(op, name)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.overload, (), call, test_utils=checks)


@pytest.mark.cases(1)
@EACH
def test_torch_compiles_the_op(op: CanonicalOp) -> None:
    torch.library.opcheck(
        op.overload, (), sample(op, "slots, written to others"), test_utils="test_aot_dispatch_dynamic"
    )


@DTYPES
@pytest.mark.parametrize(("op", "name"), CASES)
def test_the_fake_gives_the_metadata_of_the_real_one(op: CanonicalOp, name: str, dtype: torch.dtype) -> None:
    call = sample(op, name, dtype)
    mode, fakes = faked(call)
    with mode:
        (fake,) = run(op, fakes)
    (real,) = run(op, call)
    assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (real.shape, real.dtype, real.device, real.stride())


@pytest.mark.parametrize(("op", "name"), CASES)
def test_fp64_stays_fp64(op: CanonicalOp, name: str) -> None:
    call = sample(op, name, torch.float64)
    wide = copy.deepcopy(call)
    with Fp64Mode():
        exact = op.reference(**wide)
    assert torch.equal(run(op, call)[0], exact) and exact.dtype == torch.float64
    assert torch.equal(call["states"], wide["states"])


NEAR_MISSES: dict[str, tuple[CanonicalOp, Call, str]] = {
    "other channels": (CAUSAL_CONV1D_UPDATE, {"weight": torch.ones(23, 4)}, "x has 24 channels, states 24, weight 23"),
    "short states": (CAUSAL_CONV1D_UPDATE, {"weight": torch.ones(24, 6)}, "too short for 6 taps"),
    "narrow states": (CAUSAL_CONV1D_UPDATE, {"states": torch.ones(12, 24, 4).bfloat16()}, "states are torch.bfloat16"),
    "a narrow bias": (CAUSAL_CONV1D_UPDATE, {"bias": torch.ones(24).bfloat16()}, "one dtype that holds torch.float32"),
    "int32 slots": (CAUSAL_CONV1D_UPDATE, {"slots": torch.ones(5, dtype=torch.int32)}, "slots must be torch.int64"),
    "a state short": (CAUSAL_CONV1D_UPDATE, {"slots": None}, "12 states of 5 sequences need slots"),
    "int64 starts": (CAUSAL_CONV1D_UPDATE, {"query_starts": torch.arange(6)}, "query_starts must be torch.int32"),
    "no sequence": (GATED_DELTA_RULE, {"query_starts": torch.zeros(1, dtype=torch.int32)}, "one sequence at least"),
    "starts of others": (
        SELECTIVE_STATE_UPDATE,
        {"query_starts": torch.zeros(4, dtype=torch.int32)},
        r"slots must have shape \(3,\)",
    ),
    "too few slots": (GATED_DELTA_RULE, {"kept": torch.ones(4, dtype=torch.int64)}, r"kept must have shape \(5,\)"),
    "heads no multiple": (GATED_DELTA_RULE, {n: torch.ones(5, 3, 16) for n in ("query", "key")}, "no multiple of 3"),
    "transposed states": (GATED_DELTA_RULE, {"states": torch.ones(12, 4, 8, 16)}, r"states must be \(N, 4, 16, 8\)"),
    "decay of values": (GATED_DELTA_RULE, {"decay": torch.ones(5, 4, 8)}, r"decay must have shape \(5, 4, 16\)"),
    "a negative eps": (GATED_DELTA_RULE, {"norm_eps": -1.0}, "norm_eps must be positive"),
    "groups no divisor": (SELECTIVE_STATE_UPDATE, {n: torch.ones(5, 3, 16) for n in "BC"}, "no multiple of 3 groups"),
    "steps of features": (SELECTIVE_STATE_UPDATE, {"dt": torch.ones(5, 4, 8)}, r"dt must have shape \(5, 4\)"),
    "A of states alone": (SELECTIVE_STATE_UPDATE, {"A": torch.ones(4, 16)}, "A must have 1 or 3 dimensions, not 2"),
    "steps of heads": (SELECTIVE_STATE_UPDATE, {"A": torch.ones(4, 8, 16)}, r"dt must have shape \(5, 4, 8\)"),
    "merged states": (SELECTIVE_STATE_UPDATE, {"states": torch.ones(12, 32, 16)}, r"states must be \(M, 4, 8, 16\)"),
    "a negative bound": (SELECTIVE_STATE_UPDATE, {"dt_min": -1.0}, "dt_min -1.0 and dt_max 0.0 must be positive"),
    "bounds by number": (SELECTIVE_STATE_UPDATE, {"bounded": torch.ones(5)}, "bounded must be torch.bool"),
    "integers": (SELECTIVE_STATE_UPDATE, {"A": torch.ones(4, dtype=torch.int64)}, "A must be floating-point"),
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_a_near_miss_raises(near_miss: str) -> None:
    op, change, message = NEAR_MISSES[near_miss]
    assert_raises(op, sample(op, "slots") | change, message)


@pytest.mark.slow
@DTYPES
@EACH
def test_4096_steps_do_not_drift(op: CanonicalOp, dtype: torch.dtype) -> None:
    """The errors of results and state after so many steps are like those of transformers' own code."""
    first = sample(op, "no slots", dtype)
    states = [
        {"states": first["states"].clone()},
        {"states": first["states"].clone()},
        {"states": first["states"].double()},
    ]
    generator = torch.Generator().manual_seed(3)
    fixed = ("A", "D", "dt_bias", "weight", "bias", "states")
    last: list[tuple[Tensor, ...]] = []
    for step in range(4096):
        order = torch.randint(5, (5,), generator=generator)
        call = {k: v[order] if isinstance(v, Tensor) and k not in fixed else v for k, v in first.items()}
        with Fp64Mode():
            true = op.reference(**widened(call) | states[2])
        outs = run(op, call | states[0])[0], EAGER[op.name](call | states[1]), true
        if step >= 4096 - 16:
            last.append(outs)
    mine, eager, exact = (torch.cat(each) for each in zip(*last, strict=True))
    for results in ((mine, eager, exact), tuple(each["states"] for each in states)):
        verdict = judge(*results)
        assert verdict.passed, verdict
