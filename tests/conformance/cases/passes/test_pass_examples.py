"""core_conformance/cases/passes/examples.py: where the models come from in which a pass has to match."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, Match

from core.common.passes.declaration import Pass
from core.common.passes.pass_guards import Guards
from core.common.passes.patterns import InductorGraphPattern, InductorReplacement, Replacement
from core.common.passes.results import PassResult
from tests.conformance.cases.passes import wrong_passes as wrong
from tests.conformance.cases.passes.pass_support import KINDS, cases, elsewhere, keep, of
from tests.support import cpu


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave of the corpus what has soft caps, and one model without, which is enough to judge a pass for these."""
    keep(monkeypatch, "soft-cap", "repeats")
    elsewhere(monkeypatch)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sinc(x) * 2.5


class Sinc(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sinc(x) * 2


def sine(match: Match, x: Any) -> None:
    node = match.output_node()
    with match.graph.inserting_before(node):
        new = match.graph.call_function(torch.ops.aten.tanh.default, (x,))
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    match.erase_nodes()


def by_pattern(**fields: Any) -> Pass:
    def one_cap(bound: Any) -> str | None:
        return None if bound["down"] == bound["up"] else "two caps"

    pattern = Replacement(
        pattern=lambda x, down, up: up * torch.sinc(x / down),
        replacement=lambda x, down: down * torch.sinc(x / down),
        literals=("down", "up"),
        check=one_cap,
    )
    return Pass(name="mine", mechanism="replace_pattern", patterns=(pattern,), owner="acme", **fields)


def by_search(dtype: torch.dtype = torch.float32, **fields: Any) -> Pass:
    pattern = InductorReplacement(
        search=lambda x, weight, cap: weight * (cap * torch.sinc(x / cap)),
        replace=lambda x, weight, cap: weight * cap * torch.sinc(x / cap),
        examples=lambda: [torch.empty(5, 16, dtype=dtype), torch.empty(16, dtype=dtype)],
        scalars={"cap": 0.375},
    )
    return Pass(name="mine", mechanism="inductor", stage="aten", patterns=(pattern,), owner="acme", **fields)


def by_tree() -> Pass:
    aten = torch.ops.aten
    pattern = InductorGraphPattern(
        pattern=lambda: CallFunction(aten.tanh.default, CallFunction(aten.sinc.default, KeywordArg("x"))), handler=sine
    )
    return Pass(name="mine", mechanism="inductor", stage="aten", patterns=(pattern,), owner="acme")


@pytest.mark.slow
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "declared",
    [
        pytest.param(by_pattern(), id="replace_pattern"),
        # Below, that of one dtype stands for it.
        pytest.param(by_search(), id="inductor", marks=pytest.mark.slow),
    ],
)
def test_a_pattern_is_its_own_example(declared: Pass) -> None:
    assert of(cpu(passes=(declared,)), "mine") == {}


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_tree_of_calls_is_its_own_example_and_its_wrong_handler_is_found() -> None:
    assert set(of(cpu(passes=(by_tree(),)), "mine", "fires", "float32")) == {"float32"}


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_pattern_with_a_wrong_replacement_fails() -> None:
    (pattern,) = by_pattern().patterns
    bad = replace(by_pattern(), patterns=(replace(pattern, replacement=lambda x, down: torch.sinc(x / down)),))
    assert "error over bound" in of(cpu(passes=(bad,)), "mine", "float32")["float32"]


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_pattern_traced_for_one_dtype_owes_no_other() -> None:
    wide = replace(
        by_search(torch.bfloat16).patterns[0],
        search=lambda x, weight, cap: weight * (cap * torch.sinc(x.float() / cap)).to(torch.bfloat16),
        replace=lambda x, weight, cap: weight * (torch.sinc(x.float() / cap) * cap).to(torch.bfloat16),
    )
    device = cpu(passes=(replace(by_search(), patterns=(wide,)),))
    assert of(device, "mine", "fires", "float32", "bfloat16") == {}


def sinc_only(context: Any) -> PassResult:
    sites = [node for node in context.graph.nodes if node.target is torch.sinc]
    for node in sites:
        node.target = torch.special.sinc
    return PassResult(matched=len(sites), sites=tuple(node.name for node in sites))


def examples(*given: Any) -> Callable[[], Iterator[Any]]:
    return lambda: iter(given)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_examples_of_a_declaration_cover_what_the_corpus_lacks() -> None:
    unseen = Pass(name="mine", run=sinc_only, owner="acme")
    assert "matches nothing in" in of(cpu(passes=(unseen,)), "mine", "fires")["fires"]
    shown = replace(unseen, examples=examples((Sinc(), (torch.linspace(-3, 3, 80),))))
    assert shown.uuid() == unseen.uuid()
    assert of(cpu(passes=(shown,)), "mine", "fires", "float32", "bfloat16") == {}


@pytest.mark.usefixtures("few")
def test_every_example_owes_a_match() -> None:
    given = examples((Sinc(), (torch.ones(80),)), (nn.Tanh(), (torch.ones(80),)))
    device = cpu(passes=(Pass(name="mine", run=sinc_only, owner="acme", examples=given),))
    assert "mine example 1: it matches nothing in its own example" in of(device, "mine", "fires")["fires"]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("given", [examples(Sinc()), examples((Sinc(),)), lambda: 1 / 0])
def test_examples_that_are_none_say_so(given: Any) -> None:
    device = cpu(passes=(Pass(name="mine", run=sinc_only, owner="acme", examples=given),))
    assert "of pass 'mine' of acme" in of(device, "mine", "fires")["fires"]


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_pass_that_comes_too_late_is_told_so() -> None:
    def norm(x: Any, weight: Any, eps: Any) -> Any:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    pattern = Replacement(pattern=norm, replacement=lambda x, weight, eps: norm(x, weight, eps), literals=("eps",))
    late = Pass(name="mine", mechanism="replace_pattern", patterns=(pattern,), owner="acme")
    assert "no program will ever see it match" in of(cpu(passes=(late,)), "mine", "fires")["fires"]
    early = replace(late, before=("lift_rms_norm",))
    assert of(cpu(passes=(early,)), "mine", "fires") == {}


# --- kernels without an fp64 form


@torch.library.custom_op("conformance_test::sinc", mutates_args=())
def narrow_sinc(x: Tensor) -> Tensor:
    """Return sinc(x), as a kernel that knows no fp64."""
    if x.dtype == torch.float64:
        raise NotImplementedError("no fp64")
    return torch.sinc(x)


@narrow_sinc.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def to_kernel(context: Any) -> PassResult:
    sites = [node for node in context.graph.nodes if node.target is torch.sinc]
    for node in sites:
        node.target = torch.ops.conformance_test.sinc.default
    return PassResult(matched=len(sites), sites=tuple(node.name for node in sites))


@pytest.mark.cases(1)
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("factor", "fails"), [(1.0, False), (1.001, True)])
def test_what_follows_a_kernel_without_fp64_is_judged_by_the_trace(factor: float, fails: bool) -> None:
    def scale(context: Any) -> PassResult:
        sites = [node for node in context.graph.nodes if node.op == "call_function" and node.args[1:] == (2.5,)]
        for node in sites:
            node.args = (2.5 * factor, node.args[0])
        return PassResult(matched=len(sites), sites=tuple(node.name for node in sites))

    given = examples((Scaled(), (torch.linspace(-3, 3, 80),)))
    kernel = Pass(name="kernel", run=to_kernel, owner="acme", examples=given)
    product = Pass(name="mine", run=scale, owner="acme", examples=given)
    found = of(cpu(passes=(kernel, product)), "mine", "float32")
    assert ("mine example 0 output 0: error over bound" in found.get("float32", "")) == fails == bool(found)


# --- guards


def test_a_guard_that_refuses_the_device_is_not_supported() -> None:
    guards = Guards(capabilities={"acme_core": 3})
    known = cases(cpu(passes=(wrong.softcaps(wrong.right, guards=guards),)))
    reasons = {known[f"passes/softcap/{kind}"].not_supported for kind in KINDS}
    assert reasons == {"its guard: the device's capability 'acme_core' is None, needed is 3"}


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_guard_on_dtypes_leaves_out_the_others_and_none_of_its_own() -> None:
    guards = Guards(dtypes=frozenset({torch.bfloat16}))
    device = cpu(passes=(wrong.softcaps(wrong.right, guards=guards),))
    known = cases(device)
    left_out = {kind for kind in KINDS if known[f"passes/softcap/{kind}"].not_supported}
    assert left_out == {"float32", "float16"}
    assert of(device, "softcap", "fires", "bfloat16", "near-miss") == {}
    greedy = cpu(passes=(wrong.softcaps(wrong.greedy, guards=guards),))
    assert "error over bound" in of(greedy, "softcap", "near-miss")["near-miss"]


@pytest.mark.usefixtures("few")
def test_a_pass_for_few_tokens_is_told_as_many() -> None:
    device = cpu(passes=(wrong.softcaps(wrong.right, guards=Guards(tokens=(1, 1))),))
    assert of(device, "softcap", "fires", "float32") == {}


def test_a_dtype_that_the_device_lacks_is_not_run() -> None:
    narrow = replace(cpu().capabilities, dtypes=frozenset({torch.bfloat16}))
    device = cpu()
    device = replace(device, parts=replace(device.parts, capabilities=narrow))
    known = cases(device)
    assert "does not compute in float32" in known["passes/pipeline/soft-cap/float32"].not_supported
    assert "does not compute in float32" in known["passes/lift_rms_norm/float32"].not_supported
    assert not known["passes/lift_rms_norm/bfloat16"].not_supported
