"""core/common/passes/collective/norm.py: all-reduces and norms of their sums; numbers are in tests/common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.passes.collective.norm import FUSE_ALL_REDUCE_NORM
from core.common.passes.standard import COMMON_PASSES
from core.compilation.implementations import choose_implementations
from tests.common.passes.collective import layers
from tests.common.passes.collective.layers import Sharded, names, reasons, rewritten, traced
from tests.common.processes import drawn, pretended

NAME = "fuse_all_reduce_norm"
X = drawn(1, 6, layers.SIZE, seed=3)


@pytest.fixture(autouse=True)
def group() -> Iterator[str]:
    with pretended() as name:
        yield name


class Ending(Sharded):
    """Layers whose last norm goes on as the test says."""

    def __init__(self, last: Callable[[Tensor], Any], **options: Any) -> None:
        super().__init__(**options)
        self.ending = last

    def last(self, x: Tensor) -> Any:
        return self.ending(x)


class PostNorm(Sharded):
    """Layers that normalise a sum before they add it."""

    def forward(self, x: Tensor) -> Tensor:
        for index in range(len(self.ups)):
            x = x + self.norms[index](self.reduce(self.layer(index, x)))
        return x


@pytest.mark.cases(1)
@pytest.mark.parametrize("reduce", [layers.in_place, layers.functional, layers.canonical], ids=lambda f: f.__name__)
def test_every_sum_goes_with_the_add_and_the_norm_after_it(reduce: Any, group: str) -> None:
    graph = traced(Sharded(3, reduce=reduce), X)
    reports = rewritten(graph)
    assert (reports[NAME].matched, reports[NAME].near_misses) == (3, ())
    assert reports["lift_collectives"].matched == (0 if reduce is layers.canonical else 3)
    assert names(graph) == ["rms_norm", *["all_reduce_add_rms_norm"] * 3]
    (first, *_) = [node for node in graph.module.graph.nodes if "all_reduce_add" in str(node.target)]
    assert first.args[3] == 1e-5 and first.kwargs["group"] == ("" if reduce is layers.canonical else group)


def test_norms_before_the_add_have_an_op_of_their_own() -> None:
    graph = traced(PostNorm(2), X)
    assert rewritten(graph)[NAME].matched == 2 and names(graph) == ["all_reduce_rms_norm"] * 2


@pytest.mark.cases(2)
@pytest.mark.parametrize("disable", [(), ("fuse_add_rms_norm_quantize",)], ids=["joined before", "two ops"])
@pytest.mark.parametrize(
    ("codes", "op"),
    [
        (layers.codes_fp8, "all_reduce_add_rms_norm_quantize"),
        (layers.codes_fp4, "all_reduce_add_rms_norm_quantize_fp4"),
    ],
    ids=["fp8", "fp4"],
)
def test_codes_of_the_norm_go_with_it(codes: Any, op: str, disable: tuple[str, ...]) -> None:
    graph = traced(Ending(codes), X)
    assert rewritten(graph, disable=disable)[NAME].matched == 2
    assert names(graph) == ["rms_norm", "all_reduce_add_rms_norm", op]


@pytest.mark.cases(1)
@pytest.mark.parametrize("codes", [layers.codes_fp8, layers.codes_fp4], ids=["fp8", "fp4"])
def test_codes_of_a_norm_that_others_read_stay_apart(codes: Any) -> None:
    graph = traced(Ending(lambda x: (*codes(x), x.sin())), X)
    assert rewritten(graph)[NAME].matched == 2
    assert names(graph)[1:3] == ["all_reduce_add_rms_norm"] * 2 and names(graph)[3].startswith("quantize")


@pytest.mark.slow
def test_without_an_implementation_the_model_is_what_it_was() -> None:
    graph, plain = traced(Ending(layers.codes_fp8), X), traced(Ending(layers.codes_fp8), X)
    rewritten(graph)
    choices = choose_implementations(graph.module, ())
    assert {choice.implementation for choice in choices} == {"original", "reference"}
    assert [choice.op for choice in choices if choice.implementation == "reference"] == ["core::quantize"]
    targets = [[str(n.target) for n in g.module.graph.nodes if "c10d" in str(n.target)] for g in (graph, plain)]
    assert targets[0] == targets[1] != []


class SecondReader(Sharded):
    def forward(self, x: Tensor) -> Any:
        total = self.reduce(self.layer(0, x))
        return self.norms[0](x + total), total.cos()


class WriteBetween(Sharded):
    def forward(self, x: Tensor) -> Any:
        product = self.layer(0, x)
        total = layers.canonical(product)
        product.add_(1)
        return self.norms[0](x + total), product


class Itself(Sharded):
    def forward(self, x: Tensor) -> Any:
        total = layers.canonical(self.layer(0, x))
        return self.norms[0](total + total)


class NoNorm(Sharded):
    def forward(self, x: Tensor) -> Any:
        return self.reduce(self.layer(0, x)).cos()


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (SecondReader, "is read by cos, add_rms_norm"),
        (WriteBetween, "written in between by add_"),
        (Itself, "adds total to itself"),
        (NoNorm, "is no norm of it"),
    ],
)
def test_what_is_no_site_stays_with_the_reason(model: type[Sharded], reason: str) -> None:
    graph = traced(model(1), X)
    report = rewritten(graph)[NAME]
    assert report.matched == 0 and reason in reasons(report), reasons(report)
    assert "all_reduce" in names(graph)


def limited(**params: int) -> list[Any]:
    return [replace(each, params=params) if each.name == NAME else each for each in COMMON_PASSES]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"most_bytes_of_2": 6 * 32 * 4}, ""),
        ({"most_bytes_of_2": 6 * 32 * 4 - 1}, "has 768 bytes, the pass is for 767 at most where 2 processes reduce"),
        ({"most_bytes_of_4": 1 << 20, "most_bytes_of_8": 1}, "has 2 processes, the pass is for 4 or 8"),
    ],
    ids=["as many bytes as allowed", "one byte too many", "other groups"],
)
def test_limits_are_parameters(params: dict[str, int], reason: str) -> None:
    graph = traced(Sharded(1), X)
    report = rewritten(graph, limited(**params))[NAME]
    assert report.matched == (not reason) and reason in reasons(report)
    assert report.uuid != FUSE_ALL_REDUCE_NORM.uuid()


@pytest.mark.slow
def test_bytes_of_open_sizes_are_those_of_the_largest_bucket() -> None:
    for sizes, matched, reason in (((4, 8), 1, ""), ((4, 16), 0, "has 2048 bytes"), ((), 0, "asks about a symbolic")):
        graph = traced(Sharded(1), X, dynamic={"x": [1]})
        report = rewritten(graph, limited(most_bytes_of_2=8 * 32 * 4), sizes=sizes)[NAME]
        assert report.matched == matched and reason in reasons(report)


def test_a_group_of_one_process_is_left_alone() -> None:
    from torch import distributed

    own = distributed.new_group([0]).group_name

    class Alone(Sharded):
        def forward(self, x: Tensor) -> Any:
            return self.norms[0](x + torch.ops.core.all_reduce(self.layer(0, x), own))

    report = rewritten(traced(Alone(1), X))[NAME]
    assert report.matched == 0 and reasons(report) == f"the group {own!r} has one process"
