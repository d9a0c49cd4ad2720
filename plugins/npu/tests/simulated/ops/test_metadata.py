"""What tracing takes torch_npu's results for, against what its host code allocates: sizes, strides, dtype and device.

Every call of an op of torch_npu that an implementation makes is recorded and made again on fake and on meta tensors.
Where torch_npu's own fakes are wrong, a test says so and fails when a version mends it: its workaround can then go.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import npu_calls
import pytest
import torch
from npu_kernel_cases import ALONE, BY_NAME, Call, implementation, moved, npu, own_calls, reason
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import core_npu.ops
from core.common.fakes import apply_fakes
from core_npu.fakes.declared import NPU_FAKES
from core_npu.ops import attention
from tests.kernel_cases import randn

pytestmark = pytest.mark.npu_sim

OPS = tuple(each.op.removeprefix("core::") for each in ALONE if not each.op.endswith("attention"))

MASKED = "npu::npu_add_rms_norm_dynamic_quant"
"""Its masked results are of shape (0,) on fake tensors and of rank 0 on real ones; see the test below."""


class Recorder(TorchDispatchMode):
    """Keeps the calls of torch_npu's ops with the metadata of their results, as allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "npu":
            self.calls.append((func, args, kwargs or {}, described(result)))
        return result


def described(result: Any) -> list[Any]:
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return [(tuple(t.shape), t.stride() if t.numel() else (), t.dtype, t.device.type) for t in tensors]


def recorded(run: Callable[[], Any]) -> Iterator[tuple[Any, Any, Any, list[Any]]]:
    """Yield the calls of torch_npu's ops that a function makes, each form of a call once."""
    with Recorder() as recorder, torch.no_grad():
        run()
    seen = set()
    for func, args, kwargs, made in recorder.calls:
        form = (str(func), str(made), str(described((args, kwargs))))
        if form not in seen:
            seen.add(form)
            yield func, args, kwargs, made


def faked(func: Any, args: Any, kwargs: Any, device: str) -> list[Any]:
    if device == "meta":
        given = pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), (args, kwargs))
        return described(func(*given[0], **given[1]))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    given = pytree.tree_map_only(Tensor, lambda leaf: mode.from_tensor(leaf, static_shapes=True), (args, kwargs))
    with mode:
        return described(func(*given[0], **given[1]))


def check_call(func: Any, args: Any, kwargs: Any, made: list[Any]) -> None:
    for device in ("npu", "meta"):
        said = faked(func, args, kwargs, device)
        wanted = [(*rest, device) for *rest, _ in made]
        if func._schema.name == MASKED:
            said, wanted = ([each[at] for at in (0, 2, 3)] for each in (said, wanted))  # what is read of its results
        assert said == wanted, (str(func), device)


def calls(name: str, dtype: torch.dtype) -> list[Call]:
    op = BY_NAME[name]
    return [call for call in own_calls(op, dtype) if reason(op, call) is None]


@pytest.mark.parametrize("name", OPS)
def test_fakes_say_what_the_host_code_allocates(name: str) -> None:
    device, checked = npu(), 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for call in calls(name, dtype):
            on_the_device = moved(call, device)
            for each in recorded(lambda: implementation(BY_NAME[name]).fn(**on_the_device)):  # noqa: B023
                check_call(*each)
                checked += 1
    assert checked


@pytest.mark.parametrize("size", [64, 80])
def test_attention_s_fakes_say_what_the_host_code_allocates(size: int) -> None:
    """Of the op with `out` the fake is the plugin's own; its `out` list is new on fake tensors, as its schema says."""
    apply_fakes(NPU_FAKES)
    call = moved(npu_calls.attention_call(torch.bfloat16, **npu_calls.LENGTHS["decode"], size=size), npu())
    found = set()
    for func, args, kwargs, made in recorded(lambda: attention._write_and_attend(**call)):
        check_call(func, args, kwargs, made)
        found.add(str(func))
        if str(func) == "npu.npu_fused_infer_attention_score.out":
            functional = torch.ops.npu.npu_fused_infer_attention_score.default
            given = {name: value for name, value in kwargs.items() if name not in ("out", "workspace")}
            check_call(functional, args, given, described(functional(*args, **given)))
            helper = torch.ops.npu._npu_fused_infer_attention_score_infer_output.default
            names = {each.name for each in helper._schema.arguments}
            given = {name: value for name, value in kwargs.items() if name in names}
            check_call(helper, (args[0], args[2]), given, described(helper(args[0], args[2], **given)))
    assert found == {"npu.npu_scatter_nd_update_.default", "npu.npu_fused_infer_attention_score.out"}


def test_a_workspace_has_a_size_that_only_a_run_can_tell() -> None:
    apply_fakes(NPU_FAKES)
    query = randn(4, 4, 64, dtype=torch.bfloat16)
    pages = randn(3, 16, 128, dtype=torch.bfloat16)
    op = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace.default
    options = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "TND", "block_size": 16}
    options |= {"actual_seq_lengths": [4], "actual_seq_lengths_kv": [9]}
    table = torch.zeros(1, 3, dtype=torch.int32)
    given = [each.to(npu()) for each in (query, pages, pages)]
    options["block_table"] = table.to(npu())
    made = op(*given, **options)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes, rest = pytree.tree_map_only(Tensor, mode.from_tensor, (given, options))
    with mode:
        said = op(*fakes, **rest)
    assert said.dtype == made.dtype and said.dim() == made.dim() == 1
    assert isinstance(said.shape[0], torch.SymInt)


def test_every_op_of_torch_npu_that_the_plugin_calls_is_compared() -> None:
    """By the text of the modules: no call is left out of the tests above because its branch was never taken."""
    named = set()
    # Products with a collective want several processes: simulated/test_ranks.py.
    alone = [each for each in Path(core_npu.ops.__file__).parent.rglob("*.py") if each.stem != "collective"]
    for path in alone:
        named |= set(re.findall(r"(?:npu|ops\.npu)\.(_?npu_[a-z0-9_]+)", path.read_text()))
    device, called = npu(), {"_npu_fused_infer_attention_score_get_max_workspace"}
    for name in OPS:
        for dtype in (torch.bfloat16, torch.float16):
            for call in calls(name, dtype):
                on_the_device = moved(call, device)
                for func, *_ in recorded(lambda: implementation(BY_NAME[name]).fn(**on_the_device)):  # noqa: B023
                    called.add(func._schema.name.removeprefix("npu::"))
    call = moved(npu_calls.attention_call(torch.bfloat16, **npu_calls.LENGTHS["decode"]), device)
    called |= {f._schema.name.removeprefix("npu::") for f, *_ in recorded(lambda: attention._write_and_attend(**call))}
    assert named == called


# What torch_npu 2.13 has wrong. Each test fails where a version mends it.


def test_defect_masked_codes_have_another_shape_on_fake_tensors() -> None:
    """`npu_add_rms_norm_dynamic_quant`: no implementation may read what it masks. Mended: compare all five results."""
    device = npu()
    x, weight = randn(3, 64, dtype=torch.float16).to(device), randn(64, dtype=torch.float16).to(device)
    op, options = torch.ops.npu.npu_add_rms_norm_dynamic_quant.default, {"output_mask": [True, False]}
    real = described(op(x, x, weight, **options))
    said = faked(op, (x, x, weight), options, "npu")
    differing = [number for number, pair in enumerate(zip(real, said, strict=True)) if pair[0] != pair[1]]
    assert differing == [1, 4], (
        "torch_npu has mended its fake: remove MASKED above, core_npu/conformance.py's, and this"
    )
    assert (real[1][0], said[1][0]) == ((), (0,))


def test_defect_the_cast_of_a_storage_format_brings_no_fake() -> None:
    """`npu_format_cast`. Mended: the plugin's own is left out by itself, and can go."""
    program = "import torch_npu; from core.common.fakes import has_fake; print(has_fake('npu::npu_format_cast'))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False", "torch_npu brings the fake: remove it from core_npu/fakes, and this"


def test_defect_the_rotation_of_both_writes_its_arguments() -> None:
    """`npu_apply_rotary_pos_emb` says new tensors and turns query and key in place. Mended: `rotary` may use it."""
    device = npu()
    query, key = (randn(2, 5, heads, 128, dtype=torch.float16).to(device) for heads in (4, 1))
    table = randn(2, 5, 1, 128, dtype=torch.float16).to(device)
    op = torch.ops.npu.npu_apply_rotary_pos_emb.default
    assert all(each.alias_info is None for each in (*op._schema.arguments, *op._schema.returns))
    before = query.clone()
    turned, _ = op(query, key, table, table)
    assert turned.data_ptr() == query.data_ptr(), "torch_npu gives new tensors: core_npu/ops/rotary.py can use the op"
    assert not torch.equal(before.cpu(), query.cpu())


def test_defect_codes_of_transposed_rows_lie_otherwise_on_fake_tensors() -> None:
    """`npu_dynamic_quant`. Mended: `quantize` need not make its argument contiguous."""
    x, op = randn(64, 9, dtype=torch.float16).to(npu()).t(), torch.ops.npu.npu_dynamic_quant.default
    real, said = described(op(x)), faked(op, (x,), {}, "npu")
    assert (real[0][1], said[0][1]) == ((64, 1), (1, 9)), "torch_npu has mended its fake: see core_npu/ops/quantize.py"


@pytest.mark.parametrize("name", ["npu_moe_gating_top_k", "npu_moe_init_routing_v2"])
def test_defect_results_that_are_not_asked_for_hold_what_memory_held(name: str) -> None:
    """Nothing writes them, and nothing says so: two calls differ. Mended: the profile's excuse _UNWRITTEN can go."""
    device = npu()
    x = randn(32, 64).to(device)
    chosen = torch.zeros(32, 2, dtype=torch.int32, device=device)
    routing = {"expert_num": 4, "expert_tokens_num_flag": True, "active_expert_range": [0, 4]}

    def unasked() -> Tensor:
        if name == "npu_moe_gating_top_k":
            return torch.ops.npu.npu_moe_gating_top_k(x, 2, norm_type=1, out_flag=False)[2]  # type: ignore[no-any-return]
        return torch.ops.npu.npu_moe_init_routing_v2(x, chosen, **routing)[3]  # type: ignore[no-any-return]

    unasked()
    for number in (3.0, 5.0):
        unasked().fill_(number)  # whose memory the next call gets
        found = unasked().cpu()
        assert bool((found == number).all()), "torch_npu writes it: see _UNWRITTEN in core_npu/conformance.py"
