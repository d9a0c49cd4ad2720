"""`core cache`: what is kept, with sizes and ages, and clearing it; no torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.cli import main, output
from core.compilation.cache.store import Store, key_of

VALUES = {
    "a": "1",
    "w": "Parameter bfloat16[1024, 512] on acme:1",
    "v": "Parameter bfloat16[512] on acme:1, in the memory of w",
    "at.key_cache": "Tensor float8_e4m3fn[64, 16] on acme:1",
}
FACTORS = {
    "model": {"main": "m:Model"},
    "device": {"name": "acme", "torch device": "acme:1"},
    "quantization": {"main": "w4a16-g32"},
    "options": {"lowering": "inline", "disable_passes": "(one, two)", "passes": "None"},
    "buckets": {"main": '[{"phase": "main", "dims": [1, 4], "guards": []}, {"phase": "main", "dims": [8, 4]}]'},
}
GRAPHS = {"phases": [{"phase": "main", "mode": "full", "graphs": [{}]}]}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("CORE_CACHE_DIR", str(tmp_path))
    store = Store(tmp_path)
    for values in (VALUES, {**VALUES, "a": "2"}):
        store.write(key_of(FACTORS), FACTORS, {"names": [], "values": values}, GRAPHS)
    return store


def names(store: Store) -> tuple[str, str]:
    """Return the names of the first entry and of the newer one, in which `a` is 2."""
    older, newer = sorted(store.candidates(key_of(FACTORS), most=2), key=lambda name: store.reads(name)["values"]["a"])
    return older, newer


def test_entries_are_listed(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = names(store)
    (store.folder / older / "graphs.json").write_text("{}")
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    assert newer[:12] in out and "Model" in out and "can't be used" in out and "2 entries" in out


def test_a_row_tells_what_the_entry_was_made_for_in_100_columns(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_PIPE_COLUMNS", 100)
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    assert all(len(line.rstrip()) <= 100 for line in out.splitlines()) and "…" not in out
    text = " ".join(out.split())
    assert (
        "Model; w4a16-g32; weights 1.0 MiB bf16; kv cache 1.0 KiB fp8 main full 4-8 (2); inline; without one, two"
        in text
    )
    assert out.count("unlike the latest: values a") == 1


def test_the_json_says_what_differs(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "core.cache/1" and document["folder"] == str(store.folder.parent)
    found = {each["key"]: each for each in document["entries"]}
    assert found.keys() == set(names(store))
    assert sorted(each["differs"] for each in found.values()) == [[], ["values: a"]]
    assert all(each["holds"]["quantization"] == ["w4a16-g32"] for each in found.values())
    assert found[names(store)[1]]["holds"] == {
        "weights": {"bfloat16": 2**20},
        "cache": {"float8_e4m3fn": 1024},
        "quantization": ["w4a16-g32"],
        "phases": [{"phase": "main", "mode": "full", "buckets": 2, "sizes": [4, 8]}],
        "lowering": "inline",
        "switches": "without one, two",
        "torch_device": "acme:1",
    }
    assert all(each["num_bytes"] > 0 and each["age_s"] >= 0 and not each["problem"] for each in found.values())


def test_clearing_leaves_nothing(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["removed"] == 2 and document["num_bytes"] > 0 and not store.entries()
    assert main(["cache", "clear"]) == 0 and "removed 0 entries" in capsys.readouterr().out


def test_what_can_not_be_cleared_is_one_clear_error(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Root may write to any folder, so that modes would tell nothing here.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != store.folder)
    assert main(["cache", "clear"]) == 2
    err = capsys.readouterr().err
    assert str(store.folder) in err and "clear it as the user" in err and "Traceback" not in err
    assert len(store.entries()) == 2


def test_a_wrong_folder_or_action_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "burn"]) == 2
    monkeypatch.setenv("CORE_CACHE_DIR", "relative/place")
    assert main(["cache"]) == 2
    err = capsys.readouterr().err
    assert "CORE_CACHE_DIR='relative/place'" in err and "absolute" in err and "Traceback" not in err


def test_no_torch_is_imported(tmp_path: Path) -> None:
    code = "import sys; from core.cli import main; main(['cache']); sys.exit('torch' in sys.modules)"
    environment = {"CORE_CACHE_DIR": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60).returncode == 0
