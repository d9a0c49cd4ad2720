"""`core serve`: refuses before it loads anything, and is stopped by SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")
pytest.importorskip("httpx", reason="needs the extra 'dev'")
pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("uvicorn", reason="needs the extra 'serve'")

import httpx

from core.cli import main
from tests.served import serve_process

WITHOUT_TORCH = (
    "import sys; from core.cli import main; code = main(sys.argv[1:]); sys.exit('torch' in sys.modules or code)"
)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        ("--mode bogus", ("--mode bogus", "full, piecewise, segmented, compile, off")),
        ("--kv-cache-dtype fp9", ("--kv-cache-dtype fp9", "auto, fp8")),
        ("--dtype int8", ("--dtype int8", "bfloat16")),
        ("--model nowhere", ("nowhere", "to do:")),
        ("--device nothing", ("nothing", "cpu")),
        ("--memory-fraction 2", ("memory_fraction=2",)),
        ("--port 70000", ("--port",)),
        ("--max-num-seqs 0", ("--max-num-seqs",)),
        ("--max-model-len 1", ("--max-model-len",)),
        ("--max-queue -1", ("--max-queue",)),
        ("--speculative -1", ("speculative=-1", "at least 0")),
        ("--max-body-bytes 1", ("--max-body-bytes",)),
        ("--api-key= ", ("CORE_API_KEY", "unset it")),
        ("--served-model-name=", ("--served-model-name", "it is empty")),
        ("--lora sql", ("--lora sql", "not of the form NAME=FOLDER")),
        ("--lora sql=nowhere", ("'nowhere'", "no adapter_config.json")),
        ("--tp 2 --draft-model self --speculative 2", ("--draft-model with 2 ranks",)),
        ("--tp 2 --device cpu:0", ("--device cpu:0 on 2 ranks", "leave the index out")),
        ("--ray --tp 2 --draft-model self --speculative 2", ("--draft-model with 2 ranks",)),
        ("--ray --tp 2 --device cpu:0", ("--device cpu:0 on 2 ranks",)),
        ("--ray --replica-resource GPU=1 --replica-resource GPU=2", ("--replica-resource GPU=2", "GPU=1 is given too")),
    ],
)
def test_a_wrong_value_is_refused_without_torch(arguments: str, phrases: tuple[str, ...]) -> None:
    command = [
        sys.executable,
        "-c",
        WITHOUT_TORCH,
        "serve",
        *("" if "--device" in arguments else "--device cpu").split(),
        *arguments.split(" "),
    ]
    done = subprocess.run([each for each in command if each], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert all(phrase in done.stderr for phrase in phrases)


@pytest.mark.parametrize("ray", [[], ["--ray"]], ids=["here", "by ray"])
def test_adapters_on_several_ranks_are_refused_before_any_starts(
    ray: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("core.cli.serving.serve.run_on_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr("core.cli.serving.serve.serve_by_replicas", lambda *_, **__: pytest.fail("Ray was asked"))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (tmp_path / "adapter_model.safetensors").touch()
    assert main(["serve", "--device", "cpu", "--tp", "2", "--lora", f"a={tmp_path}", *ray]) == 2
    assert "--lora with 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ("--mode full", "this device has: compile, off"),
        ("--quantize fp5", "fp5"),
        ("--host 203.0.113.9", "--host"),
        ("--provider core::attention=nothing", "name one of: cpu_attention"),
        ("--deterministic batch --provider core::linear=reference", "is not declared batch-invariant"),
        ("--deterministic batch --mode off", "runs the model's own code"),
    ],
)
def test_what_the_machine_lacks_is_refused_before_the_model_is_loaded(
    arguments: str, phrase: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("core.engine.models.loading._check_dtype", load)
    monkeypatch.setattr("core.engine.http.logs.log_as_json", lambda: None)  # of the whole process
    assert main(["serve", "--device", "cpu", "--port", "0", *arguments.split()]) == 2
    assert phrase in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("core.engine.http.logs.log_as_json", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--device", "cpu", "--port", port]) == 2
    err = capsys.readouterr().err
    assert f"listen on 127.0.0.1:{port}" in err and "in use" in err and "--port" in err


@pytest.mark.slow
def test_a_process_serves_until_sigterm_and_finishes_its_streams(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, "CORE_API_KEY": "kept-secret"}
    with serve_process(["--device", "cpu", "--lowering", "inline"], log, environment) as (process, told):
        body = {"prompt": "This", "max_tokens": 60, "ignore_eos": True, "temperature": 0, "stream": True}
        headers = {"Authorization": "Bearer kept-secret"}
        with httpx.stream("POST", f"{told['url']}/v1/completions", json=body, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert first.startswith("data: {") and rest[-1] == "data: [DONE]"
        assert process.wait(30) == 0
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["signal"] for each in events if each["event"] == "draining"] == ["SIGTERM"]
    (generation,) = [each for each in events if each["event"] == "generation"]
    assert generation["outcomes"] == ["length"] and generation["completion_tokens"] == 60
    assert "kept-secret" not in log.read_text()
    # The start tells how far it is, by lines that can be read.
    steps = [each["what"] for each in events if each["event"] == "starting"]
    assert any(step.startswith("trace ") for step in steps) and any(step.startswith("capture ") for step in steps)
    before = [each["event"] for each in events[: [each["event"] for each in events].index("serving")]]
    assert not [event for event in before if " 0 matched" in event or "skipped" in event]
    assert sum(event.startswith("compile cache: ") for event in before) <= 3
