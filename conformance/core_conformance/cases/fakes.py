"""Area "fakes": fake kernels against real ones, of canonical ops, their implementations, and foreign libraries.

Tracing believes fakes: a wrong shape, stride or alias among them gives a graph that computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from core.common.conformance import ConformanceProfile
from core.common.fakes import FakeOp, FakeResult
from core.common.fakes.schema import find_overload, mutated, shared
from core.common.ops.declaration import CanonicalOp, Sample
from core.common.ops.implementation import OpImplementation
from core.device import Device
from core.verify.execution import error_line
from core.verify.fakes.parity import alias_problems, sharing
from core_conformance.case import COMPILED_TIMEOUT_S, Case
from core_conformance.cases.ops.collect import judged_ops, slug
from core_conformance.dtypes import declared_dtypes, dtype_name
from core_conformance.inputs.opcalls import calls, positional, refusal
from core_conformance.rules import oracle
from core_conformance.rules.contract import check_metadata, check_writes
from core_conformance.rules.opcheck import Recorder, check, check_recorded
from core_conformance.rules.oracle import faked, leaves, with_real_sizes
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
                    timeout_s=COMPILED_TIMEOUT_S,
                )
    yield from _foreign(device)


def _foreign(device: Device) -> Iterator[Case]:
    """Yield a case for each declared fake; for a library that is not there, one case for all of its fakes."""
    libraries: dict[str, list[tuple[FakeOp, FakeResult]]] = {}
    for fake, result in device.fakes:
        if fake.rule is None:  # the library brings its own fake
            continue
        libraries.setdefault(fake.op.partition("::")[0], []).append((fake, result))
    for library, declared in libraries.items():
        if len(declared) > 1 and not any(find_overload(fake.op) for fake, _ in declared):
            yield Case(
                id=f"fakes/foreign/{slug(library)}",
                what=f"the {len(declared)} fake kernels declared for {library} are true of the real ones",
                run=partial(judge_foreign, fake=declared[0][0]),
                not_supported=f"op library {library} is not loaded here",
            )
            continue
        for fake, result in declared:
            yield Case(
                id=f"fakes/foreign/{slug(fake.op.replace('::', '.'))}",
                what=f"the fake kernel declared for {fake.op} is true of the real one",
                run=partial(judge_foreign, fake=fake),
                not_supported="" if find_overload(fake.op) else result.reason or "not installed here",
            )


def judge_canonical(trial: Trial, *, op: CanonicalOp) -> None:
    """Compare fake and real op on every call; let torch check schema and fake on the declared samples."""
    for dtype, sample in _calls(trial, op):
        _compare(trial, f"{sample.name}, {dtype_name(dtype)}", op.overload, sample.kwargs, _of_canonical(op))
    for sample in op.samples(declared_dtypes(trial.device)[0], trial.device.torch_device):
        # Symbolic shapes do not depend on the device.
        check(trial, sample.name, op.overload, *positional(op, sample.kwargs), dynamic=False)


def judge_traced(trial: Trial, *, op: CanonicalOp, of: OpImplementation) -> None:
    """Compare an implementation on fake and on real tensors, and let torch check the custom ops that it calls."""
    if of.missing:
        raise NotSupported(of.missing)
    reasons: dict[str, None] = {}
    recorder, admitted = Recorder(), 0
    for dtype, sample in _calls(trial, op):
        try:
            reason = refusal(op, of.condition, sample.kwargs)
        except Exception:  # area "ops" reports this error
            continue
        if reason is not None:
            reasons.setdefault(reason)
            continue
        admitted += 1
        _compare(trial, f"{sample.name}, {dtype_name(dtype)}", of.fn, sample.kwargs, _of_canonical(op), recorder)
    if not admitted:
        raise NotSupported("; ".join(reasons) or "its condition raises on every call")
    check_recorded(trial, recorder.calls)
    if recorder.calls:
        trial.note(f"custom ops checked: {', '.join(recorder.calls)}")


def judge_foreign(trial: Trial, *, fake: FakeOp) -> None:
    """Compare a foreign op and its fake on the samples that the plugin gives with it.

    An op without a kernel for this device, which is torch's `NotImplementedError` on every sample or for the making of
    them, is not supported; one that has a kernel and refuses some of the samples fails.
    """
    overload = find_overload(fake.op)
    if overload is None:
        raise NotSupported(f"op {fake.op} is not installed here")
    try:
        given = [] if fake.samples is None else list(fake.samples(trial.device.torch_device))
    except NotImplementedError as error:
        raise NotSupported(error_line(error)) from error
    if not given:
        trial.fail(f"the fake of {fake.op} can't be checked: give FakeOp.samples")
        return
    refused: dict[str, str] = {}
    untraced = _why_untraced(fake, overload)
    for index, sample in enumerate(given):
        try:
            _compare(trial, sample.name, overload, sample.kwargs, _of_overload(overload))
        except NotImplementedError as error:
            refused[sample.name] = error_line(error)
            continue
        check(trial, sample.name, overload, (), sample.kwargs, dynamic=not index and not untraced)
    if len(refused) == len(given):
        raise NotSupported(next(iter(refused.values())))
    trial.fail(*(f"{name}: raises {reason}" for name, reason in refused.items()))
    if untraced:
        trial.note(f"not run in a traced graph: {untraced}")


def _why_untraced(fake: FakeOp, op: OpOverload) -> str:
    """Return why torch can't check a traced call of an op, "" where it can."""
    if fake.unwritten:
        return "its results are memory that it leaves as it was"
    given_back = any(each.alias_info is not None for each in op._schema.returns)
    if given_back and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Functionalize"):
        return "torch functionalizes no op that returns its arguments, unless the library does it itself"
    return ""


@dataclass(frozen=True, slots=True)
class _Contract:
    """The declarations of a schema that a real call must keep."""

    #: Arguments that the op may write.
    mutates: tuple[str, ...]
    #: Number of results -> which of them may share memory with which argument.
    shares: Callable[[int], frozenset[tuple[int, str]]]
    #: Whether its results may share memory with each other, if the fake's do; those of canonical ops never do.
    foreign: bool
    #: Converts arguments by name to the arguments of a call.
    spread: Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def _of_canonical(op: CanonicalOp) -> _Contract:
    return _Contract(op.mutates, lambda num_results: frozenset(), False, partial(positional, op))


def _of_overload(op: OpOverload) -> _Contract:
    shares = partial(shared, op._schema)
    return _Contract(mutated(op._schema), shares, True, lambda kwargs: ((), dict(kwargs)))


def _compare(
    trial: Trial,
    name: str,
    function: Callable[..., Any],
    before: Mapping[str, Any],
    contract: _Contract,
    recorder: Recorder | None = None,
) -> None:
    """Require of a real call what the same call on fakes says, and that it writes and shares nothing undeclared.

    Raises NotImplementedError where a foreign op does.
    """
    after = oracle.own(before)
    args, kwargs = contract.spread(after)
    try:
        with torch.no_grad(), recorder or nullcontext():
            results = leaves(function(*args, **kwargs))
        trial.device.synchronize()
    except Exception as error:
        if contract.foreign and isinstance(error, NotImplementedError):
            raise
        trial.fail(f"{name}: raises {error_line(error)}")
        return
    mode, given = faked(dict(before), sized_by_values=contract.foreign)
    args, kwargs = contract.spread(given)
    try:
        with torch.no_grad(), mode:
            fakes = leaves(function(*args, **kwargs))
    except Exception as error:
        trial.fail(f"{name}: runs on real tensors and raises on fake ones: {error_line(error)}")
        return
    if contract.foreign and len(results) == len(fakes):
        wanted = [with_real_sizes(*pair) for pair in zip(results, fakes, strict=True)]
    else:
        wanted = fakes
    check_metadata(trial, name, results, wanted)
    check_writes(trial, name, contract.mutates, before, after)
    if len(results) == len(fakes):
        pair = sharing(results, after), sharing(fakes, given)
        problems = alias_problems(*pair, contract.shares(len(results)), fake_decides=contract.foreign)
        trial.fail(*(f"{name}: {problem}" for problem in problems))


def _calls(trial: Trial, op: CanonicalOp) -> Iterator[tuple[torch.dtype, Sample]]:
    for dtype in declared_dtypes(trial.device):
        for sample in calls(op, dtype, trial.device.torch_device, trial.seed):
            yield dtype, sample
