"""core/verify/codes.py: codes that a rounding moves pass, all other integers have to be equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from core.common.passes.context import PassContext
from core.common.passes.declaration import PassTraits
from core.common.passes.sites import Finder, Site
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.verify.codes import codes_among, judge_codes, outputs_among, quantisations
from core.verify.verify import Verification, verify
from tests.common.passes.graphs import RMS, fusion, traced_graph

_LIBRARY = torch.library.Library("codes_test", "DEF")
X = torch.randn(48, 96, generator=torch.Generator().manual_seed(4))
WEIGHT = torch.linspace(0.3, 1.7, 96)
SCALE = 0.031
EPS = 1e-5
CODES = ("codes_test::quantize", "codes_test::dynamic")

Kernel = Callable[..., Any]
_NUMBERS = itertools.count()


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def to_codes(values: Tensor) -> Tensor:
    return values.round().clamp(-128, 127).to(torch.int8)


def quantize(x: Tensor, scale: float = SCALE) -> Tensor:
    return to_codes(wide(x) / scale)


def dynamic(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = wide(x).abs().amax(-1, keepdim=True) / 127
    return to_codes(wide(x) / scale), scale


def unrounded(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return wide(weight) * wide(x) * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + eps)


def define(schema: str, kernel: Kernel, fake: Kernel) -> torch._ops.OpOverload[..., Any]:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"codes_test::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.codes_test, name).default  # type: ignore[no-any-return]  # torch.ops is untyped


def int8_like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.int8)


def two_like(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return int8_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


QUANTIZE = define("quantize(Tensor x, float scale) -> Tensor", quantize, int8_like)
DYNAMIC = define("dynamic(Tensor x) -> (Tensor, Tensor)", dynamic, two_like)
RANK = define("rank(Tensor x, float scale) -> Tensor", quantize, int8_like)
"""Computes what `quantize` does, and nobody says that these are codes: for all that is known, they are indices."""


def fused(kernel: Kernel, *, two: bool = False) -> torch._ops.OpOverload[..., Any]:
    """Return an op of x and weight, as a vendor has them."""
    schema = f"fused_{next(_NUMBERS)}(Tensor x, Tensor weight) -> {'(Tensor, Tensor)' if two else 'Tensor'}"
    return define(schema, kernel, two_like if two else int8_like)


def normed(x: Tensor) -> Tensor:
    return RMS(x, WEIGHT.to(x.dtype), EPS)  # type: ignore[no-any-return]  # an op


def static_model(x: Tensor) -> Tensor:
    return QUANTIZE(normed(x), SCALE)  # type: ignore[no-any-return]  # an op


def dynamic_model(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = DYNAMIC(normed(x))
    return codes.reshape(-1), scale


def product_model(x: Tensor) -> Tensor:
    codes = QUANTIZE(normed(x), SCALE)
    return ((codes.float() * SCALE) @ WEIGHT.diag().cumsum(0)).to(x.dtype)


def indexed_model(x: Tensor) -> Tensor:
    return RANK(normed(x), SCALE)  # type: ignore[no-any-return]  # an op


def masked_model(x: Tensor) -> Tensor:
    above: Tensor = normed(x) > 0.5
    return above.char()


def finder(of: Any, made: Any, *, outputs: bool = False) -> Finder:
    """Find the norm and what reads it, and offer to compute both by `made(x, weight)`."""

    def find(context: PassContext, node: fx.Node) -> Site | None:
        if node.target is not of and node.target != of:
            return None
        interior = [node]
        while interior[0].target is not RMS:
            interior.insert(0, interior[0].all_input_nodes[0])
        results = tuple(sorted(node.users, key=lambda each: int(str(each.args[1])))) if outputs else ()
        anchor = results[0] if outputs else node
        args = interior[0].args[:2]
        return Site(anchor=anchor, target=made, args=args, interior=tuple(interior), outputs=results)

    return find


def judged(
    model: Kernel, find: Finder, *, dtype: torch.dtype = torch.bfloat16, codes: tuple[str, ...] = CODES
) -> Verification:
    whole = traced_graph(model, X.to(dtype))
    values = list(whole.values({"x": X.to(dtype)}))
    before = Snapshot(whole.module)
    (report,) = PassManager([replace(fusion(find), traits=PassTraits(codes=codes))], strict=True).run(whole.module)
    assert report.matched == 1 and report.codes == codes
    return verify(report, before.module(), whole.module, [values])


RIGHT = fused(lambda x, weight: quantize(unrounded(x, weight)))


def moved(codes: Tensor, places: int, steps: int = 1) -> Tensor:
    """Return codes of which the first few, of those far from zero, are so many steps nearer to it."""
    flat = codes.flatten().clone()
    chosen = (flat.abs() > 2).nonzero().flatten()[:places]
    flat[chosen] -= (steps * flat[chosen].sign()).to(torch.int8)
    return flat.view(codes.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_of_values_that_were_not_rounded_pass(dtype: torch.dtype) -> None:
    found = judged(static_model, finder(QUANTIZE, RIGHT), dtype=dtype)
    assert found.passed and found.num_sites == 1 and found.worst_ratio <= 1, found.findings
    assert (found.worst_ratio > 0) == (dtype != torch.float32)


def test_without_the_declaration_codes_have_to_be_equal() -> None:
    for codes in ((), ("codes_test::dynamic",), ("codes_test::quantize.default",)):
        found = judged(static_model, finder(QUANTIZE, RIGHT), codes=codes)
        assert {finding.ratio for finding in found.findings} == {float("inf")}
        assert all("elements differ" in finding.reason for finding in found.findings)


def test_a_single_code_two_steps_off_is_found() -> None:
    off = fused(lambda x, weight: moved(quantize(unrounded(x.double(), weight.double())), 1, steps=2))
    found = judged(static_model, finder(QUANTIZE, off))
    assert found.fault is not None and found.fault.node
    assert found.fault.reason == "1 of 4608 codes are off by up to 2 steps"


MISTAKES: dict[str, Kernel] = {
    "cut off": lambda x, weight: (unrounded(x, weight) / SCALE).floor().clamp(-128, 127).to(torch.int8),
    "scale": lambda x, weight: quantize(unrounded(x, weight), SCALE * 1.01),
    "127 for 128": lambda x, weight: quantize(unrounded(x, weight), SCALE * 128 / 127),
    "eps": lambda x, weight: quantize(unrounded(x, weight, 0.05)),
    "shifted": lambda x, weight: to_codes(unrounded(x, weight) / SCALE + 0.25),
    "not saturated": lambda x, weight: (unrounded(x, weight) / SCALE).round().to(torch.int32).to(torch.int8),
    "no weight": lambda x, weight: quantize(unrounded(x, torch.ones_like(weight))),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found_though_they_move_codes_by_a_step(name: str) -> None:
    found = judged(static_model, finder(QUANTIZE, fused(MISTAKES[name])))
    assert found.fault is not None and found.fault.node and "4608 codes are" in found.fault.reason


@pytest.mark.parametrize(("places", "passes"), [(0, True), (4, True), (5, False)])
def test_where_nothing_was_rounded_few_codes_may_move(places: int, passes: bool) -> None:
    few = fused(lambda x, weight: moved(quantize(RMS(x, weight, EPS)), places))
    assert judged(static_model, finder(QUANTIZE, few), dtype=torch.float32).passed is passes


def test_codes_among_several_results_and_in_another_shape() -> None:
    def verdict(kernel: Kernel) -> Verification:
        return judged(dynamic_model, finder(DYNAMIC, fused(kernel, two=True), outputs=True))

    found = verdict(lambda x, weight: dynamic(unrounded(x, weight)))
    assert found.passed and 0 < found.worst_ratio <= 1, found.findings
    assert not verdict(lambda x, weight: dynamic(unrounded(x, weight, 0.3))).passed
    assert not verdict(lambda x, weight: (dynamic(unrounded(x, weight))[0].flip(0), dynamic(x)[1])).passed


def test_what_is_computed_of_codes_is_judged_by_codes_of_the_fp64_run() -> None:
    """Pinned to the old codes, the fp64 run would have none of the errors that the graph before has of its own."""
    found = judged(product_model, finder(QUANTIZE, RIGHT))
    assert found.passed and found.num_values == 2, found.findings
    off = fused(lambda x, weight: quantize(unrounded(x, weight), SCALE * 1.1))
    assert {finding.where for finding in judged(product_model, finder(QUANTIZE, off)).findings} >= {"output 0"}


def test_indices_have_to_be_equal() -> None:
    found = judged(indexed_model, finder(RANK, RIGHT))
    assert found.fault is not None and "elements differ" in found.fault.reason


def test_masks_have_to_be_equal() -> None:
    def one_more(x: Tensor, weight: Tensor) -> Tensor:
        mask: Tensor = (RMS(x, weight, EPS) > 0.5).to(torch.int8)
        mask[3, 5] ^= 1
        return mask

    found = judged(masked_model, finder("char", fused(one_more)))
    assert found.fault is not None and found.fault.reason == "1 of 4608 elements differ"


def test_codes_have_to_be_equal_where_there_is_no_fp64_run() -> None:
    def half_only(x: Tensor) -> Tensor:
        assert x.dtype != torch.float64, "no kernel for fp64"
        return x * 3

    def graph(end: Any) -> fx.GraphModule:
        made = fx.Graph()
        x = made.call_function(half_only, (made.placeholder("x"),))
        made.output((made.create_node("call_function", end, (x, SCALE), name="quantize"),))
        return fx.GraphModule(torch.nn.Module(), made)

    report = PassReport(
        name="acme",
        owner="acme",
        stage="torch",
        matched=1,
        expected=None,
        elapsed_ms=0.0,
        sites=(),
        near_misses=(),
        codes=CODES,
    )
    after = graph(lambda x, scale: moved(quantize(x, scale), 1))
    found = verify(report, graph(QUANTIZE), after, [[X]])
    assert "no kernel for fp64" in found.unjudged
    assert found.fault is not None and "1 of 4608 elements differ" in found.fault.reason


def test_which_nodes_have_codes() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        codes, scale = torch.ops.codes_test.dynamic(x)
        whole = codes.view(-1, 8).contiguous()
        return whole, codes[0], scale, codes + 1, codes[codes > 0], torch.ops.codes_test.rank(x, SCALE)

    module = fx.symbolic_trace(model)
    found = codes_among(module.graph, quantisations(module.graph, CODES))
    # Results of the op are told apart by their dtype.
    assert outputs_among(module, found) == {0, 1, 2}
    assert not quantisations(module.graph, ("dynamic", "codes_test::dynamic.default"))


def test_the_bound_is_that_of_the_old_codes() -> None:
    exact = torch.arange(-64, 64, dtype=torch.int8).repeat(8)
    old = moved(exact, 40)
    for places, passes in ((40, True), (84, True), (85, False)):
        reason, ratio = judge_codes(moved(exact, places), old, exact)
        assert (not reason) is passes and ratio == places / 84
    assert "2 steps" in judge_codes(moved(exact, 1, steps=2), old, exact)[0]
    assert judge_codes(moved(exact, 1, steps=2), moved(exact, 40, steps=2), exact)[0] == ""
    # Few codes: one in 64 places, and none in fewer.
    assert judge_codes(moved(exact[:64], 1), exact[:64], exact[:64]) == ("", 1.0)
    assert judge_codes(moved(exact[:63], 1), exact[:63], exact[:63])[1] == float("inf")


def test_old_codes_that_are_far_off_are_no_yardstick() -> None:
    exact = torch.tensor([0, 1, -1, 1], dtype=torch.int8).repeat(64)
    reason, ratio = judge_codes(exact.sign() * 0, -exact.sign() * 0 + exact.roll(2).abs(), exact)
    assert "no yardstick" in reason and ratio == float("inf")
