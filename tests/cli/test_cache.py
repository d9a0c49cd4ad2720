"""`core cache`: what is kept, with sizes and ages, and clearing it; no torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from core.cli import main
from core.common.cache.store import Store, key_of

FACTORS = {"model": {"main": "m:Model"}, "device": {"name": "acme"}, "values": {"a": "1"}}
NEWER = {**FACTORS, "values": {"a": "2"}}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("CORE_CACHE_DIR", str(tmp_path))
    store = Store(tmp_path)
    for factors in (FACTORS, NEWER):
        store.write(key_of(factors), factors, {"phases": []})
    return store


def test_entries_are_listed(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    (store.folder / key_of(FACTORS) / "graphs.json").write_text("{}")
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    assert key_of(NEWER)[:12] in out and "m:Model" in out and "can't be used" in out and "2 entries" in out


def test_the_json_says_what_differs(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "core.cache/1" and document["folder"] == str(store.folder.parent)
    found = {each["key"]: each for each in document["entries"]}
    assert found.keys() == {key_of(FACTORS), key_of(NEWER)}
    assert sorted(each["differs"] for each in found.values()) == [[], ["values: a"]]
    assert all(each["num_bytes"] > 0 and each["age_s"] >= 0 and not each["problem"] for each in found.values())


def test_clearing_leaves_nothing(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["removed"] == 2 and document["num_bytes"] > 0 and not store.entries()
    assert main(["cache", "clear"]) == 0 and "removed 0 entries" in capsys.readouterr().out


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
