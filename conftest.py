"""For all tests: on a machine without an NVIDIA GPU, Triton's kernels run in its interpreter.

Here and not beside the kernels' tests, because Triton decides it when it is imported, and torch may import it earlier.
"""

from __future__ import annotations

import os

from core_cuda.probe import probe

if not probe().available:
    os.environ.setdefault("TRITON_INTERPRET", "1")
