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
from tests.support import needs_states_in_caches

STARTS, NUM_TOKENS, HEADS, KEYS, VALUES = torch.tensor([0, 5, 5, 22, 23], dtype=torch.int32), 25, 16, 16, 8
"""Four sequences, one without tokens, and two tokens of padding."""
SLOTS, KEPT = torch.tensor([0, 3, 4, 0]), torch.tensor([2, 3, 4, 1])
PASSES = (REMOVE_NO_OPS, LIFT_CAUSAL_CONV1D, LIFT_GATED_DELTA_RULE, LIFT_SELECTIVE_STATE_UPDATE)
TAPS = draw(24, 1, 4)
RATES, BIAS = draw(HEADS, seed=1), draw(HEADS, seed=2)
Step = Callable[..., tuple[Tensor, Tensor]]
"""Takes the states of a batch of tokens; returns results and new states."""


def convolution(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update

    out = unwrap(causal_conv1d_update)(x.transpose(1, 2), state, TAPS.to(x.dtype).squeeze(1), None, "silu")
    return out.transpose(1, 2) * 2, state


def delta_rule(state: Tensor, query: Tensor, key: Tensor, value: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    out, new = unwrap(torch_recurrent_gated_delta_rule)(
        query,
        key,
        value,
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
    return {
        "x": draw(NUM_TOKENS, HEADS, VALUES, dtype=dtype, seed=3),
        "dt": draw(NUM_TOKENS, 1, HEADS, dtype=dtype, seed=4),
        "b": draw(NUM_TOKENS, 2, KEYS, dtype=dtype, seed=5),
        "c": draw(NUM_TOKENS, 2, KEYS, dtype=dtype, seed=6),
    }


def states_of(step: Step, dtype: torch.dtype) -> Tensor:
    shape = {convolution: (24, 4), delta_rule: (HEADS, KEYS, VALUES), state_space: (HEADS, VALUES, KEYS)}[step]
    states = draw(6, *shape, dtype=dtype if step is convolution else torch.float32, seed=9)
    states[0] = 0
    return states


CASES = [(convolution, CAUSAL_CONV1D_UPDATE), (delta_rule, GATED_DELTA_RULE), (state_space, SELECTIVE_STATE_UPDATE)]
EACH = pytest.mark.parametrize(("step", "op"), CASES, ids=[op.name for _, op in CASES])


@pytest.fixture(autouse=True)
def states_in_caches() -> None:
    needs_states_in_caches()


def traced(step: Step, states: Tensor, given: dict[str, Tensor], written_by: Tensor = STARTS) -> Any:
    def whole(starts: Tensor, slots: Tensor, kept: Tensor, other: Tensor, **rest: Tensor) -> Tensor:
        state = tokens.READ(states, slots, starts, next(iter(rest.values())).shape[0])
        out, new = step(state, **rest)
        tokens.WRITTEN(states, new.to(states.dtype), kept, starts if written_by is STARTS else other)
        return out

    places = {"starts": STARTS.clone(), "slots": SLOTS, "kept": KEPT, "other": STARTS.clone()}
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


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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


@EACH
def test_states_that_go_by_other_sequences_stay_stated(step: Step, op: Any) -> None:
    graph = traced(step, states_of(step, torch.float32), inputs(step, torch.float32), written_by=SLOTS)
    reports = lifted(graph.module)
    assert all(node.target is not op.overload for node in graph.module.graph.nodes)
    assert "is not written into" in "; ".join(miss.reason for each in reports.values() for miss in each.near_misses)
    with pytest.raises(TraceError, match="keeps a state along the tokens of a sequence") as found:
        check_runnable("prefill", graph.module)
    assert found.value.states_recurrence
