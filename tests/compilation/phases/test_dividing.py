"""core/compilation/phases/dividing.py: buckets of one trace that passes rewrite differently get graphs of their own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from core import InputSpec, Program
from core.common.passes.context import PassContext
from core.common.passes.declaration import Pass, PassTraits
from core.common.passes.results import PassResult
from core.errors import PassError
from tests.support import compile_with, cpu

CALLS = [torch.arange(2.0 * rows).view(rows, 2) for rows in (1, 3, 8, 6)]


def model(x: Tensor) -> Tensor:
    return (x + 1) * 2


def rows_of(context: PassContext) -> list[int]:
    return [next(iter(sizes.values())) for sizes in context.sizes]


def is_large(context: PassContext) -> list[bool]:
    return [rows >= 5 for rows in rows_of(context)]


def for_large(context: PassContext) -> PassResult:
    """Replace `x + 1` by `x - (-1)`, if the graph serves at least 5 rows alone."""
    if not all(is_large(context)):
        return PassResult(matched=0)
    (node,) = (n for n in context.graph.nodes if n.target is operator.add)
    node.target, node.args = operator.sub, (node.args[0], -1)
    return PassResult(matched=1, sites=("",))


def declared(**traits: Any) -> Pass:
    return Pass(name="large", run=for_large, owner="wave", traits=PassTraits(**traits))


def compiled(*passes: Pass, buckets: Sequence[int] = (2, 4, 6, 8), **options: Any) -> Program:
    inputs = {"x": InputSpec(("n", 2), torch.float32)}
    own = {"inputs": inputs, "buckets": list(buckets), "lowering": "inline", "strict": True}
    return compile_with(model, cpu(passes=passes), **own, **options)


def served(program: Program) -> list[tuple[list[int], int]]:
    """Return the buckets of each graph, and the matches of the pass in it."""
    return [
        ([key.dims[0] for key in trace.buckets], next(each.matched for each in trace.passes if each.name == "large"))
        for trace in program.report().traces
    ]


def test_buckets_get_the_graph_that_is_rewritten_for_them() -> None:
    with compiled(declared(tells_apart=is_large)) as program:
        assert served(program) == [([8, 6], 1), ([4, 2], 0)]
        first, second = program.report().traces
        assert (first.reason, second.reason) == ("", "passes rewrite other buckets of the trace differently")
        assert first.trace_s > 0 and second.trace_s == 0  # it was traced once
        for x in CALLS:
            torch.testing.assert_close(program(x=x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("traits", [{}, {"tells_apart": lambda context: [0] * len(context.sizes)}])
def test_without_a_difference_one_graph_serves_all(traits: dict[str, Any]) -> None:
    with compiled(declared(**traits)) as program:
        assert served(program) == [([8, 6, 4, 2], 0)]


def test_a_pass_that_does_not_run_is_not_asked() -> None:
    def fail(context: PassContext) -> list[bool]:
        raise AssertionError("asked")

    with compiled(declared(tells_apart=fail, on_request="it is slow")) as program:
        assert [buckets for buckets, _ in served(program)] == [[8, 6, 4, 2]]


def test_several_passes_divide_by_all_that_they_say() -> None:
    halves = declared(tells_apart=is_large)
    odd = Pass(
        name="by four",
        run=lambda context: PassResult(matched=0),
        traits=PassTraits(tells_apart=lambda context: [rows % 4 == 0 for rows in rows_of(context)]),
    )
    with compiled(halves, odd) as program:
        assert served(program) == [([8], 1), ([6], 1), ([4], 0), ([2], 0)]
        for x in CALLS:
            torch.testing.assert_close(program(x=x), model(x), rtol=0, atol=0)


@pytest.mark.usefixtures("cache_folder")
def test_all_graphs_come_back_from_the_cache() -> None:
    for number in range(2):
        with compiled(declared(tells_apart=is_large), cache=True) as program:
            assert [buckets for buckets, _ in served(program)] == [[8, 6], [4, 2]]
            assert [trace.cached for trace in program.report().traces] == [bool(number)] * 2
            for x in CALLS:
                torch.testing.assert_close(program(x=x), model(x), rtol=0, atol=0)


def test_a_pass_must_answer_for_each_bucket() -> None:
    with pytest.raises(PassError, match="'large' of wave"):
        compiled(declared(tells_apart=lambda context: [True]))
