"""Area "torch": the device's own torch operators, which are the yardstick of all further criteria.

T2: a device's operator may have four times the error of the formula computed on the host in fp32. An operator that only
moves or selects has to be exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.ops.arguments import Draw
from core.device import Device
from core_conformance.case import Case
from core_conformance.dtypes import DTYPES, dtype_name, refused_dtype
from core_conformance.inputs.casts import CASTS, cast_values, rounded
from core_conformance.inputs.movement import COUNTING, MOVING, Mover
from core_conformance.inputs.operators import ROUNDING, Operator
from core_conformance.rules.judging import by_t2
from core_conformance.rules.oracle import run_fake
from core_conformance.trial import Trial


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
        yield _case(device, f"cast/{dtype_name(given)}", (wanted, given), "rounds to nearest, halves to even", run)


def _case(device: Device, name: str, dtypes: tuple[torch.dtype, ...], what: str, run: partial[None]) -> Case:
    """Return a case named after the first dtype."""
    reason = next(filter(None, (refused_dtype(device, dtype) for dtype in dtypes)), "")
    return Case(id=f"torch/{name}/{dtype_name(dtypes[0])}", what=f"{name}: {what}", run=run, not_supported=reason)


def judge_operator(trial: Trial, *, operator: Operator, dtype: torch.dtype) -> None:
    """Judge an operator by T2 on each of its inputs."""
    inputs = operator.inputs(Draw(dtype, torch.device("cpu"), seed=trial.seed))
    for name, tensors, given in _laid_out(trial, inputs):
        with torch.no_grad():
            result = operator.call(*given)
        trial.device.synchronize()
        if not _is_where_it_belongs(trial, name, result, operator.call, given):
            continue
        exact = operator.formula(*_as(tensors, torch.float64))
        host = (exact if operator.once else operator.formula(*_as(tensors, torch.float32))).to(dtype)
        by_t2(trial, name, result, host, lambda value=exact: value)  # type: ignore[misc]


def judge_mover(trial: Trial, *, mover: Mover, dtype: torch.dtype) -> None:
    """Require the same bits as the answer in plain Python."""
    tensors = mover.inputs(Draw(dtype, torch.device("cpu"), seed=trial.seed))
    wanted = torch.tensor(mover.lists(*(tensor.tolist() for tensor in tensors)), dtype=mover.result or dtype)
    for name, _, given in _laid_out(trial, {"": tensors}, dense=mover.dense):
        with torch.no_grad():
            result = mover.call(*given)
        trial.device.synchronize()
        if _is_where_it_belongs(trial, name, result, mover.call, given):
            trial.same(name, result, wanted)


def judge_cast(trial: Trial, *, given: torch.dtype, wanted: torch.dtype) -> None:
    """Require of each number the nearest one of the wanted dtype."""
    values = [rounded(value, given) for value in cast_values()]
    source = torch.tensor(values, dtype=torch.float64).to(given).to(trial.device.torch_device)
    result = source.to(wanted)
    trial.device.synchronize()
    if not _is_where_it_belongs(trial, "result", result, lambda x: x.to(wanted), [source]):
        return
    trial.same("result", result, torch.tensor([rounded(value, wanted) for value in values], dtype=wanted))


def _laid_out(
    trial: Trial, inputs: Mapping[str, tuple[Tensor, ...]], *, dense: bool = False
) -> Iterator[tuple[str, tuple[Tensor, ...], list[Tensor]]]:
    """Yield the name of each input, its tensors, and these on the device: as they are, and with their columns in memory
    where their rows were. dense: only as they are."""
    for name, tensors in inputs.items():
        given = [tensor.to(trial.device.torch_device) for tensor in tensors]
        yield name or "result", tensors, given
        if not dense and any(tensor.dim() > 1 for tensor in given):
            columns = [tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for tensor in given]
            yield f"{name}, by columns" if name else "by columns", tensors, columns


def _is_where_it_belongs(
    trial: Trial, name: str, result: Tensor, call: Callable[..., Tensor], given: Sequence[Tensor]
) -> bool:
    """Require of a result the device, shape, dtype and strides that torch's fake of the call has; tell whether it has.

    It may be contiguous instead on a device that says so of its results.

    A result in the host's memory has the right values, and each operator after it runs on the host as well, or raises
    where it meets a tensor of the device.
    """
    with torch.no_grad():
        fake = run_fake(call, tuple(given), {})
        if not trial.device.capabilities.keeps_strides and result.is_contiguous():
            fake = torch.empty_like(fake, memory_format=torch.contiguous_format)
    before = len(trial.failures)
    belongs = result.device.type == trial.device.torch_device.type
    told = f"{name}: it lies on {str(result.device)!r}, its arguments on {str(trial.device.torch_device)!r}"
    if trial.require(belongs, told):
        trial.same_metadata(f"{name}, against torch's fake", result, fake)
    return len(trial.failures) == before


def _as(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(dtype) for tensor in tensors]
