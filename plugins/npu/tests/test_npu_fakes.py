"""The fakes of torch_npu's ops against a snapshot of its schemas: they fit, and say what its host code does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from npu_schemas import SCHEMAS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from core.common.fakes import FakeOp, FakeResult, apply_fakes, has_fake
from core.common.fakes.schema import find_overload
from core.verify.fakes.parity import run_fake
from core_npu.fakes.attention import scored, scored_v2
from core_npu.fakes.declared import NPU_FAKES, routed


@pytest.fixture(scope="module")
def applied() -> Iterator[dict[str, FakeResult]]:
    """Have ops of torch_npu's schemas, without kernels, apply the fakes and yield what became of each."""
    if "torch_npu" in sys.modules:
        pytest.skip("torch_npu itself is loaded; simulated/ops/test_fakes.py compares its ops")
    libraries = {name: torch.library.Library(name, "FRAGMENT") for name in ("npu", "atb")}
    for schema in SCHEMAS:
        namespace, _, rest = schema.partition("::")
        if find_overload(rest_of(namespace, rest)) is None:
            libraries[namespace].define(rest)
    yield {fake.op: result for fake, result in apply_fakes(NPU_FAKES)}
    for library in libraries.values():
        library._destroy()


def rest_of(namespace: str, schema: str) -> str:
    return f"{namespace}::{schema.partition('(')[0]}"


def test_the_snapshot_holds_the_ops_that_fakes_are_declared_for() -> None:
    assert {schema.partition("(")[0] for schema in SCHEMAS} == {fake.op for fake in NPU_FAKES}
    assert len(NPU_FAKES) == 49


def test_every_fake_fits_its_schema_and_is_registered(applied: dict[str, FakeResult]) -> None:
    assert {op for op, result in applied.items() if not result.applied} == set()
    assert all(has_fake(op) for op in applied)
    named = {op for op, result in applied.items() if "does not declare" in result.reason}
    assert named == {
        "atb::_npu_group_topk",
        "npu::npu_fused_infer_attention_score.out",
        "npu::npu_fused_infer_attention_score_v2.out",
    }


def run(op: str, *args: Any, **kwargs: Any) -> Any:
    """Call an op on fake tensors made by `fake`, in whose mode they are."""
    overload = find_overload(op)
    assert overload is not None
    return overload(*args, **kwargs)


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        yield mode


def half(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float16)


def test_ops_that_write_give_what_they_were_given(applied: Any, mode: FakeTensorMode) -> None:
    x, out = half(3, 4), half(4, 3)
    assert run("npu::npu_silu_", x) is x
    assert run("npu::npu_transpose.out", x, [1, 0], out=out) is out
    assert run("npu::npu_format_cast_.acl_format", x, 29) is x
    assert run("npu::npu_scatter_pa_cache.value", x, x, key_cache=out) is out
    assert run("npu::npu_gather_pa_kv_cache", x, x, x, x, x, x) is None
    assert run("atb::_npu_reshape_and_cache", x, x, x, x, x) is None
    assert run("atb::npu_ring_mla.out", *[x] * 7, 1, 1, output=x, softmax_lse=out) == (x, out)


def test_a_cast_of_the_storage_format_keeps_sizes_and_strides(applied: Any, mode: FakeTensorMode) -> None:
    made = run("npu::npu_format_cast", half(4, 3).t(), 29)
    assert (made.shape, made.stride(), made.dtype) == ((3, 4), (1, 3), torch.float16)
    assert run("npu::npu_format_cast.Tensor", half(4, 6)[:, :3], half(4, 3)).stride() == (6, 1)


@pytest.mark.cases(3)
@pytest.mark.parametrize("fake", NPU_FAKES, ids=lambda fake: fake.op)
def test_declared_calls_fit_the_schema_and_the_fake(applied: Any, fake: FakeOp) -> None:
    overload = find_overload(fake.op)
    assert overload is not None and fake.samples is not None
    samples = list(fake.samples(torch.device("cpu")))
    assert samples and len({each.name for each in samples}) == len(samples)
    returned = [each.alias_info for each in overload._schema.returns]
    for sample in samples:
        results, given = run_fake(overload, sample.kwargs)
        assert len(results) == len(returned)
        for result, alias in zip(results, returned, strict=True):
            if alias is not None:
                assert any(result is each for each in given.values()), "it gives what it was given"
            elif isinstance(result, Tensor):
                assert not any(result is each for each in given.values())


def test_calls_have_no_tensor_that_says_nothing(applied: Any) -> None:
    """What a kernel computes with is neither constant nor empty: a formula that leaves it out would not show."""
    for fake in NPU_FAKES:
        assert fake.samples is not None
        for sample in fake.samples(torch.device("cpu")):
            for name in ("query", "key_cache", "value_cache", "key", "value", "q_nope", "ctkv", "x", "logits"):
                value = sample.kwargs.get(name)
                if isinstance(value, Tensor):
                    assert value.float().std() > 0, (fake.op, sample.name, name)


def test_ops_that_only_allocate_are_declared_so() -> None:
    unwritten = {fake.op for fake in NPU_FAKES if fake.unwritten}
    assert unwritten == {fake.op for fake in NPU_FAKES if "workspace" in fake.op or "infer_output" in fake.op}


def test_sizes_that_only_a_run_can_tell_are_symbols(applied: Any, mode: FakeTensorMode) -> None:
    query, cache, table = half(4, 8, 128), half(9, 16, 2, 128), torch.empty(4, 2, dtype=torch.int32)
    space = run("npu::_npu_fused_infer_attention_score_get_max_workspace", query, cache, cache)
    assert space.dtype == torch.float16 and isinstance(space.shape[0], torch.SymInt)
    space = run("atb::_npu_paged_attention_get_workspace", query, cache, cache, 2, 8, 0.1, table, table, query)
    assert space.dtype == torch.uint8 and isinstance(space.shape[0], torch.SymInt)
    key, value = run("atb::npu_paged_cache_load", cache, half(9, 16, 2, 64), table, table)
    assert key.shape[1:] == (2, 128) and value.shape[1:] == (2, 64) and key.shape[0] is not None
    assert isinstance(key.shape[0], torch.SymInt) and str(key.shape[0]) == str(value.shape[0])


def test_the_op_with_a_list_of_results_gives_new_ones_like_it(applied: Any, mode: FakeTensorMode) -> None:
    query, cache = half(4, 8, 128), half(9, 16, 256)
    out = [half(4, 8, 128), torch.empty(0)]
    made = run("npu::npu_fused_infer_attention_score.out", query, cache, cache, out=out)
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in out]


def test_samples_and_products(applied: Any, mode: FakeTensorMode) -> None:
    chosen, logits = run("npu::npu_top_k_top_p_sample", half(4, 100), half(4), half(4))
    assert (chosen.shape, chosen.dtype) == ((4,), torch.int64)
    assert (logits.shape, logits.dtype) == ((4, 100), torch.float32)
    codes = torch.empty(4, 32, dtype=torch.uint8), torch.empty(24, 32, dtype=torch.uint8)
    made = run("npu::npu_dual_level_quant_matmul", *codes, *[half(1)] * 4, output_dtype=5)
    assert (made.shape, made.dtype) == ((4, 24), torch.float16)
    with pytest.raises(RuntimeError, match=r"output_dtype 7 is none of 5 \(torch.float16\)"):
        run("npu::npu_dual_level_quant_matmul", *codes, *[half(1)] * 4, output_dtype=7)
    out, log_sum = run("atb::npu_ring_mla", *[half(5, 8, 64)] * 4, half(5, 2, 128), half(1), half(1), 8, 2)
    assert (out.shape, log_sum.shape, log_sum.dtype) == ((5, 8, 128), (8, 5), torch.float32)


ROUTED = [
    ({}, (32, 8), None, None, (32,)),
    ({"active_num": 20}, (20, 8), None, None, (20,)),
    ({"active_num": 0, "expert_tokens_num_mode": 1}, (32, 8), (256,), None, (32,)),
    ({"quant_mode": 0}, (32, 8), None, None, None),
    (
        {"drop_pad_mode": 1, "expert_num": 4, "expert_capacity": 3, "expert_tokens_before_capacity_flag": True},
        (4, 3, 8),
        None,
        (4,),
        (12,),
    ),
]


@pytest.mark.parametrize(("options", "rows", "counts", "before", "scales"), ROUTED, ids=str)
def test_quantised_routing_leaves_out_what_its_modes_do_not_make(
    options: Any, rows: Any, counts: Any, before: Any, scales: Any
) -> None:
    made = routed(half(16, 8), torch.empty(16, 2, dtype=torch.int32), **options)
    assert [None if t is None else tuple(t.shape) for t in made] == [rows, (32,), counts, before, scales]
    assert made[0].dtype == torch.int8 and made[1].dtype == torch.int32


# Layout, query, value, further arguments, and the result; what the guide of the op says of each.
SCORED = [
    ("BSH", (2, 3, 64), (2, 7, 32), {"num_key_value_heads": 2}, (2, 3, 64), (2, 4, 3, 1)),
    ("BSH", (2, 3, 64), (2, 7, 64), {"num_key_value_heads": 2}, (2, 3, 128), (2, 4, 3, 1)),
    ("BNSD", (2, 4, 3, 16), (2, 2, 7, 8), {}, (2, 4, 3, 8), (2, 4, 3, 1)),
    ("BNSD_BSND", (2, 4, 3, 16), (2, 2, 7, 16), {}, (2, 3, 4, 16), (2, 4, 3, 1)),
    ("BSND_NBSD", (2, 3, 4, 16), (2, 7, 2, 16), {}, (4, 2, 3, 16), (2, 4, 3, 1)),
    ("TND", (5, 4, 16), (7, 2, 8), {}, (5, 4, 8), (5, 4, 1)),
    ("TND_NTD", (5, 4, 16), (7, 2, 16), {}, (4, 5, 16), (5, 4, 1)),
    ("NTD_TND", (4, 5, 16), (2, 7, 16), {}, (5, 4, 16), (5, 4, 1)),
    ("TND", (5, 4, 16), (9, 128, 32), {"num_key_value_heads": 2, "paged": True}, (5, 4, 16), (5, 4, 1)),
    ("TND", (5, 4, 16), (9, 2, 128, 8), {"num_key_value_heads": 2, "paged": True}, (5, 4, 8), (5, 4, 1)),
    ("BSND", (5, 1, 4, 32), (9, 2, 2, 128, 16), {"paged": True}, (5, 1, 4, 32), (5, 4, 1, 1)),
]


@pytest.mark.parametrize(("layout", "query", "value", "options", "out", "log_sum"), SCORED, ids=str)
def test_attention_s_results_by_layout(
    layout: str, query: Any, value: Any, options: dict[str, Any], out: Any, log_sum: Any
) -> None:
    given = {name: number for name, number in options.items() if name != "paged"}
    table = torch.empty(2, 2, dtype=torch.int32) if options.get("paged") else None
    made = scored(
        half(*query),
        half(*value),
        input_layout=layout,
        num_heads=4,
        block_table=table,
        softmax_lse_flag=True,
        **given,
    )
    assert [tuple(each.shape) for each in made] == [out, log_sum]
    assert [each.dtype for each in made] == [torch.float16, torch.float32]


def test_attention_s_results_by_dtype() -> None:
    query, value = half(5, 4, 16), half(7, 2, 16)
    plain, log_sum = scored(query, value, input_layout="TND")
    assert plain.dtype == torch.float16 and log_sum.shape == (0,)
    assert scored(query, value, input_layout="TND", quant_scale2=half(1))[0].dtype == torch.int8
    rope = half(1).bfloat16()
    assert scored(query.to(torch.int8), value, input_layout="TND")[0].dtype == torch.float16
    assert scored(query.to(torch.int8), value, input_layout="TND", query_rope=rope)[0].dtype == torch.bfloat16
    packed = scored(query, value[..., :2].to(torch.int32), input_layout="TND")
    assert packed[0].shape == (5, 4, 16)
    second = scored_v2(query, value, input_layout="TND", num_query_heads=4, return_softmax_lse=True)
    assert [tuple(each.shape) for each in second] == [(5, 4, 16), (5, 4, 1)]


def test_what_the_rules_of_attention_do_not_know_is_refused() -> None:
    query, value = half(5, 4, 16), half(7, 2, 16)
    with pytest.raises(RuntimeError, match="input_layout 'XYZ' is none of BSH, BSND"):
        scored(query, value, input_layout="XYZ")
    with pytest.raises(RuntimeError, match="a paged value has rank 3 to 5, not 2"):
        scored(query, half(3, 4), input_layout="TND", block_table=query)
    with pytest.raises(RuntimeError, match="query_dtype given"):
        scored_v2(query, value, input_layout="TND", query_dtype=5)
