"""Area fuzz: what is drawn varies, odd mistakes are found and told shortly, honest implementations pass."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from core_acme.ops import IMPLEMENTATIONS
from core_acme.runner import RecordingBackend
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.graphs.backend import Callback, GraphKey
from core.common.ops.attention.paged import reference as attention
from core.common.ops.canonical import OPS
from core.common.ops.implementation import OpCall, OpImplementation, always
from core.common.ops.norm.norms import rms_norm
from core.common.ops.rotary.rotation import rotary
from core.device import Device
from core_conformance.cases.calls import fuzz as fuzz_calls
from core_conformance.cases.ops import fuzz as fuzz_ops
from core_conformance.fuzzing import CALLS, running
from core_conformance.fuzzing.running import described, pass_over, run_examples
from core_conformance.fuzzing.source import LAYOUTS, Source, arranged
from core_conformance.trial import NotSupported, Trial
from tests.conformance.inputs.wide_faults import wrong_past_2_to_20, wrong_past_8192_columns
from tests.conformance.planted_ops import LEGITIMATE, attention_padding_rows, norm_strides_ignored
from tests.recording import acme
from tests.support import cpu

CPU = torch.device("cpu")
DECLARED = {op.name: op for op in OPS}
CHECKS = list(HealthCheck)
CONSTANT = {
    ("quantize_asymmetric", "dtype"),
    ("quantized_grouped_linear", "out_dtype"),
    ("quantized_linear", "out_dtype"),
}
"""What a strategy gives one value only: fp32 would hide roundings, and none of the two is optional."""


def trial_of(device: Device, case: str, *, fuzz: int = 100, seed: int = 0) -> Trial:
    opened = (device, ConformanceProfile())
    trial = Trial(device.name, lambda: opened, seed, fuzz)
    cases = [*fuzz_ops.collect(*opened), *fuzz_calls.collect(*opened)]
    (chosen,) = (each for each in cases if each.id == f"fuzz/{case}")
    chosen.run(trial)
    return trial


def fuzzed(
    op: str,
    fn: Callable[..., Any],
    dtype: str = "float32",
    condition: Callable[[OpCall], str | None] = always,
    **options: int,
) -> Trial:
    """Fuzz one implementation on the processor."""
    planted = OpImplementation(op=f"core::{op}", name="planted", fn=fn, condition=condition)
    return trial_of(cpu(ops=(planted,)), f"{op}/planted/{dtype}", **options)


def test_every_op_but_collectives_has_a_strategy() -> None:
    assert {op.qualified_name for op in OPS} - CALLS.keys() == {op.qualified_name for op in OPS if op.is_collective}
    with pytest.raises(NotSupported, match="no strategy draws calls"):
        trial_of(cpu(), "all_reduce/reference/float32")


def draws(op: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    found = []

    @settings(
        max_examples=100,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=CHECKS,
    )
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        found.append(CALLS[op](Source(data.draw, dtype, CPU)))

    draw()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("op", CALLS)
def test_whatever_can_vary_varies(op: str) -> None:
    seen: defaultdict[str, set[Any]] = defaultdict(set)
    calls = draws(op, torch.bfloat16)
    for call in calls:
        for name, value in call.items():
            seen[name].add(form(value))
    (declared,) = (each for each in OPS if each.qualified_name == op)
    assert {argument.name for argument in declared.overload._schema.arguments} == set(seen), "an argument is left out"
    fixed = {name for name, values in seen.items() if len(values) < 2 and (declared.name, name) not in CONSTANT}
    assert not fixed, f"always the same: {fixed}"
    tensors = [value for call in calls for value in call.values() if isinstance(value, Tensor)]
    assert {value.is_contiguous() for value in tensors} == {True, False} or op == "core::quantized_linear"
    # What has no tokens at all is no call of attention.
    assert any(not value.numel() for value in tensors) or "attention" in op


def form(value: Any) -> Any:
    """Return what may vary of an argument, as something that a set holds."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.stride(), value.storage_offset()
    return tuple(value) if isinstance(value, list) else value


def test_layouts_hold_the_same_values() -> None:
    values = torch.randn(3, 4, 6)
    forms = set()
    for layout in LAYOUTS:
        other = arranged(values, layout)
        assert torch.equal(other, values)
        forms.add(form(other))
        assert arranged(torch.empty(0, 4), layout).shape == (0, 4) and torch.equal(
            arranged(values[0, 0], layout), values[0, 0]
        )
    assert len(forms) == len(LAYOUTS)


def odd_width(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Leave what does not fill eight lanes undone."""
    result = rms_norm(x, weight, eps, **options)
    left = x.shape[-1] % 8
    if left:
        result[..., -left:] = 0
    return result


def window_of_one(*args: Any, window: int = 0, **options: Any) -> Tensor:
    return attention(*args, window=0 if window == 1 else window, **options)


def rest_forgotten(
    query: Tensor, key: Tensor, *args: Any, rotary_dim: int = 0, **options: Any
) -> tuple[Tensor, Tensor]:
    turned = rotary(query, key, *args, rotary_dim=rotary_dim, **options)
    for each in turned if rotary_dim else ():
        each[..., rotary_dim:] = 0
    return turned


def two_rows(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    if x.dim() > 2:
        raise RuntimeError("rank 2 or less")
    return rms_norm(x, weight, eps, **options)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("op", "fn"),
    [
        ("rms_norm", norm_strides_ignored),
        ("rms_norm", odd_width),
        ("rms_norm", two_rows),
        ("attention", window_of_one),
        ("attention", attention_padding_rows),
        ("rotary", rest_forgotten),
        pytest.param("rms_norm", wrong_past_8192_columns, marks=pytest.mark.slow),
        pytest.param("gated_activation", wrong_past_2_to_20, marks=pytest.mark.slow),
        pytest.param("quantize", wrong_past_2_to_20, marks=pytest.mark.slow),
        pytest.param("linear", wrong_past_8192_columns, marks=pytest.mark.slow),
    ],
)
def test_a_mistake_in_an_odd_case_is_found(op: str, fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PHASES", ("generate",))
    given = partial(fn, DECLARED[op]) if fn in (wrong_past_2_to_20, wrong_past_8192_columns) else fn
    for seed in range(2):
        assert len(fuzzed(op, given, seed=seed).failures) == 1, "nothing found"


@pytest.mark.parametrize(
    ("op", "fn", "smallest"),
    [
        (
            "rms_norm",
            two_rows,
            r"x=float32\(0, 0, 1\), weight=None, eps=1e-05, .*, and then raises RuntimeError: rank 2",
        ),
        pytest.param(
            "attention",
            window_of_one,
            r"query=float32\(1, 1, 8\), .*window=1, chunked=False, softcap=0.0, sinks=None, mask=None",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_mistake_is_told_by_the_smallest_call(op: str, fn: Callable[..., Any], smallest: str) -> None:
    (failure,) = fuzzed(op, fn).failures
    assert re.match(rf"{op}\({smallest}", failure), failure


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(0,), pytest.param((1, 2, 3), marks=pytest.mark.slow)], ids=str)
def test_honest_implementations_pass(seeds: Sequence[int]) -> None:
    for number, (name, (op, fn)) in enumerate(LEGITIMATE.items()):
        if name == "norm_by_division":
            continue  # takes widths of a multiple of 16 only
        for seed in seeds:
            trial = fuzzed(op, fn, ("float32", "bfloat16")[(seed + number) % 2], fuzz=8, seed=seed)
            assert not trial.failures, name
            assert trial.measurements and trial.measurements[0].ratio <= 1


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda each: each.name)
def test_the_kernels_of_the_example_device_pass(implementation: OpImplementation) -> None:
    op = implementation.op.removeprefix("core::")
    trial = trial_of(acme(ops=(implementation,)), f"{op}/{implementation.name}/bfloat16", fuzz=25, seed=5)
    assert not trial.failures


@pytest.mark.slow
def test_an_implementation_is_tried_on_what_its_condition_admits() -> None:
    def narrow(call: OpCall) -> str | None:
        return None if call.args["x"].shape[-1] % 16 == 0 else "its rows are no multiple of 16"

    trial = fuzzed("rms_norm", LEGITIMATE["norm_by_division"][1], condition=narrow, fuzz=10)
    assert not trial.failures and "10 examples" in trial.notes
    assert any(re.fullmatch(r"\d+ calls refused: its rows are no multiple of 16", note) for note in trial.notes)
    with pytest.raises(NotSupported, match="nothing is taken"):
        fuzzed("rms_norm", rms_norm, condition=lambda call: "nothing is taken", fuzz=5)


def test_the_examples_are_those_of_the_seed() -> None:
    def drawn(seed: int) -> list[str]:
        calls: list[str] = []

        def example(data: st.DataObject, own: Trial) -> None:
            calls.append(described(CALLS["core::rotary"](Source(data.draw, torch.float32, CPU))))

        run_examples(Trial("cpu", NotImplemented, seed, 30), example)
        return calls

    assert len(drawn(0)) >= 30 and drawn(0) == drawn(0) != drawn(1)


def test_an_example_that_raises_and_one_that_fails_once_are_failures() -> None:
    trial = Trial("cpu", NotImplemented, 0, 20)

    def raises(data: st.DataObject, own: Trial) -> None:
        number = data.draw(st.integers(0, 1000))
        own.note(f"number {number}")
        if number >= 17:
            raise ValueError("too large")

    assert run_examples(trial, raises) > 0
    assert trial.failures == ["number 17: raises ValueError: too large"]
    seen: list[int] = []

    def once(data: st.DataObject, own: Trial) -> None:
        seen.append(data.draw(st.integers(0, 1000)))
        own.note("an example")
        own.require(len(seen) != 3, "the third is wrong")

    trial = Trial("cpu", NotImplemented, 0, 20)
    run_examples(trial, once)
    assert trial.failures == ["an example: the third is wrong (not each time: the same example also passed)"]
    trial = Trial("cpu", NotImplemented, 0, 20)
    assert run_examples(trial, lambda data, own: pass_over()) == 0 and trial.notes == ["0 examples"]


@pytest.mark.parametrize(
    ("criterion", "value", "ratio", "fails"),
    [
        ("T1", torch.zeros(600), 1.1, True),
        ("T1", torch.zeros(100), 1.9, False),
        ("T2", torch.zeros(100), 2.1, True),
        ("T0", torch.zeros(600, dtype=torch.int8), 1.4, False),
        ("T0", torch.zeros(600, dtype=torch.float8_e4m3fn), 1.6, True),
        ("T0", torch.zeros(100, dtype=torch.int64), 1.1, True),
    ],
)
def test_what_is_judged_often_is_judged_less_strictly(criterion: str, value: Tensor, ratio: float, fails: bool) -> None:
    def example(data: st.DataObject, own: Trial) -> None:
        own.record("a value", criterion, ratio, "over its bound", like=value)

    trial = Trial("cpu", NotImplemented, 0, 3)
    run_examples(trial, example)
    assert bool(trial.failures) == fails
    assert fails or trial.measurements[0].ratio == 1.0


class Armed(RecordingBackend):
    """Is wrong from the first example on: what capture itself checks, it gets right."""

    armed: ClassVar[bool] = False

    def replay(self, key: GraphKey, step: object = None) -> Any:
        return self.replay_wrongly(key) if self.armed else super().replay(key, step)

    def replay_wrongly(self, key: GraphKey) -> Any:
        raise NotImplementedError


class LeakingPadding(Armed):
    """Lets rows of padding write where a live row may lie: slot 0."""

    def capture_one(self, key: GraphKey, fn: Any, inputs: Mapping[str, Tensor], after_warmup: Callback) -> Any:
        self.slots = {**getattr(self, "slots", {}), key: inputs["write"]}
        return super().capture_one(key, fn, inputs, after_warmup)

    def replay_wrongly(self, key: GraphKey) -> Any:
        self.slots[key].masked_fill_(self.slots[key] == 16, 0)
        return RecordingBackend.replay(self, key)


class LargestBucket(Armed):
    """Replays the graph of the largest bucket whatever the batch, and returns its first rows."""

    def replay_wrongly(self, key: GraphKey) -> Any:
        largest = max(self._graphs, key=lambda each: each.dims)
        outputs = RecordingBackend.replay(self, largest)
        for own, output in zip(self._graphs[key].outputs, outputs, strict=True):
            own.copy_(output[: len(own)])
        return self._graphs[key].outputs


class SmallerBucket(Armed):
    """Replays the next smaller graph: the last rows are those of an earlier call."""

    def replay_wrongly(self, key: GraphKey) -> Any:
        smaller = [each for each in self._graphs if each.dims < key.dims]
        outputs = RecordingBackend.replay(self, max(smaller, key=lambda each: each.dims) if smaller else key)
        for own, output in zip(self._graphs[key].outputs, outputs, strict=True):
            own[: len(output)].copy_(output)
        return self._graphs[key].outputs


class WritesTwice(Armed):
    """Runs each graph twice."""

    def replay_wrongly(self, key: GraphKey) -> Any:
        RecordingBackend.replay(self, key)
        return RecordingBackend.replay(self, key)


@pytest.mark.parametrize("backend", [LeakingPadding, LargestBucket, SmallerBucket, WritesTwice])
def test_a_graph_that_is_wrong_about_its_bucket_is_found(backend: type[Armed], monkeypatch: pytest.MonkeyPatch) -> None:
    def armed(trial: Trial, example: running.Example) -> int:
        monkeypatch.setattr(backend, "armed", True)
        return running.run_examples(trial, example)

    monkeypatch.setattr(fuzz_calls, "run_examples", armed)
    trial = trial_of(acme(graph_backend=backend, modes=("full",)), "calls/full", fuzz=50)
    assert trial.failures and trial.failures[0].startswith("calls of batch "), trial.failures
    sizes = trial.failures[0].removeprefix("calls of batch ").partition(":")[0].split(", ")
    assert len(sizes) <= 3, trial.failures[0]


@pytest.mark.slow
def test_honest_graphs_pass() -> None:
    for mode in ("full", "piecewise", "segmented"):
        trial = trial_of(acme(), f"calls/{mode}", fuzz=15, seed=3)
        assert not trial.failures and trial.measurements
