"""The pass that fuses split, norms, rotation and the write of an NZ cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import npu_library
import pytest
import torch
from npu_rewriting import HALVES, cast, draw, kernels, rewritten
from torch import Tensor

from core.common.numerics import judge
from core.common.ops.rotary.rotation import QK_NORM_ROTARY
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.manager import PassManager
from core.compilation.trace.tracing import trace
from core.verify.execution import run_graph
from core_npu.passes.rotary.qk_norm import LIFT_QK_NORM_ROTARY as LIFT
from core_npu.passes.rotary.qkv_cache import FUSE_QKV_RMS_NORM_ROPE_CACHE as PASS
from tests.marks import slow_except

npu_library.install()
ops: Any = torch.ops.npu
F16, BF16 = HALVES
TOKENS, BLOCKS, BLOCK = 6, 4, 16
IMPLEMENTED = frozenset({QK_NORM_ROTARY.qualified_name})


@dataclass(frozen=True)
class Form:
    """How a model writes attention up to the cache; the defaults are what the kernel does."""

    heads: int = 3
    kv_heads: int = 2
    size: int = 128
    eps: tuple[float, float] = (3e-4, 3e-4)
    mode: str = "half"
    turn: str = "each"
    cache_mode: str = "PA_NZ"
    also: str = ""
    swapped: bool = False

    def __call__(self, **given: Tensor) -> tuple[Tensor, ...]:
        rows = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        query, key, value = given["qkv"].split(rows, dim=-1)
        key, value = (value, key) if self.swapped else (key, value)
        query = ops.npu_rms_norm(query.reshape(-1, self.heads, self.size), given["query_weight"], self.eps[0])[0]
        key = normed_key = ops.npu_rms_norm(
            key.reshape(-1, self.kv_heads, self.size), given["key_weight"], self.eps[1]
        )[0]
        query, key = self.turned(query, key, given["cos"], given["sin"])
        value = value.contiguous().view(-1, self.kv_heads, self.size)
        caches = given["key_cache"], given["value_cache"]
        early = caches[0] * 3 if self.also == "cache" else None
        ops.npu_scatter_pa_kv_cache(
            key.reshape(-1, self.kv_heads, self.size), value, *caches, given["slots"], cache_mode=self.cache_mode
        )
        shown = {"cache": early, "key": key, "normed": normed_key, "value": value}.get(self.also)
        return (query * 2, *(() if shown is None else (shown * 2,)))

    def turned(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.turn == "each":
            return ops.npu_rotary_mul(query, cos, sin, self.mode), ops.npu_rotary_mul(key, cos, sin, self.mode)
        if self.turn == "other tables":
            return ops.npu_rotary_mul(query, cos, sin), ops.npu_rotary_mul(key, sin, cos)
        if self.turn == "rows":
            return ops.npu_apply_rotary_pos_emb(query, key, cos, sin, "TND")
        query, key = query.view(1, -1, self.heads, self.size), key.view(1, -1, self.kv_heads, self.size)
        return ops.npu_apply_rotary_pos_emb(query, key, cos[None], sin[None])


def inputs(
    dtype: torch.dtype, form: Form, *, slots: torch.dtype = torch.int64, block: int = BLOCK
) -> dict[str, Tensor]:
    width = (form.heads + 2 * form.kv_heads) * form.size
    angles = torch.rand(TOKENS, 1, form.size, generator=torch.Generator().manual_seed(3)) * 6
    found = {
        "qkv": draw(TOKENS, width),
        "query_weight": torch.linspace(0.4, 1.6, form.size),
        "key_weight": torch.linspace(1.7, 0.3, form.size),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "slots": torch.randperm(BLOCKS * block, generator=torch.Generator().manual_seed(4))[:TOKENS].to(slots),
    }
    for name in ("key_cache", "value_cache"):
        nd = (BLOCKS, block, form.kv_heads, form.size)
        nz = (BLOCKS, form.kv_heads * form.size // 16, block, 16)
        found[name] = draw(*(nz if form.cache_mode == "PA_NZ" else nd), seed=len(name))
    return cast(found, dtype)


TURNS = [
    (open_tokens, turn, dtype) for open_tokens in (False, True) for turn in ("each", "rows", "once") for dtype in HALVES
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("dynamic", "turn", "dtype"),
    slow_except(TURNS, *(case for case in TURNS if case[2] == (torch.bfloat16 if case[0] else torch.float16))),
    ids=str,
)
def test_split_norms_rotation_and_cache_are_one_call(dtype: torch.dtype, turn: str, dynamic: bool) -> None:
    form = Form(turn=turn)
    opened = dict.fromkeys(("qkv", "cos", "sin", "slots"), (0,)) if dynamic else None
    found = rewritten(lambda **given: form(**given), PASS, dynamic=opened, **inputs(dtype, form))
    assert found.matched == 1
    assert found.calls == ["core_npu::qkv_rms_norm_rotary_cache"] and len(found.was) in (4, 5)
    assert found.before.written.keys() == found.after.written.keys() and len(found.after.written) == 2
    found.check()


def test_slots_of_every_token_are_written_and_no_other() -> None:
    form = Form()
    given = inputs(F16, form)
    found = rewritten(lambda **given: form(**given), PASS, **given)
    (name,) = (name for name in found.after.written if "value_cache" in name)
    cache, old = found.after.written[name], given["value_cache"]
    values = given["qkv"][:, -form.kv_heads * 128 :]
    for token, slot in enumerate(given["slots"].tolist()):
        assert torch.equal(cache[slot // BLOCK, :, slot % BLOCK].flatten(), values[token])
    untouched = torch.ones(BLOCKS * BLOCK, dtype=torch.bool)
    untouched[given["slots"]] = False
    by_slot = [each.transpose(1, 2).reshape(BLOCKS * BLOCK, -1)[untouched] for each in (cache, old)]
    assert torch.equal(*by_slot)


REFUSED: dict[str, tuple[Form, str]] = {
    "heads of 64": (Form(size=64), "heads have 64 features, the kernel takes 128"),
    "two eps": (Form(eps=(1e-5, 1e-6)), "the norms have eps 1e-05 and 1e-06"),
    "interleaved": (Form(mode="interleave"), "pairs are interleave"),
    "two tables": (Form(turn="other tables"), "turned by different tables"),
    "an ND cache": (Form(cache_mode="Norm"), "the cache lies in mode Norm"),
    "key and value swapped": (Form(swapped=True), "has its parts in another order"),
    "key read too": (Form(also="key"), "reads"),
    "norm read too": (Form(also="normed"), "reads"),
    "turned norm read too": (Form(also="normed", turn="rows"), "reads"),
    "key turned by one call read too": (Form(also="key", turn="once"), "reads"),
    "value read too": (Form(also="value"), "reads"),
    "cache read before": (Form(also="cache"), "uses in between what the new op writes"),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_does_not_do_stays(name: str) -> None:
    form, reason = REFUSED[name]
    found = rewritten(lambda **given: form(**given), PASS, **inputs(BF16, form))
    assert found.matched == 0 and reason in found.reasons, found.reasons
    assert tuple(found.calls) == found.was
    assert all(torch.equal(old, new) for old, new in zip(found.before.outputs, found.after.outputs, strict=True))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"slots": torch.int32}, "the kernel takes slots"), ({"block": 8}, "has blocks of 8 tokens")],
)
def test_slots_and_blocks_decide(changes: dict[str, Any], reason: str) -> None:
    form = Form()
    found = rewritten(lambda **given: form(**given), PASS, **inputs(F16, form, **changes))
    assert found.matched == 0 and reason in found.reasons


def test_shared_tables_stay() -> None:
    form = Form()
    given = inputs(F16, form)
    given |= {name: given[name][:1] for name in ("cos", "sin")}
    found = rewritten(lambda **given: form(**given), PASS, **given)
    assert found.matched == 0 and "takes one row for each token" in found.reasons


def test_the_op_alone_does_what_its_fake_says() -> None:
    from core_npu.passes.rotary.qkv_cache_op import qkv_cache_op

    form = Form()
    given = inputs(BF16, form)
    names = ("qkv", "query_weight", "key_weight", "cos", "sin", "slots", "key_cache", "value_cache")
    args = (*(given[name] for name in names), 1e-5, [-1, form.heads, 128])
    torch.library.opcheck(qkv_cache_op(), args, test_utils=("test_schema", "test_faketensor"))


def unrelated(**given: Tensor) -> tuple[Tensor, ...]:
    key = given["key_cache"].new_zeros(6, 2, 128)
    ops.npu_scatter_pa_kv_cache(key, key, given["key_cache"], given["value_cache"], given["slots"])
    return (given["qkv"] * 2,)


@pytest.mark.parametrize("function", [unrelated])
def test_another_write_of_a_cache_is_no_near_miss(function: Callable[..., Any]) -> None:
    given = inputs(F16, Form())
    found = rewritten(function, PASS, **{name: given[name] for name in ("qkv", "key_cache", "value_cache", "slots")})
    assert (found.matched, found.reasons) == (0, "")


def heads(mode: str = "half", *, both: bool = False, eps: float = 3e-4) -> Callable[..., Any]:
    def function(**given: Tensor) -> tuple[Tensor, ...]:
        query = ops.npu_rms_norm(given["query"], given["query_weight"], 3e-4)[0]
        key = ops.npu_rms_norm(given["key"], given["key_weight"], eps)[0]
        if both:
            return ops.npu_apply_rotary_pos_emb(query, key, given["cos"], given["sin"], "TND", mode)
        return ops.npu_rotary_mul(query, given["cos"], given["sin"], mode), ops.npu_rotary_mul(
            key, given["cos"], given["sin"], mode
        )

    return function


def head_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    names = ("query_weight", "key_weight", "cos", "sin")
    found = inputs(dtype, Form()) | cast({"query": draw(TOKENS, 3, 128), "key": draw(TOKENS, 2, 128, seed=5)}, dtype)
    return {name: found[name] for name in ("query", "key", *names)}


@pytest.mark.cases(3)
@pytest.mark.parametrize("both", [False, True], ids=["each", "both"])
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_norms_and_rotation_are_lifted_on_request(dtype: torch.dtype, mode: str, both: bool) -> None:
    graph, values = lifted(heads(mode, both=both), head_inputs(dtype))
    (call,) = (node for node in graph.module.graph.nodes if node.target is QK_NORM_ROTARY.overload)
    assert (call.args[6], call.kwargs["style"]) == (3e-4, "half" if mode == "half" else "interleaved")
    graph.module.recompile()
    for new, old, exact in zip(run_graph(graph.module, values[0]).outputs, *values[1:], strict=True):
        verdict = judge(new, old, exact)
        assert verdict.passed, verdict.reason
    # A device that does not take the call gets the model's own back.
    choose_implementations(graph.module, ())
    assert Counter(kernels(graph.module))["npu_rms_norm"] == 2
    graph.module.recompile()
    assert all(torch.equal(*pair) for pair in zip(run_graph(graph.module, values[0]).outputs, values[1], strict=True))


def test_what_the_rotation_of_both_writes_and_the_model_reads_is_not_lifted() -> None:
    def function(**given: Tensor) -> tuple[Tensor, ...]:
        query = ops.npu_rms_norm(given["query"], given["query_weight"], 3e-4)[0]
        key = ops.npu_rms_norm(given["key"], given["key_weight"], 3e-4)[0]
        turned = ops.npu_apply_rotary_pos_emb(query, key, given["cos"], given["sin"], "TND")
        return *(each * 2 for each in turned), query.mean(-1)

    graph = trace(function, head_inputs(F16))
    (report,) = PassManager([LIFT], strict=True, enable=[LIFT.name], implemented=IMPLEMENTED).run(graph.module)
    assert report.matched == 0 and "reads" in report.near_misses[0].reason


def test_the_rotation_of_both_writes_them_on_the_host_too() -> None:
    given = {name: value.double() for name, value in head_inputs(F16).items()}
    before = given["query"].clone()
    query, key = ops.npu_apply_rotary_pos_emb(given["query"], given["key"], given["cos"], given["sin"], "TND")
    assert torch.equal(query, given["query"]) and torch.equal(key, given["key"]) and not torch.equal(query, before)


def test_norms_of_two_eps_are_not_lifted() -> None:
    graph = trace(heads(eps=1e-5), head_inputs(F16))
    (report,) = PassManager([LIFT], strict=True, enable=[LIFT.name], implemented=IMPLEMENTED).run(graph.module)
    assert report.matched == 0 and "have different eps" in report.near_misses[0].reason


def test_a_rotation_by_a_matrix_of_the_model_s_own_is_not_lifted() -> None:
    graph = trace(heads("interleave"), head_inputs(F16))
    for node in graph.module.graph.nodes:
        if node.target in (ops.npu_rotary_mul, ops.npu_rotary_mul.default):
            # The host has no such rotation: any tensor stands for the matrix.
            node.args = (*node.args, node.args[1])
    (report,) = PassManager([LIFT], strict=True, enable=[LIFT.name], implemented=IMPLEMENTED).run(graph.module)
    assert report.matched == 0
    assert sum(len(node.args) == 5 for node in graph.module.graph.nodes) == 2


def test_nothing_is_lifted_unasked_or_for_a_device_without_the_op() -> None:
    for implemented, enable, reason in (
        (IMPLEMENTED, (), "torch_npu has no op"),
        (frozenset(), (LIFT.name,), "does not"),
    ):
        graph = trace(heads(), head_inputs(F16))
        (report,) = PassManager([LIFT], strict=True, enable=enable, implemented=implemented).run(graph.module)
        assert report.matched == 0 and reason in report.skipped


def lifted(function: Callable[..., Any], given: dict[str, Tensor]) -> tuple[Any, tuple[Any, ...]]:
    graph = trace(function, given)
    values = graph.values(given)
    before = run_graph(graph.module, values).outputs
    exact = run_graph(graph.module, values, fp64=True).outputs
    (report,) = PassManager([LIFT], strict=True, enable=[LIFT.name], implemented=IMPLEMENTED).run(graph.module)
    assert report.matched == 1
    return graph, (values, before, exact)
