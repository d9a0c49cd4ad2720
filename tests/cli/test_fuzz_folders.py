"""`core run` on folders that hold something wrong: one clear error, or what was wrong did no harm."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from core.cli import main
from tests.engine.models.fuzzing import make_wrong

NUM_CASES, NUM_QUICK = 200, 20
SEEDS = [pytest.param(seed, marks=() if seed < NUM_QUICK else pytest.mark.exhaustive) for seed in range(NUM_CASES)]
MAX_GROWTH_KIB = 512 * 1024
"""Beside what the first run of a process takes; the model has 4 MB of weights."""


def run(folder: Path) -> int:
    options = ["--mode", "off", "--no-check", "--no-cache", "--max-new-tokens", "2"]
    return main(["run", "--device", "cpu", "--model", str(folder), *options])


@pytest.mark.cases(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_folder_is_refused_or_harmless(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = make_wrong(tmp_path / "model", seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = run(tmp_path / "model")
    out, err = capsys.readouterr()
    assert "internal error" not in err and "Traceback" not in err, (wrong, err[-500:])
    assert code in (0, 2), (wrong, err)
    assert err.count("error: ") <= 1 or code == 0, (wrong, err)
    assert (code == 2) == ("\n  found: " in err and "\n  to do: " in err), (wrong, err)
    assert len(err) < 8000, wrong
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB, wrong
    assert code == 2 or out, wrong
