"""core_cuda/passes/parallel.py: from which size on sums are split and products overlapped on GPUs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from core.common.ops.declaration import declared_ops
from core.compilation.rewriting import device_passes
from core_cuda.passes.parallel import LEAST_BYTES, PASSES
from tests.common.passes.collective.layers import SIZE, Sharded, reasons, rewritten, traced
from tests.common.processes import pretended
from tests.support import cpu

NAMES = ("sequence_parallel", "async_tensor_parallel")


@pytest.mark.cases(1)
@pytest.mark.parametrize("size", LEAST_BYTES)
def test_sums_are_split_from_a_size_on_that_depends_on_the_number_of_gpus(size: int) -> None:
    passes, tokens = device_passes(cpu(passes=PASSES)), LEAST_BYTES[size] // (4 * SIZE)
    with pretended(size):
        for served, matched in ((tokens, [2, 3]), (tokens - size, [0, 0])):
            graph = traced(Sharded(2), torch.zeros(1, served, SIZE))
            reports = rewritten(graph, passes, enable=NAMES[:1], implemented=frozenset(declared_ops()))
            assert [reports[name].matched for name in NAMES] == matched
            assert matched[0] or f"the pass is for {LEAST_BYTES[size]} at least" in reasons(reports[NAMES[0]])


def test_one_small_bucket_of_a_trace_keeps_all_sums_whole() -> None:
    passes, tokens = device_passes(cpu(passes=PASSES)), LEAST_BYTES[2] // (4 * SIZE)
    with pretended():
        for sizes, matched in (((tokens, 2 * tokens), 2), ((64, tokens), 0)):
            graph = traced(Sharded(2), torch.zeros(1, 6, SIZE), dynamic={"x": [1]})
            assert rewritten(graph, passes, enable=NAMES[:1], sizes=sizes)[NAMES[0]].matched == matched
