"""Area "ops": canonical ops on the device, and the device's implementations of them, each against the op's reference.

The cases come from the declarations of ops and implementations; a plugin writes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch

from core.common.conformance import ConformanceProfile
from core.common.ops.canonical import OPS
from core.common.ops.declaration import CanonicalOp, Sample, declared_ops
from core.common.ops.implementation import OpImplementation
from core.device import Device
from core.verify.execution import error_line
from core.verify.fakes.memory import same_bits
from core_conformance.case import COMPILED_TIMEOUT_S, Case
from core_conformance.dtypes import DTYPES, declared_dtypes, dtype_name, refused_dtype
from core_conformance.inputs.opcalls import calls, positional, refusal
from core_conformance.rules import contract, oracle
from core_conformance.rules.choices import judge_route, judge_sample
from core_conformance.rules.codes import judge_asymmetric, judge_coded, judge_fp4, judge_quantized
from core_conformance.rules.judging import Judge, Judged, by_t1, by_t2, each_value
from core_conformance.rules.oracle import leaves, run_fake
from core_conformance.trial import NotSupported, Trial

"""fp32 decides whether an algorithm is right, half precision how it rounds."""

RULES: Mapping[str, Callable[[Trial, Judged], None]] = MappingProxyType(
    dict.fromkeys(("rms_norm_quantize", "add_rms_norm_quantize", "gated_activation_quantize"), judge_coded)
    | dict.fromkeys(("attention_quantize", "rotary_attention_quantize"), judge_coded)
    | {"all_reduce_add_rms_norm_quantize": judge_coded}
    | dict.fromkeys(("quantize_fp4", "all_reduce_add_rms_norm_quantize_fp4"), judge_fp4)
    | {"quantize_asymmetric": judge_asymmetric}
    | {"quantize": judge_quantized, "moe_route": judge_route, "sample": judge_sample}
)
"""Ops whose results are not judged value by value."""


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Return the cases of this area for a device."""
    for op in judged_ops(device):
        for dtype in DTYPES:
            runs = {"reference": ("T2: the reference computes as well as on the host", partial(judge_reference, op=op))}
            for name, candidate in candidates(op, device).items():
                runs[name] = (
                    f"{name!r} against the op's reference",
                    partial(judge_implementation, op=op, of=candidate),
                )
            for name, (what, run) in runs.items():
                yield Case(
                    id=f"ops/{op.name}/{slug(name)}/{dtype_name(dtype)}",
                    what=f"core::{op.name}: {what}",
                    run=partial(run, dtype=dtype),
                    not_supported=refused_dtype(device, dtype),
                    timeout_s=COMPILED_TIMEOUT_S,
                )


def judged_ops(device: Device) -> list[CanonicalOp]:
    """Return core's canonical ops, then those that the plugin declares itself, in order of its implementations."""
    foreign = dict.fromkeys(each.op for each in device.ops if each.op in declared_ops())
    return [*OPS, *(declared_ops()[name] for name in foreign if declared_ops()[name] not in OPS)]


def candidates(op: CanonicalOp, device: Device) -> dict[str, OpImplementation]:
    """Return by name what may replace an op: its form between graphs, and the device's implementations."""
    found = [each for each in device.ops if each.op == op.qualified_name]
    if op.eager is not None:
        found.insert(0, OpImplementation(op=op.qualified_name, name="eager", fn=op.eager))
    return {each.name: each for each in found}


def slug(name: str) -> str:
    """Return a name as ids have it: lower case, without spaces and slashes."""
    return "-".join(name.lower().replace("/", " ").split())


def judge_implementation(trial: Trial, *, op: CanonicalOp, of: OpImplementation, dtype: torch.dtype) -> None:
    """Judge every call that the implementation's condition admits.

    Raises `NotSupported` if it admits none, or if what the implementation needs is not installed.
    """
    if of.missing:
        raise NotSupported(of.missing)
    refused: dict[str, list[str]] = {}
    admitted = 0
    for sample in calls(op, dtype, trial.device.torch_device, trial.seed):
        try:
            reason = refusal(op, of.condition, sample.kwargs)
        except Exception as error:
            trial.fail(f"{sample.name}: the condition raised {error_line(error)}; it must return a reason")
            continue
        if reason is not None:
            refused.setdefault(reason, []).append(sample.name)
            continue
        admitted += 1
        judge_call(trial, op, sample, of.fn, slack=of.slack)
    if of.slack != 1:
        trial.note(f"it gives accuracy up and says so: judged with {of.slack:g} times eager's errors in each bound")
    for reason, names in refused.items():
        trial.note(f"{len(names)} calls refused: {reason} ({names[0]}{', …' if names[1:] else ''})")
    if admitted or trial.failures:
        return
    reasons = "; ".join(refused)
    if op.is_collective:
        raise NotSupported(f"{reasons}; the cases ops/processes judge it between processes")
    if not any(_admits(trial, op, of, other) for other in declared_dtypes(trial.device)):
        trial.fail(f"its condition takes none of the suite's calls, in any dtype of the device: {reasons}")
        return
    raise NotSupported(reasons)


def _admits(trial: Trial, op: CanonicalOp, of: OpImplementation, dtype: torch.dtype) -> bool:
    """Tell whether a condition takes any call of a dtype."""
    made = calls(op, dtype, trial.device.torch_device, trial.seed)
    return any(refusal(op, of.condition, sample.kwargs) is None for sample in made)


def judge_reference(trial: Trial, *, op: CanonicalOp, dtype: torch.dtype) -> None:
    """Judge the reference on the device against the reference in the host's memory."""
    for sample in calls(op, dtype, trial.device.torch_device, trial.seed):
        judge_call(trial, op, sample, op.reference, host=True)


def judge_call(
    trial: Trial,
    op: CanonicalOp,
    sample: Sample,
    function: Callable[..., Any],
    *,
    host: bool = False,
    slack: float = 1.0,
) -> None:
    """Judge one call against the reference on the device (T1, with the slack of an implementation), or in the host's
    memory (T2)."""
    name = sample.name
    args = oracle.own(sample.kwargs)
    try:
        results = _run(trial, op, function, args)
    except Exception as error:
        trial.fail(f"{name}: admitted, and then raises {error_line(error)}")
        return
    fakes = leaves(run_fake(op.overload, *positional(op, sample.kwargs)))
    if not contract.check_metadata(trial, name, results, fakes):
        return
    contract.check_writes(trial, name, op.mutates, sample.kwargs, args)
    contract.check_aliasing(trial, name, results, args)
    eager_args = (oracle.on_host if host else oracle.own)(sample.kwargs)
    with torch.no_grad():
        eager = leaves(op.reference(**eager_args))
    judge: Judge = by_t2 if host else partial(by_t1, slack=slack)
    exact = cache(lambda: oracle.exact(op.reference, sample.kwargs))
    uncoded = None if op.first is None else partial(_uncoded, op.first, sample.kwargs)
    judged = Judged(name, sample.kwargs, results, eager, lambda: leaves(exact()[0]), judge, uncoded)
    RULES.get(op.name, each_value)(trial, judged)
    for key in _written(op, args):
        start = contract.unread(op, sample.kwargs, key)
        mine, theirs = args[key][start:].cpu(), eager_args[key][start:].cpu()
        new = contract.computed(op, sample.kwargs, key)
        if new is not None:
            # Elements that it computes may be rounded differently; elements that it does not write must keep every bit.
            new = new[start:]
            judge(trial, f"{name}, {key}", mine[new], theirs[new], partial(_written_exactly, exact, key, start, new))
            mine, theirs = mine[~new], theirs[~new]
        trial.same(f"{name}, {key}", mine, theirs)
    if not {op.name, op.qualified_name} & trial.profile.nondeterministic_ops:
        _repeat(trial, op, sample, function, (results, args))


def _uncoded(first: CanonicalOp, kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first result of the op that a fused one begins with, of its reference and in fp64, on the CPU."""
    own = {each.name: kwargs[each.name] for each in first.overload._schema.arguments if each.name in kwargs}
    with torch.no_grad():
        eager = leaves(first.reference(**oracle.own(own)))[0]
    exact = leaves(oracle.exact(first.reference, own)[0])[0]
    return eager.cpu().double(), exact


def _written_exactly(exact: Callable[[], Any], key: str, start: int, chosen: torch.Tensor) -> torch.Tensor:
    """Return the chosen elements that the fp64 run writes into an argument."""
    written: torch.Tensor = exact()[1][key][start:][chosen]
    return written


def _repeat(
    trial: Trial, op: CanonicalOp, sample: Sample, function: Callable[..., Any], first: tuple[list[Any], dict[str, Any]]
) -> None:
    """Require the same bits of the same call once more."""
    args = oracle.own(sample.kwargs)
    pairs = list(zip(_run(trial, op, function, args), first[0], strict=True))
    for key in _written(op, args):
        start = contract.unread(op, sample.kwargs, key)
        pairs.append((args[key][start:], first[1][key][start:]))
    equal = all(same_bits(again, before) for again, before in pairs)
    trial.require(
        equal, f"{sample.name}: the same call twice gives other bits, and no one declares it nondeterministic"
    )


def _run(trial: Trial, op: CanonicalOp, function: Callable[..., Any], kwargs: dict[str, Any]) -> list[Any]:
    args, named = positional(op, kwargs)
    with torch.no_grad():
        results = leaves(function(*args, **named))
    trial.device.synchronize()
    return results


def _written(op: CanonicalOp, kwargs: Mapping[str, Any]) -> Iterator[str]:
    return (key for key in op.mutates if isinstance(kwargs.get(key), torch.Tensor))
