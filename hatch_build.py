"""The version of what is built: that of core/_version.py, with the commit behind a `+` where it is no release.

A release is built from a commit whose tag is `v` and that version (docs/releasing.md). Where this tree is not a git
checkout, as an unpacked archive, the file alone is asked; a source distribution states its version in PKG-INFO.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
FILE = "core/_version.py"


def version(root: Path = ROOT) -> str:
    """Return the version; raise `ValueError` where a tag of this commit names another one."""
    stated = _stated(root)
    commit = _commit(root)
    if not commit:
        return stated
    tags = _git(root, "tag", "--points-at", "HEAD", "--list", "v[0-9]*").split()
    wrong = [tag for tag in tags if tag != f"v{stated}"]
    if wrong:
        raise ValueError(
            f"the tag {wrong[0]} is on this commit, and {FILE} says {stated}: tag v{stated}, or change the file"
        )
    return stated if tags and not commit.endswith("-dirty") else f"{stated}+g{commit.replace('-', '.')}"


class VersionHook(BuildHookInterface):  # type: ignore[type-arg]
    """Writes the version into a wheel's `core/_version.py`; an editable installation has the file of the tree."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put a copy with the version in place of the file. version: the kind of build."""
        text = (Path(self.root) / FILE).read_text(encoding="utf-8")
        stated = _stated(Path(self.root))
        if version == "editable" or stated == self.metadata.version:
            return
        self._folder = tempfile.TemporaryDirectory()
        copy = Path(self._folder.name) / "_version.py"
        copy.write_text(text.replace(f'"{stated}"', f'"{self.metadata.version}"'), encoding="utf-8")
        build_data["force_include"][str(copy)] = FILE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copy."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _stated(root: Path) -> str:
    names: dict[str, str] = {}
    exec((root / FILE).read_text(encoding="utf-8"), names)
    return names["__version__"]


def _commit(root: Path) -> str:
    """Return the short name of the commit, with `-dirty` behind it where files were changed; "" outside of git."""
    if not (
        root / ".git"
    ).exists():  # a folder, or the file of a work tree; the repository may be that of a folder above
        return ""
    return _git(root, "describe", "--always", "--dirty", "--abbrev=9", "--exclude", "*").strip()


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        problem = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        print(f"hatch_build.py: the version is that of {FILE}, as git can't be asked: {problem}", file=sys.stderr)
        return ""
    return done.stdout
