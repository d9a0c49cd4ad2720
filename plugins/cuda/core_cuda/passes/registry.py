"""The passes that the plugin registers, those of core with limits of its own among them.

Imports Triton, so it is imported only if `kernels_missing` returns "".
"""

from __future__ import annotations

from dataclasses import replace

from core_cuda.passes.delta_gates import FUSE_DELTA_GATES
from core_cuda.passes.expert_pairs import SORT_EXPERT_PAIRS, SUM_EXPERT_ROWS
from core_cuda.passes.gated_norms import FUSE_GATED_NORM
from core_cuda.passes.gather_columns import GATHER_COLUMNS
from core_cuda.passes.norm_pairs import JOIN_RMS_NORMS
from core_cuda.passes.normed_sums import FUSE_NORMED_SUM
from core_cuda.passes.parallel import PASSES as PARALLEL
from core_cuda.passes.quantized_rows import SHARE_QUANTIZED_ROWS
from core_cuda.passes.routers import WIDEN_ROUTERS
from core_cuda.passes.shared_experts import OVERLAP_SHARED_EXPERTS
from core_cuda.passes.shared_gates import FUSE_SHARED_GATE
from core_cuda.passes.squared_relu import FUSE_SQUARED_RELU
from core_cuda.passes.weight_math import JOIN_WEIGHT_MATH

_OF_OWN_KERNELS = (
    JOIN_RMS_NORMS,
    FUSE_NORMED_SUM,
    FUSE_GATED_NORM,
    SHARE_QUANTIZED_ROWS,
    SORT_EXPERT_PAIRS,
    SUM_EXPERT_ROWS,
    WIDEN_ROUTERS,
    FUSE_SHARED_GATE,
    FUSE_SQUARED_RELU,
    FUSE_DELTA_GATES,
    GATHER_COLUMNS,
    OVERLAP_SHARED_EXPERTS,
)
PASSES = (
    *(replace(each, traits=replace(each.traits, own_kernels=True)) for each in _OF_OWN_KERNELS),
    JOIN_WEIGHT_MATH,
    *PARALLEL,
)
