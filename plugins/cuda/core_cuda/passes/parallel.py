"""Which sums `sequence_parallel` splits, and which products `async_tensor_parallel` overlaps, on GPUs of a host.

Below, what is small is summed by one kernel with the norm after it (core_cuda/collective_norm.py), and halves of a
product would fill the GPU worse than the whole. Limits are bytes of what all GPUs have together: tokens times width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from core.common.passes.collective.async_tensor_parallel import ASYNC_TENSOR_PARALLEL
from core.common.passes.collective.sequence_parallel import SEQUENCE_PARALLEL

LEAST_BYTES: Mapping[int, int] = MappingProxyType({2: 2**24, 4: 2**25, 8: 2**26})
"""By the number of GPUs: parts of 512 tokens of width 8192 in bf16. On two H200s a layer of that width wins from there
on (8 % at 1,024 tokens, 4 % at 8,192), and on four a model of 80 layers of it wins 11 % at 8,192; where four begin to
win, and eight at all, was not measured."""
_PARAMS = MappingProxyType({f"least_bytes_of_{size}": least for size, least in LEAST_BYTES.items()})

PASSES = tuple(replace(each, params=_PARAMS) for each in (SEQUENCE_PARALLEL, ASYNC_TENSOR_PARALLEL))
