"""core_cuda/ops/sampling/argmax.py against `core::argmax`: ties, NaN, masked tokens, rows of any length, anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from core.common.ops.implementation import OpCall
from core.common.ops.sampling import ARGMAX
from tests.kernel_cases import CPU, DTYPES, faked, laid_out, moved, randn

pytest.importorskip("triton", reason="needs triton")
from core_cuda.implementations import IMPLEMENTATIONS
from core_cuda.ops.sampling import argmax
from core_cuda.ops.sampling.argmax import ArgmaxConfig
from core_cuda.ops.workspace import counters

NAN, INF = float("nan"), float("inf")
SMALL = ArgmaxConfig(num_warps=1, steps=2)
"""Parts of 512 in two steps, so that short rows have many."""


def assert_exact(logits: Tensor, device: torch.device, config: ArgmaxConfig | None = None) -> None:
    """Expect torch's own answer, twice: the first call leaves the counters as the second needs them."""
    given = moved({"logits": logits}, device)["logits"]
    for _ in range(2):
        tokens = argmax.run_argmax(given, config)
        assert laid_out([tokens]) == laid_out(faked(ARGMAX, {"logits": logits}))
        assert torch.equal(tokens.cpu(), ARGMAX.reference(logits))
    assert not counters(1, tokens.device).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_the_references_own_on_its_samples(dtype: torch.dtype, kernel_device: torch.device) -> None:
    for sample in ARGMAX.samples(dtype, CPU):
        assert_exact(sample.kwargs["logits"], kernel_device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_logits_the_lowest_id_wherever_they_lie(dtype: torch.dtype, kernel_device: torch.device) -> None:
    rows = randn(8, 2000, dtype=dtype)
    rows[0] = 0.0
    rows[1, 700:], rows[2, ::513] = 9.0, 9.0
    rows[3, 511:513], rows[4, 255:257] = 9.0, 9.0
    rows[5, 1999], rows[6, [0, 1999]] = 9.0, 9.0
    rows[7, 1:] = -0.0
    rows[7, 0] = -1.0
    assert_exact(rows, kernel_device, SMALL)
    assert argmax.run_argmax(rows.to(kernel_device), SMALL).tolist()[1:] == [700, 0, 511, 255, 1999, 0, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_is_the_largest_and_the_first_one_counts(dtype: torch.dtype, kernel_device: torch.device) -> None:
    rows = randn(7, 2000, dtype=dtype)
    rows[0, 1200] = NAN
    rows[1, 300], rows[1, 40], rows[1, 1300:] = INF, NAN, NAN
    rows[2, 100], rows[2, 1700] = -NAN, NAN
    rows[3], rows[4] = NAN, -INF
    rows[5], rows[5, 1500] = -INF, -60000.0
    rows[6, 0], rows[6, 256] = INF, NAN  # of one thread: the step after
    assert_exact(rows, kernel_device, SMALL)
    assert argmax.run_argmax(rows.to(kernel_device), SMALL).tolist() == [1200, 40, 100, 0, 0, 1500, 256]


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 511, 512, 513, 1025, 5001])
def test_rows_of_any_length_and_in_any_place(vocabulary: int, kernel_device: torch.device) -> None:
    wide = randn(3, vocabulary + 9, scale=3.0)
    wide[:, [4, 5 + vocabulary]] = 1e6  # what a row may not read
    for logits in (wide[:, 5 : 5 + vocabulary], wide.t().contiguous().t()[:, 5 : 5 + vocabulary]):
        assert_exact(logits, kernel_device, SMALL)
        assert_exact(logits, kernel_device)
    masked = torch.full((2, vocabulary), -INF)
    assert_exact(masked, kernel_device, SMALL)


def test_random_rows_of_few_values(kernel_device: torch.device) -> None:
    values = torch.tensor([-INF, -1.0, 0.0, -0.0, 1.0, INF, NAN])
    for seed, kept in enumerate((7, 6, 5, 4, 2)):
        picks = torch.randint(kept, (6, 1500), generator=torch.Generator().manual_seed(seed))
        logits = values[picks]
        logits[::2, : 300 * seed] = -INF
        assert_exact(logits, kernel_device, SMALL)


def test_every_configuration_gives_the_same(kernel_device: torch.device) -> None:
    logits = randn(3, 9000, dtype=torch.bfloat16, scale=2.0)
    logits[1, [100, 4000, 8999]] = 50.0
    configs = list(argmax.candidates(3, 128_256))
    assert len(configs) > 5
    for config in configs:
        assert_exact(logits, kernel_device, config)


def test_rows_are_shared_out_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core_cuda.ops.launching.num_multiprocessors", lambda: 132)
    parts = [argmax.default_config(rows, 128_256).part for rows in (1, 4, 8, 32, 64, 256)]
    assert parts[0] == 1024
    assert all(fewer <= more for fewer, more in pairwise(parts)) and parts[-1] == 16_384


def test_fp64_is_refused() -> None:
    (own,) = (each for each in IMPLEMENTATIONS if each.op == "core::argmax")
    call = {"logits": torch.empty(2, 3, dtype=torch.float64, device="meta")}
    assert "float64" in str(own.condition(OpCall(op="core::argmax", args=call)))
    assert own.condition(OpCall(op="core::argmax", args={"logits": torch.empty(2, 3)})) is None
