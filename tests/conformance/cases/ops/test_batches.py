"""core_conformance/cases/ops/batches.py: what declares itself batch-invariant is tested, and can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.conformance import ConformanceProfile
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.implementation import OpImplementation
from core.common.ops.linear.gated import LINEAR
from core.common.ops.norm.norms import RMS_NORM
from core.device import Device
from core.host.selection import select_device
from core_conformance.case import Case
from core_conformance.cases.ops.batches import collect
from tests.conformance.support import run_case
from tests.support import cpu


def cases(device: Device) -> dict[str, Case]:
    return {each.id: each for each in collect(device, ConformanceProfile())}


def planted(op: Any, fn: Any, **fields: Any) -> Device:
    made = OpImplementation(op=op.qualified_name, name="planted", fn=fn, batch_invariant=True, **fields)
    return cpu(ops=(made,))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(cases(select_device("cpu"))))
def test_the_processors_kernels_are_what_they_declare(name: str) -> None:
    device = select_device("cpu")
    assert run_case(cases(device)[name], device) == []


def test_kernels_of_the_processor_declare_it_for_products_adapters_and_attention() -> None:
    ops = {name.split("/")[1] for name in cases(select_device("cpu"))}
    assert ops == {"linear", "add_lora", "attention"}


def by_halves(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sum in two parts, of which the first is larger where there are few rows."""
    cut = 3 if x.shape[0] <= 4 else 5
    found = x[..., :cut] @ weight[:, :cut].T + x[..., cut:] @ weight[:, cut:].T
    return found if bias is None else found + bias


def test_a_sum_that_depends_on_the_number_of_rows_is_found() -> None:
    device = planted(LINEAR, by_halves)
    assert (
        "alone differ from the same among" in run_case(cases(device)["ops/linear/planted/batches/float32"], device)[0]
    )


def test_a_condition_that_depends_on_the_number_of_rows_is_found() -> None:
    def few(call: Any) -> str | None:
        return None if call.args["x"].shape[0] <= 8 else "too many rows"

    device = planted(LINEAR, LINEAR.reference, condition=few)
    found = run_case(cases(device)["ops/linear/planted/batches/float32"], device)
    assert found
    assert all("its condition depends on the number of rows" in each for each in found)


def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Be off by a little where one token attends."""
    found: Tensor = ATTENTION.reference(query, *args, **kwargs)
    return found * (1 + 2**-20) if kwargs["max_query_len"] == 1 else found


@pytest.mark.slow
def test_attention_that_depends_on_chunks_is_found() -> None:
    device = planted(ATTENTION, attention)
    found = run_case(cases(device)["ops/attention/planted/batches/float32"], device)
    assert any("chunks of 1 tokens" in each for each in found)


def test_an_op_without_batches_of_the_suite_fails() -> None:
    from core.common.ops.recurrent.convolution import CAUSAL_CONV1D_UPDATE

    device = planted(CAUSAL_CONV1D_UPDATE, CAUSAL_CONV1D_UPDATE.reference)
    (found,) = run_case(cases(device)[f"ops/{CAUSAL_CONV1D_UPDATE.name}/planted/batches/float32"], device)
    assert "knows no batches of this op" in found


@pytest.mark.slow
def test_a_norm_by_rows_passes() -> None:
    def norm(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
        rows = [RMS_NORM.reference(row[None], weight, eps, **options) for row in x.reshape(-1, x.shape[-1])]
        return torch.cat(rows).view(x.shape)

    device = planted(RMS_NORM, norm)
    assert run_case(cases(device)["ops/rms_norm/planted/batches/float32"], device) == []
