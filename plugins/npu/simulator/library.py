"""The simulated runtime's library, as ctypes sees it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


class NotSimulatedError(Exception):
    """This process does not run under the simulated ACL runtime."""


@cache
def library() -> Any:
    """Return the loaded library; raises NotSimulatedError in a process that launch.py did not start."""
    try:
        found = ctypes.CDLL("libascendcl.so")
        found.ascend_sim_version.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise NotSimulatedError(
            f"the simulated ACL runtime; found: {error}; to do: run under plugins/npu/simulator/launch.py"
        ) from None
    found.ascend_sim_log_size.restype = ctypes.c_int64
    return found
