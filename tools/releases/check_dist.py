"""Check a built wheel and source distribution: what has to be in, what must not be, and which version they are.

    python tools/releases/check_dist.py dist [--tag v0.1.0]

The folder holds one of each, built from this tree. `make dist` builds and checks; so does the release workflow.
"""

from __future__ import annotations

import argparse
import email
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
ROOT_FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "hatch_build.py")
WASTE = {
    "__pycache__",
    ".gpu",
    ".ci",
    ".git",
    ".github",
    ".venv",
    ".cache",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
}
TEMPLATES = PurePosixPath("core/scaffold/templates")
"""What `core new-plugin` writes has a folder `tests`, which is no test of core's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is wrong, a line each, and return 1 for any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", help="the release: the version has to be that of this tag")
    chosen = parser.parse_args(arguments)
    wheels, archives = sorted(chosen.folder.glob("*.whl")), sorted(chosen.folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(archives) != 1:
        print(f"check-dist: {chosen.folder} holds {len(wheels)} wheels and {len(archives)} archives, not one of each")
        return 1
    files = files_of(ROOT, package_folders(ROOT))
    wrong = [*wheel_problems(wheels[0], set(files.values())), *sdist_problems(archives[0], set(files))]
    version = metadata(wheels[0])["Version"]
    if chosen.tag is not None and chosen.tag != f"v{version}":
        wrong.append(f"the version is {version}, and the tag {chosen.tag}")
    for problem in wrong:
        print(f"check-dist: {problem}")
    if not wrong:
        print(f"check-dist: core {version} is as it should be")
    return 1 if wrong else 0


def package_folders(root: Path) -> list[str]:
    """Return the folders of the import packages, as pyproject.toml names them."""
    config = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[str] = config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return found


def files_of(root: Path, packages: Iterable[str]) -> dict[str, str]:
    """Return the files of the packages: the path in the tree -> the path in a wheel."""
    return {
        path.relative_to(root).as_posix(): path.relative_to((root / package).parent).as_posix()
        for package in packages
        for path in (root / package).rglob("*")
        if path.is_file() and not _is_waste(path.relative_to(root))
    }


def wheel_problems(wheel: Path, expected: set[str]) -> list[str]:
    """Return what is wrong with a wheel. expected: the files of the packages by their paths in a wheel."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    info = {name for name in names if PurePosixPath(name).parts[0].endswith(".dist-info")}
    problems = _differences(wheel.name, names - info, expected)
    kept = {PurePosixPath(name).name for name in info}
    problems += [f"{wheel.name} lacks {name}" for name in sorted({"LICENSE", "entry_points.txt", "METADATA"} - kept)]
    stated = metadata(wheel)
    absent = [name for name in ("License-Expression", "Requires-Python", "Summary", "Classifier") if not stated[name]]
    return problems + [f"the metadata of {wheel.name} state no {name}" for name in absent]


def sdist_problems(archive: Path, expected: set[str]) -> list[str]:
    """Return what is wrong with a source distribution. expected: the files of the packages by their paths here."""
    with tarfile.open(archive) as opened:
        names = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    # PKG-INFO states the version; hatchling's .gitignore keeps waste out of a wheel built from the archive.
    return _differences(archive.name, names - {"PKG-INFO", ".gitignore"}, expected | set(ROOT_FILES))


def metadata(wheel: Path) -> email.message.Message:
    """Return the metadata of a wheel."""
    opened = zipfile.ZipFile(wheel)
    (name,) = (each for each in opened.namelist() if each.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(opened.read(name))


def _differences(where: str, names: set[str], expected: set[str]) -> list[str]:
    strays = [f"{where} holds {name}, which is none of its files" for name in sorted(names - expected)]
    unwanted = [f"{where} holds {name}" for name in sorted(names & expected) if _is_test(name)]
    return strays + unwanted + [f"{where} lacks {name}" for name in sorted(expected - names)]


def _is_waste(path: Path) -> bool:
    return bool(WASTE & set(path.parts)) or path.suffix == ".pyc"


def _is_test(name: str) -> bool:
    path = PurePosixPath(name)
    return "tests" in path.parts and TEMPLATES not in path.parents


if __name__ == "__main__":
    sys.exit(main())
