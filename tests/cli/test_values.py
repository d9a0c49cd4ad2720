"""core/cli/values.py and what else is refused of a command line before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from core.bench.preset_names import PRESET_NAMES
from core.bench.presets import PRESETS
from core.cli import main
from core.paths import local_path
from core.quantization.names import SCHEME_NAMES, WEIGHT_ONLY
from core.quantization.scheme import SCHEMES
from core.settings import Settings

EARLY = (
    "run --speculative 999999999999999999999999999999",
    "run --speculative 2000",
    "run --max-new-tokens 0",
    "run --temperature nan",
    "run --top-p 7",
    "run --mode bogus",
    "run --mode decode=full,decode=off",
    "run --provider core::attention",
    "serve --provider core::attention=a --provider core::attention=b",
    "run --provider core::nothing=x",
    "serve --provider attention=reference",
    "serve --ray --provider core::nothing=x",
    "bench --provider core::nothing=x",
    "run --dtype float8",
    "run --verify maybe",
    "run --kv-cache-dtype fp9",
    "run --device bogus",
    "run --device :7",
    "run --model ~nosuchuser/m",
    "run --model no/such/folder",
    "run no/such/folder",
    "run --model nowhere",
    "serve core --model core",
    "run --no-passes --pass lift_rms_norm",
    "run --max-new-tokens " + "9" * 5000,
    "run --quantize nope",
    "run --quantize int8-g32",
    "run --calibration text.txt",
    "serve --quantize nope",
    "explain --quantize w4a16-g0",
    "explain --sensitivity",
    "bench --quantize nope",
    "bench --preset nope",
    "bench --batch 0",
    "bench --batch x",
    "bench --rounds 0",
    "bench --plot ~nosuchuser/p.svg",
    "bench --json no/such/folder/x.json",
    "bench llama --preset llama-8b",
    "explain --phase verify",
    "explain --cache none",
    "explain --kernels --batch 0",
    "explain --html ~nosuchuser/page.html",
    "bisect --level all",
    "bisect no/such/folder",
    "passes --device bogus",
    "passes --no-passes --no-pass x",
    "doctor --timeout-s inf",
    "fakes --timeout-s nan",
    "conformance --timeout-factor inf",
    "conformance --html no/such/folder/x.html",
    "new-plugin acme --into ~nosuchuser/x",
)


@pytest.mark.slow
def test_a_wrong_command_line_is_refused_before_torch_is_imported() -> None:
    code = (
        "import json, sys\nfrom core.cli import main\n"
        "rows = [(main(line.split()), 'torch' in sys.modules) for line in json.loads(sys.argv[1])]\n"
        "print(json.dumps(rows))"
    )
    ran = subprocess.run([sys.executable, "-c", code, json.dumps(EARLY)], capture_output=True, text=True, check=True)
    rows = dict(zip(EARLY, json.loads(ran.stdout.splitlines()[-1]), strict=True))
    assert {line: row for line, row in rows.items() if row != [2, False]} == {}
    assert "internal error" not in ran.stderr


def test_what_is_checked_without_torch_is_what_there_is() -> None:
    assert tuple(SCHEMES) == SCHEME_NAMES and tuple(PRESETS) == PRESET_NAMES
    assert tuple(name for name, scheme in SCHEMES.items() if scheme.activations is None) == WEIGHT_ONLY


@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (["run", "--prompt", "caf\udce9"], ("argument 3, 'caf\\udce9'", "not UTF-8")),
        (["run", "--prompt", "a\0b"], ("argument 3, 'a\\x00b'", "NUL")),
        (["run", "--model", "x" * 300], ("a name in it has 300 bytes",)),
        (["bench", "--plot", "/".join(["x" * 200] * 30)], ("--plot", "too long")),
        (["run", "--mode", "decode=full, decode=off"], ("--mode decode=full, decode=off", "'decode'", "once")),
        (["explain", "--html", "~nosuchuser/x.html"], ("--html", "no home folder for '~nosuchuser'")),
        (["run", "--provider", "core::atention=x"], ("--provider core::atention=x", "did you mean 'core::attention'?")),
        (["run", "--provider", "x=y"], ("no canonical op 'x'", "core::add_lora, ")),
        (["run", "--seed", str(2**64)], ("--seed 18446744073709551616", "is the most")),
    ],
)
def test_an_unusable_value_has_one_error(
    arguments: list[str], phrases: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert all(phrase in err for phrase in phrases) and err.count("error: ") == 1 and "to do:" in err, err
    assert len(err) < 4500 or "x" * 200 in err


def test_a_home_that_is_not_there_is_named_by_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CORE_CACHE_DIR", "~nosuchuser/x")
    assert main(["cache", "list"]) == 2
    assert "CORE_CACHE_DIR='~nosuchuser/x'" in capsys.readouterr().err


def test_a_path_that_can_be_used_is_resolved(tmp_path: Path) -> None:
    assert local_path("x", "~") == Path.home() and local_path("x", tmp_path / "new") == tmp_path / "new"
    assert Settings.from_environment({"CORE_CACHE_DIR": "~/x"}).cache_dir == Path.home() / "x"
