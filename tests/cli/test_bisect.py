"""`core bisect`: what it prints, its JSON, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import core
from core.cli import main
from core.common.passes.declaration import Pass
from core.common.passes.results import PassResult
from core.compilation.rewrite.snapshot import Snapshot
from core.device import Device
from core.engine.check.graphs import PhaseGraph, engine_graphs
from core.engine.models.loading import LoadedModel
from core.verify.planted import mistakes, planted

COMMON = ("bisect", "llama", "--device", "cpu", "--phase", "decode", "--lowering", "inline", "--dtype", "float32")
TWO = ("--only-pass", "lift_rms_norm", "--only-pass", "fuse_add_rms_norm")

WRONG = planted("norm-eps")
INJECT_IDLE = ("--inject", "tests.cli.test_bisect:IDLE")
IDLE = Pass(name="acme_idle", run=lambda context: PassResult(matched=0), owner="acme")


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> Iterator[None]:
    """Let the subcommand trace what one test has traced before only once: tracing takes most of its time."""
    kept: dict[tuple[object, ...], tuple[PhaseGraph, ...]] = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def remembered(loaded: LoadedModel, device: Device, **options: Any) -> Iterator[tuple[PhaseGraph, ...]]:
            key = (type(loaded.model), loaded.dtype, device.name, *sorted(options.items()))
            if key not in kept:
                kept[key] = stack.enter_context(engine_graphs(loaded, device, **options))
            # Copies, since they are rewritten in place.
            modules = [Snapshot(graph.traced.module).module() for graph in kept[key]]
            yield tuple(
                replace(graph, traced=replace(graph.traced, module=module))
                for graph, module in zip(kept[key], modules, strict=True)
            )

        patch.setattr("core.engine.check.graphs.engine_graphs", remembered)
        yield


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([*COMMON, *arguments, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


@pytest.mark.slow
def test_the_json_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys, *TWO)
    steps = document.pop("steps")
    assert code == 0 and document.pop("headline").startswith("within the criterion: ")
    assert document == {
        "schema": "core.verify.bisect/1",
        "core": core.__version__,
        "device": "cpu",
        "plugin": f"core {metadata.version('core')}",
        "model": "llama, built tiny with random weights",
        "dtype": "float32",
        "cache": "paged: all 2 attention layers go through transformers' attention interface",
        "level": "full",
        "lowering": "inline",
        "examples": {"decode": 2},
        "injected": None,
        "passed": True,
        "num_values": sum(step["num_values"] for step in steps),
        "faults": [],
    }
    assert {key: steps[0][key] for key in ("phase", "kind", "name", "owner", "outcome", "matched", "num_sites")} == {
        "phase": "decode",
        "kind": "pass",
        "name": "lift_rms_norm",
        "owner": "core",
        "outcome": "ok",
        "matched": 5,
        "num_sites": 5,
    }
    assert steps[0].keys() - {"num_whole", "num_values", "worst_ratio", "note"} == {
        *("phase", "kind", "name", "owner", "outcome", "matched", "num_sites")
    }
    assert [step["kind"] for step in steps if step["kind"] != "op"] == ["pass", "pass", "lowering", "model"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("inject", ["norm-eps", "tests.cli.test_bisect:WRONG"])
def test_a_planted_mistake_is_the_first_line_and_the_exit_code(
    inject: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main([*COMMON, *TWO, "--inject", inject]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAULT: pass 'lift_rms_norm' of core with planted 'norm-eps' breaks decode at ")
    assert "model.layers.1.input_layernorm, node rms_norm_default_2: error over bound" in lines[0]
    assert any("lift_rms_norm" in line and "FAULT" in line for line in lines[2:])
    assert any(line.startswith("pass lift_rms_norm: it was undone") for line in lines[2:])
    told = [record for record in caplog.records if record.name == "core.passes" and record.levelno > logging.INFO]
    assert not told, "the report says it; the log need not"
    assert logging.getLogger("core.passes").level == logging.NOTSET


def test_the_json_of_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys, *TWO, "--inject", "add-norm-eps", "--level", "sample")
    (fault,) = document["faults"]
    assert code == 1 and not document["passed"] and document["examples"] == {"decode": 1}
    assert document["injected"] == {"asked": "add-norm-eps", "pass": "fuse_add_rms_norm", "found": True}
    assert fault.keys() == {*("phase", "kind", "name", "owner", "site", "nodes", "reason", "ratio", "op", "text")}
    assert document["headline"] == f"FAULT: {fault['text']}" and fault["ratio"] > 1


@pytest.mark.slow
def test_an_injected_pass_that_does_nothing_wrong_is_loud(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, *TWO, "--only-pass", "acme_idle", *INJECT_IDLE]) == 0
    out = capsys.readouterr().out
    assert "THE INJECTED PASS 'acme_idle' WAS NOT FOUND AT FAULT" in out and "it matched nothing" in out


@pytest.mark.slow
def test_the_table_fits_80_columns_and_what_was_skipped_stands_below_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*COMMON, *TWO, "--only-pass", "lift_rotary_table", "--only-pass", "acme_idle", *INJECT_IDLE]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("decode "))
    table = lines[start : lines.index(next(line for line in lines if line.startswith("skipped: ")))]
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert [line.split()[:3] for line in table[1:3]] == [
        ["pass", "lift_rms_norm", "ok"],
        ["pass", "fuse_add_rms_norm", "ok"],
    ]
    assert not any("acme_idle" in line for line in table)


def test_the_mistakes_are_listed_and_no_name_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["bisect", "--inject", "help"]) == 0
    out = capsys.readouterr().out
    assert all(mistake.name in out and mistake.of in out for mistake in mistakes())
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bisect", "--inject", "help"]) == 0
    assert "…" not in capsys.readouterr().out
    assert main(["bisect", "--inject", "help", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["mistakes"]
    assert {row["name"]: row["pass"] for row in rows} == {mistake.name: mistake.of for mistake in mistakes()}


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (("--inject", "norm-ep"), ("planting 'norm-ep'", "did you mean 'norm-eps'?")),
        (("--inject", "no.such:THING"), ("ModuleNotFoundError",)),
        (("--inject", "tests.cli.test_bisect:COMMON"), ("a tuple",)),
        (("--inject", "norm-eps", "--no-pass", "lift_rms_norm"), ("lift_rms_norm is left out",)),
        (("--phase", "training"), ("the choices are prefill, decode",)),
        (("--level", "some"), ("the choices are full, sample",)),
        (("--lowering", "magic"), ("lowering 'magic'",)),
        (("--only-pass", "lift_rms_nrm"), ("did you mean 'lift_rms_norm'?",)),
    ],
)
def test_what_it_refuses(
    arguments: tuple[str, ...], phrases: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", "llama", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert all(phrase in error for phrase in phrases), error
