"""core/compilation/capture/pieces.py: a graph cut at marked ops does what it did whole, and equal pieces are lowered
once.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from core.common.inductor import inductor
from core.common.lowering import FlatCallable, LoweringRequest, inline
from core.common.numerics import Fp64Mode, judge
from core.compilation.capture.breaks import breaking
from core.compilation.capture.pieces import PieceLowering, lower_pieces, mark_breaks


@torch.library.custom_op("core_test::mix", mutates_args=())
def mix(x: Tensor) -> Tensor:
    """Mix rows, as attention does: a break point."""
    return x.flip(0) + x


@mix.register_fake
def _mix_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("core_test::store", mutates_args=("cache",))
def store(cache: Tensor, x: Tensor) -> None:
    """Write into a cache and return nothing."""
    cache.add_(x.sum())


@store.register_fake
def _store_fake(cache: Tensor, x: Tensor) -> None:
    return None


@torch.library.custom_op("core_test::both", mutates_args=())
def both(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two results."""
    return x + 1, x * 2


@both.register_fake
def _both_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


OPS = ("core_test::mix", "core_test::store", "core_test::both")


class Names:
    """A breaker that notes names and calls on."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(name)
        return fn(*args, **kwargs)


def graph_of(fn: Callable[..., Any], *values: Any) -> fx.GraphModule:
    return make_fx(fn)(*values)


def cut(
    fn: Callable[..., Any], *values: Any, lowering: Callable[[LoweringRequest], FlatCallable] = inline
) -> tuple[FlatCallable, PieceLowering]:
    graph, pieces = graph_of(fn, *values), PieceLowering(lowering)
    mark_breaks(graph, OPS)
    return lower_pieces(graph, values, pieces), pieces


def breaks_of(call: Callable[..., Any], *values: Any) -> list[str]:
    names = Names()
    with breaking(names):
        call(*values)
    return names.names


def test_marks_are_set_by_qualified_name_once() -> None:
    graph = graph_of(lambda x: (torch.ops.core_test.mix(torch.ops.core_test.mix(x)).sin(),), torch.ones(2))
    assert mark_breaks(graph, ["aten::cos"]) == 0
    assert mark_breaks(graph, ["core_test::mix", "core_test::mix"]) == 2
    assert mark_breaks(graph, ["core_test::mix", "aten::sin"]) == 3


CASES: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "none": (lambda x: (x * 2, x + 1), 0),
    "middle": (lambda x: (torch.ops.core_test.mix(x * 2) + x,), 1),
    "first_and_last": (lambda x: (torch.ops.core_test.mix(x),), 1),
    "two_in_a_row": (lambda x: (torch.ops.core_test.mix(torch.ops.core_test.mix(x)) * 2,), 2),
    "two_results": (lambda x: (lambda pair: (pair[0] * pair[1], pair[1]))(torch.ops.core_test.both(x * 2)), 1),
    "input_is_an_output": (lambda x: (torch.ops.core_test.mix(x), x, x.view(-1)), 1),
    "result_not_used": (lambda x: (torch.ops.core_test.mix(x), x * 3)[1:], 1),
    "size": (lambda x: (torch.ops.core_test.mix(x.reshape(x.shape[0] * 2, -1)) * x.shape[0],), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cut_graph_equals_the_whole(case: str) -> None:
    fn, num_breaks = CASES[case]
    call, _ = cut(fn, torch.ones(4, 2))
    for seed in range(3):
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(seed))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(call(x), fn(x), strict=True))
    names = breaks_of(call, x)
    assert len(names) == num_breaks and set(names) <= set(OPS)


def test_in_place_writes_between_breaks_keep_their_order_and_number() -> None:
    def fn(x: Tensor, cache: Tensor, count: Tensor) -> tuple[Tensor]:
        count.add_(1)
        torch.ops.core_test.store(cache, x)
        count.mul_(3)  # a piece that returns nothing
        torch.ops.core_test.store(cache, x * 2)
        return (x + cache,)

    x = torch.ones(2)
    call, _ = cut(fn, x, torch.zeros(2), torch.zeros(2))
    ours, theirs = (torch.zeros(2), torch.zeros(2)), (torch.zeros(2), torch.zeros(2))
    for _ in range(3):
        assert torch.equal(call(x, *ours)[0], fn(x, *theirs)[0])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert breaks_of(call, x, *ours) == ["core_test::store"] * 2


def test_only_tensors_and_sizes_cross_from_piece_to_piece() -> None:
    """A lowering for fixed sizes makes constants of all but tensors: of results in a tuple too."""
    seen: list[Any] = []

    def lowering(request: LoweringRequest) -> FlatCallable:
        seen.extend(request.example_inputs)
        return inline(request)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        first, second = torch.ops.core_test.both(x * 2)
        third, _ = torch.ops.core_test.both(first)  # adjacent, and its second result is not used
        fourth = torch.ops.core_test.both(third)[1]
        return torch.ops.core_test.mix(fourth) + second, second

    graph, pieces, x = graph_of(fn, torch.ones(4, 2)), PieceLowering(lowering), torch.randn(4, 2)
    # A pass may leave a result to be taken where it is used.
    (late,) = [node for node in graph.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    for node in [node for node in graph.graph.nodes if node.target is operator.getitem and late in node.users]:
        late.prepend(node)
    assert mark_breaks(graph, OPS) == 4
    call = lower_pieces(graph, (torch.ones(4, 2),), pieces)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(call(x), fn(x), strict=True))
    assert breaks_of(call, x) == ["core_test::both"] * 3 + ["core_test::mix"]
    assert seen and all(isinstance(value, (Tensor, int)) for value in seen)


class Layers(nn.Module):
    """Layers of one code and different weights, a break point in each."""

    def __init__(self, count: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(16, 16, dtype=dtype) for _ in range(count))

    def weights(self) -> list[Tensor]:
        return [tensor.detach() for layer in self.layers for tensor in (layer.weight, layer.bias)]

    @staticmethod
    def run(x: Tensor, *weights: Tensor) -> tuple[Tensor]:
        for weight, bias in zip(weights[::2], weights[1::2], strict=True):
            x = torch.ops.core_test.mix(torch.nn.functional.linear(x, weight, bias)).relu() + x
        return (x,)


def test_layers_share_the_code_of_their_pieces() -> None:
    model = Layers(6)
    call, pieces = cut(Layers.run, torch.ones(4, 16), *model.weights())
    # The first piece, the one of every layer between, the last one.
    assert pieces.num_lowered == 3
    x = torch.randn(4, 16)
    assert torch.equal(call(x, *model.weights())[0], Layers.run(x, *model.weights())[0])


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (torch.ops.core_test.mix(x * 3),),
        lambda x: (torch.ops.core_test.mix(x + 2),),
        lambda x: (torch.ops.core_test.mix(2 - x),),
    ],
)
def test_pieces_that_differ_are_not_shared(other: Callable[[Tensor], Any]) -> None:
    pieces, x = PieceLowering(inline), torch.randn(4, 2)
    for fn in (lambda x: (torch.ops.core_test.mix(x * 2),), other):
        graph = graph_of(fn, x)
        mark_breaks(graph, OPS)
        assert torch.equal(lower_pieces(graph, (x,), pieces)(x)[0], fn(x)[0])
    assert pieces.num_lowered == 2


def test_pieces_for_other_shapes_dtypes_and_strides_are_lowered_anew() -> None:
    seen: list[Any] = []

    def lowering(request: LoweringRequest) -> FlatCallable:
        seen.append(tuple((t.dtype, tuple(t.shape), t.stride()) for t in request.example_inputs))
        return inline(request)

    pieces = PieceLowering(lowering)
    for x in (torch.ones(4, 2), torch.ones(8, 2), torch.ones(4, 2).double(), torch.ones(2, 4).t(), torch.ones(4, 2)):
        graph = graph_of(lambda x: (torch.ops.core_test.mix(x * 2),), x)
        mark_breaks(graph, OPS)
        lower_pieces(graph, (x,), pieces)
    assert len(seen) == len(set(seen)) == pieces.num_lowered == 4


def test_a_piece_whose_inputs_share_memory_is_lowered_anew() -> None:
    """What is compiled for inputs apart may read one of them after it has written the other."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor]:
        x.add_(1)
        return (torch.ops.core_test.mix(x + y),)

    pieces, graph = PieceLowering(inline), graph_of(fn, torch.ones(8), torch.ones(8))
    mark_breaks(graph, OPS)
    both = torch.ones(16)
    for values in ((torch.ones(8), torch.ones(8)), (both[:8], both[8:]), (both[:8], both[:8]), (both[:8], both[4:12])):
        lower_pieces(fx.GraphModule(graph, copy.deepcopy(graph.graph)), values, pieces)
    assert pieces.num_lowered == 3


def test_constants_of_equal_names_are_not_mixed_up() -> None:
    pieces, x = PieceLowering(inline), torch.ones(4)
    for value in (2.0, 5.0):
        graph = graph_of(lambda x: (torch.ops.core_test.mix(x * 1.0) + 1,), x)
        graph.register_buffer("k", torch.full((4,), value))
        (node,) = [n for n in graph.graph.nodes if n.op == "output"]
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr("k")
            node.args = ((graph.graph.call_function(torch.mul, (node.args[0][0], constant)),),)
        graph.recompile()
        mark_breaks(graph, OPS)
        assert lower_pieces(graph, (x,), pieces)(x)[0].tolist() == [3 * value] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inline_pieces_equal_the_graph_in_every_bit(dtype: torch.dtype) -> None:
    model = Layers(3, dtype)
    x = torch.randn(8, 16, dtype=dtype)
    call, _ = cut(Layers.run, x, *model.weights())
    assert torch.equal(call(x, *model.weights())[0], Layers.run(x, *model.weights())[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_that_inductor_compiles_meet_the_criterion(dtype: torch.dtype) -> None:
    model = Layers(3, dtype)
    x = torch.randn(64, 16, dtype=dtype, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        call, pieces = cut(Layers.run, x, *model.weights(), lowering=inductor)
        (actual,), (eager,) = call(x, *model.weights()), Layers.run(x, *model.weights())
        with Fp64Mode():
            (reference,) = Layers.run(x.double(), *(weight.double() for weight in model.weights()))
    verdict = judge(actual, eager, reference)
    assert verdict.passed, verdict
    assert not judge(actual * 1.02, eager, reference).passed
    assert pieces.num_lowered == 3 and breaks_of(call, x, *model.weights()) == ["core_test::mix"] * 3
