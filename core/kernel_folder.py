"""Where a plugin keeps kernels that it compiles itself: beside the compile cache, so that one command clears both."""

from __future__ import annotations

import os
from pathlib import Path

from core.common.kernel_compilers import KernelCompiler
from core.compilation.cache.folders import Untrusted, make_private, refuse_foreign
from core.compilation.cache.store import Store


def kernel_folder(compiler: KernelCompiler) -> Path:
    """Return a compiler's folder, made where there is none: the one that its variable names, else one of its name.

    Raises `OSError` where it can't be made, and where others may write to it: what lies there is run.
    """
    named = os.environ.get(compiler.folder_variable) if compiler.folder_variable else None
    kept = Store.of_user().kernels
    folder = Path(named) if named else kept / compiler.name
    for each in (folder,) if named else (kept.parent, kept, folder):
        make_private(each)
        try:
            refuse_foreign(each)
        except Untrusted as error:
            raise PermissionError(str(error)) from None
    return folder
