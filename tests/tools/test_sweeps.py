"""tools/: what the sweeps over model types share, and the coverage report and choice, on made-up results."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"
Import = Callable[[str], Any]

WORKER = """
import os
import time

def answer(request):
    model_type = request["type"]
    if model_type == "crashes":
        raise SystemExit(3)
    if model_type == "hangs":
        time.sleep(60)
    print("a library talks")
    if model_type.startswith("kills"):
        stage = model_type.removeprefix("kills at ")
        return {"stage": stage, **({} if stage == "done" else {"error": "assertion"}), "lost": "no device"}
    return {"stage": "done", "process": os.getpid(), "lost": ""}
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Import:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.mark.slow
def test_a_worker_that_is_lost_is_a_result_and_the_next_type_runs(
    scripts: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examining.py").write_text(WORKER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = scripts("sweeping").Worker("examining", timeout_s=5)
    try:
        results = [worker.run(name) for name in ("crashes", "good", "hangs", "good")]
    finally:
        worker.close()
    assert [result.get("error") for result in results] == [
        "the process ended with exit code 3 and no answer",
        None,
        "the process gave no answer within 5 s and was killed",
        None,
    ]
    assert results[1]["stage"] == "done"


def test_after_a_type_that_loses_the_device_the_next_gets_a_process_of_its_own(
    scripts: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "losing.py").write_text(WORKER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = scripts("sweeping").Worker("losing", timeout_s=20)
    try:
        results = [worker.run(name) for name in ("good", "good", "kills at done", "good", "kills at engine", "good")]
    finally:
        worker.close()
    processes = [result.get("process") for result in results]
    assert processes[0] == processes[1] and len({*processes} - {None}) == 3
    lost = [(result["stage"], result["error"]) for result in (results[2], results[4])]
    assert lost == [("run", "no device"), ("engine", "assertion")]


def test_a_device_that_computes_nothing_more_is_lost(scripts: Import) -> None:
    def synchronize() -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    loss = scripts("sweep_architectures").loss
    for parts, found in (
        (lambda: None, ""),
        (synchronize, "the device is lost to the process: AcceleratorError: CUDA"),
    ):
        device = SimpleNamespace(torch_device=torch.device("cpu"), parts=SimpleNamespace(synchronize=parts))
        assert loss(device).startswith(found) and bool(loss(device)) == bool(found)


def test_a_sweep_keeps_results_by_version_and_key(scripts: Import, tmp_path: Path) -> None:
    sweeping = scripts("sweeping")
    path = tmp_path / "results.jsonl"

    class Counting:
        def __init__(self) -> None:
            self.ran: list[str] = []

        def run(self, name: str) -> dict[str, Any]:
            self.ran.append(name)
            return {"type": name, "stage": "done"}

        def close(self) -> None:
            pass

    def ran(key: str, *, again: bool = False) -> list[str]:
        worker = Counting()
        sweeping.sweep(worker, ["a", "b"], path, {"digest": key}, again=again, describe=str)
        return worker.ran

    assert ran("1") == ["a", "b"]
    assert ran("1") == []
    assert ran("2") == ["a", "b"]
    assert ran("2", again=True) == ["a", "b"]
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"type": "c", "versions": {"torch": "0"}, "digest": "2"}) + "\n")
    assert set(sweeping.read_results(path, {"digest": "2"})) == {"a", "b"}


def facts(sites: int, lifted: int, **changes: Any) -> dict[str, Any]:
    kinds = dict.fromkeys(
        (
            *("rms_norm", "add_rms_norm", "gated_activation", "attention"),
            *("rotary", "layer_norm", "moe_route", "experts", "short_convolution", "recurrence"),
        ),
        0,
    )
    site = {"kind": "rms_norm", "path": "model.norm", "class_name": "ToyRMSNorm", "parts": 1, "form": ""}
    return {
        "num_sites": {**kinds, "rms_norm": sites},
        "num_lifted": {**kinds, "rms_norm": lifted},
        "missed": [{"site": site, "reason": "lift_rms_norm: no | eps", "node": "mul_3"}] * (sites - lifted),
        "extra": [],
        "errors": [],
        "disagreements": [],
        "matched": {"lift_rms_norm": lifted},
        "signatures": [],
        "judged": {"equal": True, "passed": True, "ratio": 0.0, "reason": "", "unjudged": ""},
        **changes,
    }


def result(name: str, **variants: Any) -> dict[str, Any]:
    found = {variant.replace("_", "-"): facts for variant, facts in variants.items()}
    return {"type": name, "stage": "done", "seconds": 1.0, "variants": found}


def test_the_report_states_counts_reasons_and_numbers(scripts: Import, tmp_path: Path) -> None:
    wrong = {"equal": False, "passed": False, "ratio": 7.5, "reason": "output 0: error over bound", "unjudged": ""}
    developed = [
        result("a", decode_float32_sdpa=facts(4, 3), prefill_float32_sdpa=facts(2, 2, judged=wrong)),
        result("b", decode_float32_sdpa={"untraced": "a loop", "num_sites": {}}),
        {"type": "c", "stage": "build", "error": "no cache", "variants": {}},
    ]
    path = tmp_path / "coverage.md"
    scripts("coverage_report").write_report(path, developed, [], "the command")
    text = path.read_text(encoding="utf-8")
    assert "| rms_norm | 2 of 2, 100.0 % | 0 of 0, - | 3 of 4, 75.0 % |" in text
    assert "| decode-float32-sdpa | 2 | 1 | 50.0 % |" in text
    assert "- `b` (decode-float32-sdpa): a loop" in text
    assert (
        "  - rms_norm `model.norm` (ToyRMSNorm): lift_rms_norm: no \\| eps at node `mul_3` (decode-float32-sdpa)"
        in text
    )
    assert "| prefill-float32-sdpa | 1 | 0 | 0 | 1 | 0 | 7.5 |" in text
    assert "- `a` prefill-float32-sdpa: output 0: error over bound" in text
    assert "- `c`: no cache" in text
    assert "The held-out types have not been run." in text


def test_the_choice_covers_with_few_types_and_says_what_it_left(scripts: Import) -> None:
    module = scripts("coverage_signatures")
    results = [
        result(name, decode_float32_sdpa=facts(1, 1, signatures=forms))
        for name, forms in (("a", ["1"]), ("b", ["1", "2", "3"]), ("c", ["3", "4"]), ("d", ["4"]))
    ]
    assert module.choose(results) == ([("b", "decode-float32-sdpa"), ("c", "decode-float32-sdpa")], [])
    many = [result(f"t{i}", decode_float32_sdpa=facts(1, 1, signatures=[str(i)])) for i in range(20)]
    chosen, left = module.choose(many)
    assert (len(chosen), len(left)) == (module.MAX_TYPES, 20 - module.MAX_TYPES)
    expected = module.expectations([("a", "decode-float32-sdpa")], {"a": results[0]})
    assert expected["cases"] == [{"type": "a", "variant": "decode-float32-sdpa", "lifted": {"rms_norm": [1, 1]}}]


def test_a_model_without_a_cache_is_counted_apart_and_its_prompts_as_its_decode(scripts: Import) -> None:
    sweep = scripts("sweep_architectures")
    base = {"stage": "done", "passed": True, "batched": True, "reason": "why"}
    results = [
        {**base, "route": "recompute", "modes": {"decode": "compile"}},
        {**base, "route": "recompute", "modes": {"decode": "off"}, "batched": False},
        {**base, "route": "static", "modes": {"decode": "compile"}},
        {**base, "route": "paged", "modes": {"decode": "compile", "prefill": "compile"}},
    ]
    counts = sweep._counts(results)
    assert counts["on the static cache"] == counts["on the paged cache"] == 1
    assert counts["on no cache, all tokens computed again at each step"] == 2
    assert (counts["of these batched, several sequences at once"], counts["of these batched as well"]) == (1, 1)
    assert (counts["decode not captured, run eagerly"], counts["prompts not captured, run eagerly"]) == (1, 2)
    assert [list(sweep._reasons(each)) for each in results[1:]] == [["recompute: why"], ["static: why"], []]
    assert list(map(sweep._cache, results)) == ["recompute, batched", "recompute", "static, batched", "paged"]
