"""MODEL means the same in every command: a folder or a type, by place."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.cli import main
from core.engine.models.assets import embedded_model
from core.engine.models.resolve import check_type, resolve_model
from core.engine.models.tiny import causal_lm_types
from core.errors import UsageError
from tests.support import cpu


def test_a_folder_is_named_by_place(capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--device", "cpu", "--mode", "off", "--max-new-tokens", "2", "--no-check", "--json"]
    assert main(["run", str(embedded_model()), *quick]) == 0
    by_place = json.loads(capsys.readouterr().out)
    assert main(["run", "--model", str(embedded_model()), *quick]) == 0
    assert json.loads(capsys.readouterr().out)["completions"] == by_place["completions"]


def test_a_type_continues_the_bytes_of_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    quick = [
        "run",
        "llama",
        "--device",
        "cpu",
        "--mode",
        "off",
        "--max-new-tokens",
        "2",
        "--prompt",
        "If",
        "--no-check",
    ]
    assert main([*quick, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (completion,) = document["completions"]
    assert completion["prompt_token_ids"] == list(b"If") and len(completion["token_ids"]) == 2
    assert document["model"]["path"] is None
    assert main(quick) == 0
    assert f"[0] token ids: {', '.join(map(str, completion['token_ids']))}" in capsys.readouterr().out


def test_two_names_of_the_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(embedded_model())
    assert main(["serve", "llama", "--model", folder]) == 2
    assert f"MODEL 'llama' with --model {folder!r}" in capsys.readouterr().err


def test_a_type_is_built_for_a_server() -> None:
    loaded, name = resolve_model("llama", cpu(), "auto")
    assert name == "llama, built tiny with random weights" and loaded.tokenizer is None


@pytest.mark.slow
def test_no_type_that_transformers_knows_is_refused_before_it_is_imported() -> None:
    for each in causal_lm_types():
        check_type(each)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "remedy"),
    [("lama", "did you mean the type 'llama'?"), ("nowhere", "pass a folder or a model type such as 'llama'")],
)
def test_what_can_be_no_type_is_refused_without_torch(name: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=f"model '{name}'") as refused:
        check_type(name)
    assert refused.value.remedy == remedy
    code = "import sys; from core.cli import main; main(['run', sys.argv[1]]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and remedy in done.stderr, done.stderr
