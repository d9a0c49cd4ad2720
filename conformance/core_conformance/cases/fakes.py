"""Area "fakes": fake kernels against real ones, of canonical ops, of what implements them, and of foreign libraries.

Tracing believes fakes: a wrong shape, stride or alias among them gives a graph that computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from core.common.conformance import ConformanceProfile
from core.common.fakes import FakeOp, FakeResult
from core.common.ops.declaration import CanonicalOp, Sample
from core.common.ops.implementation import OpImplementation
from core.common.verification.execution import error_line
from core.device import Device
from core_conformance import oracle
from core_conformance.case import Case
from core_conformance.cases.ops import DTYPES, judged_ops, slug
from core_conformance.contract import check_aliasing, check_metadata, check_writes
from core_conformance.faked import leaves, run_fake
from core_conformance.opcalls import calls, positional, refusal
from core_conformance.opcheck import Recorder, check, check_recorded
from core_conformance.trial import NotSupported, Trial


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Return the cases of this area for a device."""
    for op in judged_ops(device):
        yield Case(
            id=f"fakes/{op.name}/reference",
            what=f"core::{op.name}: its fake and schema are true of it",
            run=partial(judge_canonical, op=op),
        )
        for each in device.ops:
            if each.op == op.qualified_name:
                yield Case(
                    id=f"fakes/{op.name}/{slug(each.name)}",
                    what=f"{each.name!r} can be traced, and so can the custom ops it calls",
                    run=partial(judge_traced, op=op, of=each),
                )
    for fake, result in device.fakes:
        yield Case(
            id=f"fakes/foreign/{slug(fake.op.replace('::', '.'))}",
            what=f"the fake kernel declared for {fake.op} is true of the real one",
            run=partial(judge_foreign, fake=fake),
            not_supported="" if _overload(fake) else _absent(result),
        )


def judge_canonical(trial: Trial, *, op: CanonicalOp) -> None:
    """Compare fake and real op on every call; let torch check schema and fake on the declared samples."""
    for dtype, sample in _calls(trial, op):
        _compare(trial, f"{sample.name}, {_short(dtype)}", op.overload, sample.kwargs, _of_canonical(op))
    for sample in op.samples(_dtypes(trial)[0], trial.device.torch_device):
        # Symbolic shapes are no matter of the device.
        check(trial, sample.name, op.overload, *positional(op, sample.kwargs), dynamic=False)


def judge_traced(trial: Trial, *, op: CanonicalOp, of: OpImplementation) -> None:
    """Compare an implementation on fake and on real tensors, and let torch check the custom ops that it calls."""
    reasons: dict[str, None] = {}
    recorder, admitted = Recorder(), 0
    for dtype, sample in _calls(trial, op):
        try:
            reason = refusal(op, of.condition, sample.kwargs)
        except Exception:  # area "ops" reports it
            continue
        if reason is not None:
            reasons.setdefault(reason)
            continue
        admitted += 1
        _compare(trial, f"{sample.name}, {_short(dtype)}", of.fn, sample.kwargs, _of_canonical(op), recorder)
    if not admitted:
        raise NotSupported("; ".join(reasons) or "its condition raises on every call")
    check_recorded(trial, recorder.calls)
    if recorder.calls:
        trial.note(f"custom ops checked: {', '.join(recorder.calls)}")


def judge_foreign(trial: Trial, *, fake: FakeOp) -> None:
    """Compare a foreign op and its fake on the samples that the plugin gives with it."""
    overload = _overload(fake)
    if overload is None:
        raise NotSupported(f"op {fake.op} is not installed here")
    given = [] if fake.samples is None else list(fake.samples(trial.device.torch_device))
    if not given:
        trial.require(False, f"the fake of {fake.op} can't be checked: give FakeOp.samples")
        return
    for index, sample in enumerate(given):
        _compare(trial, sample.name, overload, sample.kwargs, _of_overload(overload))
        check(trial, sample.name, overload, (), sample.kwargs, dynamic=not index)


@dataclass(frozen=True, slots=True)
class _Contract:
    """What a schema says. mutates: arguments it may write; fresh: no result shares memory with an argument.

    spread: arguments by name -> arguments as the op is called with.
    """

    mutates: tuple[str, ...]
    fresh: bool
    spread: Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def _of_canonical(op: CanonicalOp) -> _Contract:
    return _Contract(op.mutates, True, partial(positional, op))


def _of_overload(op: OpOverload) -> _Contract:
    arguments, returns = op._schema.arguments, op._schema.returns
    mutates = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    fresh = all(result.alias_info is None for result in returns)
    return _Contract(mutates, fresh, lambda kwargs: ((), dict(kwargs)))


def _compare(
    trial: Trial,
    name: str,
    function: Callable[..., Any],
    before: Mapping[str, Any],
    contract: _Contract,
    recorder: Recorder | None = None,
) -> None:
    """Require of a real call what the same call on fakes says, and that it writes and shares nothing undeclared."""
    after = oracle.own(before)
    args, kwargs = contract.spread(after)
    try:
        with torch.no_grad(), recorder or nullcontext():
            results = leaves(function(*args, **kwargs))
        trial.device.synchronize()
    except Exception as error:
        trial.require(False, f"{name}: raises {error_line(error)}")
        return
    try:
        fakes = leaves(run_fake(function, *contract.spread(before)))
    except Exception as error:
        trial.require(False, f"{name}: runs on real tensors and raises on fake ones: {error_line(error)}")
        return
    check_metadata(trial, name, results, fakes)
    check_writes(trial, name, contract.mutates, before, after)
    if contract.fresh:
        check_aliasing(trial, name, results, after)


def _calls(trial: Trial, op: CanonicalOp) -> Iterator[tuple[torch.dtype, Sample]]:
    for dtype in _dtypes(trial):
        for sample in calls(op, dtype, trial.device.torch_device, trial.seed):
            yield dtype, sample


def _dtypes(trial: Trial) -> list[torch.dtype]:
    return [dtype for dtype in DTYPES if dtype in trial.device.capabilities.dtypes]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _overload(fake: FakeOp) -> OpOverload | None:
    """Return the op that a fake is declared for, None where its library is not installed."""
    library, _, name = fake.op.partition("::")
    packet = getattr(getattr(torch.ops, library), name, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    overload: OpOverload = getattr(packet, packet.overloads()[0])
    return overload


def _absent(result: FakeResult) -> str:
    return result.reason or "not installed here"
