"""How graphs become callables on NVIDIA GPUs, and which of torch's own ops keep the bits of rows there."""

from __future__ import annotations

from dataclasses import replace

from core.common.inductor import INLINE_AND_INDUCTOR
from core.common.lowering import OwnOps

_OWN_OPS = OwnOps(
    by_batch=frozenset(
        {
            *("sum", "mean", "var", "std", "var_mean", "norm", "prod", "logsumexp", "cumsum"),
            *("rms_norm", "layer_norm", "native_layer_norm", "group_norm", "topk", "sort", "argsort"),
        }
    ),
    functions_alike=True,
)
"""torch's reductions give a row as many threads as there are few rows (aten/src/ATen/native/cuda/Reduce.cuh), and a
single one a scan of its own (ScanUtils.cuh); softmax goes by the row's length alone (SoftMax.cu). Norms, and what
chooses among equals, are not known to. A function is the same code for every number of a tensor."""

LOWERINGS = replace(INLINE_AND_INDUCTOR, batch_invariant=frozenset({"inline"}), own_ops=_OWN_OPS)
"""The graph's own Python, whose kernels the graph captures; Inductor on request."""
