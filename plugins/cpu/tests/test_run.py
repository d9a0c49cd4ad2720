"""`core run` on the processor, through the command line: what it prints, and each way to be refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.cli import main
from core.engine.models.assets import embedded_model

RUN = ["run", "--device", "cpu", "--lowering", "inline", "--max-new-tokens", "8"]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([*RUN, *arguments, "--json"])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    document: dict[str, Any] = json.loads(out)
    return code, document


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model that a test may break."""
    return Path(shutil.copytree(embedded_model(), tmp_path / "model"))


@pytest.mark.slow
def test_the_json_document_says_what_ran_and_that_it_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys)
    assert code == 0
    assert document["schema"] == "core.run/1"
    assert document["device"]["name"] == "cpu"
    assert document["model"]["class"] == "LlamaForCausalLM"
    assert document["cache"]["route"] == "paged"
    assert document["program"]["lowering"] == "inline"
    assert [trace["phase"] for trace in document["program"]["traces"]] == ["decode", "prefill"]
    # Greedy is all that was asked for, so nothing else was compiled.
    keys = [bucket["key"] for bucket in document["program"]["buckets"]]
    assert [key.partition("[")[0] for key in keys] == ["prefill", "decode"] and "sampling=greedy" in keys[1]
    (completion,) = document["completions"]
    assert len(completion["token_ids"]) == 8 or completion["finish_reason"] == "stop"
    check = document["check"]
    assert check["tokens_equal"] and check["passed"] and check["verdict"]["passed"]
    assert check["num_tokens"] == 32


@pytest.mark.slow
def test_compiled_graphs_are_right_at_the_first_start_and_loaded_at_the_next(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORE_CACHE", "1")
    monkeypatch.setenv("CORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for counts in ({"traces": 1, "kernels": 2}, {"traces": 0, "passes": 0, "kernels": 0}):
        code, document = run_json(capsys, "--lowering", "inductor")
        assert code == 0 and document["program"]["lowering"] == "inductor"
        assert document["check"]["passed"] and document["check"]["tokens_equal"]
        assert document["program"]["counters"].items() >= counts.items() and document["program"]["notes"] == []


@pytest.mark.slow
def test_every_field_of_the_document_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = run_json(capsys, "--mode", "off")
    text = (Path(__file__).parents[3] / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.partition("## core.run/1")[2].partition("\n## ")[0]
    assert section
    objects = [document, *(document[name] for name in ("device", "model", "cache", "program", "check"))]
    objects += [document["completions"][0], document["check"]["verdict"]]
    named = {name for item in objects for name in item} - {"schema", "core"}
    assert not [name for name in sorted(named) if f"`{name}`" not in section]


@pytest.mark.slow
def test_the_table_shows_text_speed_and_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--prompt", "Return a list of"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Return a list of")
    for line in ("device ", "cache ", "\nstart ", "tokens/s, eager", "criterion T1 holds", "equal to eager"):
        assert line in out
    assert "Traceback" not in err


@pytest.mark.slow
def test_several_prompts_come_out_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "Return a list of", "--prompt", "If the argument is"]
    assert main([*RUN, *arguments, "--mode", "off", "--no-check"]) == 0
    out = capsys.readouterr().out
    assert 0 <= out.index("[0] Return a list of") < out.index("[1] If the argument is")
    assert "not run: --no-check" in out


@pytest.mark.slow
def test_two_prompts_are_checked_together(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys, "--prompt", "Return a list of", "--prompt", "This module")
    assert code == 0
    assert len(document["completions"]) == 2
    assert document["check"]["num_tokens"] == 64
    assert document["check"]["passed"]


@pytest.mark.slow
def test_modes_are_chosen_by_phase_and_drafts_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--mode", "decode=off,prefill=compile", "--lowering", "inline", "--speculative", "2", "--no-check"]
    assert main(["run", "--device", "cpu", "--prompt", "the list of the list of the list", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "decode off, prefill compile, verify compile" in out and "drafted tokens accepted" in out
    assert main(["run", "--device", "cpu", "--mode", "decode=full", "--no-check"]) == 2
    assert "mode 'full' for phase 'decode'" in capsys.readouterr().err
    assert main(["run", "--device", "cpu", "--mode", "encode=off", "--no-check"]) == 2
    assert "the phases are" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_check_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys, "--no-check", "--mode", "off")
    assert (code, document["check"]) == (0, None)
    assert document["program"]["traces"] == []


def matched(document: dict[str, Any]) -> list[dict[str, int]]:
    return [{p["name"]: p["matched"] for p in trace["passes"]} for trace in document["program"]["traces"]]


@pytest.mark.slow
def test_passes_run_are_verified_and_can_be_switched(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys, "--verify", "sample", "--strict", "--no-pass", "lift_rotary")
    assert code == 0 and document["check"]["passed"]
    for counts in matched(document):
        # Four layers: a norm before attention, one before the MLP, one at the end; the first has no sum before it.
        assert (counts["lift_rms_norm"], counts["fuse_add_rms_norm"], counts["lift_gated_activation"]) == (9, 8, 4)
        assert "lift_rotary" not in counts
    code, document = run_json(capsys, "--only-pass", "lift_rotary", "--no-check")
    assert (code, matched(document)) == (0, [{"lift_rotary": 4}] * 2)
    code, document = run_json(capsys, "--no-passes", "--no-check")
    assert (code, matched(document)) == (0, [{}, {}])


def test_an_unknown_pass_is_refused_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--no-pass", "lift_rotry"]) == 2
    err = capsys.readouterr().err
    assert "choosing pass 'lift_rotry'" in err and "did you mean 'lift_rotary'?" in err


@pytest.mark.slow
def test_a_seed_repeats_a_sampled_text(capsys: pytest.CaptureFixture[str]) -> None:
    sampled = ("--temperature", "1", "--seed", "7", "--no-check", "--mode", "off")
    first, again = (run_json(capsys, *sampled)[1]["completions"] for _ in range(2))
    assert first == again


def _nowhere(folder: Path) -> None:
    shutil.rmtree(folder)


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _damaged(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def _scribbled(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no header at all")


def _encoder_decoder(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "t5"'))


def _unknown_architecture(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "lama"'))


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *phrases: str) -> None:
    """Expect exit code 2 and one message that says what was asked, found and to do, in both forms."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out.strip() == ""
    assert "Traceback" not in err
    assert err.count("error:") == 1 and "  found: " in err and "  to do: " in err
    missing = [phrase for phrase in phrases if phrase not in err]
    assert not missing, f"{missing} not in:\n{err}"
    assert main([*arguments, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "core.error/1"
    assert all(document["error"][name] for name in ("type", "asked", "found", "remedy"))


@pytest.mark.parametrize(
    ("spoil", "phrases"),
    [
        (_nowhere, ("no such folder", "pass the folder that holds config.json")),
        (_without_weights, ("no weights in the folder", "model.safetensors")),
        (_damaged, ("model.safetensors is damaged", "copy model.safetensors again")),
        (_scribbled, ("model.safetensors is damaged", "copy model.safetensors again")),
        (_encoder_decoder, ("'t5'", "has no causal language model")),
        (_unknown_architecture, ("'lama'", "did you mean 'llama'?")),
    ],
)
def test_a_model_folder_that_cannot_be_used_is_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, spoil: Callable[[Path], None], phrases: tuple[str, ...]
) -> None:
    spoil(folder)
    refused(capsys, [*RUN, "--model", str(folder)], str(folder), *phrases)


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (["--prompt", ""], ("it is empty", "at least one character")),
        (["--prompt", "word " * 600], ("the context holds 512", "shorten the prompt to at most 511 tokens")),
        (["--dtype", "float8"], ("--dtype float8", "auto, float32, bfloat16, float16")),
        (["--mode", "turbo"], ("--mode turbo", "compile, off")),
        (["--lowering", "magic"], ("lowering 'magic'", "inductor, inline")),
        (["--max-new-tokens", "0"], ("max_new_tokens=0", "an int >= 1")),
        (["--temperature", "-1"], ("temperature=-1.0", "0 (greedy)")),
        (["--top-p", "2"], ("top_p=2.0", "(0, 1]")),
        (["--device", "abacus"], ("device 'abacus'", "known: ", "`core devices` lists")),
        (["--device", "cpu:7"], ("cpu:7",)),
    ],
)
def test_a_value_that_cannot_be_used_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], phrases: tuple[str, ...]
) -> None:
    refused(capsys, [*RUN, *arguments], *phrases)


def test_a_device_that_is_not_here_is_refused_and_nothing_takes_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/dev/davinci0").exists():
        pytest.skip("an NPU is here")
    refused(capsys, [*RUN, "--device", "npu"], "device 'npu:0'", "note: raised by plugin core")


def test_a_wrong_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--no-such-option"]) == 2
    assert "Traceback" not in capsys.readouterr().err
