"""core_cuda/ops/rotary/table.py: both tables against fp64, at the positions of long contexts too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.common.ops.rotary.table import LAYOUTS, ROTARY_TABLE, inverse_frequencies
from tests.kernel_cases import CPU, DTYPES, check, moved

pytest.importorskip("triton", reason="needs triton")
from core_cuda.implementations import IMPLEMENTATIONS
from core_cuda.ops.rotary import table as rotary_table


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_agree_with_the_reference(dtype: torch.dtype, kernel_device: torch.device) -> None:
    calls = [sample.kwargs for sample in ROTARY_TABLE.samples(dtype, CPU)]
    for call in calls:
        assert rotary_table.why_not(ROTARY_TABLE.bind((), call)) is None
    check(ROTARY_TABLE, rotary_table.rotary_table, calls, kernel_device)


def call(num_tokens: int, count: int, **options: Any) -> dict[str, Any]:
    """Return a call at positions from all over a context of 131072."""
    positions = torch.arange(num_tokens)[None] * max(131_072 // max(num_tokens, 1), 1) + 7
    return {"positions": positions, "inv_freq": inverse_frequencies(count, torch.float32, CPU), **options}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_tokens_and_frequencies(layout: str, kernel_device: torch.device) -> None:
    sizes = ((1, 1), (1, 64), (3, 48), (33, 32), (5, 300), (70, 5))
    for dtype in (torch.float32, torch.bfloat16):
        options = {"layout": layout, "out_dtype": dtype, "scaling": 1.25}
        calls = [call(num_tokens, count, **options) for num_tokens, count in sizes]
        check(ROTARY_TABLE, rotary_table.rotary_table, calls, kernel_device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_any_integers_and_any_order_of_memory(dtype: torch.dtype, kernel_device: torch.device) -> None:
    positions = torch.randint(0, 120, (3, 2, 8), generator=torch.Generator().manual_seed(1)).to(dtype)
    given = call(1, 32)
    forms = (positions, positions.transpose(0, 2), positions[..., ::2], positions[:1].expand(4, 2, 8))
    frequencies = given["inv_freq"].repeat_interleave(2)[::2]
    calls = [{"positions": form, "inv_freq": frequencies} for form in forms]
    check(ROTARY_TABLE, rotary_table.rotary_table, calls, kernel_device)


def test_large_angles_are_reduced_exactly(kernel_device: torch.device) -> None:
    """At a frequency of 1 an angle is its position, without an error: so the results are right to the last bits."""
    positions = torch.tensor([0, 1, 22, 355, 710, 104_348, 105_615, 105_616, 131_071, 2**24 - 1, 2**24])
    given = moved({"positions": positions, "inv_freq": torch.ones(1)}, kernel_device)
    for found, exact in zip(rotary_table.rotary_table(**given), (torch.cos, torch.sin), strict=True):
        torch.testing.assert_close(found.cpu()[:, 0].double(), exact(positions.double()), rtol=3e-7, atol=1e-7)


def test_every_configuration_gives_the_same(kernel_device: torch.device) -> None:
    given = moved(call(19, 48), kernel_device)
    wanted = rotary_table.run_rotary_table(**given)
    configs = list(rotary_table.candidates(19, 48))
    assert len(configs) > 5
    for config in configs:
        found = rotary_table.run_rotary_table(**given, config=config)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_what_the_kernel_refuses() -> None:
    (own,) = (each for each in IMPLEMENTATIONS if each.op == "core::rotary_table")
    given = call(3, 8)
    assert own.condition(ROTARY_TABLE.bind((), given)) is None
    wide = ROTARY_TABLE.bind((), {**given, "inv_freq": given["inv_freq"].double()})
    assert "inv_freq is torch.float64" in str(own.condition(wide))
    assert "out_dtype is torch.float64" in str(
        own.condition(ROTARY_TABLE.bind((), {**given, "out_dtype": torch.float64}))
    )
    assert "up to 4096" in str(own.condition(ROTARY_TABLE.bind((), call(1, 5000))))
