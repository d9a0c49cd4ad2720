"""The fakes that the plugin declares, with the real torch_npu: each fits its op and says what the kernel does.

Where a schema is not true of its op no fake can be: these defects of torch_npu 2.13 are watched one by one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import npu_atb
import npu_tiles
import pytest
import torch
from npu_kernel_cases import moved, npu
from npu_schemas import SCHEMAS

from core.common.fakes import FakeOp, apply_fakes
from core.common.fakes.schema import find_overload
from core.verify.fakes.parity import compare, run_fake
from core_npu.conformance import PROFILE
from core_npu.fakes.declared import NPU_FAKES
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


UNDECLARED = {
    "atb::_npu_group_topk": {"writes its argument 'self', which the schema does not declare"},
    "npu::npu_fused_infer_attention_score.out": {
        "writes its argument 'out', which the schema does not declare",
        "result 0 shares memory with argument 'out'",
    },
    "npu::npu_fused_infer_attention_score_v2.out": {
        "writes its argument 'out', which the schema does not declare",
        "result 0 shares memory with argument 'out'",
    },
    "npu::npu_format_cast": {"result 0 shares memory with argument 'input'"},
    "npu::npu_format_cast.Tensor": {"result 0 shares memory with argument 'input'"},
}
"""Op -> how its schema lies, and nothing else."""


@pytest.mark.parametrize("fake", NPU_FAKES, ids=lambda fake: fake.op)
def test_a_fake_says_of_each_declared_call_what_the_kernel_does(fake: FakeOp) -> None:
    device = npu()
    apply_fakes(NPU_FAKES)
    op = find_overload(fake.op)
    assert op is not None and fake.samples is not None
    try:
        samples = list(fake.samples(device))
    except NotImplementedError as error:
        assert fake.op == "npu::npu_dual_level_quant_matmul" and "only Ascend 950" in str(error)
        return
    found = {problem for each in samples for problem in compare(op, each.kwargs, torch.npu.synchronize)}
    assert samples and found == UNDECLARED.get(fake.op, set())


def test_the_profile_excuses_the_schemas_that_lie_and_no_other() -> None:
    excused = {name.lower() for name in PROFILE.not_supported if name.startswith("fakes/foreign/")}
    assert excused == {f"fakes/foreign/{op.replace('::', '.').lower()}" for op in UNDECLARED}


def test_the_op_of_another_chip_says_so() -> None:
    op = "npu::npu_dual_level_quant_matmul"
    call = npu_atb.sample(op, "half")
    with pytest.raises(RuntimeError, match="only on the Ascend950 platform"):
        npu_atb.run(op, moved(call, npu()))


def test_casts_into_tiles_are_what_the_fakes_say_and_come_back() -> None:
    script = Path(npu_tiles.__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), *sys.path])}
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"rows": [], "codes": []}


def test_a_plain_cast_keeps_the_strides() -> None:
    device = npu()
    turned = torch.arange(12.0, device=device).half().view(3, 4).t()
    op = find_overload("npu::npu_format_cast")
    assert op is not None
    real = op(turned, 2)
    fakes, _ = run_fake(op, {"input": turned, "acl_format": 2})
    assert real.stride() == fakes[0].stride() == (1, 4)
