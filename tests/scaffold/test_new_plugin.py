"""`core new-plugin`: which names it takes, what it writes or leaves alone, and that what it writes works at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from core.cli import main
from core.errors import UsageError
from core.hookspecs import CoreSpec
from core.host.discovery import discover
from core.scaffold.names import MAX_NAME, MAX_PACKAGE, MAX_VENDOR, Names, choose_names, range_of
from core.scaffold.writing import FILES, FILES_ON_TORCH, render, write
from core.settings import Settings
from core_conformance.rules.expectations import Expectations
from tests.conftest import InstallVendor
from tests.support import refused

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "core" / "scaffold" / "templates"


def names(device: str, **given: str) -> Names:
    return choose_names(device, discover(Settings.from_environment({})), **given)


@pytest.mark.parametrize(
    ("device", "package", "distribution", "title", "prefix"),
    [
        ("wave", "core_wave", "wave-device", "Wave", "wave"),
        ("Wave-2", "core_wave_2", "wave-2-device", "Wave 2", "wave_2"),
        ("MyChip_X-", "core_mychip_x", "mychip-x-device", "MyChip X", "mychip_x"),
        ("class", "core_class", "class-device", "Class", "class"),
    ],
)
def test_all_names_are_made_from_the_device_name(
    device: str, package: str, distribution: str, title: str, prefix: str
) -> None:
    made = names(device)
    assert (made.package, made.distribution, made.title, made.prefix) == (package, distribution, title, prefix)
    assert made.vendor == title and names(device, vendor="Wave Computing & Söhne").vendor == "Wave Computing & Söhne"
    assert names(device, package="wave_device").package == "wave_device"


@pytest.mark.parametrize(
    ("device", "given", "phrase"),
    [
        ("auto", {}, "reserved for choosing a device automatically"),
        ("2wave", {}, "not a letter followed by letters, digits"),
        ("wave 2", {}, "not a letter followed by letters, digits"),
        ("wäve", {}, "not a letter followed by letters, digits"),
        ("", {}, "not a letter followed by letters, digits"),
        ("Core", {}, "is that of core itself"),
        ("w" * (MAX_NAME + 1), {}, "at most 24 fit"),
        ("cpu", {}, "device 'cpu' is installed here"),
        ("CPU", {}, "device 'cpu' is installed here"),
        ("wave", {"package": "core-wave"}, "no name that Python can import"),
        ("wave", {"package": "class"}, "no name that Python can import"),
        ("wave", {"package": "core.wave"}, "no name that Python can import"),
        ("wave", {"package": "welle_ä"}, "no name that Python can import"),
        ("wave", {"package": "_wave"}, "begins with '_'"),
        ("wave", {"package": "w" * 33}, "longer than 32"),
        ("wave", {"package": "aten"}, "torch has ops of that namespace"),
        ("wave", {"package": "json"}, "one would hide the other"),
        ("wave", {"package": "core"}, "one would hide the other"),
        ("wave", {"package": "jinja2"}, "one would hide the other"),
        ("wave", {"package": "core_cpu"}, "one would hide the other"),
        ("wave", {"vendor": 'the "Wave"'}, "a quote"),
        ("wave", {"vendor": "Wave\nComputing"}, "another mark"),
        ("wave", {"vendor": "\u202eWave"}, "another mark"),
        ("wave", {"vendor": "{{ 7 }}"}, "another mark"),
        ("wave", {"vendor": "w" * 61}, "61 characters"),
    ],
)
def test_names_that_cannot_be_used_are_refused(device: str, given: Mapping[str, str], phrase: str) -> None:
    with refused(UsageError, phrase):
        names(device, **given)


def test_names_that_are_taken_are_refused(install_vendor: InstallVendor) -> None:
    vendor = install_vendor(device="wave-2", distribution="ripple-device")
    with refused(UsageError, "device 'wave-2' is installed here: ripple-device 1.0"):
        names("Wave_2")
    with refused(UsageError, "the distribution 'ripple-device'", "version 1.0 of it is installed", "pip uninstall"):
        names("Ripple")
    with refused(UsageError, vendor.module, "one would hide the other"):
        names("surf", package=vendor.module)


def test_the_range_of_core_is_that_of_compatible_versions() -> None:
    assert [range_of(v) for v in ("0.1.0", "0.12.3", "1.0.0", "2.3.1", "0.2.0.dev1")] == [
        ">=0.1,<0.3",
        ">=0.12,<0.14",
        ">=1.0,<3",
        ">=2.3,<4",
        ">=0.2,<0.4",
    ]


def test_every_template_is_written_and_nothing_is_left_open() -> None:
    assert {path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.rglob("*.*")} == {
        f"{name}.jinja" for name in (*FILES, *FILES_ON_TORCH)
    }
    files = render(names("Wave-2", vendor="Wave Computing"))
    assert len(files) == len(FILES)
    for path, text in files.items():
        assert text.endswith("\n") or path == "core_wave_2/py.typed"
        assert "{%" not in text and ("{{" not in text or path.endswith(".yml")), path
        assert "acme" not in text.lower(), path
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["entry-points"]["core.plugins"] == {"Wave-2": "core_wave_2.plugin"}
    assert project["entry-points"]["core.probes"] == {"Wave-2": "core_wave_2.probe:probe"}
    assert project["dependencies"] == ["core>=0.1,<0.3"] and project["authors"] == [{"name": "Wave Computing"}]
    assert tomllib.loads(files["xfail.toml"]) == {"schema": "core.xfail/1"}
    hooks = [name for name in vars(CoreSpec) if name.startswith("core_")]
    assert all(f"def {hook}(" in files["core_wave_2/plugin.py"] for hook in hooks)


def test_the_example_of_an_expected_failure_is_one(tmp_path: Path) -> None:
    text = render(names("wave"))["xfail.toml"]
    _, _, example = text.partition('schema = "core.xfail/1"\n')
    lines = [line.removeprefix("# ") for line in example.splitlines() if line.startswith("# ") and " = " in line]
    file = tmp_path / "xfail.toml"
    file.write_text(text)
    assert not Expectations.load(file).entries
    file.write_text("\n".join(['schema = "core.xfail/1"', "[[expected]]", *lines]))
    (entry,) = Expectations.load(file).entries
    assert entry.case == "ops/attention/*" and not entry.expired("0.1.0") and entry.expired("0.2.0")


def test_a_template_that_asks_for_an_unknown_name_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import jinja2

    (tmp_path / "README.md.jinja").write_text("{{ devise }}")
    monkeypatch.setattr("core.scaffold.writing.FILES", {"README.md": "README.md"})
    monkeypatch.setattr(jinja2, "PackageLoader", lambda package: jinja2.FileSystemLoader(tmp_path))
    with pytest.raises(jinja2.UndefinedError, match="devise"):
        render(names("wave"))


@pytest.mark.parametrize("device", ["w", "Wave-2", "W" * MAX_NAME])
def test_what_is_written_is_formatted_whatever_the_name(device: str, tmp_path: Path) -> None:
    given = {"package": "p" * MAX_PACKAGE, "vendor": "V" * MAX_VENDOR} if len(device) == MAX_NAME else {}
    write(render(names(device, **given)), tmp_path / "new")
    for arguments in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments], cwd=tmp_path / "new", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("existing", [False, True], ids=["new", "empty"])
def test_the_command_writes_a_folder_and_says_what_to_do_next(
    existing: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "a folder" / "wave"
    if existing:
        target.mkdir(parents=True)
    assert main(["new-plugin", "Wave-2", "--into", str(target)]) == 0
    out = capsys.readouterr().out
    written = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
    assert written == sorted(path.format(package="core_wave_2") for path in FILES.values())
    assert all(f"  {path}\n" in out for path in written)
    assert out.splitlines()[-4:] == [
        f"  cd '{target}'",
        "  pip install --editable '.[dev]'",
        "  core run --device Wave-2",
        "  core conformance --device Wave-2 --level 2",
    ]
    assert [path.name for path in target.parent.iterdir()] == ["wave"]
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o777 & ~umask


def test_the_default_folder_is_named_after_the_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", "Wave-2", "--vendor", "Wave Computing", "--package", "wave_core", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "core.new-plugin/1"
    assert (document["device"], document["distribution"], document["package"]) == (
        "Wave-2",
        "wave-2-device",
        "wave_core",
    )
    assert document["folder"] == str(tmp_path / "wave-2-device") and len(document["next"]) == 4
    assert document["files"] == sorted(document["files"]) and "wave_core/plugin.py" in document["files"]
    assert all((Path(document["folder"]) / path).is_file() for path in document["files"])
    section = (ROOT / "docs" / "json.md").read_text(encoding="utf-8").partition("## core.new-plugin/1")[2]
    section = section.partition("\n## ")[0]
    assert not [field for field in document.keys() - {"schema", "core"} if f"`{field}`" not in section]


def test_the_current_folder_may_be_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", "wave", "--into", "."]) == 0
    assert Path("pyproject.toml").is_file() and not list(tmp_path.glob(".new-plugin*"))


def test_a_folder_that_holds_anything_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    for target, phrase in ((tmp_path, "the folder is not empty"), (kept, "it is a file")):
        assert main(["new-plugin", "wave", "--into", str(target)]) == 2
        err = capsys.readouterr().err
        assert phrase in err and "choose a new folder with --into" in err
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert main(["new-plugin", "wave", "--into", str(tmp_path / "link")]) == 2
    assert "it is a link to nothing" in capsys.readouterr().err
    assert main(["new-plugin", "wave", "--into", str(kept / "below")]) == 2
    assert "it cannot be written" in capsys.readouterr().err
    assert kept.read_text() == "mine" and sorted(path.name for path in tmp_path.iterdir()) == ["kept.txt", "link"]


@pytest.mark.parametrize("operation", ["write_text", "rename"])
@pytest.mark.parametrize("existing", [False, True], ids=["new", "empty"])
def test_where_writing_fails_nothing_is_left(
    operation: str, existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "wave"
    if existing:
        target.mkdir()
    real, done = getattr(Path, operation), []

    def failing(path: Path, *args: object, **kwargs: object) -> object:
        done.append(path)
        if len(done) == (3 if existing or operation == "write_text" else 1):
            raise OSError(28, "No space left on device")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, operation, failing)
    with refused(UsageError, "it cannot be written: No space left on device"):
        write(render(names("wave")), target)
    assert list(tmp_path.rglob("*")) == ([target] if existing else [])


def test_a_refused_name_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", "cpu", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "UsageError" and "'cpu' is installed here" in error["found"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_neither_torch_nor_a_plugin_is_imported(tmp_path: Path) -> None:
    code = f"import sys; from core.cli import main; main(['new-plugin', 'wave', '--into', {str(tmp_path / 'new')!r}]); "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'core_cpu')))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_a_plugin_may_start_from_an_accelerator_of_torch(tmp_path: Path) -> None:
    assert main(["new-plugin", "--into", str(tmp_path / "none")]) == 2
    assert main(["new-plugin", "--torch-device", "wave", "--into", str(tmp_path / "same")]) == 0
    assert main(["new-plugin", "Wave-2", "--torch-device", "wave", "--into", str(tmp_path / "other")]) == 0
    for folder, device in (("same", "wave"), ("other", "Wave-2")):
        made = tmp_path / folder
        project = tomllib.loads((made / "pyproject.toml").read_text())["project"]
        assert (
            list(project["entry-points"]["core.plugins"]) == [device] and "core.probes" not in project["entry-points"]
        )
        (plugin,) = made.glob("core_*/plugin.py")
        text = plugin.read_text()
        assert 'open_accelerator("wave", context.index)' in text
        hooks = [name for name in vars(CoreSpec) if name.startswith("core_")]
        assert all(f"def {hook}(" in text for hook in hooks)
        assert not [
            path for path in made.rglob("*") if path.name in ("probe.py", "memory.py", "graphs.py", "test_probe.py")
        ]
        for path in made.rglob("*.*"):
            assert path.is_dir() or ("{%" not in path.read_text() and "simulat" not in path.read_text()), path
        for arguments in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
            command = [sys.executable, "-m", "ruff", *arguments]
            done = subprocess.run(command, cwd=made, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("device", "phrase"), [("wave:1", "a word of letters"), ("my wave", "a word of letters")])
def test_a_torch_device_that_is_no_type_is_refused(device: str, phrase: str) -> None:
    with refused(UsageError, phrase):
        names("wave", torch_device=device)
