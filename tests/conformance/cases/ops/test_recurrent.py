"""The suite on steps of recurrent layers: honest ones pass, each fault of a state fails, drift over thousands of steps
too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.ops.declaration import CanonicalOp
from core.common.ops.implementation import OpImplementation
from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE
from core_conformance.cases.ops import collect, long_states
from tests.conformance.support import run_case
from tests.support import cpu

OPS = (CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE)
Kernel = Callable[..., Tensor]


def on(op: CanonicalOp, kernel: Kernel) -> dict[str, list[str]]:
    """Return why the cases of an implementation fail, by their last word."""
    device = cpu(ops=(OpImplementation(op=op.qualified_name, name="planted", fn=kernel),))
    found = [*collect.collect(device, ConformanceProfile()), *long_states.collect(device, ConformanceProfile())]
    cases = {case.id.rpartition("/")[2]: case for case in found if case.id.startswith(f"ops/{op.name}/planted/")}
    return {name: run_case(cases[name], device) for name in ("float32", f"{long_states.NUM_STEPS}-steps")}


def named(op: CanonicalOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(op.bind(args, kwargs).args)


def with_fault(op: CanonicalOp, fault: Callable[[dict[str, Any], dict[str, Any]], None]) -> Kernel:
    """Return the reference, with a fault in the states: it gets the call before and after."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        call = named(op, args, kwargs)
        before = {**call, "states": call["states"].clone()}
        out: Tensor = op.reference(**call)
        fault(before, call)
        return out

    return kernel


def kept(call: dict[str, Any]) -> Any:
    places = call["kept"] if call["kept"] is not None else call["slots"]
    return slice(None) if places is None else places


def stale(before: dict[str, Any], after: dict[str, Any]) -> None:
    after["states"].copy_(before["states"])


def of_another(before: dict[str, Any], after: dict[str, Any]) -> None:
    after["states"][kept(after)] = after["states"][kept(after)].roll(1, 0)


def not_shifted(before: dict[str, Any], after: dict[str, Any]) -> None:
    after["states"][kept(after), :, :-1] = before["states"][kept(after), :, :-1]


def read_slot_written(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Write the state that was read, too."""
    if after["slots"] is not None and len(after["slots"]):
        after["states"][after["slots"]] = after["states"][kept(after)]


def narrow(before: dict[str, Any], after: dict[str, Any]) -> None:
    after["states"][kept(after)] = after["states"][kept(after)].half().to(after["states"].dtype)


FAULTS = [
    (CAUSAL_CONV1D_UPDATE, not_shifted),
    *((CAUSAL_CONV1D_UPDATE, fault) for fault in (stale, of_another, read_slot_written)),
    (GATED_DELTA_RULE, stale),
    (SELECTIVE_STATE_UPDATE, of_another),
    (GATED_DELTA_RULE, narrow),
    (SELECTIVE_STATE_UPDATE, narrow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "fault"), FAULTS, ids=[f"{op.name}-{fault.__name__}" for op, fault in FAULTS])
def test_faults_of_states_are_rejected(op: CanonicalOp, fault: Callable[..., None]) -> None:
    reasons = on(op, with_fault(op, fault))
    assert any("states" in reason for reason in reasons["float32"]), reasons


def one_sequence(call: dict[str, Any]) -> None:
    """Let the first sequence have the rows of all."""
    call["query_starts"] = call["query_starts"].clone()
    call["query_starts"][1:] = call["query_starts"][-1]


def from_nothing(call: dict[str, Any]) -> None:
    """Let each sequence begin without a state."""
    if call["slots"] is not None:
        call["states"][call["slots"]] = 0


def a_row_late(call: dict[str, Any]) -> None:
    """Let each sequence begin a row late, where it has one."""
    starts = call["query_starts"]
    call["query_starts"] = torch.cat((torch.minimum(starts[:-1] + 1, starts[1:]), starts[-1:]))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("fault", [one_sequence, from_nothing, a_row_late])
def test_faults_of_prompts_alone_are_rejected(op: CanonicalOp, fault: Callable[[dict[str, Any]], None]) -> None:
    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        call = named(op, args, kwargs)
        if call["query_starts"] is not None:
            fault(call)
        out: Tensor = op.reference(**call)
        return out

    reasons = on(op, kernel)
    assert any("sequences" in reason or "prompts" in reason for reason in reasons["float32"]), reasons
    assert not reasons[f"{long_states.NUM_STEPS}-steps"]


def no_bounds(call: dict[str, Any]) -> None:
    call |= {"dt_min": 0.0, "dt_max": 0.0}


def bounds_of_all(call: dict[str, Any]) -> None:
    call["bounded"] = None


def other_rows(call: dict[str, Any]) -> None:
    call["bounded"] = None if call["bounded"] is None else call["bounded"].roll(1)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [no_bounds, bounds_of_all, other_rows])
def test_faults_of_bounds_are_rejected(fault: Callable[[dict[str, Any]], None]) -> None:
    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        call = named(SELECTIVE_STATE_UPDATE, args, kwargs)
        fault(call)
        out: Tensor = SELECTIVE_STATE_UPDATE.reference(**call)
        return out

    reasons = on(SELECTIVE_STATE_UPDATE, kernel)
    assert any("bounded" in reason for reason in reasons["float32"]), reasons


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_honest_implementation_passes(op: CanonicalOp) -> None:
    reasons = on(op, lambda *args, **kwargs: op.reference(*args, **kwargs))
    assert set(map(tuple, reasons.values())) == {()}, reasons


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS[1:], ids=lambda op: op.name)
def test_drift_shows_after_thousands_of_steps_only(op: CanonicalOp) -> None:
    """A decay that is off by a rounding in some places is within the bounds of one call."""

    def drifting(before: dict[str, Any], after: dict[str, Any]) -> None:
        if (
            after["query_starts"] is None and len(after["states"][kept(after)]) > 1
        ):  # one row has too few numbers to hide it
            after["states"][kept(after), ..., ::4] *= 1 + 2.0**-23

    reasons = on(op, with_fault(op, drifting))
    assert not reasons["float32"] and reasons[f"{long_states.NUM_STEPS}-steps"], reasons
