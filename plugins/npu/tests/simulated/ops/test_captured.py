"""Attention inside a captured graph: one graph for steps of other lengths and of fewer sequences, in both forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from npu_calls import Call, attention_call, tables
from npu_kernel_cases import BY_NAME, copied, implementation, moved, npu, widened

from core.common.graphs.backend import GraphKey
from core.common.numerics import Fp64Mode, judge
from core.errors import UsageError
from core.host.selection import select_device
from core_npu.runner import NPUGraphBackend
from simulator import runtime
from tests.support import refused

pytestmark = pytest.mark.npu_sim
KEY = GraphKey("decode", (4,))

STEPS = (((1, 7), (1, 1), (1, 33), (1, 20)), ((1, 8), (1, 40)), ((1, 33),), ((1, 16), (1, 17), (1, 48)))
CHUNKS = (((5, 5), (3, 40)), ((1, 48), (4, 9)), ((7, 21),))


@pytest.fixture
def backend() -> Iterator[NPUGraphBackend]:
    # Opening the device tells graphs how its tensors are held weakly.
    backend = NPUGraphBackend(select_device("npu").torch_device)
    yield backend
    backend.cleanup()


def padded(lens: tuple[tuple[int, int], ...], tokens: int, sequences: int, **options: Any) -> Call:
    """Return a call of a bucket: with padding up to so many tokens and sequences, and tables of three blocks."""
    padding = (tokens - sum(new for new, _ in lens), sequences - len(lens))
    call = attention_call(torch.bfloat16, lens, padding=padding, **options)
    blocks = call["block_table"].shape[1]
    call["block_table"] = torch.nn.functional.pad(call["block_table"], (0, 3 - blocks))
    for name in ("key_cache", "value_cache"):
        cache = call[name]
        call[name] = torch.cat((cache, cache.new_zeros(13 - len(cache), *cache.shape[1:])))
    return call


def check_steps(name: str, calls: list[Call], backend: NPUGraphBackend) -> None:
    """Capture the first call, replay all of them with their own values, and judge each by T1."""
    op = BY_NAME[name]
    static = moved(calls[0], npu())
    inputs = {key: value for key, value in static.items() if isinstance(value, torch.Tensor)}
    with torch.no_grad(), backend.capture_session():
        (out,) = backend.capture_one(KEY, lambda: (implementation(op).fn(**static),), inputs, lambda: None)
    assert backend.host_arguments(KEY) == {"seq_lens", "query_starts"}
    for call in calls:
        for key, tensor in inputs.items():
            tensor.copy_(call[key])
        backend.update(KEY, {key: call[key].tolist() for key in ("seq_lens", "query_starts")})
        backend.replay(KEY)
        torch.npu.synchronize()  # type: ignore[attr-defined]
        wide = widened(call)
        with Fp64Mode():
            exact = op.reference(**wide)
        verdict = judge(out.cpu(), op.reference(**copied(call)), exact)
        assert verdict.passed, (call["seq_lens"], verdict)
        assert not out[int(call["query_starts"][-1]) :].cpu().any()


@pytest.mark.parametrize("size", [64, 80])
def test_one_graph_serves_decode_steps_of_any_lengths(size: int, backend: NPUGraphBackend) -> None:
    check_steps("attention", [padded(lens, 4, 4, size=size, max_query_len=1) for lens in STEPS], backend)


def test_one_graph_serves_chunks_of_any_lengths(backend: NPUGraphBackend) -> None:
    check_steps("attention", [padded(lens, 8, 2) for lens in CHUNKS], backend)
    assert runtime.kernels("update").count("aclnnFusedInferAttentionScoreV3") == len(CHUNKS)


def test_one_graph_serves_windows(backend: NPUGraphBackend) -> None:
    check_steps("attention", [padded(lens, 8, 2, window=5) for lens in CHUNKS], backend)


def test_one_graph_serves_rotations_before_attention(backend: NPUGraphBackend) -> None:
    turning = tables(4, 64, torch.bfloat16)
    check_steps("rotary_attention", [{**padded(s, 4, 4, max_query_len=1), **turning} for s in STEPS], backend)


def test_a_step_out_of_order_is_refused_before_the_graph_changes(backend: NPUGraphBackend) -> None:
    """Heads of 80 have one row to a sequence: a sequence without a token before one with a token cannot be told."""
    call = padded(STEPS[0], 4, 4, size=80, max_query_len=1)
    static = moved(call, npu())
    inputs = {key: value for key, value in static.items() if isinstance(value, torch.Tensor)}
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(KEY, lambda: (implementation(BY_NAME["attention"]).fn(**static),), inputs, lambda: None)
    with refused(UsageError, "sequences of padding come last"):
        backend.update(KEY, {"seq_lens": [7, 0, 33, 20], "query_starts": [0, 1, 1, 2, 3]})
