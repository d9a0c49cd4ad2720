"""Whether intel-extension-for-pytorch can be used, found out without importing it.

Each of its releases works with one torch, and ends the process when it is imported with another. The last one is 2.8:
the project was archived in 2026 (github.com/intel/intel-extension-for-pytorch, issue 867).
"""

from __future__ import annotations

import functools
import importlib
from importlib import metadata

import torch
from packaging.version import Version

_NAME = "intel-extension-for-pytorch"


@functools.cache
def why_not() -> str:
    """Return why it can't be used, as one clause; "" where it can."""
    try:
        installed = Version(metadata.version(_NAME))
    except metadata.PackageNotFoundError:
        return f"{_NAME} is not installed: it needs an environment with torch 2.8 (pip install 'core[ipex]')"
    if installed.release[:2] != Version(torch.__version__).release[:2]:
        wanted = ".".join(map(str, installed.release[:2]))
        return f"{_NAME} {installed.public} works with torch {wanted} alone, and this is torch {torch.__version__}"
    return ""


def load() -> None:
    """Import it, which takes seconds and replaces some of torch's own kernels for the whole process.

    Call it only if `why_not` returns "".
    """
    importlib.import_module("intel_extension_for_pytorch")
