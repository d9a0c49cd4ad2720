"""Whether FlashInfer can be used, found out without importing it, and its import."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from packaging.version import Version

from core_cuda.flashinfer import folder

log = logging.getLogger("core.cuda")
PACKAGE = "flashinfer-python"
_LEAST, _BELOW = Version("0.6.12"), Version("0.7")
"""The first version that was read and run; versions after the second may call their functions otherwise."""


@functools.cache
def installed() -> str:
    """Return the installed version, "" for none."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def why_not() -> str:
    """Return why it can't be used, as one clause; "" where it can."""
    version = installed()
    if not version:
        return f"{PACKAGE} is not installed (pip install 'core[cuda]')"
    if not _LEAST <= Version(version) < _BELOW:
        return f"{PACKAGE} {version} is installed, and versions from {_LEAST} on and below {_BELOW} are known"
    return ""


@functools.cache
def load() -> Any:
    """Return the module, imported at the first call; call it only if `why_not` returns "".

    Kernels that `core kernels build` made are loaded as they are, without a compiler. Others FlashInfer compiles at
    their first use, into the same folder.
    """
    kept = folder.base()
    if kept is not None:
        os.environ.setdefault(folder.VARIABLE, str(kept))
        os.environ.setdefault("TRTLLM_DG_CACHE_DIR", str(kept / "deep_gemm"))  # kernels that are compiled for a size
    # Norms in CUDA C++: those in CuTe, which FlashInfer prefers where it finds that, are compiled at each start.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    module = importlib.import_module("flashinfer")
    ahead = folder.ahead(installed())
    if ahead is not None and ahead.is_dir() and find_spec("flashinfer_jit_cache") is None:
        module.jit.env.FLASHINFER_AOT_DIR = ahead  # where it looks for libraries that are not to be compiled
        log.info("kernels of FlashInfer that were built ahead: %s", ahead)
    return module
