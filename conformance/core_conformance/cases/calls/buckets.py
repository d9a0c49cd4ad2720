"""Promises of calls: the right bucket, padding that stays out, and nothing replayed that was not captured for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.common.graphs.backend import GraphKey
from core.compilation.capture.inputs import InputSpec, Padding
from core.compilation.program import Program
from core.device import Device, Mode
from core.errors import CaptureError
from core_conformance.cases.calls.programs import BUCKETS, WIDTH, doubled, make, rows, rows_spec
from core_conformance.cases.graphs.promises import Promise
from core_conformance.trial import Trial, raised

LARGEST = BUCKETS[-1]
SENTINEL, KEPT = 7, 5


def buckets(trial: Trial, mode: Mode) -> None:
    """Call with every size, in no order; values tell the bucket, which shapes do not after slicing."""
    device = trial.device

    def decode(x: Tensor) -> tuple[Tensor, Tensor]:
        return doubled(x + 1) + x.shape[0], x.sum(0)

    def prefill(x: Tensor) -> tuple[Tensor, Tensor]:
        return doubled(x) - x.shape[0], -x.sum(0)

    phases = {"decode": BUCKETS, "prefill": [4, 8]}
    models: dict[str, Callable[..., Any]] = {"decode": decode, "prefill": prefill}
    with make(device, mode, models, buckets=phases) as program:
        order = [bucket.key.dims[0] for bucket in program.report().buckets if bucket.key.phase == "decode"]
        trial.same("sizes in order of capture", order, sorted(BUCKETS, reverse=True))
        counts: dict[GraphKey, int] = dict.fromkeys(program.keys, 0)
        for number, count in enumerate((3, 8, 1, 4, 2, 7, 5, 2, 6)):
            for phase, sizes in phases.items():
                key = GraphKey(phase, (min(size for size in sizes if size >= count),))
                counts[key] += 1
                _poison(program.inputs(program.keys[0]))
                x = rows(device, count, number)
                out, total = program(phase, x=x)
                sign = 1 if phase == "decode" else -1
                wanted = x * 2 + 2 + key.dims[0] if phase == "decode" else x * 2 - key.dims[0]
                trial.same(f"{count} rows of {phase}", out, wanted)
                trial.same(f"{count} rows of {phase}, their sum", total, sign * x.sum(0))
        trial.same("replays by key", dict(program.report().replays), counts)
        trial.same("calls without a graph", dict(program.report().fallbacks), {})


def _poison(buffers: Mapping[str, Tensor]) -> None:
    """Fill static buffers with what must not come through: NaN, or a number that is far off."""
    for buffer in buffers.values():
        buffer.fill_(float("nan") if buffer.is_floating_point() else 3)


def padding(trial: Trial, mode: Mode) -> None:
    """Call with fewer rows than the bucket has, after its buffers were poisoned; sums show what the padding held."""
    device = trial.device
    kinds: dict[str, Padding] = {"zero": "zero", "kept": "keep", "last": "edge"}
    inputs = {name: rows_spec(device, padding=kind) for name, kind in kinds.items()}
    inputs["marked"] = rows_spec(device, padding="sentinel", value=SENTINEL)

    def function(zero: Tensor, marked: Tensor, kept: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        mixed = doubled(zero + 1) + marked + kept + last
        return mixed, zero.sum(0), marked.sum(0), kept.sum(0), last.sum(0)

    with make(device, mode, function, inputs, buckets=BUCKETS) as program:
        for number, count in enumerate((5, 3, 8, 1, 6)):
            size = min(each for each in BUCKETS if each >= count)
            key = next(key for key in program.keys if key.dims == (size,))
            _poison(program.inputs(next(key for key in program.keys if key.dims == (LARGEST,))))
            program.inputs(key)["kept"].fill_(KEPT)
            given: dict[str, Any] = {
                name: rows(device, count, 10 * number + place) for place, name in enumerate(inputs)
            }
            outputs = program(**given)
            pads = size - count
            held: dict[str, Any] = {"zero": 0, "marked": SENTINEL, "kept": KEPT, "last": given["last"][-1]}
            mixed = doubled(given["zero"] + 1) + given["marked"] + given["kept"] + given["last"]
            trial.same(f"{count} of {size} rows", outputs[0], mixed)
            for name, total in zip(("zero", "marked", "kept", "last"), outputs[1:], strict=True):
                wanted = given[name].sum(0) + held[name] * pads
                trial.same(f"{count} of {size} rows: sum with padding {inputs[name].padding!r}", total, wanted)


def refused(trial: Trial, mode: Mode) -> None:
    """Call with more rows than any bucket holds, and replay keys that are none of the program's."""
    device = trial.device
    for strict in (False, True):
        with make(device, mode, lambda x: doubled(x) + 1, buckets=BUCKETS, strict=strict) as program:
            x = rows(device, LARGEST + 1, 1)
            for call in (1, 2):
                if strict:
                    _refuses(trial, f"{len(x)} rows, strict", program, x=x)
                    continue
                trial.same(f"{len(x)} rows without a graph", program(x=x), x * 2 + 1)
                fallbacks = program.report().fallbacks
                trial.same(f"calls without a graph after {call}", list(fallbacks.values()), [call])
                trial.require(all("bucket" in reason for reason in fallbacks), f"the reason says {list(fallbacks)}")
            for key in (
                GraphKey("main", (LARGEST + 1,)),
                GraphKey("other", (LARGEST,)),
                GraphKey("main", (LARGEST,), (("lora", True),)),
                GraphKey("main", (LARGEST,), (), 0),
            ):
                _refuses(trial, f"replay({key})", program.replay, key)
            _serves(trial, device, program, "after refusals")
            trial.same("replays", sum(program.report().replays.values()), 3)


def _serves(trial: Trial, device: Device, program: Program, when: str) -> None:
    for count in (3, 8, 2):
        x = rows(device, count, count)
        trial.same(f"{count} rows {when}", program(x=x), x * 2 + 1)


def _refuses(trial: Trial, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Require that a call raises `CaptureError`."""
    error = raised(CaptureError, call, *args, **kwargs)
    if trial.require(error is not None, f"{name} returns instead of raising CaptureError"):
        assert error is not None
        trial.require(bool(error.found and error.remedy), f"{name}: the error says too little: {error}")


def guards(trial: Trial, mode: Mode) -> None:
    """Capture one bucket for two values of two guards, and call with those and with another."""
    device = trial.device
    values = {"want": ("sum", "difference"), "lora": (False, True)}

    def function(x: Tensor, want: str, lora: bool) -> Tensor:
        out = doubled(x) + (1 if want == "sum" else -1)
        return out * 3 if lora else out

    for strict in (False, True):
        with make(device, mode, function, buckets=[4, 8], guards=values, strict=strict) as program:
            trial.same("captured keys", len(program.keys), 8)
            for number in range(2):
                for want in values["want"]:
                    for lora in values["lora"]:
                        x = rows(device, 3 + number, number)
                        out = program(x=x, guards={"want": want, "lora": lora})
                        trial.same(f"want={want}, lora={lora}", out, function(x, str(want), bool(lora)))
            x, other = rows(device, 3, 9), {"want": "neither", "lora": False}
            if strict:
                _refuses(trial, "a value of a guard not captured, strict", program, x=x, guards=other)
            else:
                trial.same("a value not captured", program(x=x, guards=other), function(x, "neither", False))
            counted = sum(program.report().fallbacks.values())
            trial.same("calls without a graph", counted, 0 if strict else 1)
            trial.same("replays", sum(program.report().replays.values()), 8)


def state(trial: Trial, mode: Mode) -> None:
    """Write rows into a cache of the caller's at slots, in padded calls; `reset` undoes what captures wrote."""
    device = trial.device
    spare = 3 * LARGEST - 1
    cache = rows(device, spare + 1, 3)
    runs = torch.zeros((), dtype=torch.int64, device=device.torch_device)
    start = cache.clone()
    inputs = {
        "x": rows_spec(device, padding="sentinel", value=float("nan")),
        "slots": InputSpec(("n",), torch.int64, padding="sentinel", value=spare),
        "cache": InputSpec((spare + 1, WIDTH), cache.dtype, padding="bound"),
    }

    def function(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        x = doubled(x)
        cache.index_copy_(0, slots, x)
        runs.add_(1)
        return cache[slots] + 1

    def reset() -> None:
        cache.copy_(start)
        runs.zero_()

    # Sets of inputs to check captures on, since core can't guess which slots are valid.
    examples = [{"x": rows(device, 2, seed), "slots": torch.arange(2, device=cache.device)} for seed in (1, 2)]
    state: dict[str, Any] = {"bound": {"cache": cache}, "reset": reset, "examples": examples}
    with make(device, mode, function, inputs, BUCKETS, **state) as program:
        trial.same("the cache after all captures", cache[:spare], start[:spare])
        trial.same("runs after all captures", int(runs), 0)
        order = torch.Generator().manual_seed(trial.seed)
        for number, count in enumerate((5, 8, 1, 3)):
            x, slots = rows(device, count, 20 + number), torch.randperm(spare, generator=order)[:count].to(cache.device)
            out = program(x=x, slots=slots)
            start.index_copy_(0, slots, x * 2)
            trial.same(f"{count} rows", out, x * 2 + 1)
            trial.same(f"the cache after call {number}", cache[:spare], start[:spare])
            trial.same(f"runs after call {number}", int(runs), number + 1)


PROMISES = (
    Promise(name="buckets", what="a call takes the smallest bucket that holds it, and the right graph", run=buckets),
    Promise(name="padding", what="padding is what its policy says, and never reaches real rows", run=padding),
    Promise(name="refused", what="what was not captured is refused, or runs eagerly and is counted", run=refused),
    Promise(name="guards", what="each value of a guard has its own graph; others are refused or counted", run=guards),
    Promise(name="state", what="captures leave a caller's cache alone, and each call writes it once", run=state),
)
