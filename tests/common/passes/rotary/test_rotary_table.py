"""core/common/passes/rotary/table.py: the tables of rotary embedding become one op, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from core.common.ops.implementation import OpImplementation
from core.common.ops.rotary.table import LAYOUTS, ROTARY_TABLE
from core.common.passes.rotary.table import LIFT_ROTARY_TABLE, examples
from core.common.passes.standard import COMMON_PASSES
from core.compilation.implementations import choose_implementations
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.snapshot import Snapshot
from core.compilation.rewriting import bound_constants
from core.compilation.trace.traced import TracedGraph
from core.compilation.trace.tracing import trace
from core.verify.execution import Run, run_graph
from tests.marks import slow_except

NAME = LIFT_ROTARY_TABLE.name
BRINGS = frozenset({ROTARY_TABLE.qualified_name})
BF16, F32 = torch.bfloat16, torch.float32

Tables = tuple[Tensor, Tensor]


def calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target is ROTARY_TABLE.overload]


def same(one: Run, other: Run) -> bool:
    pairs = list(zip(one.outputs, other.outputs, strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def lifted(model: Callable[..., Any], dynamic: Any = None, **inputs: Tensor) -> tuple[TracedGraph, PassReport]:
    """Run the pass on a function, and check that no bit has changed, with the old nodes back neither."""
    graph = trace(lambda **given: model(**given), inputs, dynamic=dynamic)
    values = graph.values(inputs)
    before = run_graph(graph.module, values)
    (report,) = PassManager((LIFT_ROTARY_TABLE,), strict=True, implemented=BRINGS).run(graph.module)
    assert same(before, run_graph(graph.module, values))
    restored = Snapshot(graph.module).module()
    (*choices,) = choose_implementations(restored, ())
    assert same(before, run_graph(restored, values)) and not calls(restored)
    assert all(choice.implementation == "original" for choice in choices)
    return graph, report


def inputs(batch: int = 2, num_tokens: int = 5, dtype: torch.dtype = F32) -> dict[str, Tensor]:
    positions = torch.arange(7, 7 + batch * num_tokens).view(batch, num_tokens) * 11
    return {"positions": positions, "inv_freq": (100.0 ** -torch.linspace(0, 1, 8)).to(dtype)}


# What must match.


def products(positions: Tensor, inv_freq: Tensor) -> Tables:
    angles = positions[..., None].float() * inv_freq.to(dtype=F32)
    emb = torch.cat((angles, angles), dim=-1)
    return (emb.cos() * 1.0).to(BF16), (emb.sin() * 1.0).to(BF16)


def matrices(positions: Tensor, inv_freq: Tensor) -> Tables:
    column = inv_freq[None, :, None].float().expand(positions.shape[0], -1, 1).to(positions.device)
    angles = (column.float() @ positions[:, None, :].float()).transpose(1, 2)
    emb = torch.cat((angles, angles), dim=-1)
    return (emb.cos() * 0.75).to(dtype=BF16), (emb.sin() * 0.75).to(dtype=BF16)


def not_scaled(positions: Tensor, inv_freq: Tensor) -> Tables:
    angles = inv_freq * positions.unsqueeze(-1)  # integers are promoted
    emb = angles.repeat_interleave(2, dim=-1)
    return emb.cos().half(), emb.sin().half()


def kept_wide(positions: Tensor, inv_freq: Tensor) -> Tables:
    angles = positions.unsqueeze(-1).float() * inv_freq[None, None, :].float()
    return torch.cos(angles) * 1.5, 1.5 * torch.sin(angles)


def three_rows(positions: Tensor, inv_freq: Tensor) -> Tables:
    rows = positions[None].expand(3, *positions.shape)
    column = inv_freq[None, None, :, None].float().expand(3, rows.shape[1], -1, 1)
    angles = (column @ rows[:, :, None, :].float()).transpose(2, 3)
    emb = torch.cat((angles, angles), dim=-1)
    return emb.cos().to(BF16), emb.sin().to(BF16)


def used_besides(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, ...]:
    """The angles and the unrounded cosine are read by others too."""
    angles = positions[..., None].float() * inv_freq
    cos = angles.cos()
    return cos.to(BF16), angles.sin(), angles + 1, cos * 2 + cos


def rounded_apart(positions: Tensor, inv_freq: Tensor) -> Tables:
    angles = positions[..., None].float() * inv_freq
    return (angles.cos() * 1.25).to(BF16), (angles.sin() * 1.25).half()


FORMS: dict[Callable[..., Any], dict[str, Any]] = {
    products: {"layout": "half", "scaling": 1.0, "out_dtype": BF16},
    matrices: {"layout": "half", "scaling": 0.75, "out_dtype": BF16},
    not_scaled: {"layout": "interleaved", "scaling": 1.0, "out_dtype": torch.float16},
    kept_wide: {"layout": "pairs", "scaling": 1.5, "out_dtype": F32},
    three_rows: {"layout": "half", "scaling": 1.0, "out_dtype": BF16},
    used_besides: {"layout": "pairs", "scaling": 1.0, "out_dtype": F32},
    rounded_apart: {"layout": "pairs", "scaling": 1.25, "out_dtype": F32},
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_becomes_the_op_and_no_bit_changes(form: Callable[..., Any], dtype: torch.dtype) -> None:
    graph, report = lifted(form, **inputs(dtype=F32 if form is not_scaled else dtype))
    assert (report.matched, report.near_misses) == (1, ())
    (node,) = calls(graph.module)
    bound = ROTARY_TABLE.bind(node.args, node.kwargs).args
    assert {name: bound[name] for name in FORMS[form]} == FORMS[form]
    assert not bound["positions"].meta["example_value"].is_floating_point()
    left = {str(node.target) for node in graph.module.graph.nodes}
    assert not left & {"matmul", "cos", "sin", "cat"} or form is used_besides


def test_symbolic_token_counts_are_no_obstacle() -> None:
    for form in (products, matrices):
        graph, report = lifted(form, {"positions": [1]}, **inputs(batch=1))
        assert report.matched == 1
        assert isinstance(calls(graph.module)[0].args[0].meta["example_value"].shape[1], torch.SymInt)  # type: ignore[union-attr]


def test_the_examples_of_the_pass_owe_a_match_each() -> None:
    found = list(examples())
    for module, (positions,) in found:
        graph, report = lifted(module, positions=positions)
        assert report.matched == 1
    assert {node.kwargs["layout"] for node in calls(graph.module)} <= set(LAYOUTS) and len(found) == 4


# What must not match.


def real_positions(positions: Tensor, inv_freq: Tensor) -> Tables:
    angles = (positions.float() / 4)[..., None] * inv_freq
    return angles.cos(), angles.sin()


def rounded_positions(positions: Tensor, inv_freq: Tensor) -> Tables:
    angles = positions.to(BF16).float()[..., None] * inv_freq
    return angles.cos(), angles.sin()


def rounded_frequencies(positions: Tensor, inv_freq: Tensor) -> Tables:
    """The rounded vector is a vector too: but here it is rounded as a row, when it is none any more."""
    angles = positions[..., None].float() * inv_freq[None, None].to(BF16).float()
    return angles.cos(), angles.sin()


def wide_angles(positions: Tensor, inv_freq: Tensor) -> Tables:
    angles = positions[..., None].double() * inv_freq
    return angles.cos().float(), angles.sin().float()


def by_position(positions: Tensor, inv_freq: Tensor) -> Tables:
    angles = positions[..., None].float() * inv_freq.expand(*positions.shape, -1).contiguous()
    return angles.cos(), angles.sin()


def turned_over(positions: Tensor, inv_freq: Tensor) -> Tables:
    """Eight tokens and eight frequencies: of the angles' two dimensions the first is that of the frequencies."""
    angles = inv_freq[:, None] * positions[0].float()[None, :]
    return angles.cos(), angles.sin()


def matrices_turned_over(positions: Tensor, inv_freq: Tensor) -> Tables:
    column = inv_freq[None, :, None].float()
    angles = column @ positions[:, None, :].float()
    return angles.cos(), angles.sin()


def sections(positions: Tensor, inv_freq: Tensor) -> Tables:
    angles = positions[..., None].float() * inv_freq
    emb = torch.cat((angles, angles.flip(-1)), dim=-1)
    return emb.cos(), emb.sin()


def scaled_apart(positions: Tensor, inv_freq: Tensor) -> Tables:
    angles = positions[..., None].float() * inv_freq
    return angles.cos() * 2.0, angles.sin() * 3.0


def sums(positions: Tensor, inv_freq: Tensor) -> Tables:
    angles = positions[..., None].float() + inv_freq
    return angles.cos(), angles.sin()


def of_an_input(positions: Tensor, inv_freq: Tensor) -> Tables:
    return inv_freq.cos() * positions.sum(), inv_freq.sin()


NO_PRODUCT = "is no product of integer positions (..., T) and frequencies (F,)"
NEAR_MISSES = {
    real_positions: NO_PRODUCT,
    rounded_positions: NO_PRODUCT,
    rounded_frequencies: NO_PRODUCT,
    wide_angles: "is torch.float64",
    by_position: NO_PRODUCT,
    turned_over: NO_PRODUCT,
    matrices_turned_over: NO_PRODUCT,
    sections: NO_PRODUCT,
    scaled_apart: "the cosine is scaled by 2.0, the sine by 3.0",
    sums: NO_PRODUCT,
    of_an_input: NO_PRODUCT,
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("model", NEAR_MISSES, ids=lambda model: model.__name__)
def test_near_misses_stay_as_they_are_with_the_reason(model: Callable[..., Any]) -> None:
    graph, report = lifted(model, **inputs(num_tokens=8))
    assert report.matched == 0 and not calls(graph.module)
    (miss,) = report.near_misses
    assert NEAR_MISSES[model] in miss.reason


def test_a_cosine_alone_is_no_near_miss() -> None:
    _, report = lifted(lambda positions, inv_freq: (positions[..., None].float() * inv_freq).cos(), **inputs())
    assert (report.matched, report.near_misses) == (0, ())


def test_a_device_without_the_op_keeps_its_graph() -> None:
    graph = trace(lambda **given: products(**given), inputs())
    (report,) = PassManager((LIFT_ROTARY_TABLE,), strict=True, implemented=frozenset({"core::rotary"})).run(
        graph.module
    )
    assert report.skipped == "the device does not implement core::rotary_table" and not calls(graph.module)


# Tiny models on the engine's paged cache.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # transformers'
@pytest.mark.parametrize(
    ("model", "layout", "count", "dtype"),
    slow_except(
        [
            ("llama", "half", 1, F32),
            ("llama", "half", 1, BF16),
            ("gemma3_text", "half", 2, BF16),
            ("gpt_oss", "pairs", 1, F32),
        ],
        ("llama", "half", 1, BF16),
    ),
    ids=str,
)
def test_the_tables_of_models_become_one_op_each(model: str, layout: str, count: int, dtype: torch.dtype) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    from core.engine.check.graphs import engine_graphs
    from core.engine.models.loading import build_model
    from core.engine.models.tiny import tiny_config
    from core.host.selection import select_device

    loaded = build_model(tiny_config(model), torch_device=torch.device("cpu"), dtype=dtype)
    with engine_graphs(loaded, select_device("cpu"), phases=("decode",)) as (graph,):
        module, constants = graph.traced.module, bound_constants(graph.traced)
        seen: dict[str, fx.GraphModule] = {}

        def check(report: PassReport, before: fx.GraphModule, after: fx.GraphModule) -> None:
            seen[report.name] = before

        manager = PassManager(COMMON_PASSES, strict=True, implemented=BRINGS)
        reports = {each.name: each for each in manager.run(module, constants=constants, check=check)}
        assert reports[NAME].matched == count == len(calls(module)) and reports[NAME].near_misses == ()
        for node in calls(module):
            assert node.kwargs["layout"] == layout and node.kwargs["out_dtype"] == dtype
        added = [tensor for _, tensor in constants.added]
        own = OpImplementation(op=ROTARY_TABLE.qualified_name, name="own", fn=ROTARY_TABLE.reference)
        choose_implementations(module, (own,))
        choose_implementations(seen[NAME], ())
        for values in graph.values():
            before, after = (run_graph(each, [*values, *added]).outputs for each in (seen[NAME], module))
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_second_run_finds_nothing() -> None:
    graph, _ = lifted(products, **inputs())
    (report,) = PassManager((LIFT_ROTARY_TABLE,), strict=True, implemented=BRINGS).run(graph.module)
    assert (report.matched, report.near_misses) == (0, ())
    assert isinstance(graph.module, nn.Module)
