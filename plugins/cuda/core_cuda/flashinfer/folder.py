"""Where kernels of FlashInfer lie: what it compiles itself, and beside it what `core kernels build` made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from core.common.kernel_compilers import Count, KernelCompiler
from core.kernel_folder import kernel_folder
from core_cuda.ops import launching

VARIABLE = "FLASHINFER_WORKSPACE_BASE"
"""FlashInfer's own: the folder below which it keeps what it compiles, read when it is imported."""


def base() -> Path | None:
    """Return the folder; None where it can't be made, or where others may write to it."""
    try:
        return kernel_folder(KEPT)
    except OSError:
        return None


def ahead(version: str) -> Path | None:
    """Return where kernels lie that were built ahead for this version, GPU and CUDA; None where there is no folder."""
    kept = base()
    major, minor = launching.capability()
    return None if kept is None else kept / "ahead" / f"{version}-sm{major}{minor}-cuda{torch.version.cuda}"


def library(folder: Path, name: str) -> Path:
    """Return the path of a module's library in a folder, as FlashInfer lays them out."""
    return folder / name / f"{name}.so"


def is_ahead(name: str, version: str) -> bool:
    """Tell whether a module of this name was built ahead."""
    folder = ahead(version)
    return folder is not None and library(folder, name).is_file()


@contextmanager
def _counting() -> Iterator[Count]:
    """Count the libraries that FlashInfer compiled into its folder in the block; 0 where it is not loaded."""
    before = _compiled()
    yield lambda: len(_compiled() - before)


def _compiled() -> set[str]:
    module: Any = sys.modules.get("flashinfer")
    return set() if module is None else {path.name for path in Path(module.jit.env.FLASHINFER_JIT_DIR).glob("*/*.so")}


KEPT = KernelCompiler(name="flashinfer", counting=_counting, folder_variable=VARIABLE)
"""FlashInfer's compiler without what needs FlashInfer."""
