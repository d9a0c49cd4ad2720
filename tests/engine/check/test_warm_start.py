"""A second start of the engine: nothing is traced, no pass runs, no kernel is compiled, and not a bit differs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.compilation.options import CompileOptions
from core.compilation.report import ProgramReport
from core.engine.config import SamplingParams
from core.engine.models.loading import LoadedModel, build_model
from core.engine.models.tiny import tiny_config
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.host.selection import select_device

NOTHING = {"traces": 0, "passes": 0, "kernels": 0, "measured": 0, "captures": 2}
PROMPTS = [[5, 6, 7, 8], [9, 10]]
SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 48, "block_size": 8, "sampling": ("greedy",)}
SMALL |= {"decode_buckets": (2,), "prefill_buckets": (32,)}


pytestmark = pytest.mark.usefixtures("cache_folder")


def tiny(model_type: str, **changes: Any) -> LoadedModel:
    config = tiny_config(model_type, **changes)
    return build_model(config, torch_device=torch.device("cpu"), dtype=torch.float32)


def start(
    loaded: LoadedModel, speculative: int = 0, sizes: Mapping[str, Any] | None = None, **options: Any
) -> tuple[ProgramReport, list[Tensor]]:
    """Return the report of an engine and the logits of a short generation; sizes: fields other than in `SMALL`."""
    given = {"lowering": "inline", "enable_passes": ("merge_linears",), **options}
    config = EngineConfig(**{**SMALL, **(sizes or {})}, speculative=speculative, options=CompileOptions(**given))
    with Engine(loaded, select_device("cpu"), config) as engine:
        params = SamplingParams(max_new_tokens=6, ignore_eos=True)
        completions = engine.generate(PROMPTS, params, collect_logits=True)
        return engine.report(), [each.logits for each in completions if each.logits is not None]


@dataclass(frozen=True)
class Cold:
    """A first start of a tiny llama, and the cache that it left; read only."""

    folder: Path
    report: ProgramReport
    logits: list[Tensor]


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Cold:
    folder = tmp_path_factory.mktemp("cold")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORE_CACHE", "1")
        patch.setenv("CORE_CACHE_DIR", str(folder))
        return Cold(folder, *start(tiny("llama")))


@pytest.fixture
def after_cold(cold: Cold, cache_folder: Path) -> Cold:
    """Put what it left into the test's cache."""
    shutil.copytree(cold.folder, cache_folder)
    return cold


def test_a_warm_start_makes_nothing_and_gives_the_same_bits(after_cold: Cold) -> None:
    is_warm(after_cold.report, after_cold.logits, tiny("llama"))


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "traces"), [("qwen3_moe", 1), ("gemma3_text", 1), ("mamba", 2)])
def test_a_warm_start_of_others_gives_the_same_bits(model_type: str, traces: int) -> None:
    is_warm(*start(tiny(model_type)), tiny(model_type), traces)


def is_warm(cold: ProgramReport, expected: list[Tensor], again: LoadedModel, traces: int = 1) -> None:
    """Check a second start against the first one's account and logits.

    traces: of the first start; where layers keep recurrent states, prompts have one of their own.
    """
    warm, logits = start(again)
    assert cold.cache.state == "miss", cold.cache
    assert cold.num_traces == traces and cold.num_passes > 10
    assert warm.cache.state == "hit" and warm.counters == NOTHING | {"captures": cold.num_captures}, warm.cache
    assert len(logits) == 2 and all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))
    told = [(each.phase, each.buckets, [(p.name, p.matched) for p in each.passes]) for each in cold.traces]
    assert [(each.phase, each.buckets, [(p.name, p.matched) for p in each.passes]) for each in warm.traces] == told
    assert all(each.cached for each in warm.traces)


@pytest.mark.slow
def test_what_the_model_is_and_what_the_engine_is_asked_for_are_factors(after_cold: Cold) -> None:
    report, _ = start(tiny("llama", rms_norm_eps=1e-3), sizes={"decode_buckets": (1,), "max_num_seqs": 1})
    assert report.cache.state == "miss"
    assert any("variance_epsilon" in line and "0.001" in line for line in report.cache.differences)
    assert any("buckets: decode" in line for line in report.cache.differences), report.cache.differences
    report, _ = start(tiny("llama"), cache=False, mode="off")
    assert report.cache.state == "off"


@pytest.mark.slow
def test_each_of_them_alone_is_a_factor(after_cold: Cold) -> None:
    report, _ = start(tiny("llama"), speculative=2)
    assert report.cache.state == "miss" and any("buckets: verify" in line for line in report.cache.differences)
    report, _ = start(tiny("llama", rms_norm_eps=1e-3))
    assert report.cache.state == "miss" and any("variance_epsilon" in line for line in report.cache.differences)


@pytest.mark.slow
def test_a_warm_start_with_a_draft_model_makes_nothing_of_either() -> None:
    def both() -> tuple[ProgramReport, ProgramReport, list[tuple[int, ...]]]:
        draft = tiny("llama", num_hidden_layers=1)
        options = CompileOptions(lowering="inline")
        config = EngineConfig(**SMALL, speculative=2, draft_model=draft, options=options)
        with Engine(tiny("llama"), select_device("cpu"), config) as engine:
            done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=6, ignore_eos=True))
            report = engine.drafter.report()
            assert report is not None and report.replays and not report.fallbacks
            return engine.report(), report, [each.token_ids for each in done]

    *cold, tokens = both()
    assert [each.cache.state for each in cold] == ["miss", "miss"]
    *warm, again = both()
    assert again == tokens
    for before, after in zip(cold, warm, strict=True):
        assert after.cache.state == "hit" and after.counters == NOTHING | {"captures": before.num_captures}, after.cache


SCRIPT = [
    "-m",
    "core",
    "run",
    "--device",
    "cpu",
    "--lowering",
    "inline",
    "--max-new-tokens",
    "8",
    "--no-check",
    "--json",
]


@pytest.mark.slow
def test_a_process_of_its_own_starts_warm() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, *SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=300
        )
        runs.append(json.loads(run.stdout))
    cold, warm = runs
    assert cold["program"]["cache"]["state"] == "miss" and cold["program"]["counters"]["traces"] == 1
    assert warm["program"]["cache"]["state"] == "hit", warm["program"]["cache"]
    assert warm["program"]["counters"] == NOTHING
    assert cold["completions"] == warm["completions"]
    seconds = [each["compile_time_s"] for each in (cold, warm)]
    print(f"\ncompile: cold {seconds[0]:.2f} s, warm {seconds[1]:.2f} s, ratio {seconds[1] / seconds[0]:.2f}")  # noqa: T201


def test_a_run_may_leave_the_cache_out(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    from core.cli import main

    class Stopped(Exception):
        """Ends a run before anything is compiled."""

    def stop(loaded: LoadedModel, device: object, config: EngineConfig, **_: object) -> None:
        assert config.options.cache is wanted
        raise Stopped

    monkeypatch.setattr("core.engine.serve.leading.Engine", stop)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    for wanted, arguments in ((False, ["--no-cache"]), (True, [])):
        assert main(["run", "--device", "cpu", *arguments]) == 1
        kept = str(cache_folder / "kernels" / "inductor")
        assert (os.environ.get("TORCHINDUCTOR_CACHE_DIR") == kept) is wanted
