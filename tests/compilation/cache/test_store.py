"""core/compilation/cache/store.py: whole entries or none, whoever else writes, and what lies there told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.common.kernel_compilers import INDUCTOR, KernelCompiler
from core.compilation.cache.folders import Untrusted, default_folder
from core.compilation.cache.store import Damaged, Store, key_of

COMPILERS = (INDUCTOR, KernelCompiler(name="acme", counting=INDUCTOR.counting, folder_variable="ACME_CACHE_DIR"))
FACTORS = {"model": {"main": "m:Model"}, "device": {"name": "acme"}, "values": {"a": "1"}}
GRAPHS = {"phases": [{"phase": "main", "graphs": [{"nodes": [{"op": "placeholder", "name": "x"}]}]}]}
KEY = key_of(FACTORS)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.read(KEY, FACTORS) is None and store.entries() == []
    path = store.write(KEY, FACTORS, GRAPHS)
    assert store.read(KEY, FACTORS) == GRAPHS and store.factors(KEY) == FACTORS
    assert sorted(each.name for each in path.iterdir()) == ["checksums.json", "factors.json", "graphs.json"]
    (entry,) = store.entries()
    assert (entry.key, entry.model, entry.device, entry.problem) == (KEY, "m:Model", "acme", "")
    assert entry.num_bytes > 100 and 0 <= entry.age_s < 60


def test_only_the_user_may_read_and_write_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")
    store.write(KEY, FACTORS, GRAPHS)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    store.folder.chmod(0o770)
    with pytest.raises(Untrusted, match="others may write"):
        store.read(KEY, FACTORS)
    with pytest.raises(Untrusted, match="others may write"):
        store.write(KEY, FACTORS, GRAPHS)


def test_the_key_is_that_of_the_factors_in_any_order(tmp_path: Path) -> None:
    assert key_of(dict(reversed(FACTORS.items()))) == KEY != key_of({**FACTORS, "values": {"a": "2"}})
    store = Store(tmp_path)
    store.write(KEY, {**FACTORS, "values": {"a": "2"}}, GRAPHS)
    with pytest.raises(Damaged, match="other factors than its name says"):
        store.read(KEY, FACTORS)


@pytest.mark.parametrize("name", ["factors.json", "graphs.json", "checksums.json"])
@pytest.mark.parametrize("at", [0.0, 0.3, 0.99])
def test_every_flipped_byte_is_seen(tmp_path: Path, name: str, at: float) -> None:
    store = Store(tmp_path)
    path = store.write(KEY, FACTORS, GRAPHS) / name
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"checksum|read"):
        store.read(KEY, FACTORS)
    assert store.entries()[0].problem
    assert store.nearest({**FACTORS, "values": {"a": "2"}}) is None or name == "graphs.json"


def test_a_damaged_entry_is_replaced_and_a_whole_one_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.write(KEY, FACTORS, GRAPHS)
    inode = (path / "graphs.json").stat().st_ino
    store.write(KEY, FACTORS, GRAPHS)
    assert (path / "graphs.json").stat().st_ino == inode
    (path / "graphs.json").write_text("{}")
    store.write(KEY, FACTORS, GRAPHS)
    assert store.read(KEY, FACTORS) == GRAPHS
    assert [each.name for each in store.folder.iterdir()] == [KEY]


def test_what_a_dead_writer_left_is_no_entry(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.folder.mkdir(mode=0o700)
    left, fresh = store.folder / ".writing-dead", store.folder / ".writing-alive"
    for folder in (left, fresh):
        folder.mkdir()
        (folder / "factors.json").write_text("{")
    os.utime(left, (time.time() - 7200,) * 2)
    assert store.entries() == [] and store.nearest(FACTORS) is None
    store.write(KEY, FACTORS, GRAPHS)
    assert not left.exists() and fresh.exists()  # an old one is removed, another writer's is not
    assert store.clear()[0] == 1 and list(store.folder.iterdir()) == []


def test_the_nearest_entry_names_what_differs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    far = {**FACTORS, "values": {"a": "2", "b": "3"}, "device": {"name": "other"}}
    other = {**FACTORS, "model": {"main": "m:Other"}}
    for factors in (FACTORS, far, other):
        store.write(key_of(factors), factors, GRAPHS)
    key, found = store.nearest({**FACTORS, "values": {"a": "9"}}) or ("", [])
    assert (key, list(map(str, found))) == (KEY, ["values: a: 1 -> 9"])


def test_clearing_takes_kernels_too_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_CACHE_DIR", "/own/place")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    store = Store(tmp_path)
    store.keep_kernels(COMPILERS)
    assert os.environ["ACME_CACHE_DIR"] == "/own/place"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kernels" / "inductor")
    store.write(KEY, FACTORS, GRAPHS)
    (tmp_path / "kernels" / "inductor" / "kernel").write_text("12345")
    (tmp_path / "mine.txt").write_text("")
    (tmp_path / "mine").mkdir()
    assert store.kernel_bytes() == {"inductor": 5}
    count, num_bytes = store.clear()
    assert count == 1 and num_bytes > 5
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["graphs-1", "kernels", "mine", "mine.txt"]
    assert store.kernel_bytes() == {}


@pytest.mark.parametrize("open_to_all", ["", "kernels", "kernels/inductor"])
def test_kernels_are_not_taken_from_a_folder_that_others_may_write(
    open_to_all: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a compiler finds there is run, so that somebody else could have any code run."""
    for variable in ("ACME_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "shared"
    (folder / "kernels" / "inductor").mkdir(parents=True)
    (folder / open_to_all).chmod(0o777)
    Store(folder).keep_kernels(COMPILERS)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ and "others may write" in caplog.text
    assert ("ACME_CACHE_DIR" in os.environ) == (open_to_all == "kernels/inductor")
    monkeypatch.delenv("ACME_CACHE_DIR", raising=False)


def test_a_home_that_can_not_be_written_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ACME_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").write_text("where nobody can make a folder, not even root")
    Store(tmp_path / "home" / "core").keep_kernels(COMPILERS)
    (line,) = caplog.messages
    assert line.startswith("compile cache: not used for kernels of inductor, acme: ") and str(tmp_path) in line
    assert line.endswith("; CORE_CACHE_DIR may name another folder")
    assert "ACME_CACHE_DIR" not in os.environ and "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_kernels_are_not_kept_in_a_folder_that_is_there_and_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an image whose cache another user has filled: the compiler would fail at its first kernel."""
    for name in ("ACME_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    store = Store(tmp_path)
    read_only = store.kernels / "inductor"
    # Root may write to any folder, so that modes would tell nothing here.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != read_only)
    store.keep_kernels(COMPILERS)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert os.environ["ACME_CACHE_DIR"] == str(store.kernels / "acme")
    (line,) = caplog.messages
    assert line.startswith("compile cache: not used for kernels of inductor: ") and str(read_only) in line
    monkeypatch.delenv("ACME_CACHE_DIR")


def test_kernels_of_inductor_are_not_kept_below_a_folder_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ACME_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    Store(tmp_path / "a b").keep_kernels(COMPILERS)
    assert os.environ["ACME_CACHE_DIR"] == str(tmp_path / "a b" / "kernels" / "acme")
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ and "Inductor can't compile below" in caplog.text
    monkeypatch.delenv("ACME_CACHE_DIR")


def test_folders_are_the_users_own_whatever_the_process_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_CACHE_DIR", "/own/place")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = os.umask(0)
    try:
        store = Store(tmp_path / "core")
        store.keep_kernels(COMPILERS)
        store.write(KEY, FACTORS, GRAPHS)
    finally:
        os.umask(before)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folders = (tmp_path / "core", store.kernels, store.kernels / "inductor", store.folder)
    modes = [path.stat().st_mode & 0o777 for path in folders]
    assert modes == [0o700] * 4


def test_where_a_users_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux":
        assert default_folder({"HOME": "/home/me", "XDG_CACHE_HOME": "not/absolute"}) == Path("/home/me/.cache/core")
        assert default_folder({"HOME": "/home/me"}) == Path("/home/me/.cache/core")
        assert default_folder({"HOME": "/home/me", "XDG_CACHE_HOME": "/fast"}) == Path("/fast/core")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user of no name
        assert default_folder({}).is_absolute()


WRITER = """
import sys
from pathlib import Path
from core.common.kernel_compilers import INDUCTOR, KernelCompiler
from core.compilation.cache.store import Store, key_of
factors = {"model": {"main": "m:Model"}, "device": {"name": "acme"}, "values": {"a": "1" * 100000}}
store = Store(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    store.write(key_of(factors), factors, {"phases": []})
    assert store.read(key_of(factors), factors) == {"phases": []}
    if sys.argv[2] == "discards":
        store.discard(key_of(factors))
"""


@pytest.mark.parametrize("second", ["keeps", "discards"])
def test_two_processes_may_write_at_once(tmp_path: Path, second: str) -> None:
    """The one that also discards makes the other see entries vanish; a read then finds none, never a half of one."""
    script = WRITER.replace('== {"phases": []}', 'in ({"phases": []}, None)')
    command = [sys.executable, "-c", script, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, what], **pipes) for what in ("keeps", second)]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.communicate("go\n", timeout=60)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert all(not each.name.startswith(".writing-") for each in Store(tmp_path).folder.iterdir())
