"""core/compilation/cache/store.py: whole entries or none, whoever else writes, and what lies there told."""

from __future__ import annotations

import os
import re
import shutil
import stat as stat_of
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from core.common.kernel_compilers import INDUCTOR, KernelCompiler
from core.compilation.cache.differences import Factors
from core.compilation.cache.entry import Damaged, Gone
from core.compilation.cache.folders import Untrusted, default_folder
from core.compilation.cache.store import MOST_COMPARED, Store, key_of

COMPILERS = (INDUCTOR, KernelCompiler(name="acme", counting=INDUCTOR.counting, folder_variable="ACME_CACHE_DIR"))
FACTORS = {"model": {"main": "m:Model"}, "device": {"name": "acme"}, "options": {"a": "1"}}
READS = {"names": ["forward"], "values": {"phases['main'].scale": "2.0"}}
GRAPHS = {"phases": [{"phase": "main", "mode": "full", "graphs": [{"nodes": [{"op": "placeholder", "name": "x"}]}]}]}
KEY = key_of(FACTORS)


def write(store: Store, factors: Factors = FACTORS, reads: Any = READS) -> Path:
    return store.write(key_of(factors), factors, reads, GRAPHS)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.candidates(KEY, most=9) == [] and store.entries() == []
    path = write(store)
    assert store.candidates(KEY, most=9) == [path.name] and path.name.endswith(KEY)
    assert store.graphs(path.name, FACTORS) == GRAPHS and store.reads(path.name) == READS
    assert store.factors(path.name) == {**FACTORS, "values": {"main.scale": "2.0"}}
    assert sorted(each.name for each in path.iterdir()) == ["checksums.json", *(f"{n}.json" for n in NAMES)]
    (entry,) = store.entries()
    assert (entry.name, entry.model, entry.device, entry.problem) == (path.name, "m:Model", "acme", "")
    assert entry.num_bytes > 100 and 0 <= entry.age_s < 60


NAMES = ("factors", "graphs", "reads")


def test_entries_of_one_program_lie_beside_each_other_the_latest_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    paths = [write(store, reads={**READS, "values": {"a": str(number)}}) for number in range(3)]
    for age, path in enumerate(paths):
        os.utime(path, (1e9 + age,) * 2)
    assert store.candidates(KEY, most=2) == [paths[2].name, paths[1].name]


LEVELS = ("", "graphs-2", "graphs-2/entry", *(f"graphs-2/entry/{name}.json" for name in (*NAMES, "checksums")))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["mode", "owner"])
def test_no_level_is_read_that_others_may_write(
    level: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "new")
    path = write(store)
    opened = tmp_path / "new" / level.replace("entry", path.name)
    if how == "mode":
        opened.chmod(opened.stat().st_mode | 0o020)
    else:  # as if this were another user, who owns but this
        pretend_another_owns(opened, monkeypatch)
    with pytest.raises(Untrusted, match=f"others may write to {re.escape(str(opened))}; "):
        for name in store.candidates(KEY, most=9):
            store.reads(name)
            store.graphs(name, FACTORS)
    if level.count("/") < 1:
        with pytest.raises(Untrusted, match="others may write"):
            write(store)
    else:
        assert "others may write" in store.entries()[0].problem and store.nearest(FACTORS) is None


def pretend_another_owns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.stat

    def stat(self: Path, **options: Any) -> os.stat_result:
        found = real(self, **options)
        fields = list(found)
        fields[stat_of.ST_UID] = 4242 if self == path else os.getuid()
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", stat)


def test_only_the_user_may_read_and_write_it(tmp_path: Path) -> None:
    path = write(Store(tmp_path / "new"))
    modes = {each: each.stat().st_mode & 0o777 for each in (path.parent.parent, path.parent, path, *path.iterdir())}
    assert set(modes.values()) == {0o700, 0o600} and all(modes[each] == 0o600 for each in path.iterdir())


def test_the_key_is_that_of_the_factors_in_any_order(tmp_path: Path) -> None:
    other = {**FACTORS, "options": {"a": "2"}}
    assert key_of(dict(reversed(FACTORS.items()))) == KEY != key_of(other)
    store = Store(tmp_path)
    path = store.write(KEY, other, READS, GRAPHS)
    with pytest.raises(Damaged, match="other factors than its name says"):
        store.graphs(path.name, FACTORS)


@pytest.mark.parametrize("name", ["factors.json", "reads.json", "graphs.json", "checksums.json"])
@pytest.mark.parametrize("at", [0.0, 0.3, 0.99])
def test_every_flipped_byte_is_seen(tmp_path: Path, name: str, at: float) -> None:
    store = Store(tmp_path)
    path = write(store) / name
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"checksum|read"):
        store.reads(path.parent.name)
        store.graphs(path.parent.name, FACTORS)
    assert store.entries()[0].problem and store.nearest({**FACTORS, "options": {"a": "2"}}) is None


WRONG: dict[str, tuple[Any, Any, Any]] = {
    "no graphs": (FACTORS, READS, {}),
    "graphs of no mode": (FACTORS, READS, {"phases": [{"phase": "main"}]}),
    "graphs in a text": (FACTORS, READS, {"phases": "main"}),
    "no reads": (FACTORS, {}, GRAPHS),
    "reads in a list": (FACTORS, {"names": [], "values": []}, GRAPHS),
    "factors in a list": ({"model": []}, READS, GRAPHS),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_entry_with_right_checksums_and_wrong_content_is_damaged(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.write(KEY, *WRONG[name])
    assert store.entries()[0].problem and store.nearest(FACTORS) is None and store.places(path.name) == {}
    with pytest.raises(Damaged):
        store.summary(path.name)


def test_a_damaged_entry_is_replaced_and_a_whole_one_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = write(store)
    inode = (path / "graphs.json").stat().st_ino
    write(store)
    assert (path / "graphs.json").stat().st_ino == inode
    (path / "graphs.json").write_text("{}")
    write(store)
    assert store.graphs(path.name, FACTORS) == GRAPHS
    assert [each.name for each in store.folder.iterdir()] == [path.name]


def test_what_a_dead_writer_left_is_no_entry(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.folder.mkdir(mode=0o700)
    left, fresh = store.folder / ".writing-dead", store.folder / ".writing-alive"
    for folder in (left, fresh):
        folder.mkdir()
        (folder / "factors.json").write_text("{")
    os.utime(left, (time.time() - 7200,) * 2)
    assert store.entries() == [] and store.nearest(FACTORS) is None
    write(store)
    assert not left.exists() and fresh.exists()  # an old one is removed, another writer's is not
    assert store.clear()[0] == 1 and list(store.folder.iterdir()) == []


def test_the_nearest_entry_names_what_differs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    far = {**FACTORS, "options": {"a": "2", "b": "3"}, "device": {"name": "other"}}
    other = {**FACTORS, "model": {"main": "m:Other"}}
    paths = [write(store, factors) for factors in (FACTORS, far, other)]
    name, found = store.nearest({**FACTORS, "options": {"a": "9"}}) or ("", [])
    assert (name, list(map(str, found))) == (paths[0].name, ["options: a: 1 -> 9"])
    assert store.nearest({**FACTORS, "device": {"name": "third"}}) is None  # of which every factor differs


def test_a_miss_reads_no_more_entries_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = Store(tmp_path), set[Path]()
    paths = [write(store, {**FACTORS, "options": {"a": str(number)}}) for number in range(2 * MOST_COMPARED)]
    for age, path in enumerate(paths):
        os.utime(path, (1e9 + age,) * 2)

    def read_noted(self: Path, before: Any = Path.read_bytes) -> bytes:
        read.add(self.parent)
        content: bytes = before(self)
        return content

    monkeypatch.setattr(Path, "read_bytes", read_noted)
    found = store.nearest({**FACTORS, "options": {"a": "other"}})
    assert found is not None and found[0] == paths[-1].name
    assert read == {*paths[-MOST_COMPARED:]}


def test_clearing_takes_kernels_too_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_CACHE_DIR", "/own/place")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    store = Store(tmp_path)
    store.keep_kernels(COMPILERS)
    assert os.environ["ACME_CACHE_DIR"] == "/own/place"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kernels" / "inductor")
    write(store)
    (tmp_path / "graphs-1" / "of_an_older_format").mkdir(parents=True)
    (tmp_path / "kernels" / "inductor" / "kernel").write_text("12345")
    (tmp_path / "kernels" / "lowered" / "graph").mkdir(parents=True)
    (tmp_path / "kernels" / "lowered" / "graph" / "graph.so").write_text("123")
    (tmp_path / "mine.txt").write_text("")
    (tmp_path / "mine").mkdir()
    assert store.kernel_bytes() == {"inductor": 5, "lowered": 3}
    count, num_bytes = store.clear()
    assert count == 2 and num_bytes > 5
    assert [each.name for each in sorted(tmp_path.iterdir())] == [
        *("graphs-1", "graphs-2", "kernels", "mine", "mine.txt"),
    ]
    assert list(store.folder.iterdir()) == [] and store.clear() == (0, 0)
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
        write(store)
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


def test_a_reader_finds_an_entry_whole_or_not_at_all_while_it_is_cleared(tmp_path: Path) -> None:
    """Whatever a reader has found or read before, clearing leaves it no half of an entry."""
    store = Store(tmp_path)
    path = write(store)
    (name,) = store.candidates(KEY, most=9)
    store.reads(name)
    removed: list[list[str]] = []
    real = shutil.rmtree

    def look(folder: Any, **options: Any) -> None:
        removed.append(store.candidates(KEY, most=9))
        with pytest.raises(Gone, match="removed meanwhile"):
            store.graphs(name, FACTORS)
        real(folder, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", look)
        assert store.clear()[0] == 1
    assert removed == [[]] and not path.exists()


WRITER = """
import sys
from pathlib import Path
from core.common.kernel_compilers import INDUCTOR, KernelCompiler
from core.compilation.cache.store import Store, key_of
from core.compilation.cache.entry import Gone
factors = {"model": {"main": "m:Model"}, "device": {"name": "acme"}, "options": {"a": "1" * 100000}}
store = Store(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    name = store.write(key_of(factors), factors, {"names": [], "values": {}}, {"phases": []}).name
    try:
        assert store.graphs(name, factors) == {"phases": []}
    except Gone:
        assert "discards" in sys.argv[2:]
    if sys.argv[2] == "discards":
        store.discard(name)
    if sys.argv[2] == "clears":
        store.clear()
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize("second", ["keeps", "discards", "clears"])
def test_two_processes_may_write_at_once(tmp_path: Path, second: str) -> None:
    """The one that also removes makes the other see entries vanish; a read then finds none, never a half of one."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, *what], **pipes) for what in (("keeps", second), (second, second))]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.communicate("go\n", timeout=60)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert all(not each.name.startswith(".writing-") for each in Store(tmp_path).folder.iterdir())


@pytest.mark.parametrize("name", ["factors.json", "reads.json", "graphs.json", "checksums.json"])
def test_a_pipe_in_the_place_of_a_file_is_damage_and_not_waited_for(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path)
    path = write(store)
    (path / name).unlink()
    os.mkfifo(path / name, 0o600)
    assert "is no regular file" in store.entries()[0].problem
    with pytest.raises(Damaged, match="is no regular file"):
        store.reads(path.name) if name == "reads.json" else store.graphs(path.name, FACTORS)
    assert write(store) == path and store.graphs(path.name, FACTORS) == GRAPHS


def test_an_entry_whose_phase_has_no_graphs_is_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.write(KEY, FACTORS, READS, {"phases": [{"phase": "main", "mode": "full", "graphs": []}]})
    with pytest.raises(Damaged, match="holds no graphs by phase"):
        store.graphs(path.name, FACTORS)


def test_entries_behind_a_link_that_programs_follow_are_cleared(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    write(store)
    store.folder.rename(tmp_path / "elsewhere")
    store.folder.symlink_to(tmp_path / "elsewhere")
    assert store.candidates(KEY, most=9) and store.clear()[0] == 1
    assert store.entries() == [] and list((tmp_path / "elsewhere").iterdir()) == []
