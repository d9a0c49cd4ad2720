"""core/common/passes/recurrent: steps of recurrent layers as transformers writes them become one op each, and what only
looks like one stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from core.common.numerics import judge
from core.common.ops.recurrent import CAUSAL_CONV1D_UPDATE, GATED_DELTA_RULE, SELECTIVE_STATE_UPDATE
from core.common.passes.cleanup.no_ops import REMOVE_NO_OPS
from core.common.passes.original import restore
from core.common.passes.recurrent.convolution import LIFT_CAUSAL_CONV1D
from core.common.passes.recurrent.delta_rule import LIFT_GATED_DELTA_RULE
from core.common.passes.recurrent.state_space import LIFT_SELECTIVE_STATE_UPDATE
from core.compilation.rewrite.batch_invariant import choose_invariant
from core.compilation.rewrite.manager import PassManager
from core.compilation.rewrite.pass_report import PassReport
from core.compilation.trace.tracing import trace
from core.errors import LoweringError
from core.host.selection import select_device
from core.verify.execution import Run, run_graph
from tests.common.passes.lifting import draw
from tests.support import refused

ROWS, HEADS, KEYS, VALUES = 3, 16, 16, 8
"""Many heads: steps and decays are shared by all of a head, and the errors of a few numbers would decide."""
PASSES = (REMOVE_NO_OPS, LIFT_CAUSAL_CONV1D, LIFT_GATED_DELTA_RULE, LIFT_SELECTIVE_STATE_UPDATE)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
FORMS = ("in slots", "in slots, padded", "its own")
Step = Callable[..., tuple[Tensor, Tensor | None]]
"""Takes a state and tensors; returns the result, and the new state where it was not written into the state itself."""


# Drawn outside of what is traced.
TAPS, PAIRED, TWO = draw(24, 1, 4), draw(24, 2, 4), draw(24, 1, 2)
PER_HEAD = {
    (seed, dtype): draw(HEADS, dtype=dtype, seed=seed)
    for seed in (1, 2, 3)
    for dtype in (torch.float32, torch.bfloat16)
}
RATES = draw(HEADS, VALUES, KEYS)


@dataclass
class Lifted:
    report: dict[str, PassReport]
    before: Run
    after: Run
    exact: Run
    graph: fx.GraphModule
    again: Callable[[], Run]

    @property
    def reasons(self) -> str:
        return "; ".join(miss.reason for report in self.report.values() for miss in report.near_misses)

    def calls(self, target: object) -> list[fx.Node]:
        return [node for node in self.graph.graph.nodes if node.target is target]


def lifted(step: Step, states: Tensor, form: str = FORMS[0], **inputs: Tensor) -> Lifted:
    """Trace a step on states in slots as the engine has it, or in a tensor of their own, and lift it."""
    padded = torch.tensor([0, 3, 4]) if "padded" in form else torch.tensor([4, 2, 3])
    given = inputs if form == "its own" else {**inputs, "slots": padded}

    def whole(slots: Tensor | None = None, **rest: Tensor) -> Tensor:
        state = states if slots is None else states.index_select(0, slots)
        kept = None if slots is None else slots.clamp(min=1)
        out, new = step(state, **rest)
        if slots is not None:
            states.index_copy_(0, kept, (state if new is None else new).to(states.dtype))
        elif new is not None:
            states.copy_(new)
        return out * 2

    with torch.no_grad():
        graph = trace(lambda **named: whole(**named), given)
        values = graph.values(given)
        before, exact = run_graph(graph.module, values), run_graph(graph.module, values, fp64=True)
        reports = {report.name: report for report in PassManager(PASSES, strict=True).run(graph.module)}
        after = run_graph(graph.module, values)
    return Lifted(reports, before, after, exact, graph.module, lambda: run_graph(graph.module, values))


def check(found: Lifted, target: Any) -> dict[str, Any]:
    """Expect one op in place of the step, results and states within the errors of eager code, and a way back; return
    the op's options."""
    assert len(found.calls(target)) == 1, found.reasons
    options = dict(found.calls(target)[0].kwargs)
    assert not [node for node in found.graph.graph.nodes if node.target in ("index_copy_", "index_select", "copy_")]
    assert len(found.before.written) == 1
    for one, other, exact in zip(found.after.results, found.before.results, found.exact.results, strict=True):
        verdict = judge(one, other, exact)
        assert verdict.passed, verdict
    assert restore(found.calls(target)[0]) is not None
    found.graph.recompile()
    for one, other in zip(found.again().results, found.before.results, strict=True):
        assert torch.equal(one, other)
    return options


def states_of(form: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return draw(*((ROWS, *shape) if form == "its own" else (6, *shape)), dtype=dtype, scale=0.5)


def convolution(activation: str | None = "silu", bias: bool = True, dtype: torch.dtype = torch.float32) -> Step:
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update

    weight, added = draw(24, 1, 4, dtype=dtype, scale=0.5), draw(24, dtype=dtype) if bias else None

    def step(state: Tensor, x: Tensor) -> tuple[Tensor, None]:
        token = x.transpose(1, 2)
        out = unwrap(causal_conv1d_update)(token, state, weight.squeeze(1), added, activation)
        return out.transpose(1, 2), None

    return step


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("activation", "bias"), [("silu", True), (None, False), ("gelu", True)])
def test_a_convolution_is_lifted(dtype: torch.dtype, form: str, activation: str | None, bias: bool) -> None:
    step = convolution(activation, bias, dtype)
    found = lifted(step, states_of(form, 24, 4, dtype=dtype), form, x=draw(ROWS, 1, 24, dtype=dtype))
    assert check(found, CAUSAL_CONV1D_UPDATE.overload)["silu"] is (activation == "silu")


def delta_inputs(dtype: torch.dtype, group: int = 2, by_feature: bool = False) -> dict[str, Tensor]:
    fading = (ROWS, 1, HEADS, KEYS) if by_feature else (ROWS, 1, HEADS)
    heads = HEADS // group
    return {
        "query": draw(ROWS, 1, heads, KEYS, dtype=dtype),
        "key": draw(ROWS, 1, heads, KEYS, dtype=dtype, seed=6),
        "value": draw(ROWS, 1, HEADS, VALUES, dtype=dtype),
        "g": -draw(*fading, seed=7).abs(),
        "beta": draw(ROWS, 1, HEADS, dtype=dtype, seed=8).sigmoid(),
    }


def delta_rule(state: Tensor, normed: bool = True, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    from tests.delta_rule import own_delta_rule

    by_feature = inputs["g"].dim() == 4
    function: Any = unwrap(recurrent_kimi_delta_attention) if by_feature else own_delta_rule
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": normed}
    out, new = function(**inputs, **options)
    return out, new


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [1, 2])
def test_a_delta_rule_is_lifted(dtype: torch.dtype, form: str, group: int) -> None:
    found = lifted(delta_rule, states_of(form, HEADS, KEYS, VALUES), form, **delta_inputs(dtype, group))
    options = check(found, GATED_DELTA_RULE.overload)
    assert (options["scale"], options["norm_eps"]) == (KEYS**-0.5, 1e-6)


def test_a_delta_rule_without_norms_is_lifted() -> None:
    step = lambda state, **inputs: delta_rule(state, normed=False, **inputs)  # noqa: E731
    found = lifted(step, states_of("", HEADS, KEYS, VALUES), **delta_inputs(torch.bfloat16))
    assert check(found, GATED_DELTA_RULE.overload)["norm_eps"] == 0.0


@DTYPES
def test_a_delta_rule_with_decay_by_feature_is_lifted(dtype: torch.dtype) -> None:
    """In fp32 no cast follows: what reads the result reads the buffer that it was written into."""
    inputs = delta_inputs(dtype, 1, by_feature=True)
    check(lifted(delta_rule, states_of("", HEADS, KEYS, VALUES), **inputs), GATED_DELTA_RULE.overload)


def space_inputs(dtype: torch.dtype, groups: int) -> dict[str, Tensor]:
    return {
        "x": draw(ROWS, HEADS, VALUES, dtype=dtype),
        "dt": draw(ROWS, 1, HEADS, dtype=dtype),
        "B": draw(ROWS, groups, KEYS, dtype=dtype),
        "C": draw(ROWS, groups, KEYS, dtype=dtype, seed=6),
    }


def state_space(state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, None]:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    spread = [PER_HEAD[seed, x.dtype][:, None].expand(-1, VALUES) for seed in (1, 2)]
    rates = (-torch.exp(PER_HEAD[3, x.dtype].float()))[:, None, None].expand(-1, VALUES, KEYS)
    steps = dt.transpose(1, 2).expand(-1, -1, VALUES)
    update = unwrap(mamba2_selective_state_update)
    return update(state, x, steps, rates, B, C, spread[0], z=None, dt_bias=spread[1], dt_softplus=True), None


@pytest.mark.cases(2)
@DTYPES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_a_state_space_is_lifted(dtype: torch.dtype, form: str, groups: int) -> None:
    found = lifted(state_space, states_of(form, HEADS, VALUES, KEYS), form, **space_inputs(dtype, groups))
    assert check(found, SELECTIVE_STATE_UPDATE.overload)["dt_softplus"] is True


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: lifted(convolution(), states_of("", 24, 4), x=draw(ROWS, 1, 24)), "conv1d: node"),
        (
            lambda: lifted(delta_rule, states_of("", HEADS, KEYS, VALUES), **delta_inputs(torch.float32)),
            "sum: node 'kv_mem_1' calls it, over other dimensions than the last",
        ),
        (
            lambda: lifted(state_space, states_of("", HEADS, VALUES, KEYS), **space_inputs(torch.float32, 2)),
            "bmm: node 'out_4' calls it, a product whose order of sums depends on its sizes",
        ),
    ],
    ids=["convolution", "delta rule", "state space"],
)
def test_a_batch_invariant_program_refuses_a_step_that_nobody_declares(make: Callable[[], Lifted], reason: str) -> None:
    """Its op is put back into the model's own nodes, of which some sum in an order that sizes decide."""
    with refused(LoweringError, reason):
        choose_invariant(make().graph, select_device("cpu").ops)


def elsewhere(step: Step) -> Step:
    """Keep the new state in another tensor than that which it was read from."""
    other = torch.zeros(6, 24, 4)

    def wrong(state: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, _ = step(state, **inputs)
        other.copy_(torch.cat((state, state)))
        return out, state * 0

    return wrong


def unshifted(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the oldest input in place of the second oldest."""
    row = torch.cat([state, x.transpose(1, 2)], dim=-1)
    out = F.conv1d(row, TAPS, None, groups=24)[:, :, -1:]
    return out, torch.cat((row[:, :, :1], row[:, :, 2:]), dim=-1)


def first_result(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Take the convolution of the state before the token."""
    row = torch.cat([state, x.transpose(1, 2)], dim=-1)
    return F.conv1d(row, TAPS, None, groups=24)[:, :, :1], row[:, :, -4:]


def mixed(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mix pairs of channels."""
    row = torch.cat([state, x.transpose(1, 2)], dim=-1)
    return F.conv1d(row, PAIRED, None, groups=12)[:, :, -1:], row[:, :, -4:]


def dilated(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    row = torch.cat([state, x.transpose(1, 2)], dim=-1)
    return F.conv1d(row, TWO, None, groups=24, dilation=2)[:, :, -1:], row[:, :, -4:]


def read_again(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Read the row of inputs once more."""
    row = torch.cat([state, x.transpose(1, 2)], dim=-1)
    return F.conv1d(row, TAPS, None, groups=24)[:, :, -1:] + row.sum(-1, keepdim=True), row[:, :, -4:]


CONVOLUTIONS: dict[str, tuple[Step, str]] = {
    "kept elsewhere": (elsewhere(convolution()), "is not written into"),
    "not shifted": (unshifted, "are not taken as the new state"),
    "the result before": (first_result, "not the last result"),
    "mixed channels": (mixed, "mixes channels"),
    "dilated": (dilated, "has the dilation"),
    "read again": (read_again, "which lies within"),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_what_is_no_convolution_step_stays(name: str) -> None:
    step, reason = CONVOLUTIONS[name]
    found = lifted(step, states_of("", 24, 4), x=draw(ROWS, 1, 24))
    assert not found.calls(CAUSAL_CONV1D_UPDATE.overload) and reason in found.reasons, found.reasons
    assert all(torch.equal(*pair) for pair in zip(found.after.results, found.before.results, strict=True))


def rule(change: str) -> Step:
    """Return the delta rule written out, with one change."""

    def step(
        state: Tensor, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        if change == "scale before the norm":
            q = q * KEYS**-0.5
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        if change == "another eps":
            q = query[:, 0] * torch.rsqrt((query[:, 0] * query[:, 0]).sum(-1, keepdim=True) + 1e-5)
        q = q / KEYS**0.5
        if change == "decay of values":
            state = state * value[:, 0].sigmoid().log().exp()[..., None, :]
        else:
            state = state * g[:, 0].exp()[..., None, None]
        missing = v - (state * k.unsqueeze(-1)).sum(-2)
        delta = missing * (v.sigmoid() if change == "beta of values" else beta[:, 0].unsqueeze(-1))
        outer = (q if change == "another key" else k).unsqueeze(-1) * delta.unsqueeze(-2)
        new = state + (outer.transpose(-1, -2) if change == "transposed" else outer)
        out = (new * (q.unsqueeze(-2) if change == "read along values" else q.unsqueeze(-1))).sum(-2)
        if change == "a buffer is read early":
            buffer = torch.ones(ROWS, 1, HEADS, KEYS)
            early = buffer.sum()
            buffer[:, 0] = out
            return buffer + early, new
        kept = state if change == "the decayed state is kept" else new
        return out + (new.sum(-2) if change == "read again" else 0), kept

    return step


RULES = {
    "another eps": "eps of the norms of query and key differ",
    "decay of values": "differs between the features of a value",
    "beta of values": "is not multiplied by one number of each head",
    "another key": "does not add the product of",
    "transposed": "does not add the product of",
    "read along values": "is no key of each head",
    "the decayed state is kept": "is not written into",
    "read again": "which lies within",
    "a buffer is read early": "before it is filled",
}


def square_inputs() -> dict[str, Tensor]:
    """Return inputs whose keys and values have equally many features, so that no shape tells them apart."""
    return {**delta_inputs(torch.float32, 1), "value": draw(ROWS, 1, HEADS, KEYS, seed=9)}


@pytest.mark.cases(5)
@pytest.mark.parametrize("change", RULES)
def test_what_is_no_delta_rule_stays(change: str) -> None:
    found = lifted(rule(change), states_of("", HEADS, KEYS, KEYS), **square_inputs())
    assert not found.calls(GATED_DELTA_RULE.overload) and RULES[change] in found.reasons, found.reasons


@pytest.mark.parametrize("change", ["", "scale before the norm"])
def test_a_delta_rule_written_otherwise_is_lifted(change: str) -> None:
    found = lifted(rule(change), states_of("", HEADS, KEYS, KEYS), **square_inputs())
    check(found, GATED_DELTA_RULE.overload)


def space(change: str) -> Step:
    """Return the selective state space written out, with one change."""

    def step(state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        heads, wide = (ROWS, HEADS, 1, KEYS), (ROWS, 2, HEADS // 2, KEYS)
        dt = F.softplus(dt.transpose(1, 2).expand(-1, -1, VALUES), beta=2 if change == "softplus" else 1)[..., None]
        if change == "steps of features":
            dt = dt * 1 + x[..., None].abs()
        rates = RATES if change == "rates of features" else PER_HEAD[1, torch.float32][:, None, None]
        B = B.reshape(ROWS, 2, 1, KEYS).expand(wide).reshape(heads)
        if change == "interleaved groups":
            B = B.reshape(ROWS, 2, HEADS // 2, KEYS).transpose(1, 2).reshape(heads)
        new = state * torch.exp(dt * rates) + dt * B * (x * x if change == "" else x)[..., None]
        C = C.reshape(ROWS, 2, 1, KEYS).expand(wide).reshape(ROWS, HEADS, KEYS)
        out = torch.bmm(new.view(ROWS * HEADS, VALUES, KEYS), C.view(ROWS * HEADS, KEYS, 1)).view(ROWS, HEADS, VALUES)
        return out + (new.sum(-1) if change == "read again" else 0), state * 1 if change == "stale" else new

    return step


SPACES = {
    "softplus": "is not the softplus",
    "steps of features": "differs between the features",
    "rates of features": "is not a step times one number of each head",
    "stale": "is not written into",
    "read again": "which lies within",
}


@pytest.mark.parametrize("change", SPACES)
def test_what_is_no_state_space_stays(change: str) -> None:
    found = lifted(space(change), states_of("", HEADS, VALUES, KEYS), **space_inputs(torch.float32, 2))
    assert not found.calls(SELECTIVE_STATE_UPDATE.overload) and SPACES[change] in found.reasons, found.reasons
    assert all(torch.equal(*pair) for pair in zip(found.after.results, found.before.results, strict=True))


@pytest.mark.parametrize("change", ["", "interleaved groups"])
def test_a_state_space_written_otherwise_keeps_its_numbers(change: str) -> None:
    found = lifted(space(change), states_of("", HEADS, VALUES, KEYS), **space_inputs(torch.float32, 2))
    check(found, SELECTIVE_STATE_UPDATE.overload)
