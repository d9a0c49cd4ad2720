"""Checks for the tools that Inductor needs to compile for the processor."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from core.common.lowering import FlatCallable, Lowering, LoweringRequest
from core.errors import LoweringError


def find_cxx_compiler() -> str | None:
    """Return the path of the C++ compiler that Inductor takes: $CXX, where that is set, and else the system's."""
    return shutil.which(_name())


def missing() -> str:
    """Return what Inductor lacks on this machine, as one clause; "" for nothing."""
    if find_cxx_compiler() is None:
        named = "CXX names" if os.environ.get("CXX") else "Inductor takes"
        return f"there is no C++ compiler: {named} {_name()}, which is not here"
    headers = Path(sysconfig.get_path("include"))
    if sys.platform == "linux" and not (headers / "Python.h").exists():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return f"there is no {headers}/Python.h (Debian, Ubuntu: apt install python{version}-dev)"
    return ""


def refuse(name: str, reason: str) -> Lowering:
    """Return a lowering that says what is missing, where the compiler's own error would name its settings."""

    def refused(request: LoweringRequest) -> FlatCallable:
        raise LoweringError(
            f"lowering by {name!r}",
            found=reason,
            remedy="install what is missing, or use lowering 'inline', which compiles nothing",
        )

    return refused


def _name() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
