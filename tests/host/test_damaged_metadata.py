"""core/host/distributions: whatever one installed distribution's metadata hold, the others are listed and used."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PathDistribution, entry_points
from pathlib import Path
from typing import Any

import pytest

import core
from core.cli import main
from core.errors import UnknownDeviceError
from core.host.discovery import discover
from core.host.distributions.isolation import folders_set_aside
from core.settings import Settings

InstallVendor = Callable[..., Any]

FILES = ("entry_points.txt", "METADATA", "RECORD")
ALWAYS_NAMED = ("folder", "huge", "pipe", "loop", "not UTF-8")
QUICK, ALL = 20, 200


def _flip(text: bytes, chance: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(chance.randint(1, 6)):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _insert(text: bytes, chance: random.Random, what: bytes) -> bytes:
    place = chance.randrange(len(text))
    return text[:place] + what + text[place:]


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped bits": _flip,
    "truncated": lambda text, chance: text[: chance.randrange(len(text))],
    "a line too many": lambda text, chance: _insert(text, chance, b"\nfoo\n"),
    "zero bytes": lambda text, chance: _insert(text, chance, b"\0" * chance.randint(1, 9)),
    "escape sequences": lambda text, chance: _insert(text, chance, b"\x1b[31m\x07"),
    "long line": lambda text, chance: _insert(text, chance, b"x" * 5000),
    "not UTF-8": lambda text, chance: _insert(text, chance, b"\xff\xfe"),
    "doubled": lambda text, chance: text + text,
    "noise": lambda text, chance: chance.randbytes(len(text)),
}
REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(),
    # Sparse: longer than what is read of any file, and no byte of it is on the disk.
    "huge": lambda path: (path.touch(), os.truncate(path, 2**24 + 1)),
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
    "absent": lambda path: None,
}


def damage(info: Path, chance: random.Random) -> tuple[str, str]:
    """Damage one file of the metadata; return which and how."""
    file, how = chance.choice(FILES), chance.choice([*CHANGES, *REPLACEMENTS])
    path = info / file
    text = path.read_bytes()
    path.unlink()
    if how in CHANGES:
        path.write_bytes(CHANGES[how](text, chance))
    else:
        REPLACEMENTS[how](path)
    return file, how


def unreadable(info: Path) -> bool:
    """Ask the standard library itself whether it can read the metadata."""
    distribution = PathDistribution(info)
    try:
        list(distribution.entry_points)
        distribution.metadata["Name"]
        list(distribution.files or ())
    except Exception:
        return True
    return False


def declared(info: Path) -> bool:
    return any(point.group == "core.plugins" for point in PathDistribution(info).entry_points)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < QUICK else pytest.mark.exhaustive) for seed in range(ALL)]
)
def test_damage_is_named_and_the_sound_go_on(
    seed: int, install_vendor: InstallVendor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    install_vendor(device="sound", distribution="sound-device", probe=None)
    vendor = install_vendor(device="acme", distribution="acme-device", probe=None)
    info = vendor.root / "acme_device-1.0.dist-info"
    (info / "RECORD").write_text("".join(f"{vendor.module}/{name}.py,sha256=abc,12\n" for name in ("plugin", "probe")))
    file, how = damage(info, chance)
    if chance.random() < 0.2:  # an upgrade that failed half-way leaves two
        install_vendor(device="acme", distribution="acme-device", version="2.0", probe=None)
    monkeypatch.setenv("CORE_PLUGINS_DISABLE", "core")  # its probes would start processes

    assert main(["devices", "--json"]) == 0, (file, how)
    out, err = capsys.readouterr()
    document = json.loads(out)
    states = {row["device"]: row["state"] for row in document["devices"]}
    assert (states["sound"], states["cpu"]) == ("available", "blocked")
    assert "Traceback" not in err and "internal error" not in err
    told = [*document["warnings"], *(row["plugin"]["distribution"] + row["reason"] for row in document["devices"])]
    assert all(line.isprintable() and len(line) < 2000 for line in told)
    # A pipe that the library opened would wait for ever, so it is asked about the rest only.
    if how in ALWAYS_NAMED or unreadable(info) or declared(info):
        assert any("acme-device" in line or "acme_device" in line for line in told), (file, how)


def test_a_broken_rival_takes_no_name(install_vendor: InstallVendor) -> None:
    install_vendor(distribution="acme-device")
    rival = install_vendor(distribution="acme-fork")
    (rival.root / "acme_fork-1.0.dist-info" / "METADATA").write_bytes(b"Name: \xff")
    found = {entry.info.distribution: entry.verdict for entry in discover(Settings()).claiming("acme")}
    assert found == {"acme-device": "ready", "acme_fork": "broken"}


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a distribution that has nothing to do with core, and whose entry points can't be read."""
    info = tmp_path / "foreign" / "foo-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[other.group]\nfoo\n")
    monkeypatch.syspath_prepend(str(info.parent))
    return info


def assert_named(text: str, folder: Path) -> None:
    problem = "entry_points.txt is damaged: line 2 is 'foo', which is no `name = module:attribute`"
    assert f"distribution foo 1.0 ({folder}) is damaged and left out: {problem}" in text
    assert "install it again, or uninstall it" in text


def test_a_damaged_foreign_distribution_is_set_aside_until_it_is_mended(
    foreign: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TypeError):
        entry_points()
    for _ in range(2):
        assert core.select_device("cpu").name == "cpu"
    (line,) = caplog.messages
    assert_named(line, foreign)
    assert folders_set_aside() == (str(foreign),)
    assert "core.plugins" in entry_points().groups
    (foreign / "entry_points.txt").write_text("[other.group]\nfoo = bar\n")
    core.select_device("cpu")
    assert folders_set_aside() == () and entry_points(group="other.group").names == {"foo"}


@pytest.mark.parametrize(
    ("file", "text"), [("METADATA", b"Name: f\xff"), ("RECORD", b"foo.py,,x\n"), ("RECORD", b"\xff")]
)
def test_what_only_other_libraries_read_is_set_aside_too(foreign: Path, file: str, text: bytes) -> None:
    (foreign / "entry_points.txt").unlink()
    (foreign / file).write_bytes(text)
    core.select_device("cpu")
    assert folders_set_aside() == (str(foreign),)


def test_a_worker_sets_aside_what_its_parent_does(install_vendor: InstallVendor, foreign: Path) -> None:
    source = """
    from importlib.metadata import entry_points
    def probe():
        return Probe(available=True, device_count=len(entry_points(group="core.plugins")), reason="read")
    """
    install_vendor(probe=source)
    assert {each.plugin.device: each.state for each in core.list_devices()}["acme"] == "broken"
    core.select_device("cpu")
    assert {each.plugin.device: each.state for each in core.list_devices()}["acme"] == "available"


def test_an_unknown_device_may_be_one_of_the_damaged(foreign: Path) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        core.select_device("foo")
    (note,) = caught.value.__notes__
    assert note.startswith("'foo' may be a device of this one: ")
    assert_named(note, foreign)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["devices", "doctor", "passes --device cpu", "run --device cpu --max-new-tokens 2 --no-check --lowering inline"],
)
def test_commands_go_on_and_say_so(command: str, foreign: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for arguments in (command.split(), [*command.split(), "--json"]):
        ran = subprocess.run(
            [sys.executable, "-m", "core", *arguments], env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        assert "Traceback" not in ran.stderr
        if arguments[-1] == "--json":
            (line,) = json.loads(ran.stdout)["warnings"]
            assert_named(line, foreign)
        else:
            assert_named(ran.stderr, foreign)
