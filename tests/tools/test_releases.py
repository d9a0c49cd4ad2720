"""hatch_build.py and releases/check_dist.py: the version of what is built, and what a wheel and an archive hold."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="needs what builds the wheel, in the extra 'dev'")

from hatch_build import version
from releases.check_dist import files_of, main, metadata, package_folders, sdist_problems, wheel_problems
from tests.house.rules import ROOT, plant

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *IDENTITY, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    plant(tmp_path, {"core/_version.py": '__version__ = "1.2.3"\n'})
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_a_commit_without_a_tag_is_named(tree: Path) -> None:
    commit = git(tree, "rev-parse", "--short=9", "HEAD")
    assert version(tree) == f"1.2.3+g{commit}"
    (tree / "core" / "_version.py").write_text('__version__ = "1.2.4"\n')
    assert version(tree) == f"1.2.4+g{commit}.dirty"


def test_a_tagged_commit_is_a_release_as_it_was_committed(tree: Path) -> None:
    git(tree, "tag", "v1.2.3")
    git(tree, "tag", "nightly")
    assert version(tree) == "1.2.3"
    (tree / "core" / "_version.py").write_text('__version__ = "1.2.3"  # changed\n')
    assert version(tree).endswith(".dirty")


def test_a_tag_that_says_otherwise_is_refused(tree: Path) -> None:
    git(tree, "tag", "v1.3.0")
    with pytest.raises(ValueError, match=r"the tag v1.3.0 is on this commit, and core/_version.py says 1.2.3"):
        version(tree)


def test_without_git_the_file_is_asked(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = tree / "unpacked"  # in a checkout of something else
    plant(inner, {"core/_version.py": '__version__ = "0.9"\n'})
    assert version(inner) == "0.9" and not capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert version(tree) == "1.2.3"
    assert "as git can't be asked" in capsys.readouterr().err


def build(folder: Path, kind: str, target: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (built,) = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.mark.slow
def test_the_archive_holds_what_the_wheel_needs_and_no_tests(tmp_path: Path) -> None:
    archive = build(ROOT, "sdist", tmp_path / "dist")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = build(unpacked, "wheel", tmp_path / "dist")
    assert main([str(tmp_path / "dist")]) == 0
    number = metadata(wheel)["Version"]
    assert number == version() == archive.name.removeprefix("core-").removesuffix(".tar.gz")
    assert f'__version__ = "{number}"' in zipfile.ZipFile(wheel).read("core/_version.py").decode()
    assert main([str(tmp_path / "dist"), "--tag", f"v{number}"]) == 0
    assert main([str(tmp_path / "dist"), "--tag", "v9.9.9"]) == 1
    assert main([str(tmp_path)]) == 1


def planted_wheel(path: Path, names: Iterable[str]) -> Path:
    with zipfile.ZipFile(path, "w") as opened:
        for name in names:
            opened.writestr(name, "")
        opened.writestr("core-1.dist-info/METADATA", "Name: core\nVersion: 1\nSummary: x\n")
    return path


def test_strays_and_gaps_are_named(tmp_path: Path) -> None:
    expected = {"core/a.py", "core/tests/test_a.py", "core/scaffold/templates/tests/t.jinja"}
    wheel = planted_wheel(tmp_path / "core.whl", ["core/tests/test_a.py", "core/b.pyc", ".gpu/log"])
    assert wheel_problems(wheel, expected) == [
        "core.whl holds .gpu/log, which is none of its files",
        "core.whl holds core/b.pyc, which is none of its files",
        "core.whl holds core/tests/test_a.py",
        "core.whl lacks core/a.py",
        "core.whl lacks core/scaffold/templates/tests/t.jinja",
        "core.whl lacks LICENSE",
        "core.whl lacks entry_points.txt",
        *(
            f"the metadata of core.whl state no {name}"
            for name in ("License-Expression", "Requires-Python", "Classifier")
        ),
    ]
    with tarfile.open(tmp_path / "core.tar.gz", "w") as opened:
        for name in ("core/a.py", "tests/test_a.py"):
            opened.addfile(tarfile.TarInfo(f"core-1/{name}"), io.BytesIO())
    problems = sdist_problems(tmp_path / "core.tar.gz", {"core/a.py"})
    assert problems[0] == "core.tar.gz holds tests/test_a.py, which is none of its files"
    assert "core.tar.gz lacks hatch_build.py" in problems


def test_waste_in_the_tree_is_expected_nowhere(tmp_path: Path) -> None:
    plant(tmp_path, {"core/a.py": "", "core/__pycache__/a.pyc": "", "plugins/x/core_x/b.py": ""})
    assert files_of(tmp_path, ["core", "plugins/x/core_x"]) == {
        "core/a.py": "core/a.py",
        "plugins/x/core_x/b.py": "core_x/b.py",
    }
    assert "core" in package_folders(ROOT)


def test_each_classifier_is_one_that_indexes_know() -> None:
    import tomllib

    from trove_classifiers import classifiers

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not set(project["classifiers"]) - set(classifiers)
