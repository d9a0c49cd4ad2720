"""core/common/passes/rotary: every spelling of rotary embedding becomes one op, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from core.common.numerics import judge
from core.common.ops.rotary.rotation import ROTARY, ROTARY_SINGLE
from core.common.passes.results import NearMiss
from core.common.passes.rotary.lift import LIFT_ROTARY
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from tests.marks import slow_except

F32, BF16 = torch.float32, torch.bfloat16
SIZE = 8
Turn = Callable[[Tensor, Tensor, Tensor], Any]


def inputs_of(dtype: torch.dtype, *, tables: torch.dtype | None = None, width: int = SIZE) -> dict[str, Tensor]:
    """Return query (2, 4, 5, 8), key (2, 2, 5, 8), strided as projections leave them, cos and sin (2, 5, width)."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    angles = torch.arange(2)[:, None, None] * 7.0 + torch.arange(5.0)[:, None] + torch.linspace(0.1, 1.4, width)
    kind = tables or dtype
    heads = {"query": draw(2, 5, 4, SIZE).transpose(1, 2), "key": draw(2, 5, 2, SIZE).transpose(1, 2)}
    return {**heads, "cos": angles.cos().to(kind), "sin": angles.sin().to(kind)}


def half(x: Tensor) -> Tensor:
    middle = x.shape[-1] // 2
    return torch.cat((-x[..., middle:], x[..., :middle]), dim=-1)


def every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def in_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def by_halves_of_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (a, b), n = x.split(SIZE // 2, -1), SIZE // 2
    return torch.cat((a * cos[..., :n] - b * sin[..., :n], b * cos[..., n:] + a * sin[..., n:]), -1)


def in_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([cos * a - sin * b, sin * a + cos * b], dim=-1).flatten(-2)


def even_then_odd(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def laid_out_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.view(*x.shape[:-1], SIZE // 2, 2).transpose(-1, -2).reshape(x.shape)
    return x * cos + half(x) * sin


def partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    return torch.cat((turned * cos + half(turned) * sin, rest), dim=-1)


def wide(turn: Turn) -> Turn:
    return lambda x, cos, sin: turn(x.float(), cos, sin).to(x.dtype)


def cast_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos + half(x) * sin).to(x.dtype)


def repeated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (table.repeat_interleave(2, dim=-1) for table in (cos, sin))
    return (x * cos) + (every_two(x) * sin)


def by_complex(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    table = torch.complex(cos.float(), sin.float())

    def turn(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table[:, None, :, :]).flatten(3).type_as(x)

    return turn(query), turn(key)


# Per spelling: how one tensor is turned by tables with a head dimension, their width, and what must be read off.
SPELLINGS: dict[str, tuple[Turn, int, dict[str, Any]]] = {
    "rotate half": (lambda x, c, s: x * c + half(x) * s, SIZE, {"style": "half"}),
    "operands turned round": (lambda x, c, s: s * half(x) + c * x, SIZE, {"style": "half"}),
    "halves": (in_halves, SIZE // 2, {"style": "half"}),
    "halves of the tables": (by_halves_of_tables, SIZE, {"style": "half"}),
    "interleaved": (lambda x, c, s: x * c + every_two(x) * s, SIZE, {"style": "interleaved"}),
    "repeated tables": (repeated, SIZE // 2, {"style": "interleaved"}),
    "pairs": (in_pairs, SIZE // 2, {"style": "interleaved"}),
    "even then odd": (even_then_odd, SIZE // 2, {"style": "deinterleave"}),
    "laid out first": (laid_out_first, SIZE, {"style": "deinterleave"}),
    "partial": (partly, 6, {"style": "half", "rotary_dim": 6}),
    "partial of all": (partly, SIZE, {"style": "half", "rotary_dim": 0}),
    "partial pairs": (
        lambda x, c, s: torch.cat((in_pairs(x[..., :4], c, s), x[..., 4:]), -1),
        2,
        {"style": "interleaved", "rotary_dim": 4},
    ),
    "wide": (wide(lambda x, c, s: x * c + every_two(x) * s), SIZE, {"style": "interleaved"}),
    "wide halves": (wide(in_halves), SIZE // 2, {"style": "half"}),
    "cast back": (cast_back, SIZE, {"style": "half"}),
}


def reports(graph: TracedGraph) -> PassReport:
    (report,) = PassManager([LIFT_ROTARY], strict=True).run(graph.module)
    return report


def ops(graph: TracedGraph, target: object = ROTARY.overload) -> list[Any]:
    return [node for node in graph.module.graph.nodes if node.target is target]


def run(graph: TracedGraph, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(graph.module(*graph.values(dict(inputs))))


def both(turn: Turn) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a model that turns query and key by the same tables, their head dimension put in once."""

    def model(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return turn(query, cos, sin), turn(key, cos, sin)

    return model


def lifted(model: Callable[..., Any], inputs: dict[str, Tensor], dynamic: Any = None) -> tuple[TracedGraph, PassReport]:
    """Lift a model, and check that no bit of its results changes, neither by the op nor by what it is restored to."""
    graph = trace(lambda **given: model(**given), inputs, dynamic=dynamic)
    control = run(graph, inputs)
    report = reports(graph)
    assert all(map(torch.equal, run(graph, inputs), control))
    recorded = [value.meta["example_value"].stride() for value in graph.module.graph.output_node().args[0]]
    assert dynamic or recorded == [value.stride() for value in run(graph, inputs)]
    return graph, report


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_lifted_and_no_bit_changes(spelling: str, dtype: torch.dtype) -> None:
    turn, width, expected = SPELLINGS[spelling]
    inputs = inputs_of(dtype, width=width)
    graph, report = lifted(both(turn), inputs)
    (op,) = ops(graph)
    assert report.matched == 1 and not report.near_misses
    assert {name: op.kwargs[name] for name in expected} == expected
    assert op.kwargs["compute_dtype"] == (F32 if "wide" in spelling and dtype is BF16 else None)
    assert [tuple(x.meta["example_value"].shape) for x in op.args[:2]] == [(2, 4, 5, SIZE), (2, 2, 5, SIZE)]
    # Nothing of the rotation is left beside the op.
    kinds = {getattr(node.target, "__name__", node.target) for node in graph.module.graph.nodes}
    assert not kinds & {"cat", "stack", "neg", "mul", "add", "sub", "chunk", "split"}
    control = run(graph, inputs)
    (choice,) = choose_implementations(graph.module, ())
    assert choice.implementation == "original"
    assert all(map(torch.equal, run(graph, inputs), control))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("spelling", "dtype"),
    slow_except(
        [(spelling, dtype) for spelling in ("rotate half", "halves", "partial", "pairs") for dtype in (F32, BF16)],
        ("rotate half", F32),
        ("partial", BF16),
    ),
    ids=str,
)
def test_symbolic_token_counts_are_no_obstacle(spelling: str, dtype: torch.dtype) -> None:
    turn, width, expected = SPELLINGS[spelling]
    inputs = inputs_of(dtype, width=width)
    dims = {"query": [2], "key": [2], "cos": [1], "sin": [1]}
    graph, report = lifted(both(turn), inputs, dynamic=dims)
    assert report.matched == 1
    assert ops(graph)[0].kwargs["style"] == expected["style"]


def test_wide_tables_give_the_promoted_dtype_and_an_exact_cast_back() -> None:
    graph, _ = lifted(both(cast_back), inputs_of(BF16, tables=F32))
    (op,) = ops(graph)
    assert op.kwargs["compute_dtype"] is None and "out_dtype" not in op.kwargs


@pytest.mark.parametrize("turn", [SPELLINGS["rotate half"][0], partly], ids=["whole", "partial"])
def test_a_result_that_stays_wide_is_named(turn: Turn) -> None:
    graph, report = lifted(both(turn), inputs_of(BF16, tables=F32, width=6 if turn is partly else SIZE))
    assert report.matched == 1 and ops(graph)[0].kwargs["out_dtype"] == F32


def test_a_cast_that_only_follows_is_left_outside() -> None:
    graph, _ = lifted(both(lambda x, c, s: (x * c + half(x) * s).float()), inputs_of(BF16))
    (op,) = ops(graph)
    assert "out_dtype" not in op.kwargs


def test_a_cast_in_front_is_left_outside() -> None:
    def model(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query, key = (query * 3).to(BF16), (key * 3).type_as(cos)
        return both(SPELLINGS["rotate half"][0])(query, key, cos, sin)

    graph, _ = lifted(model, inputs_of(F32, tables=BF16))
    (op,) = ops(graph)
    assert op.kwargs["compute_dtype"] is None and op.args[0].meta["example_value"].dtype is BF16
    assert {choice.implementation for choice in choose_implementations(graph.module, ())} == {"original"}


def test_a_narrower_compute_dtype_is_named() -> None:
    def narrow(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low = x.bfloat16()
        return (low * cos + half(low) * sin).float()

    graph, _ = lifted(both(narrow), inputs_of(F32, tables=BF16))
    assert ops(graph)[0].kwargs["compute_dtype"] == BF16


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_complex_products_are_lifted_within_the_criterion(dtype: torch.dtype) -> None:
    inputs = inputs_of(dtype, width=SIZE // 2)
    graph = trace(lambda **given: by_complex(**given), inputs)
    control = run(graph, inputs)
    assert reports(graph).matched == 1
    (op,) = ops(graph)
    assert op.kwargs["style"] == "interleaved"
    truth = both(in_pairs)(**{name: value.double() for name, value in inputs.items()})
    for result, eager, reference in zip(run(graph, inputs), control, truth, strict=True):
        assert not judge(result, eager, reference).reason


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_turn_the_other_way_negates_the_sine(dtype: torch.dtype) -> None:
    graph, report = lifted(both(lambda x, c, s: x * c + torch.cat((x[..., 4:], -x[..., :4]), -1) * s), inputs_of(dtype))
    (op,) = ops(graph)
    assert report.matched == 1 and getattr(op.args[3].target, "__name__", "") == "neg"


def test_tables_prepared_twice_are_one() -> None:
    def model(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def turn(x: Tensor) -> Tensor:
            return repeated(x, cos[:, None, :, :], sin[:, None, :, :])

        return turn(query), turn(key)

    graph, report = lifted(model, inputs_of(BF16, width=SIZE // 2))
    assert report.matched == len(ops(graph)) == 1
    assert sum(getattr(n.target, "__name__", n.target) == "repeat_interleave" for n in graph.module.graph.nodes) == 2


def test_a_key_turned_after_the_query_has_moved_on_is_still_its_partner() -> None:
    def model(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        query = (query * cos + half(query) * sin).transpose(1, 2)
        key = key * 3
        return query, (key * cos + half(key) * sin).transpose(1, 2)

    graph, report = lifted(model, inputs_of(BF16))
    assert report.matched == len(ops(graph)) == 1


def test_tensors_alone_or_by_other_tables_become_single_ops() -> None:
    def alone(query: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
        return (in_halves(query, cos.unsqueeze(1), sin.unsqueeze(1)),)

    inputs = inputs_of(BF16, width=SIZE // 2)
    graph, report = lifted(alone, {name: value for name, value in inputs.items() if name != "key"})
    assert report.matched == len(ops(graph, ROTARY_SINGLE.overload)) == 1 and not ops(graph)

    def apart(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return in_halves(query, cos, sin), in_halves(key, cos * 2, sin * 2)

    graph, report = lifted(apart, inputs)
    assert report.matched == len(ops(graph, ROTARY_SINGLE.overload)) == 2 and not ops(graph)


def test_a_query_that_waits_for_another_is_not_its_partner() -> None:
    def model(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first = query * cos + half(query) * sin
        later = first * 2
        return first, later * cos + half(later) * sin

    graph, report = lifted(model, inputs_of(F32))
    assert report.matched == len(ops(graph, ROTARY_SINGLE.overload)) == 2 and not ops(graph)


def test_many_layers_share_tables_and_keep_their_pairs() -> None:
    def model(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for _ in range(3):
            query, key = both(SPELLINGS["rotate half"][0])(query, key, cos, sin)
            found += [query, key]
            query, key = query * 0.5, key * 0.25
        return tuple(found)

    graph, report = lifted(model, inputs_of(BF16))
    assert report.matched == 3
    heads = [[x.meta["example_value"].shape[1] for x in op.args[:2]] for op in ops(graph)]
    assert heads == [[4, 2]] * 3


def test_a_rotated_part_used_elsewhere_stays() -> None:
    def model(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        crossed = half(query)
        return query * cos + crossed * sin, key * cos + half(key) * sin, crossed

    _, report = lifted(model, inputs_of(BF16))
    assert report.matched == 1


def shuffled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat((-x[..., 2:6], x[..., 6:], x[..., :2]), -1) * sin


def rounded_between(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).float() + (half(x) * sin).float()


# Nothing to report: a plain sum of products, and a reflection, which has no sign to turn by.
OTHERS: dict[str, Turn] = {
    "mixing": lambda x, c, s: x * c + x * s,
    "reflection": lambda x, c, s: x * c + torch.cat((x[..., 4:], x[..., :4]), -1) * s,
}
_OTHER_PAIRS = "in another way than rotary embedding"
NEAR_MISSES: dict[str, tuple[Turn, torch.dtype, str]] = {
    "another half": (lambda x, c, s: x * c + torch.cat((-x[..., 5:], x[..., :5]), -1) * s, F32, _OTHER_PAIRS),
    "another pairing": (shuffled, F32, _OTHER_PAIRS),
    "both halves negated": (lambda x, c, s: x * c + torch.cat((-x[..., 4:], -x[..., :4]), -1) * s, F32, _OTHER_PAIRS),
    "along the tokens": (
        lambda x, c, s: x * c + torch.cat((-x[:, :, 3:], x[:, :, :3]), 2) * s,
        F32,
        "looks like a rotation",
    ),
    "another x": (lambda x, c, s: x.sin() * c + half(x) * s, F32, "looks like a rotation"),
    "a rounding between": (rounded_between, BF16, "rounded before they are added"),
    "one value per head": (lambda x, c, s: x * c[..., :1] + half(x) * s, F32, "has not one value per feature"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_plainly_is_something_else_is_left_alone(case: str) -> None:
    _, report = lifted(both(OTHERS[case]), inputs_of(F32))
    assert report.matched == 0


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_are_left_alone_with_the_reason(case: str) -> None:
    turn, dtype, reason = NEAR_MISSES[case]
    _, report = lifted(both(turn), inputs_of(dtype))
    assert report.matched == 0
    assert [miss for miss in report.near_misses if reason in miss.reason]


def test_a_write_between_is_a_near_miss() -> None:
    def model(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin, query = cos.unsqueeze(1), sin.unsqueeze(1), query.clone()
        straight = query * cos
        query.add_(1)
        return straight + half(query) * sin, key * cos + half(key) * sin

    _, report = lifted(model, inputs_of(F32))
    (miss,) = report.near_misses
    assert isinstance(miss, NearMiss) and report.matched == 0 and "written" in miss.reason
