"""core/common/passes/recurrent on prompts: steps written between the states before and after each token become ops over
whole sequences, with the numbers of the steps one by one."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from core.common.numerics import judge
from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE, tokens
from core.common.passes.cleanup.no_ops import REMOVE_NO_OPS
from core.common.passes.original import ORIGINAL, restore
from core.common.passes.recurrent.convolution import LIFT_CAUSAL_CONV1D
from core.common.passes.recurrent.delta_rule import LIFT_GATED_DELTA_RULE
from core.common.passes.recurrent.state_space import LIFT_SELECTIVE_STATE_UPDATE
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.rewrite.stated import check_runnable
from core.compilation.trace.tracing import trace
from core.errors import TraceError
from core.verify.execution import Run, run_graph
from tests.common.passes.lifting import draw

STARTS, NUM_TOKENS, HEADS, KEYS, VALUES = torch.tensor([0, 5, 5, 22, 23], dtype=torch.int32), 25, 16, 16, 8
"""Four sequences, one without tokens, and two tokens of padding."""
SLOTS, KEPT = torch.tensor([0, 3, 4, 0]), torch.tensor([2, 3, 4, 1])
PASSES = (REMOVE_NO_OPS, LIFT_CAUSAL_CONV1D, LIFT_GATED_DELTA_RULE, LIFT_SELECTIVE_STATE_UPDATE)
TAPS = draw(24, 1, 4)
RATES, BIAS, BY_STATE = draw(HEADS, seed=1), draw(HEADS, seed=2), draw(HEADS, KEYS, seed=1)
Step = Callable[..., tuple[Tensor, Tensor]]
"""Takes the states of a batch of tokens; returns results and new states."""


def convolution(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update

    out = unwrap(causal_conv1d_update)(x.transpose(1, 2), state, TAPS.to(x.dtype).squeeze(1), None, "silu")
    return out.transpose(1, 2) * 2, state


def delta_rule(state: Tensor, query: Tensor, key: Tensor, value: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    from tests.delta_rule import own_delta_rule

    out, new = own_delta_rule(
        query=query,
        key=key,
        value=value,
        g=-RATES.float().exp() * torch.nn.functional.softplus(a.float() + BIAS),
        beta=a.sigmoid(),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out * 2, new


def state_space(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    skip, bias = (numbers.to(x.dtype)[:, None].expand(-1, VALUES) for numbers in (RATES, BIAS))
    rates = (-torch.exp(RATES.float()))[:, None, None].expand(-1, VALUES, KEYS)
    steps = dt.transpose(1, 2).expand(-1, -1, VALUES)
    update = unwrap(mamba2_selective_state_update)
    return update(state, x, steps, rates, b, c, skip, z=None, dt_bias=bias, dt_softplus=True) * 2, state


def scan(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.mamba.modeling_mamba import mamba_selective_state_update

    skip, bias, rates = RATES.to(x.dtype), BIAS.float(), -torch.exp(BY_STATE.float())
    update = unwrap(mamba_selective_state_update)
    return update(state, x, dt, rates, b, c, skip, dt_bias=bias, dt_softplus=True) * 2, state


def inputs(step: Step, dtype: torch.dtype) -> dict[str, Tensor]:
    if step is convolution:
        return {"x": draw(NUM_TOKENS, 1, 24, dtype=dtype, seed=3)}
    if step is delta_rule:
        keys = {
            n: draw(NUM_TOKENS, 1, HEADS // 2, KEYS, dtype=dtype, seed=3 + i) for i, n in enumerate(("query", "key"))
        }
        return {
            **keys,
            "value": draw(NUM_TOKENS, 1, HEADS, VALUES, dtype=dtype, seed=5),
            "a": draw(NUM_TOKENS, 1, HEADS, dtype=dtype, seed=6),
        }
    if step is scan:
        sizes = {"x": HEADS, "dt": HEADS, "b": KEYS, "c": KEYS}
        return {name: draw(NUM_TOKENS, size, dtype=dtype, seed=3 + i) for i, (name, size) in enumerate(sizes.items())}
    return {
        "x": draw(NUM_TOKENS, HEADS, VALUES, dtype=dtype, seed=3),
        "dt": draw(NUM_TOKENS, 1, HEADS, dtype=dtype, seed=4),
        "b": draw(NUM_TOKENS, 2, KEYS, dtype=dtype, seed=5),
        "c": draw(NUM_TOKENS, 2, KEYS, dtype=dtype, seed=6),
    }


def states_of(step: Step, dtype: torch.dtype) -> Tensor:
    shapes: dict[Any, tuple[int, ...]] = {convolution: (24, 4), delta_rule: (HEADS, KEYS, VALUES), scan: (HEADS, KEYS)}
    shape = shapes.get(step, (HEADS, VALUES, KEYS))
    states = draw(6, *shape, dtype=dtype if step is convolution else torch.float32, seed=9)
    states[0] = 0
    return states


CASES = [
    (convolution, CAUSAL_CONV1D_UPDATE),
    (delta_rule, GATED_DELTA_RULE),
    (state_space, SELECTIVE_STATE_UPDATE),
    (scan, SELECTIVE_STATE_UPDATE),
]
EACH = pytest.mark.parametrize(("step", "op"), CASES, ids=[step.__name__ for step, _ in CASES])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
BOUNDED = torch.arange(NUM_TOKENS) % 3 > 0
"""Tokens of prompts, in a step that has others."""
BOUNDS = (0.4, 0.9)


def traced(
    step: Step,
    states: Tensor,
    given: dict[str, Tensor],
    written_by: Tensor = STARTS,
    bounds: tuple[float, float] | None = None,
) -> Any:
    def whole(
        starts: Tensor, slots: Tensor, kept: Tensor, other: Tensor, bounded: Tensor | None = None, **rest: Tensor
    ) -> Tensor:
        stated = () if bounds is None else (bounded, *bounds)
        rows = next(iter(rest.values())) if bounded is None else bounded
        state = tokens.READ(states, slots, starts, rows.shape[0], *stated)
        out, new = step(state, **rest)
        tokens.WRITTEN(states, new.to(states.dtype), kept, starts if written_by is STARTS else other)
        return out

    places = {"starts": STARTS.clone(), "slots": SLOTS, "kept": KEPT, "other": STARTS.clone()}
    given = given if bounds is None else {"bounded": BOUNDED, **given}
    return trace(whole, {**places, **given}, dynamic={name: [0] for name in given})


def lifted(module: fx.GraphModule) -> dict[str, PassReport]:
    return {report.name: report for report in PassManager(PASSES, strict=True).run(module)}


def one_by_one(step: Step, states: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Run the step itself on each token of each sequence; return results, zeros for padding, and states."""
    found: dict[int, Tensor] = {}
    for i, (first, last) in enumerate(pairwise(STARTS.tolist())):
        state = states[SLOTS[i] : SLOTS[i] + 1].clone()
        for row in range(first, last):
            found[row], state = step(state, **{name: value[row : row + 1] for name, value in given.items()})
        states[KEPT[i]] = state[0]
    rows = [found.get(row, torch.zeros_like(found[0])) for row in range(NUM_TOKENS)]
    return torch.cat(rows), states


@pytest.mark.cases(1)
@EACH
@DTYPES
def test_steps_along_sequences_become_one_op_with_their_numbers(step: Step, op: Any, dtype: torch.dtype) -> None:
    given, states = inputs(step, dtype), states_of(step, dtype)
    graph = traced(step, states, given)
    places = {"starts": STARTS, "slots": SLOTS, "kept": KEPT, "other": STARTS}
    values = graph.values({**places, **given})
    reports = lifted(graph.module)
    (call,) = [node for node in graph.module.graph.nodes if node.target is op.overload]
    assert sum(report.matched for name, report in reports.items() if name.startswith("lift_")) == 1
    assert call.kwargs["query_starts"] is not None and tokens.first_stated(graph.module.graph) is None
    check_runnable("prefill", graph.module)
    assert call.meta[ORIGINAL] is None and restore(call) is None  # nothing that could run stood there
    after: Run = run_graph(graph.module, values)
    exact: Run = run_graph(graph.module, values, fp64=True)
    eager, moved = one_by_one(step, states.clone(), given)
    used = torch.tensor([2, 3, 4])
    found = after.results[0], after.results[1][used]
    for one, other, true in zip(found, (eager, moved[used]), (exact.results[0], exact.results[1][used]), strict=True):
        verdict = judge(one, other, true)
        assert verdict.passed, verdict
    assert torch.equal(after.results[1][[0, 5]], states[[0, 5]])


@pytest.mark.cases(2)
@EACH
def test_states_that_go_by_other_sequences_stay_stated(step: Step, op: Any) -> None:
    graph = traced(step, states_of(step, torch.float32), inputs(step, torch.float32), written_by=SLOTS)
    reports = lifted(graph.module)
    assert all(node.target is not op.overload for node in graph.module.graph.nodes)
    assert "is not written into" in "; ".join(miss.reason for each in reports.values() for miss in each.near_misses)
    with pytest.raises(TraceError, match="keeps a state along the tokens of a sequence") as found:
        check_runnable("prefill", graph.module)
    assert found.value.states_recurrence


@pytest.mark.cases(1)
@DTYPES
@pytest.mark.parametrize("step", [state_space, scan], ids=lambda step: step.__name__)
def test_bounds_that_are_stated_with_the_states_are_the_ops(step: Step, dtype: torch.dtype) -> None:
    """Of the tokens of prompts alone; more than half of all steps are beyond them."""
    given, states = inputs(step, dtype), states_of(step, dtype)
    graph = traced(step, states, given, bounds=BOUNDS)
    places = {"starts": STARTS, "slots": SLOTS, "kept": KEPT, "other": STARTS, "bounded": BOUNDED}
    values = graph.values({**places, **given})
    assert sum(report.matched for name, report in lifted(graph.module).items() if name.startswith("lift_")) == 1
    after: Run = run_graph(graph.module, values)
    exact: Run = run_graph(graph.module, values, fp64=True)
    eager, moved = one_by_one(step, states.clone(), within(step, given))
    used = torch.tensor([2, 3, 4])
    found = after.results[0], after.results[1][used]
    for one, other, true in zip(found, (eager, moved[used]), (exact.results[0], exact.results[1][used]), strict=True):
        verdict = judge(one, other, true)
        assert verdict.passed, verdict
    free = one_by_one(step, states.clone(), given)[0]
    assert (free - after.results[0]).abs().max() > 0.1, "a bound that is forgotten would not show"


def within(step: Step, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return inputs whose steps, behind bias and softplus, are those of `given` in their bounds, in some rows."""
    dt = given["dt"].double()
    bias = BIAS.double()
    steps = torch.nn.functional.softplus(dt + bias).clamp(*BOUNDS)
    inverse = (steps.expm1().log() - bias).to(given["dt"].dtype)
    return {**given, "dt": torch.where(BOUNDED.view(-1, *[1] * (dt.dim() - 1)), inverse, given["dt"])}


def test_an_op_that_knows_no_bounds_is_not_lifted_from_states_that_have_some() -> None:
    graph = traced(
        convolution, states_of(convolution, torch.float32), inputs(convolution, torch.float32), bounds=BOUNDS
    )
    misses = [miss.reason for each in lifted(graph.module).values() for miss in each.near_misses]
    assert any("has bounds of steps, and the op knows none" in reason for reason in misses)


def by_transposed_states(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Decay by a rate of each number of state alone, in every feature the same."""
    decay = torch.exp(dt[..., None] * -BY_STATE[0].exp())
    new = state * decay + dt[..., None] * b[:, None] * x[..., None]
    return torch.matmul(new, c[..., None]).squeeze(-1), new


def by_other_steps(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Decay by one step, add by another."""
    decay = torch.exp(dt[..., None] * -BY_STATE.exp())
    new = state * decay + (dt * 2)[..., None] * b[:, None] * x[..., None]
    return torch.matmul(new, c[..., None]).squeeze(-1), new


def summed(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Show the state without a product."""
    new = state * torch.exp(dt[..., None] * -BY_STATE.exp()) + dt[..., None] * b[:, None] * x[..., None]
    return (new * c[:, None]).sum(-1), new


def in_another_order(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Show the features backwards, in a tensor of the same shape."""
    new = state * torch.exp(dt[..., None] * -BY_STATE.exp()) + dt[..., None] * b[:, None] * x[..., None]
    return torch.matmul(new, c[..., None])[:, list(range(x.shape[1]))[::-1], 0], new


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (in_another_order, "is not brought back to rows and features"),
        (by_transposed_states, "is not a step of each feature times one number of each of its states"),
        (by_other_steps, "is not the product of step, B and x"),
        (summed, "is not multiplied with C"),
    ],
)
def test_what_resembles_a_state_space_of_features_stays(step: Step, reason: str) -> None:
    graph = traced(step, states_of(scan, torch.float32), inputs(scan, torch.float32))
    misses = [miss.reason for each in lifted(graph.module).values() for miss in each.near_misses]
    assert any(reason in miss for miss in misses), misses
