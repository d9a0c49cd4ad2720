"""Area "torch": the device's own torch operators, which all further criteria take for their yardstick.

T2: a device's operator may have four times the error of the formula computed on the host in fp32. What only moves or
selects has to be exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.ops.arguments import Draw
from core.device import Device
from core_conformance.case import Case
from core_conformance.inputs.movement import CASTS, COUNTING, MOVING, Mover, cast_values, rounded
from core_conformance.inputs.operators import ROUNDING, Operator
from core_conformance.rules.judging import by_t2
from core_conformance.trial import Trial

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Return the cases of this area for a device."""
    for operator in ROUNDING:
        for dtype in operator.dtypes:
            run = partial(judge_operator, operator=operator, dtype=dtype)
            yield _case(device, operator.name, (dtype,), "T2: computes as well as its formula on the host", run)
    for mover in MOVING:
        for dtype in DTYPES:
            run = partial(judge_mover, mover=mover, dtype=dtype)
            yield _case(device, mover.name, (dtype,), "gives the one right answer", run)
    for mover in COUNTING:
        run = partial(judge_mover, mover=mover, dtype=torch.int64)
        yield Case(id=f"torch/{mover.name}/integers", what=f"{mover.name}: gives the one right answer", run=run)
    for given, wanted in CASTS:
        run = partial(judge_cast, given=given, wanted=wanted)
        yield _case(device, f"cast/{_short(given)}", (wanted, given), "rounds to nearest, halves to even", run)


def _case(device: Device, name: str, dtypes: tuple[torch.dtype, ...], what: str, run: partial[None]) -> Case:
    """Return a case named after the first dtype."""
    absent = [_short(dtype) for dtype in dtypes if dtype not in device.capabilities.dtypes]
    reason = f"the device declares no arithmetic in {absent[0]}" if absent else ""
    return Case(id=f"torch/{name}/{_short(dtypes[0])}", what=f"{name}: {what}", run=run, not_supported=reason)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def judge_operator(trial: Trial, *, operator: Operator, dtype: torch.dtype) -> None:
    """Judge an operator by T2 on each of its inputs."""
    inputs = operator.inputs(Draw(dtype, torch.device("cpu"), seed=trial.seed))
    for name, tensors in inputs.items():
        with torch.no_grad():
            result = operator.call(*(tensor.to(trial.device.torch_device) for tensor in tensors))
        trial.device.synchronize()
        wide = torch.float64 if operator.once else torch.float32
        exact = operator.formula(*_as(tensors, torch.float64))
        host = (exact if operator.once else operator.formula(*_as(tensors, wide))).to(dtype)
        by_t2(trial, name or "result", result, host, lambda value=exact: value)  # type: ignore[misc]


def judge_mover(trial: Trial, *, mover: Mover, dtype: torch.dtype) -> None:
    """Require the very bits that the answer in plain Python has."""
    tensors = mover.inputs(Draw(dtype, torch.device("cpu"), seed=trial.seed))
    with torch.no_grad():
        result = mover.call(*(tensor.to(trial.device.torch_device) for tensor in tensors))
    trial.device.synchronize()
    wanted = torch.tensor(mover.lists(*(tensor.tolist() for tensor in tensors)), dtype=mover.result or dtype)
    trial.same("result", result, wanted)


def judge_cast(trial: Trial, *, given: torch.dtype, wanted: torch.dtype) -> None:
    """Require of each number the nearest one of the wanted dtype."""
    values = [rounded(value, given) for value in cast_values()]
    result = torch.tensor(values, dtype=torch.float64).to(given).to(trial.device.torch_device).to(wanted)
    trial.device.synchronize()
    trial.same("result", result, torch.tensor([rounded(value, wanted) for value in values], dtype=wanted))


def _as(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(dtype) for tensor in tensors]
