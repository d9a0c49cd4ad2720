"""Area "fuzz", on request: canonical ops on random shapes, strides and options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from core.common.conformance import ConformanceProfile
from core.common.ops.declaration import CanonicalOp, Sample
from core.common.ops.implementation import OpImplementation
from core.device import Device
from core_conformance.case import COMPILED_TIMEOUT_S, Case
from core_conformance.cases.ops.collect import candidates, judge_call, judged_ops, slug
from core_conformance.dtypes import DTYPES, dtype_name, refused_dtype
from core_conformance.fuzzing import CALLS
from core_conformance.fuzzing.running import described, pass_over, run_examples
from core_conformance.fuzzing.source import Source
from core_conformance.inputs.opcalls import refusal
from core_conformance.trial import NotSupported, Trial

if TYPE_CHECKING:
    from hypothesis.strategies import DataObject

_MAX_REASONS = 5


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Return the cases of this module for a device."""
    for op in judged_ops(device):
        for name, candidate in {"reference": None, **candidates(op, device)}.items():
            for dtype in DTYPES[:2]:
                yield Case(
                    id=f"fuzz/{op.name}/{slug(name)}/{dtype_name(dtype)}",
                    what=f"core::{op.name}: {name} on random shapes, strides and options",
                    run=partial(_fuzz, op=op, of=candidate, dtype=dtype),
                    not_supported=refused_dtype(device, dtype),
                    timeout_s=COMPILED_TIMEOUT_S,
                )


def _fuzz(trial: Trial, *, op: CanonicalOp, of: OpImplementation | None, dtype: torch.dtype) -> None:
    """Judge random calls; of: the implementation, None for the reference against the host's."""
    if op.qualified_name not in CALLS:
        raise NotSupported("no strategy draws calls of this op: it is the plugin's own, or needs further processes")
    refused: Counter[str] = Counter()

    def example(data: DataObject, own: Trial) -> None:
        kwargs = CALLS[op.qualified_name](Source(data.draw, dtype, own.device.torch_device))
        own.note(f"{op.name}({described(kwargs)})")
        reason = None if of is None else refusal(op, of.condition, kwargs)
        if reason is not None:
            refused[reason] += 1
            pass_over()
        function, slack = (op.reference, 1.0) if of is None else (of.fn, of.slack)
        judge_call(own, op, Sample(name="the call", kwargs=kwargs), function, host=of is None, slack=slack)

    count = run_examples(trial, example)
    trial.note(*(f"{times} calls refused: {reason}" for reason, times in refused.most_common(_MAX_REASONS)))
    if not count:
        raise NotSupported("; ".join(reason for reason, _ in refused.most_common(_MAX_REASONS)))
