"""A whole run on the processor: cells, figures, checks, floors, references, settings that are refused."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.bench import bench as bench_module
from core.bench import engines, served, start, start_worker
from core.bench.bench import Settings, bench, failed, read_references
from core.bench.cells import BenchReport, Cell, Record
from core.bench.engines import Engines
from core.bench.model import open_model
from core.bench.rates import Rates
from core.bench.rounds import measure
from core.bench.start import measure_start
from core.bench.text import renderables, start_lines
from core.compilation.options import CompileOptions
from core.engine.models.loading import LoadedModel
from core.engine.serve.engine import Engine
from core.engine.steps.runner import EngineConfig
from core.errors import ModelError, UsageError
from core.host.workers.worker import WorkerResult
from tests.recording import acme
from tests.support import cpu, refused

RATES = Rates(bytes_per_s=1e10, flops_per_s=1e11, copy_bytes=1, matmul_size=1, dtype="float32")
ENGINE = EngineConfig(options=CompileOptions(lowering="inline"))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return open_model(None, "tiny-llama", cpu(), "auto")[0]


@pytest.fixture(scope="module")
def report(loaded: LoadedModel) -> Iterator[BenchReport]:
    settings = Settings(
        subjects=("eager", "core"), batches=(2,), context=20, prompts=(8,), rounds=2, steps=3, engine=ENGINE
    )
    references = {"others": {"decode/2": 3.0, "prefill/9": 1.0}}
    told: list[tuple[str, int, int]] = []
    yield bench(
        loaded,
        cpu(),
        settings,
        title="tiny-llama",
        references=references,
        rates=RATES,
        progress=lambda *each: told.append(each),
    )
    assert told == [("decode/2", 0, 2), ("prefill/8", 1, 2), ("done", 2, 2)]


@pytest.mark.slow
def test_each_cell_has_each_subject_measured_and_checked(report: BenchReport) -> None:
    document = report.to_json()
    assert json.loads(json.dumps(document)) == document
    assert [cell["name"] for cell in document["cells"]] == ["decode/2", "prefill/8"]
    for cell in document["cells"]:
        eager, ours = cell["subjects"]
        assert (eager["subject"], ours["subject"]) == ("eager", "core")
        assert eager["failure"] == ours["failure"] == ""
        assert len(eager["rounds_ms"]) == len(ours["rounds_ms"]) == 2
        assert cell["order"] == [["eager", "core"], ["core", "eager"]]
        assert ours["check"]["tokens_equal"] and ours["check"]["logits"]["passed"]
        assert ours["route"] == "paged" and ours["replay_ms"]["median"] > 0
        assert ours["program"]["lowering"] == "inline"
        assert all(trace["passes"]["lift_rms_norm"] == 5 for trace in ours["program"]["traces"])
        assert eager["replay_ms"] is None and eager["check"] is None
    decode, prefill = document["cells"]
    assert decode["subjects"][1]["check"]["tokens_compared"] == 2 * (2 + 3)
    assert decode["mean_context"] == 20 + 2 + 2.5 and prefill["steps"] == 1
    assert decode["floor"]["cache_bytes"] == 2 * 24.5 * 2 * 256
    assert not failed(report)
    # A prompt's cell never decodes, so that is not compiled.
    assert prefill["subjects"][1]["program"]["modes"]["decode"] == "off"
    assert [trace["phase"] for trace in prefill["subjects"][1]["program"]["traces"]] == ["prefill"]


@pytest.mark.slow
def test_facts_name_device_model_and_settings(report: BenchReport) -> None:
    document = report.to_json()
    assert document["device"]["name"] == "cpu" and document["versions"]["torch"] == torch.__version__
    assert document["model"]["shape"]["hidden_size"] == 64 and document["model"]["dtype"] == "float32"
    assert document["model"]["attention"] == "sdpa" and document["rates"]["bytes_per_s"] == 1e10
    assert document["settings"]["subjects"] == ["eager", "core"] and document["settings"]["steps"] == 3
    assert document["references"] == {"others": {"decode/2": 3.0, "prefill/9": 1.0}}


def test_the_table_shows_figures_floor_and_references(report: BenchReport) -> None:
    text = _text(report)
    lines = text.splitlines()
    assert any(line.startswith("decode/2") and "floor (bytes)" in line for line in lines)
    assert any(line.split()[:3] == ["others", "3.000", "given"] for line in lines)
    assert lines[-1] == "core: 11 tokens equal in 2 cells; logits hold T1"


def test_the_table_fits_80_columns(report: BenchReport) -> None:
    wide = _text(report, width=220).splitlines()
    start = next(number for number, line in enumerate(wide) if line.startswith("decode/2"))
    rows = [line for line in wide[start - 2 :] if line.split()[0] in ("decode/2", "eager", "core", "others", "ms")]
    assert len(rows) > 6 and max(len(line.rstrip()) for line in rows) <= 80


def test_failures_and_different_tokens_are_said(report: BenchReport) -> None:
    from copy import deepcopy

    broken = deepcopy(report)
    eager, ours = broken.cells[0].records
    eager.failure, eager.rounds_ms = "OutOfMemoryError: no memory", []
    ours.verdict = {"tokens_equal": False, "tokens_compared": 4, "mismatch": "sequence 0, token 1: 2, not 3"}
    text = _text(broken)
    assert "OutOfMemoryError: no memory" in text and "TOKENS DIFFER (sequence 0, token 1: 2, not 3)" in text
    assert not failed(broken)
    ours.verdict["logits"] = {"passed": False, "reason": "error over bound"}
    assert failed(broken) and "BREAK T1: error over bound" in _text(broken)


def _text(report: BenchReport, width: int = 220) -> str:
    from io import StringIO

    from rich.console import Console

    out = Console(file=StringIO(), width=width)
    for item in renderables(report):
        out.print(item, markup=False)
    return str(out.file.getvalue())  # type: ignore[attr-defined]


def _counted(monkeypatch: pytest.MonkeyPatch, *, refused: int = 0) -> list[Any]:
    """Note the configuration of every engine; those of over `refused` sequences, if not zero, find no memory."""
    made: list[Any] = []

    class Counted(Engine):
        def __init__(self, loaded: LoadedModel, device: Any, config: Any) -> None:
            made.append(config)
            if refused and config.max_num_seqs > refused:
                raise ModelError("a cache", found="1 GiB free", remedy="less")
            super().__init__(loaded, device, config)

    monkeypatch.setattr(engines, "Engine", Counted)
    return made


@pytest.mark.slow
def test_the_cells_of_a_phase_share_one_engine(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _counted(monkeypatch)
    settings = Settings(
        subjects=("eager", "core"), batches=(2, 1), context=9, prompts=(4, 8), rounds=1, steps=2, engine=ENGINE
    )
    found = bench(loaded, cpu(), settings, title="tiny-llama", rates=RATES)
    assert [config.decode_buckets for config in made] == [(1, 2), (1,)]
    assert [config.prefill_buckets for config in made] == [(18,), (4, 8)]
    for cell in found.cells:
        ours = cell.records[1]
        assert ours.replay_ms and not ours.notes and ours.verdict["logits"]["passed"], cell.cell.name
        assert len(ours.tokens) == cell.cell.batch
    assert loaded.config._attn_implementation == "sdpa"  # no engine is left open


@pytest.mark.slow
def test_a_cell_whose_cache_fits_only_alone_gets_an_engine_of_its_own(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _counted(monkeypatch, refused=1)
    settings = Settings(subjects=("core",), batches=(2, 1), context=9, prompts=(), rounds=1, steps=2, engine=ENGINE)
    two, one = bench(loaded, cpu(), settings, title="tiny-llama", rates=RATES).cells
    assert "1 GiB free" in two.records[0].failure and one.records[0].rounds_ms
    assert [config.max_num_seqs for config in made] == [2, 2, 2, 1]


@pytest.mark.parametrize("at", ["measure", "profile"])
def test_an_interrupt_leaves_what_was_measured(at: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        subjects=("eager",), batches=(1,), context=9, prompts=(4, 8), rounds=1, steps=2, profile=True, engine=ENGINE
    )
    cells: list[str] = []
    measure_cell = bench_module._measure

    def interrupted(cell: Cell, *rest: Any) -> Any:
        cells.append(cell.name)
        if at == "measure" and len(cells) == 2:
            raise KeyboardInterrupt
        return measure_cell(cell, *rest)

    def profile(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_module, "_measure", interrupted)
    monkeypatch.setattr(bench_module, "_kernels", profile)
    report = bench(loaded, cpu(), settings, title="tiny", rates=RATES)
    missing = "prefill/4, prefill/8" if at == "measure" else "the kernels of decode/1"
    assert missing in str(report.facts["interrupted"]) and failed(report)
    assert len(report.cells) == (1 if at == "measure" else 3)
    assert missing in "\n".join(str(line) for line in renderables(report))


@pytest.mark.slow
def test_every_round_computes_as_many_steps_as_it_counts() -> None:
    """Also the first one, where steps begin to be queued before the tokens of the one before are known."""
    device = acme()
    loaded = open_model(None, "tiny-llama", device, "auto")[0]
    cell = Cell(phase="decode", batch=2, tokens=9, steps=3, rounds=2)
    subject = served.CoreSubject(Engines(loaded, device, replace(ENGINE, run_ahead=True), [cell]), keep_logits=True)
    computed: list[int] = []
    try:
        subject.open(cell, Record(subject="core"))
        engine = subject._engine
        assert engine is not None and engine.runs_ahead
        for _ in range(cell.rounds):
            before = sum(engine.report().replays.values())
            subject.run(cell.steps)
            computed.append(sum(engine.report().replays.values()) - before)
    finally:
        subject.free()
    assert computed == [cell.steps] * cell.rounds


@pytest.mark.slow
def test_a_prompt_that_failed_is_not_served_in_the_next_cell(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [Cell(phase="prefill", batch=1, tokens=tokens, steps=1, rounds=2) for tokens in (24, 8)]

    def measured(engines: Engines, cell: Cell) -> Record:
        ((record,), _) = measure([served.CoreSubject(engines, keep_logits=True)], cell, cpu())
        return record

    alone = Engines(loaded, cpu(), ENGINE, cells[1:])
    wanted = measured(alone, cells[1])
    alone.close()
    engines = Engines(loaded, cpu(), ENGINE, cells)
    engine = engines.open(cells[0])
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", lambda step: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
        assert measured(engines, cells[0]).failure
    found = measured(engines, cells[1])
    engines.close()
    assert found.tokens == wanted.tokens and found.logits is not None and wanted.logits is not None
    torch.testing.assert_close(found.logits, wanted.logits)


CODEGEN = "CodeGenForCausalLM does not call transformers' attention interface"


@pytest.mark.slow
@pytest.mark.parametrize("why_one", ["", "it mixes rows"])
def test_a_model_without_paged_cache_is_measured_as_it_is_served(why_one: str, monkeypatch: Any) -> None:
    if why_one:
        monkeypatch.setattr("core.engine.static.model.why_not_in_rows", lambda *_, **__: why_one)
    loaded = open_model("codegen", None, cpu(), "auto")[0]
    settings = Settings(subjects=("core",), batches=(1, 2), context=8, prompts=(), rounds=1, steps=2, engine=ENGINE)
    one, two = bench(loaded, cpu(), settings, title="codegen", rates=RATES).cells
    assert one.records[0].failure == "" and one.records[0].details["route"] == "static"
    assert one.records[0].replay_ms == []  # a replay might move its state on
    if why_one:
        assert f"1 sequence at once there: {CODEGEN}; one sequence at a time: {why_one}" in two.records[0].failure
        assert not two.records[0].rounds_ms
    else:
        assert two.records[0].failure == "" and two.records[0].rounds_ms


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({"subjects": ("eager", "fast")}, ("--subjects", "max-autotune", "leave out fast")),
        ({"subjects": ()}, ("--subjects", "name at least one")),
        ({"batches": (1, 0)}, ("--batch 1,0", "below 1")),
        ({"prompts": (-1,)}, ("--prefill -1", "below 1")),
        ({"context": 0}, ("--context 0",)),
        ({"rounds": 0}, ("--rounds 0",)),
        ({"steps": 0}, ("--steps 0",)),
        ({"batches": (), "prompts": ()}, ("both empty",)),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], phrases: tuple[str, ...]) -> None:
    with refused(UsageError, *phrases):
        Settings(**changes)


def test_a_context_longer_than_the_model_is_refused_before_anything_runs(loaded: LoadedModel) -> None:
    settings = Settings(subjects=("eager",), batches=(1,), context=500, prompts=(), rounds=2, steps=6)
    with refused(UsageError, "--context 500", "514 tokens", "512 positions"):
        bench(loaded, cpu(), settings, title="x", rates=RATES)
    with refused(UsageError, "--prefill 511"):
        Settings(batches=(), prompts=(511,)).check_length(512)
    Settings(batches=(), prompts=(510,)).check_length(512)
    Settings().check_length(None)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("[1]", "no object"),
        ('{"a": {"decode/1": "fast"}}', "positive numbers"),
        ('{"a": {"x": 0}}', "positive"),
        ("{", "no JSON"),
    ],
)
def test_references_that_are_refused(tmp_path: Path, text: str, phrase: str) -> None:
    file = tmp_path / "others.json"
    file.write_text(text)
    with refused(UsageError, "--reference", phrase):
        read_references(file)


def test_references_are_read(tmp_path: Path) -> None:
    file = tmp_path / "others.json"
    file.write_text('{"a": {"decode/1": 4, "prefill/128": 7.5}}')
    assert read_references(file) == {"a": {"decode/1": 4, "prefill/128": 7.5}}
    with refused(UsageError, "can't be read"):
        read_references(tmp_path / "none.json")


ASKED = {"device": "cpu", "model": None, "preset": "tiny-llama", "dtype": "auto", "prompt": 8}


@pytest.mark.slow
def test_a_start_is_itemised() -> None:
    options = {"lowering": "inline", "disable_passes": []}
    found = start_worker.answer({**ASKED, "started": time.time() - 1, "options": options})
    phases, cache = found["phases"], found["cache"]
    assert found["background_s"] == 0.0  # nothing is compiled
    assert cache.split(":")[0] in ("off", "hit", "miss", "refused") and cache.rstrip(": ") == cache
    assert list(phases)[:3] == ["imports", "device", "weights"]
    of_compile = ["trace", "passes", "kernels", "lower", "capture", "rest of compile"]
    assert list(phases)[3:] == ["checks", *of_compile, "first token"] and found["kernels"]["ahead"] == 0
    assert all(seconds >= 0 for seconds in phases.values()) and phases["imports"] > 1 and phases["trace"] > 0


def test_a_start_is_timed_cold_then_warm_with_caches_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any], str]] = []

    def ask(module: str, payload: dict[str, Any], *, timeout_s: float, CORE_CACHE_DIR: str) -> WorkerResult:
        calls.append((module, payload, CORE_CACHE_DIR))
        phases = {"imports": len(calls), "weights": 2.5}
        cold = len(calls) == 1
        kernels = {"compiled": 9, "ahead": 7} if cold else {"compiled": 0, "ahead": 0}
        told = {"background_s": 8.5 if cold else 0.0, "kernels": kernels, "cache": "miss" if cold else "hit"}
        return WorkerResult(answer={"phases": phases, **told})

    monkeypatch.setattr(start, "ask_once", ask)
    found = measure_start({**ASKED, "options": {}})
    phases = {"imports": 1, "weights": 2.5}
    told = {"background_s": 8.5, "kernels": {"compiled": 9, "ahead": 7}, "cache": "miss"}
    assert found["cold"] == {"phases": phases, **told, "total_s": 3.5}
    assert found["warm"]["total_s"] == 4.5 and found["warm"]["cache"] == "hit"
    lines = list(start_lines(found))
    assert lines[1].endswith("compile cache: miss; 8.50 s more of compiling beside its steps")
    assert "9 kernels compiled, 7 of them ahead of the first run" in lines[1]
    assert "(imports 2.00, weights 2.50); 0 kernels compiled" in lines[2] and lines[2].endswith("compile cache: hit")
    assert calls[0][0] == "core.bench.start_worker" and calls[0][1]["started"] > 0
    folders = [folder for _, _, folder in calls]
    assert folders[0] == folders[1] and not Path(folders[0]).exists()


def test_a_start_compiles_into_its_own_folder_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    device = cpu()
    start_worker.keep_all_kernels(device)
    kept = [os.environ[each.folder_variable] for each in device.kernel_compilers if each.folder_variable]
    assert kept and all(Path(folder).is_relative_to(tmp_path) for folder in kept)


def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    done = WorkerResult(problem="ended", output="Traceback\ncore.errors.UsageError: --preset 'none'\n")
    monkeypatch.setattr(start, "ask_once", lambda *_, **__: done)
    with refused(ModelError, "--preset 'none'"):
        measure_start({**ASKED, "options": {}})
