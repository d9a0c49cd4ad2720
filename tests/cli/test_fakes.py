"""`core fakes`: what it prints, as text and as JSON, and its exit codes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from core.cli import main
from core.cli.fakes import fake_json, op_json
from core.common.fakes import FakeOp, FakeResult, nothing
from core.verify.fakes import checks as fake_checks
from core.verify.fakes.checks import LibraryCheck, Lie, OpCheck

TRUE = OpCheck(op="lib::a", schema="lib::a() -> ()", verdict="agrees", declared=True, calls=1)
LYING = OpCheck(
    op="lib::b",
    schema="lib::b(Tensor x) -> Tensor",
    verdict="lies",
    declared=False,
    calls=3,
    lies=(Lie("x=float32 (5, 8)", "writes its argument 'x'"),),
    reason="x=bool (): the process crashed with SIGSEGV",
)
ABSENT = OpCheck(op="lib::c", schema="lib::c() -> ()", verdict="no fake", declared=False, reason="none declared")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["fakes", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Answer `--check good` with an op that agrees, and anything else with one that lies too."""
    calls: list[Any] = []

    def check(library: str, device: str, *, timeout_s: float) -> LibraryCheck:
        calls.append((library, device, timeout_s))
        ops = (TRUE, ABSENT) if library == "good" else (TRUE, LYING, ABSENT)
        return LibraryCheck(library=library, device="cpu (a processor)", ops=ops)

    monkeypatch.setattr(fake_checks, "check_library", check)
    return calls


def test_what_became_of_each_declared_fake_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--device", "cpu")
    assert code == 0
    assert "59 fakes declared, 0 applied" in out
    lines = out.splitlines()
    at = lines.index("not applied  sgl_kernel::rotary_embedding_cpu -> like query; like key")
    assert lines[at + 1].strip() == "op sgl_kernel::rotary_embedding_cpu is not loaded in this process"


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--device", "cpu", "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["check"]) == (0, "core.fakes/1", None)
    assert document["device"].startswith("cpu (") and len(document["fakes"]) == 59
    (one,) = (each for each in document["fakes"] if each["op"] == "sgl_kernel::bmm_cpu")
    assert one == {
        "op": "sgl_kernel::bmm_cpu",
        "rule": "nothing; writes out",
        "samples": True,
        "applied": False,
        "reason": "op sgl_kernel::bmm_cpu is not loaded in this process",
    }


def test_a_lie_is_shown_with_its_call_and_the_exit_code_is_1(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "--device", "cpu", "--check", "bad", "--timeout-s", "7")
    assert (code, asked) == (1, [("bad", "cpu", 7.0)])
    assert out.splitlines() == [
        "op library bad on device cpu (a processor)",
        "agrees      lib::a  (1 declared call)",
        "lies        lib::b  (3 guessed calls)",
        "            writes its argument 'x'",
        "              in x=float32 (5, 8)",
        "            x=bool (): the process crashed with SIGSEGV",
        "no fake     lib::c",
        "            none declared",
        "agrees: 1, lies: 1, no fake: 1, not called: 0; of 3 ops",
    ]


def test_without_a_lie_the_exit_code_is_0(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--device", "cpu", "--check", "good")[0] == 0


def test_the_check_as_json(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--check", "bad", "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["fakes"]) == (1, "core.fakes/1", [])
    assert document["check"] == {"library": "bad", "ops": [op_json(each) for each in (TRUE, LYING, ABSENT)]}
    assert document["check"]["ops"][1]["lies"] == [{"call": "x=float32 (5, 8)", "what": "writes its argument 'x'"}]


def test_the_documents_fields_are_those_written() -> None:
    text = (Path(__file__).parents[2] / "docs/json.md").read_text(encoding="utf-8")
    section = text.partition("## core.fakes/1")[2].partition("\n## ")[0]
    written = [
        *fake_json(FakeOp(op="a::b", rule=nothing), FakeResult(applied=True, reason="")),
        *op_json(TRUE),
        *(each.name for each in fields(Lie)),
        "library",
        "ops",
    ]
    assert [name for name in written if f"| `{name}` |" not in section] == []


def test_an_unknown_device_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--device", "nosuch")
    assert code == 2 and "'nosuch'" in err
