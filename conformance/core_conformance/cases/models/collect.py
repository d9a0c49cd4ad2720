"""Level 3: whole models of transformers through the engine, judged against transformers' own eager model and fp64.

The cases of one model and dtype stand together and share one engine and its references: the runner hands neighbouring
ids to one worker. Each looks at one aspect, so that a report says what broke; any of them also runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec

import torch

from core.common.conformance import ConformanceProfile
from core.device import Device
from core.host.distributions.installing import pip_install
from core_conformance.case import Case
from core_conformance.cases.models import numbers, promises
from core_conformance.cases.models.runs import Bench, bench
from core_conformance.cases.models.zoo import SUBJECTS, Subject
from core_conformance.dtypes import dtype_name
from core_conformance.trial import Skip, Trial

Aspect = Callable[[Trial, Bench], None]

ASPECTS: dict[str, tuple[str, Aspect]] = {
    "logits": ("logits of prefill and decode by T1 against fp64, the eager model's by T2", numbers.logits),
    "tokens": ("greedy tokens by T3", numbers.tokens),
    "divergence": ("distributions over the next token: KL from fp64 against eager's", numbers.divergence),
    "batch": ("requests that come, go, wait and are aborted get the tokens of running alone", numbers.batch),
    "modes": ("logits by T1 in every mode that the device declares, and without graphs", numbers.modes),
    "graphs": ("graphs are replayed, and equal the callables they were captured from", promises.graphs),
    "determinism": ("equal runs give equal tokens and equal bits", promises.determinism),
    "passes": ("the lifts fire, and change no number", promises.passes),
}
RELEASED = ("gpt_neox", "falcon")
"""Models whose engine is opened and closed for its memory: one of each cache."""
TIMEOUT_S, COMPILED_TIMEOUT_S = 240.0, 900.0
"""A compiler may take minutes for a whole model on a slow machine."""


def collect(device: Device, profile: ConformanceProfile) -> Iterable[Case]:
    """Yield the cases of this area, those that share an engine next to each other."""
    for subject in SUBJECTS:
        for dtype in subject.dtypes:
            for aspect, (what, _) in ASPECTS.items():
                # Mistakes of passes show best in fp32.
                if (aspect != "passes" or dtype == "float32") and (aspect != "modes" or subject.modes):
                    yield _case(device, subject, dtype, aspect, what)
            if subject.name in RELEASED and dtype == "float32":
                yield _case(device, subject, dtype, "release", "closing an engine gives back all that it took")


def _case(device: Device, subject: Subject, dtype: str, aspect: str, what: str) -> Case:
    lowering = subject.lowering(dtype) if aspect != "release" else "inline"
    described = f"lowering {lowering!r}" if lowering else f"the device's default lowering, {device.lowerings.default!r}"
    return Case(
        id=f"models/{subject.name}/{dtype}/{aspect}",
        what=f"{what} ({subject.adds}; {described})",
        run=partial(run_aspect, subject=subject, dtype=dtype, aspect=aspect),
        not_supported=_refusal(device, dtype, aspect),
        timeout_s=TIMEOUT_S if lowering else COMPILED_TIMEOUT_S,
        exclusive=aspect == "release",
    )


def _refusal(device: Device, dtype: str, aspect: str) -> str:
    able = device.capabilities
    if getattr(torch, dtype) not in able.dtypes:
        known = ", ".join(sorted(map(dtype_name, able.dtypes)))
        return f"the device computes in {known}"
    if aspect == "graphs" and not set(able.modes) - {"off"}:
        return "the device declares no mode but 'off'"
    if aspect == "passes" and not set(able.modes) - {"off", "segmented"}:
        return "the device declares no mode in which a model is traced"
    return ""


def run_aspect(trial: Trial, subject: Subject, dtype: str, aspect: str) -> None:
    """Run one aspect of a model; raises `Skip` where transformers is not installed."""
    if find_spec("transformers") is None:
        raise Skip(f"transformers is not installed; {pip_install('hf')}")
    if aspect == "release":
        promises.release(trial, subject, dtype)
        return
    ASPECTS[aspect][1](trial, bench(trial, subject, dtype))
