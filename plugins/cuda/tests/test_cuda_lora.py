"""What adapters add to linear layers: core_cuda/ops/linear/lora.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from core.common.numerics import judge
from core.common.ops.arguments import Draw
from core.common.ops.implementation import OpCall, OpImplementation
from core.common.ops.linear.lora import ADD_LORA, lora_call
from core.engine.lora.layers import FoundLayer
from core.engine.lora.ranks import slot_rank
from tests.kernel_cases import CPU, DTYPES, check, in_fp64, moved

pytest.importorskip("triton", reason="needs triton")

from core_cuda.ops import launching
from core_cuda.ops.linear.lora import add_lora, lora_config, why_not

FORMS: dict[str, dict[str, Any]] = {
    "query, key, value of 1 row": {"leading": (1,), "sizes": (64, 32, 32)},
    "gate and up of 17 rows": {"leading": (17,), "sizes": (48, 48)},
    "70 rows": {"leading": (1, 70), "sizes": (40,)},
    "260 rows": {"leading": (260,), "sizes": (40, 16)},
    "slots beyond a tile": {"leading": (20,), "sizes": (40,), "num_slots": 9, "rank": 8},
    "a rank beyond a tile": {"leading": (5,), "sizes": (40,), "num_slots": 2, "rank": 72},
    "more layers than a launch takes": {"leading": (5,), "sizes": (16, 24, 8, 16, 40)},
}


@pytest.fixture(autouse=True)
def _units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the work as for an H100, whatever is here."""
    monkeypatch.setattr(launching, "num_multiprocessors", lambda: 132)


def call_of(form: str, dtype: torch.dtype, size_in: int = 1040) -> dict[str, Any]:
    return lora_call(Draw(dtype, CPU, 3), size_in=size_in, **FORMS[form])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples(dtype: torch.dtype, kernel_device: torch.device) -> None:
    calls = [sample.kwargs for sample in ADD_LORA.samples(dtype, CPU)]
    on_gpu = kernel_device.type != "cpu"  # a rank of 3 is refused for what came out there
    check(ADD_LORA, add_lora, [call for call in calls if call["rank"] % 4 == 0 or not on_gpu], kernel_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    call = call_of(form, dtype)
    there = moved(call, kernel_device)
    found = add_lora(**there)
    verdict = judge(found.cpu(), ADD_LORA.reference(**call), in_fp64(ADD_LORA, call)[0])
    assert verdict.passed, verdict.reason
    assert torch.equal(found, add_lora(**there))


@pytest.mark.parametrize("rank", [1, 3, 5, 8])
def test_slots_of_any_rank_get_places_that_the_kernels_take(rank: int) -> None:
    kernels = [OpImplementation(op=ADD_LORA.qualified_name, name="own", fn=add_lora, condition=why_not)]
    layers = [FoundLayer(size_in, size_out, torch.bfloat16, 0) for size_in, size_out in ((64, 32), (32, 128))]
    assert slot_rank(rank, layers, kernels, CPU) == -(-rank // 4) * 4
    wide = [FoundLayer(64, 32, torch.float32, 0)]  # the kernels take none of that dtype, of whatever rank
    assert slot_rank(rank, wide, kernels, CPU) == rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_places_of_zeros_keep_the_numbers_of_the_rank(
    rank: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    call, places, slots = lora_call(Draw(dtype, CPU, 3), (17,), 1040, (40, 16), rank=rank), -(-rank // 4) * 4, 3
    a = pad(call["a"].view(-1, rank, 1040), (0, 0, 0, places - rank)).reshape(-1, 1040)
    b = pad(call["b"].view(-1, slots, rank), (0, places - rank)).reshape(-1, slots * places)
    found = add_lora(**moved({**call, "a": a, "b": b, "rank": places}, kernel_device)).cpu()
    verdict = judge(found, ADD_LORA.reference(**call), in_fp64(ADD_LORA, call)[0])
    assert verdict.passed, verdict.reason


def test_rows_without_an_adapter_keep_every_bit(kernel_device: torch.device) -> None:
    call = call_of("gate and up of 17 rows", torch.bfloat16)
    call["slots"][::2] = 0
    found = add_lora(**moved(call, kernel_device)).cpu()
    assert torch.equal(found[::2], call["base"][::2])
    assert not torch.equal(found[1::2], call["base"][1::2])


def test_what_one_adapter_makes_infinite_stays_with_its_rows(kernel_device: torch.device) -> None:
    call = call_of("70 rows", torch.bfloat16)
    call["a"][4:8] = torch.finfo(torch.bfloat16).max  # slot 2
    call["x"] = call["x"].abs()
    expected = add_lora(**moved({**call, "a": call["a"].clamp(max=1e3)}, kernel_device)).cpu()
    found = add_lora(**moved(call, kernel_device)).cpu()
    others = call["slots"] != 2
    assert torch.equal(found[0, others], expected[0, others]) and found[0, others].isfinite().all()
    assert not found[0, ~others].isfinite().all()


def test_a_row_does_not_depend_on_the_adapters_of_others(kernel_device: torch.device) -> None:
    call = call_of("70 rows", torch.bfloat16)
    found = add_lora(**moved(call, kernel_device)).cpu()
    for slot in (1, 2, 3):
        alone = {**call, "slots": torch.where(call["slots"] == slot, slot, 0)}
        own = call["slots"] == slot
        assert torch.equal(add_lora(**moved(alone, kernel_device)).cpu()[0, own], found[0, own])


def test_shares_of_the_depth_and_none_of_them_empty() -> None:
    shares = {rows: lora_config(rows, 4096, 6144, 64, 3, 2).splits for rows in (1, 8, 64, 256, 4096)}
    assert shares == {1: 8, 8: 8, 64: 4, 256: 2, 4096: 1}
    assert lora_config(8, 512, 512, 64, 1, 2).splits == 1  # shorter than what a program reads at once


def test_what_the_kernels_refuse() -> None:
    call = call_of("70 rows", torch.bfloat16)

    def reason(**changes: Any) -> str | None:
        return why_not(OpCall(op=ADD_LORA.qualified_name, args={**call, **changes}))

    assert reason() is None
    assert "torch.float64" in str(reason(x=call["x"].double()))
    assert "torch.float32" in str(reason(x=call["x"].float()))
    assert "rows of a" in str(reason(a=call["a"].T.contiguous().T))
    assert "a rank of 3, and the kernels take multiples of 4" in str(reason(rank=3))
    assert "layers of features 33, 40, and the kernels take multiples of 8" in str(reason(x=call["x"][..., :33]))
