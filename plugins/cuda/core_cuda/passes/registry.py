"""The passes that the plugin registers. Imports Triton, so it is imported only if `kernels_missing` returns ""."""

from __future__ import annotations

from core_cuda.passes.norm_pairs import JOIN_RMS_NORMS
from core_cuda.passes.normed_sums import FUSE_NORMED_SUM
from core_cuda.passes.shared_experts import OVERLAP_SHARED_EXPERTS

PASSES = (JOIN_RMS_NORMS, FUSE_NORMED_SUM, OVERLAP_SHARED_EXPERTS)
