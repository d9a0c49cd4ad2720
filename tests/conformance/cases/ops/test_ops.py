"""core_conformance/cases/ops/: honest implementations pass, each planted mistake fails for its own reason."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_acme.ops import IMPLEMENTATIONS
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.numerics import judge
from core.common.ops.arguments import Draw
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.canonical import OPS
from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import Condition, OpCall, OpImplementation, always
from core.common.ops.norm.norms import RMS_NORM
from core.device import Device
from core.verify.fakes.memory import overlap
from core_conformance.cases.ops import collect as ops
from core_conformance.inputs import opcalls
from core_conformance.inputs.large import LARGE, NON_FINITE
from core_conformance.rules.judging import by_t2
from core_conformance.trial import NotSupported, Trial
from tests.conformance import planted_ops
from tests.conformance.planted_ops import LEGITIMATE, WRONG
from tests.recording import acme
from tests.support import cpu

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
REASONS = {
    "norm_in_place": "writes its argument 'x', which the schema does not declare",
    "norm_contiguous": "strides (720, 240, 48, 1) instead of",
    "norm_noisy": "the same call twice gives other bits",
    "norm_strides_ignored": "slice of wider rows, result 0: error over bound",
    "norm_nan_flushed": "rows of NaN and infinity, result 0: NaN or infinity",
    "add_norm_alias": "result 1 shares memory with argument 'residual'",
    "add_norm_shared": "results 0 and 1 share memory",
    "attention_stale_row": "heads of 64, decode with a window and padding, result 0: NaN or infinity",
    "attention_padding_rows": "decode padded, result 0: error over bound",
    "attention_padding_writes": "mixed and padded, key_cache: ",
    "attention_dropped_write": "decode, key_cache: ",
    "quantize_truncates": "int8 by group, codes: ",
    "quantize_in_half": "codes are one step off",
    "quantize_scale": "scale: error over bound",
    "rotary_attention_key": "key_cache: error over bound",
    "rotary_attention_neighbour": "elements differ in bits",
    "route_in_half": "an expert that ranks lower",
    "route_next_best": "an expert that ranks lower",
    "route_unnormalized": "weights: error over bound",
}
"""Planted mistake -> what one of the reasons says; the others are off in the error of a result."""
SEEN_IN_HALF = (
    *("norm_eps", "norm_rounding", "norm_noisy", "gelu_tanh", "attention_scale", "dense_scale"),
    *("quantize_truncates", "quantize_in_half", "route_in_half"),
)
"""Mistakes that half precision might hide."""
DEAR = tuple(
    name for name, (op, _) in WRONG.items() if op in ("attention", "rotary_attention") and name != "attention_stale_row"
)
"""Of those in attention, with its many calls, `make test` finds one."""


def implemented(op: str, fn: Callable[..., Any], condition: Condition = always) -> Device:
    return cpu(ops=(OpImplementation(op=f"core::{op}", name="Planted one", fn=fn, condition=condition),))


def trial_of(device: Device, case: str, profile: ConformanceProfile | None = None) -> Trial:
    opened = (device, profile or ConformanceProfile())
    trial = Trial(device.name, lambda: opened)
    (chosen,) = (each for each in ops.collect(*opened) if each.id == f"ops/{case}")
    chosen.run(trial)
    return trial


def judged(op: str, fn: Callable[..., Any], dtype: torch.dtype, **options: Any) -> Trial:
    return trial_of(implemented(op, fn, **options), f"{op}/planted-one/{str(dtype).removeprefix('torch.')}")


def dear(names: Iterable[str], others: Collection[str] = ()) -> list[Any]:
    """Return these as parameters, slow where the op is attention, with its many calls, or one of the others."""
    return [
        pytest.param(name, marks=pytest.mark.slow if "attention" in name or name in others else ()) for name in names
    ]


FUSED = (
    *("all_reduce_rms_norm", "all_reduce_add_rms_norm", "all_reduce_add_rms_norm_quantize"),
    *("all_reduce_add_rms_norm_quantize_fp4", "gated_activation_fused", "gated_activation_quantize", "gated_linear"),
    *("add_rms_norm_quantize", "rms_norm_quantize", "qk_norm_rotary", "quantized_grouped_linear"),
    *("gated_delta_rule", "selective_state_update"),
)
"""Ops that are several others in a row, and the longer recurrences: each has a shorter relation in its family."""


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", dear((op.name for op in OPS), FUSED))
def test_references_pass_on_the_processor(name: str) -> None:
    trial = trial_of(cpu(), f"{name}/reference/bfloat16")
    (op,) = (op for op in OPS if op.name == name)
    assert not trial.failures and len(trial.measurements) >= len(list(op.samples(torch.bfloat16, CPU)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("op", OPS[2:4], ids=lambda op: op.name)
def test_references_pass_on_a_device_with_graphs(op: CanonicalOp) -> None:
    trial = trial_of(acme(), f"{op.name}/reference/bfloat16")
    assert not trial.failures and len(trial.measurements) >= len(list(op.samples(torch.bfloat16, CPU)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", dear(each.name for each in IMPLEMENTATIONS))
def test_the_kernels_of_the_example_device_pass(name: str) -> None:
    device = acme()
    (kernel,) = (each for each in device.ops if each.name == name)
    trial = trial_of(device, f"{kernel.op.removeprefix('core::')}/{name}/float16")
    assert not trial.failures and trial.measurements


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", dear(LEGITIMATE))
def test_a_legitimate_variant_passes(name: str, dtype: torch.dtype) -> None:
    trial = judged(*LEGITIMATE[name], dtype)
    assert not trial.failures


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{dtype}", marks=pytest.mark.slow if name in DEAR else ())
        for names, dtype in ((WRONG, torch.float32), (SEEN_IN_HALF, torch.bfloat16))
        for name in names
    ],
)
def test_a_planted_mistake_is_rejected(name: str, dtype: torch.dtype) -> None:
    failures = judged(*WRONG[name], dtype).failures
    reason = REASONS.get(name, "error over bound")
    if len(failures) < 20:  # where more fail, the one looked for may not be listed
        assert any(reason in each for each in failures), failures
    assert failures


@pytest.mark.slow
def test_slack_widens_the_bounds_of_what_gives_accuracy_up_and_no_further() -> None:
    """An error of 6 times eager's: rejected without slack and with 2, accepted with 4, and the report says so."""

    def off(x: Any, *args: Any, **kwargs: Any) -> Any:
        wide = RMS_NORM.reference(x.double(), *args, **kwargs)
        return wide.add(RMS_NORM.reference(x, *args, **kwargs).double().sub(wide), alpha=6).to(x.dtype)

    def failures(slack: float) -> Trial:
        device = cpu(ops=(OpImplementation(op="core::rms_norm", name="loose", fn=off, slack=slack),))
        return trial_of(device, "rms_norm/loose/float32")

    assert failures(1.0).failures and failures(2.0).failures
    accepted = failures(4.0)
    assert not accepted.failures and any("gives accuracy up" in note for note in accepted.notes)


@pytest.mark.slow
def test_what_runs_between_graphs_is_judged_too() -> None:
    assert not trial_of(cpu(), "attention/eager/bfloat16").failures


def test_cases_come_from_declarations() -> None:
    device = replace(implemented("rms_norm", RMS_NORM.reference), name="acme")
    found = {case.id: case for case in ops.collect(device, ConformanceProfile())}
    assert [case for case in found if case.startswith("ops/rms_norm/") and case.endswith("/float16")] == [
        "ops/rms_norm/reference/float16",
        "ops/rms_norm/planted-one/float16",
    ]
    assert set(found) >= {f"ops/{op.name}/reference/float32" for op in OPS}
    assert not any(case.not_supported for case in found.values())
    parts = replace(device.parts, capabilities=replace(device.capabilities, dtypes=frozenset({torch.float32})))
    narrow = {case.id: case.not_supported for case in ops.collect(replace(device, parts=parts), ConformanceProfile())}
    assert narrow["ops/rms_norm/planted-one/float16"] == "the device declares no arithmetic in float16"
    assert not narrow["ops/rms_norm/planted-one/float32"] and list(narrow) == list(found)


def wide_rows_only(call: OpCall) -> str | None:
    x = call.args["x"]
    assert isinstance(x, torch._subclasses.FakeTensor)
    return None if x.shape[-1] == 1024 and x.is_contiguous() else "rows must be 1024 wide and contiguous"


def test_refused_calls_are_noted_and_not_run() -> None:
    def fn(x: Tensor, *args: Any, **options: Any) -> Tensor:
        assert x.shape == (9, 1024)
        return RMS_NORM.reference(x, *args, **options)

    trial = judged("rms_norm", fn, torch.float32, condition=wide_rows_only)
    assert not trial.failures and len(trial.measurements) >= 4
    assert any("refused: rows must be 1024 wide" in note for note in trial.notes)


def test_an_implementation_that_refuses_a_dtype_is_not_supported_there() -> None:
    def condition(call: OpCall) -> str | None:
        return "bfloat16 only" if call.args["x"].dtype != torch.bfloat16 else None

    with pytest.raises(NotSupported, match=r"^bfloat16 only$"):
        judged("rms_norm", RMS_NORM.reference, torch.float32, condition=condition)


def test_an_implementation_that_takes_nothing_at_all_is_a_failure() -> None:
    failures = judged("rms_norm", RMS_NORM.reference, torch.float32, condition=lambda call: "no licence").failures
    assert failures == ["its condition takes none of the suite's calls, in any dtype of the device: no licence"]


def test_a_collective_that_wants_a_group_is_judged_between_processes() -> None:
    with pytest.raises(NotSupported, match=r"^nobody shares the group; the cases ops/processes"):
        judged("all_reduce", print, torch.float32, condition=lambda call: "nobody shares the group")


def test_a_condition_that_lies_is_a_failure() -> None:
    def fn(x: Tensor, *args: Any, **options: Any) -> Tensor:
        if x.dim() != 2:
            raise ValueError("rank 2 only")
        return RMS_NORM.reference(x, *args, **options)

    failures = judged("rms_norm", fn, torch.float32).failures
    assert failures == [
        f"{name}: admitted, and then raises ValueError: rank 2 only"
        for name in ("one token", "rank 4", "transposed heads")
    ]


def test_a_condition_that_raises_is_a_failure() -> None:
    def condition(call: OpCall) -> str | None:
        raise KeyError("gate")

    (first, *_) = judged("rms_norm", RMS_NORM.reference, torch.float32, condition=condition).failures
    assert first == "odd rows: the condition raised KeyError: 'gate'; it must return a reason"


@pytest.mark.slow
def test_a_declared_noise_is_accepted() -> None:
    device = implemented("rms_norm", planted_ops.norm_noisy)
    profile = ConformanceProfile(nondeterministic_ops=frozenset({"core::rms_norm"}))
    assert not trial_of(device, "rms_norm/planted-one/float32", profile).failures


@pytest.mark.parametrize(("error", "passes"), [(3.0, True), (6.0, False)])
def test_the_yardstick_may_be_four_times_as_far_off(error: float, passes: bool) -> None:
    trial = Trial("acme", lambda: (cpu(), ConformanceProfile()))
    exact, noise = (Draw(torch.float64, CPU, seed=seed)(2048) for seed in (0, 1))
    host, result = ((exact + factor * 1e-6 * noise).float() for factor in (1.0, error))
    by_t2(trial, "x", result, host, lambda: exact)
    assert bool(trial.failures) is not passes
    assert trial.measurements[0].criterion == "T2" and not judge(result, host, exact).passed


def test_a_result_on_another_device_is_told_by_its_device() -> None:
    trial, wanted = Trial("acme", lambda: (cpu(), ConformanceProfile())), torch.zeros((), dtype=torch.int8)
    trial.same_metadata("x", wanted.to("meta"), wanted)
    trial.same_metadata("y", wanted.short(), wanted)
    assert trial.failures == [
        "x: () int8 strides () on meta instead of () int8 strides () on cpu",
        "y: () int16 strides () instead of () int8 strides ()",
    ]


def test_every_op_has_larger_calls() -> None:
    assert set(LARGE) == {op.name for op in OPS} and set(NON_FINITE) <= set(LARGE)


@pytest.mark.slow
def test_larger_calls_have_names_of_their_own() -> None:
    for op in OPS:
        names = [sample.name for sample in opcalls.calls(op, torch.bfloat16, CPU)]
        assert len(names) == len(set(names))
        assert any("wider rows" in name for name in names), op.name


def test_strided_variants_hold_equal_values_in_other_strides() -> None:
    (base, *_) = LARGE["dense_attention"](Draw(torch.float32, CPU))
    variants = list(opcalls.strided(next(op for op in OPS if op.name == "dense_attention"), base))
    assert len(variants) == 6
    for variant in variants:
        ((name, changed),) = [(k, v) for k, v in variant.kwargs.items() if v is not base.kwargs[k]]
        assert torch.equal(changed, base.kwargs[name]) and changed.stride() != base.kwargs[name].stride()


def test_caches_hold_nan_where_nothing_may_be_read() -> None:
    for sample in LARGE["attention"](Draw(torch.float32, CPU)):
        cache, slots = sample.kwargs["key_cache"], sample.kwargs["slot_mapping"]
        assert cache[0].isnan().all() and cache.flatten(0, 1)[slots].isnan().all()
        assert (
            not ATTENTION.reference(**{k: v.clone() if isinstance(v, Tensor) else v for k, v in sample.kwargs.items()})
            .isnan()
            .any()
        )


def test_memory_in_common_is_found_by_the_byte() -> None:
    base = torch.arange(24.0)
    assert overlap(base, base[3:4]) and overlap(base.view(torch.int32), base[:2])
    assert not overlap(base[:12], base[12:]) and not overlap(base[::2], base[1::2])
    assert not overlap(base, base.clone()) and not overlap(base, base[:0])


def test_writing_beside_a_view_is_seen() -> None:
    def fn(x: Tensor, *args: Any, **options: Any) -> Tensor:
        result = RMS_NORM.reference(x, *args, **options)
        if x._base is not None and x.shape == (5, 48):
            x.as_strided((1,), (1,), 0).fill_(7.0)
        return result

    failures = judged("rms_norm", fn, torch.float32).failures
    assert "slice of wider rows: writes its argument 'x', which the schema does not declare" in failures
