"""The torch extension of device "shore", built from torch_shore/ and unpacked as pip unpacks a wheel."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_cxx_compiler

SOURCES = Path(__file__).parent / "torch_shore"
# The repository's folder for what can be made again.
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "shore"
# In a process of its own: loading the library gives torch the device, once and for all.
BUILD = """
import sys
from torch.utils import cpp_extension
name, source, folder = sys.argv[1:]
cpp_extension.load(name, [source], build_directory=folder, is_python_module=False, extra_cflags=["-O1"])
"""
METADATA = "Metadata-Version: 2.1\nName: torch-shore\nVersion: 1.0\n"
ENTRY_POINTS = "[torch.backends]\nshore = torch_shore:autoload\n"


def reason_not_to_build() -> str:
    """Return what is missing here to build the extension, or ""."""
    compiler = get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"no C++ compiler {compiler!r} on PATH"
    if shutil.which("ninja") is None:
        return "no ninja on PATH"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "no Python.h"
    return ""


def install(site: Path) -> None:
    """Put the extension into a folder of sys.path, with the entry point by which `import torch` loads it."""
    package, metadata = site / "torch_shore", site / "torch_shore-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    shutil.copy(SOURCES / "__init__.py", package)
    shutil.copy(_library(), package)
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


def _library() -> Path:
    """Return the library, built once for each version of the source and of torch."""
    source = SOURCES / "shore.cpp"
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = CACHE / key
    library = folder / "libshore.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", BUILD, library.stem, str(source), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return library
