"""Area "models": honest devices pass every aspect, and each planted mistake is rejected by the aspect made for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_acme.runner import RecordingBackend
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.graphs.backend import GraphKey
from core.common.ops.attention.paged import reference
from core.common.ops.implementation import OpImplementation
from core.device import Device
from core.engine.inspect.probe import forward_logits
from core.engine.steps.runner import EngineConfig
from core.host.selection import select_device
from core_conformance.case import Case
from core_conformance.cases.models import collect as models
from core_conformance.cases.models import promises as model_promises
from core_conformance.cases.models import runs as model_runs
from core_conformance.cases.models import zoo
from core_conformance.cases.models.zoo import SUBJECTS, Subject
from core_conformance.trial import Skip, Trial
from tests.conformance.support import run_case
from tests.recording import acme

pytest.importorskip("transformers", reason="needs the extra 'hf'")

PROFILE = ConformanceProfile()
SHARING = tuple(aspect for aspect in models.ASPECTS if aspect != "modes")
SMALL = ("gpt_neox", "falcon")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    model_runs.close_shared()
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def _one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave of each model that is run here one layer: half the trace, and a mistake in it is in every layer."""
    less = [replace(each, changes=(*each.changes, ("num_hidden_layers", 1))) for each in SUBJECTS if each.name in SMALL]
    monkeypatch.setattr(models, "SUBJECTS", (*(each for each in SUBJECTS if each.name not in SMALL), *less))


def cases(device: Device, profile: ConformanceProfile = PROFILE) -> dict[str, Case]:
    return {case.id: case for case in models.collect(device, profile)}


def failures(device: Device, subject: str, *aspects: str) -> dict[str, list[str]]:
    """Run aspects of a model in fp32 and return what each complains about."""
    known = cases(device)
    return {aspect: run_case(known[f"models/{subject}/float32/{aspect}"], device) for aspect in aspects}


@pytest.fixture
def _decode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave prefill to the model's own Python: half the traces, where decode shows what is tested."""
    made = model_runs.engine_config

    def config(subject: Subject, dtype: str, device: Device, **changes: Any) -> EngineConfig:
        modes: dict[str, Any] = {"decode": device.capabilities.modes[0], "prefill": "off"}
        return made(subject, dtype, device, **{"mode": modes, **changes})

    monkeypatch.setattr(model_runs, "engine_config", config)


@pytest.mark.slow
def test_an_honest_device_passes_every_aspect() -> None:
    assert failures(acme(), "gpt_neox", *SHARING) == {aspect: [] for aspect in SHARING}


@pytest.mark.slow
@pytest.mark.usefixtures("_decode_only")
def test_an_honest_device_without_graphs_passes() -> None:
    aspects = ("logits", "tokens", "divergence", "batch", "graphs", "determinism")
    assert failures(select_device("cpu"), "gpt_neox", *aspects) == {aspect: [] for aspect in aspects}


@pytest.mark.slow
def test_an_engine_on_the_static_cache_passes_and_gives_all_back() -> None:
    aspects = ("logits", "batch", "graphs", "release")
    assert failures(acme(), "falcon", *aspects) == {aspect: [] for aspect in aspects}


@pytest.mark.slow
def test_states_in_slots_pass_and_need_no_shared_beginning() -> None:
    aspects = ("logits", "batch", "graphs", "passes")
    assert failures(acme(), "falcon_h1", *aspects) == {aspect: [] for aspect in aspects}


def test_the_indexer_of_the_suite_leaves_positions_out_of_the_longer_prompts() -> None:
    """With a wider choice the same weights give other logits there; else wrong choices would pass."""
    subject, device = next(each for each in SUBJECTS if each.name == "deepseek_v32"), acme()
    found = []
    for changes in (subject.changes, (*subject.changes, ("index_topk", zoo.MAX_LEN))):
        loaded = zoo.build(replace(subject, changes=changes), device, torch.float32, 0)
        found.append([forward_logits(loaded.model, prompt)[-1] for prompt in zoo.prompts_for(loaded, 0)])
    alike = [torch.allclose(ours, theirs, atol=1e-3) for ours, theirs in zip(*found, strict=True)]
    assert dict(zip(zoo.PROMPT_LENGTHS, alike, strict=True)) == {1: True, 8: True, 17: False, 34: False}


@pytest.mark.slow
def test_the_choice_of_an_indexer_is_judged_in_every_mode() -> None:
    device = acme()
    trial = Trial(device.name, lambda: (device, PROFILE))
    cases(device)["models/deepseek_v32/float32/modes"].run(trial)
    assert not trial.failures and not trial.notes
    assert [each.name for each in trial.measurements] == [
        f"{what}, mode {mode}" for mode in ("full", "piecewise", "segmented", "off") for what in ("tokens", "logits")
    ]


def planted(fn: Any) -> Device:
    return acme(ops=(OpImplementation(op="core::attention", name="planted", fn=fn),))


def scaled(*args: Any, scale: float, **options: Any) -> Tensor:
    return reference(*args, scale=1.02 * scale, **options)


def short(*args: Any, **options: Any) -> Tensor:
    return reference(*args[:7], (args[7] - 1).clamp(min=0), args[8], **options)


def late(*args: Any, **options: Any) -> Tensor:
    """Attend before the rows of this step are in the cache."""
    caches = [cache.clone() for cache in args[3:5]]
    reference(*args, **options)
    lost = torch.zeros_like(args[6])  # the null block, in place of where they belong
    return reference(*args[:3], *caches, args[5], lost, *args[7:], **options)


@pytest.mark.slow
@pytest.mark.usefixtures("_decode_only")
@pytest.mark.parametrize("fn", [scaled, short, late], ids=["scale 2 %", "length", "stale row"])
def test_wrong_attention_is_rejected_by_the_numbers(fn: Any) -> None:
    found = failures(planted(fn), "gpt_neox", "logits", "divergence", "batch", "graphs", "determinism")
    assert found["logits"] and found["divergence"] and found["batch"]
    # What a stale row holds depends on what ran before; the others are wrong in the same way each time.
    assert bool(found["graphs"]) == bool(found["determinism"]) == (fn is late)
    assert "error over bound" in found["logits"][0]
    assert "worst at prompt" in found["logits"][0]
    assert "`core bisect gpt_neox --device acme --dtype float32 --lowering inline`" in found["logits"][0]
    assert "divergence over bound" in found["divergence"][0]


class Eager(RecordingBackend):
    """Runs the callable again at each replay."""

    def capture_one(self, key: GraphKey, fn: Any, *args: Any) -> tuple[Tensor, ...]:
        outputs = super().capture_one(key, fn, *args)
        self.functions = {**getattr(self, "functions", {}), key: fn}
        return outputs

    def replay(self, key: GraphKey, step: object = None) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.functions[key]() if key in self.functions else super().replay(key, step)


class Noisy(RecordingBackend):
    """Adds noise of one rounding to what floats a replay gives."""

    def replay(self, key: GraphKey, step: object = None) -> tuple[Tensor, ...]:
        outputs = super().replay(key, step)
        for output in outputs:
            if output.is_floating_point():
                output.mul_(1 + torch.finfo(output.dtype).eps * torch.randint(0, 2, output.shape))
        return outputs


class Keeping(RecordingBackend):
    """Keeps its tapes when it is told to drop them."""

    kept: list[Any] = []  # noqa: RUF012

    def cleanup(self) -> None:
        self.kept.append(dict(self._graphs))
        super().cleanup()


@pytest.mark.slow
def test_a_backend_that_runs_the_python_again_is_told_from_one_that_replays() -> None:
    (reason,) = failures(acme(graph_backend=Eager), "falcon", "graphs")["graphs"]
    assert "ran the Python that was captured instead of a graph" in reason and "decode[" in reason


def test_graphs_in_parts_are_compared_with_the_model_as_it_is() -> None:
    device = acme(modes=("segmented",))
    trial = Trial(device.name, lambda: (device, PROFILE))
    cases(device)["models/falcon/float32/graphs"].run(trial)
    assert not trial.failures
    assert any("no key is captured whole" in note for note in trial.notes)
    assert {m.criterion for m in trial.measurements} == {"T1", "T3"}


@pytest.mark.slow
def test_noise_is_rejected_where_the_device_promises_equal_bits_and_judged_where_it_does_not() -> None:
    noisy = acme(graph_backend=Noisy)
    found = failures(noisy, "falcon", "logits", "graphs", "determinism")
    assert not found["logits"] and found["graphs"] and found["determinism"]
    assert "elements differ in bits" in found["determinism"][0]
    able = replace(noisy.capabilities, deterministic=False)
    declared = replace(noisy, parts=replace(noisy.parts, capabilities=able))
    assert failures(declared, "falcon", "graphs", "determinism") == {"graphs": [], "determinism": []}


@pytest.mark.slow
def test_memory_that_stays_taken_is_found() -> None:
    try:
        reasons = failures(acme(graph_backend=Keeping), "falcon", "release")["release"]
    finally:
        Keeping.kept.clear()
    assert reasons and "are still held after close()" in reasons[0]


@pytest.mark.slow
def test_a_phase_in_another_mode_is_told_with_the_reason() -> None:
    class Refusing(RecordingBackend):
        def capture_one(self, *args: Any) -> tuple[Tensor, ...]:
            raise RuntimeError("this device is tired")

    device = acme(graph_backend=Refusing)
    trial = Trial(device.name, lambda: (device, PROFILE))
    cases(device)["models/falcon/float32/graphs"].run(trial)
    assert "decode runs 'segmented' instead of 'full'" in trial.notes[0] and "this device is tired" in trial.notes[0]


@pytest.mark.parametrize(
    ("model_type", "mode", "reasons", "wrong"),
    [
        ("falcon", "full", (), False),
        ("falcon", "segmented", ("it can't be captured",), False),
        ("falcon", "segmented", (), True),
        ("falcon", "off", ("it can't be captured",), True),
        (None, "segmented", ("it can't be captured",), True),
    ],
)
def test_only_a_model_of_others_may_run_in_another_mode_and_only_with_a_reason(
    model_type: str | None, mode: str, reasons: tuple[str, ...], wrong: bool
) -> None:
    trial = Trial("acme", lambda: (acme(), PROFILE))
    bench: Any = SimpleNamespace(
        device=acme(), engine=SimpleNamespace(config=EngineConfig()), subject=SimpleNamespace(model_type=model_type)
    )
    report: Any = SimpleNamespace(modes={"decode": mode}, notes=reasons)
    model_promises._require_modes(trial, bench, report)
    assert bool(trial.failures) == wrong


@pytest.mark.slow
def test_passes_that_do_not_fire_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    owed = next(subject for subject in models.SUBJECTS if subject.name == "falcon")
    more = replace(owed, lifts=(*owed.lifts, "lift_rms_norm", "a_pass_of_theirs"))
    monkeypatch.setattr(models, "SUBJECTS", (more,))
    reasons = failures(acme(), "falcon", "passes")["passes"]
    assert [reason.split(" matched nothing")[0] for reason in reasons] == [
        "decode: pass lift_rms_norm",
        "decode: pass a_pass_of_theirs",
    ]


def test_collecting_is_cheap_stable_and_keeps_those_that_share_an_engine_together() -> None:
    device = acme()
    found = [case.id for case in models.collect(device, PROFILE)]
    assert found == [case.id for case in models.collect(device, PROFILE)]
    pairs = [tuple(name.split("/")[1:3]) for name in found]
    starts = [pair for index, pair in enumerate(pairs) if index == 0 or pair != pairs[index - 1]]
    assert len(starts) == len(set(starts)) == sum(len(subject.dtypes) for subject in SUBJECTS)
    assert all(case.exclusive == case.id.endswith("/release") for case in models.collect(device, PROFILE))


def test_what_a_device_does_not_declare_is_not_supported() -> None:
    device = acme()
    able = replace(device.capabilities, dtypes=frozenset({torch.float32}), modes=("off",))
    found = cases(replace(device, parts=replace(device.parts, capabilities=able)))
    assert found["models/qwen3/bfloat16/tokens"].not_supported == "the device computes in float32"
    assert found["models/qwen3/float32/graphs"].not_supported == "the device declares no mode but 'off'"
    assert "no mode in which a model is traced" in found["models/qwen3/float32/passes"].not_supported
    assert not found["models/qwen3/float32/tokens"].not_supported


def test_without_transformers_the_cases_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    device = acme()
    trial = Trial(device.name, lambda: (device, PROFILE))
    with pytest.raises(Skip, match="transformers is not installed"):
        cases(device)["models/qwen3/float32/tokens"].run(trial)


def test_a_model_that_cannot_be_built_fails_each_of_its_cases_and_is_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = list[int]()

    def broken(*args: Any) -> None:
        tried.append(1)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(model_runs, "build", broken)
    found = failures(acme(), "gpt_neox", "logits", "tokens")
    assert found == {"logits": ["RuntimeError: no such kernel"], "tokens": ["RuntimeError: no such kernel"]}
    assert tried == [1]
