"""The example device as a vendor's installed package, for tools and tests: a checkout has its source only."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "examples/acme_device"


def install(folder: Path) -> None:
    """Write the metadata into a folder that an installation of the example device would give it."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"acme_device-{project['version']}.dist-info"
    info.mkdir()
    requires = "".join(f"Requires-Dist: {line}\n" for line in project["dependencies"])
    version = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{requires}"
    (info / "METADATA").write_text(version)
    groups = project["entry-points"].items()
    lines = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups)
    (info / "entry_points.txt").write_text("\n".join(lines))


def environment(folder: Path, *paths: str, **variables: str) -> dict[str, str]:
    """Return the environment of a process that finds the example device, whose metadata are written into a folder."""
    install(folder)
    known = paths or filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, SOURCE, *known))), **variables}
