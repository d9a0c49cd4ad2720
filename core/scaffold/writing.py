"""From names to files: the templates are rendered first and written then, all of them or none."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from core.errors import UsageError
from core.scaffold.names import Names

FILES: Mapping[str, str] = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "ci.yml": ".github/workflows/ci.yml",
    "conformance.yml": ".github/workflows/conformance.yml",
    "xfail.toml": "xfail.toml",
    "package/__init__.py": "{package}/__init__.py",
    "package/plugin.py": "{package}/plugin.py",
    "package/probe.py": "{package}/probe.py",
    "package/memory.py": "{package}/memory.py",
    "package/graphs.py": "{package}/graphs.py",
    "package/ops.py": "{package}/ops.py",
    "package/passes.py": "{package}/passes.py",
    "package/py.typed": "{package}/py.typed",
    "tests/conftest.py": "tests/conftest.py",
    "tests/test_probe.py": "tests/test_probe.py",
    "tests/test_plugin.py": "tests/test_plugin.py",
    "tests/test_graphs.py": "tests/test_graphs.py",
    "tests/test_ops.py": "tests/test_ops.py",
    "tests/test_passes.py": "tests/test_passes.py",
    "tests/test_conformance.py": "tests/test_conformance.py",
}
"""Template (templates/NAME.jinja) -> where its text goes, relative to the new folder."""

_OF_THE_SIMULATION = (
    "package/plugin.py",
    "package/probe.py",
    "package/memory.py",
    "package/graphs.py",
    "tests/test_probe.py",
)
FILES_ON_TORCH: Mapping[str, str] = {
    **{name: path for name, path in FILES.items() if name not in _OF_THE_SIMULATION},
    "package/plugin_of_torch.py": "{package}/plugin.py",
}
"""The same for a plugin that starts from an accelerator that torch drives: `core.accelerator` has what is left out."""


def render(names: Names) -> dict[str, str]:
    """Return the text of each file by its path; a name that a template uses and `Names` lacks is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("core.scaffold"), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    fields = asdict(names)
    return {
        path.format(package=names.package): environment.get_template(f"{name}.jinja").render(fields)
        for name, path in (FILES_ON_TORCH if names.torch_device else FILES).items()
    }


def check_target(target: Path) -> None:
    """Raise `UsageError` unless the folder is new or empty."""
    found = ""
    try:
        if target.is_symlink() and not target.exists():
            found = "it is a link to nothing"
        elif target.exists() and not target.is_dir():
            found = "it is a file"
        elif target.is_dir() and any(target.iterdir()):
            found = "the folder is not empty"
    except OSError as error:
        found = error.strerror or str(error)
    if found:
        raise UsageError(f"a new plugin in {str(target)!r}", found=found, remedy="choose a new folder with --into")


def write(files: Mapping[str, str], target: Path) -> None:
    """Write the files into a new or empty folder, whose parents are made; where that fails, none is left there."""
    check_target(target)
    new = not target.exists()
    try:
        if new:
            target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder, or in it: in both cases one rename away from it.
        with TemporaryDirectory(dir=target.parent if new else target, prefix=".new-plugin-") as scratch:
            written = Path(scratch) / "written"
            for path, text in files.items():
                file = written / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8", newline="\n")
            if new:
                written.rename(target)
            else:
                _move_all(written, target)
    except OSError as error:
        raise UsageError(
            f"a new plugin in {str(target)!r}",
            found=f"it cannot be written: {error.strerror or error}",
            remedy="choose a folder that you may write to with --into",
        ) from error


def _move_all(folder: Path, target: Path) -> None:
    moved: list[Path] = []
    try:
        for entry in sorted(folder.iterdir()):
            moved.append(entry.rename(target / entry.name))
    except OSError:
        for entry in moved:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        raise
