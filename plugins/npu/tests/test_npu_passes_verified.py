"""Verification of the plugin's passes: what is right passes site by site, and a planted mistake in each is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import npu_library
import pytest
import torch
from torch import fx

from core.common.passes.declaration import Pass, PassTraits
from core.compilation.rewrite.order import PassSwitches
from core.compilation.rewriting import Rewriter, Rewritten
from core.compilation.trace.tracing import trace
from core.errors import PassError
from core.verify.planted import Mistake, with_mistake
from core_npu.passes.calls import called
from core_npu.passes.registry import PASSES
from tests.support import cpu

npu_library.install()
BY_NAME = {declared.name: declared for declared in PASSES}
# Without those that need several processes (test_npu_collectives.py).
JUDGED = [each for each in PASSES if "lift" not in each.name and each.guards.world_size[0] == 1]
# Passes whose results are codes, which differ from those they replace by a step here and there.
CODED = [declared for declared in PASSES if "quant" in declared.name]


def verified(declared: Pass, *, dtype: torch.dtype = torch.bfloat16) -> list[Rewritten]:
    assert declared.examples is not None
    found = []
    for module, args in declared.examples():
        values = [value.to(dtype) if value.is_floating_point() else value for value in args]
        names = module.forward.__code__.co_varnames[1:]
        inputs = dict(zip(names, values, strict=False))
        graph = trace(module.eval().to(dtype), inputs)
        switches = PassSwitches(only=(declared.name,))
        rewriter = Rewriter(cpu(passes=(declared,)), switches, strict=True, verify="full")
        found.append(rewriter.rewrite(graph, examples=[graph.values(inputs)]))
    return found


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("declared", JUDGED, ids=lambda declared: declared.name)
def test_each_site_is_judged_and_passes(declared: Pass, dtype: torch.dtype) -> None:
    for made in verified(declared, dtype=dtype):
        assert [report.matched > 0 for report in made.passes if report.name == declared.name] == [True]


@pytest.mark.cases(2)
@pytest.mark.parametrize("declared", CODED, ids=lambda declared: declared.name)
def test_codes_that_differ_by_a_rounding_pass_as_codes_alone(declared: Pass) -> None:
    with pytest.raises(PassError, match="elements differ"):
        verified(replace(declared, traits=PassTraits()))


def argument(op: str, index: int | str, change: Callable[[Any], Any]) -> Callable[[fx.Node], bool]:
    """Return a spoiler that changes one argument of an op of this name."""

    def spoil(node: fx.Node) -> bool:
        if op not in (called(node), getattr(node.target, "__name__", "").partition(".")[0]):
            return False
        if isinstance(index, int):
            node.args = (*node.args[:index], change(node.args[index]), *node.args[index + 1 :])
        else:
            node.kwargs = {**node.kwargs, index: change(node.kwargs[index])}
        return True

    return spoil


def swapped(op: str, first: int, second: int) -> Callable[[fx.Node], bool]:
    """Return a spoiler that exchanges two arguments of an op of this name."""

    def spoil(node: fx.Node) -> bool:
        if op not in (called(node), getattr(node.target, "__name__", "").partition(".")[0]):
            return False
        args = list(node.args)
        args[first], args[second] = args[second], args[first]
        node.args = tuple(args)
        return True

    return spoil


# A factor of whole rows leaves codes by token as they are: there the mistake has to show in their scales.
MISTAKES = {
    "fuse_npu_add_rms_norm": argument("npu_add_rms_norm", 3, lambda eps: eps + 0.05),
    "fuse_npu_add_rms_norm_cast": argument("npu_add_rms_norm_cast", 3, lambda eps: eps + 0.05),
    "fuse_npu_add_rms_norm_quant": argument("npu_add_rms_norm_quant", "epsilon", lambda eps: eps + 0.05),
    "fuse_npu_add_rms_norm_dynamic_quant": argument("npu_add_rms_norm_dynamic_quant", "epsilon", lambda eps: eps + 0.5),
    "fuse_npu_rms_norm_quant": argument("npu_rms_norm_quant", 5, lambda eps: eps + 0.05),
    "fuse_npu_swiglu_dynamic_quant": argument("npu_dequant_swiglu_quant", "activate_left", lambda left: not left),
    "fuse_npu_multiply_add": argument("add", "alpha", lambda alpha: alpha * 1.05),
    "fuse_npu_qkv_rms_norm_rope_cache": swapped("qkv_rms_norm_rotary_cache", 1, 2),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str) -> None:
    wrong = Mistake(name="argument", of=name, what="another argument", make=MISTAKES[name])
    with pytest.raises(PassError, match=r"error over bound|differ|codes are"):
        verified(replace(with_mistake(BY_NAME[name], wrong), name=name))


def test_a_key_and_value_in_each_others_cache_are_found() -> None:
    name = "fuse_npu_qkv_rms_norm_rope_cache"
    wrong = Mistake(name="caches", of=name, what="caches exchanged", make=swapped("qkv_rms_norm_rotary_cache", 6, 7))
    with pytest.raises(PassError, match="error over bound"):
        verified(replace(with_mistake(BY_NAME[name], wrong), name=name))
