"""The fakes that the plugin declares, with the real torch_npu: each fits, and the snapshot of schemas is its own."""

from __future__ import annotations

import pytest
import torch
from npu_kernel_cases import npu
from test_npu_fakes import SCHEMAS

from core.common.fakes import apply_fakes
from core.common.fakes.parity import compare
from core.common.fakes.schema import find_overload
from core_npu.fakes import NPU_FAKES
from tests.kernel_cases import randn

pytestmark = pytest.mark.npu_sim


def test_the_snapshot_of_schemas_is_that_of_the_installed_version() -> None:
    npu()
    installed = [find_overload(fake.op) for fake in NPU_FAKES]
    assert all(each is not None for each in installed)
    assert sorted(str(each._schema) for each in installed if each is not None) == sorted(SCHEMAS)


def test_every_fake_fits_the_installed_version() -> None:
    npu()
    refused = [(fake.op, result.reason) for fake, result in apply_fakes(NPU_FAKES) if not result.applied]
    assert refused == []


@pytest.mark.parametrize("layout", ["TND", "TND_NTD"])
def test_results_are_those_of_the_host_code(layout: str) -> None:
    device = npu()
    apply_fakes(NPU_FAKES)
    op = find_overload("npu::_npu_fused_infer_attention_score_infer_output")
    assert op is not None
    query, value = (randn(*shape, dtype=torch.bfloat16).to(device) for shape in ((5, 4, 64), (9, 16, 2 * 32)))
    table = torch.zeros(1, 3, dtype=torch.int32, device=device)
    call = {"query": query, "value": value, "input_layout": layout, "block_table": table}
    for more in ({}, {"softmax_lse_flag": True}, {"quant_scale2": torch.ones(1, device=device)}):
        assert compare(op, {**call, "num_heads": 4, "num_key_value_heads": 2, **more}) == []
