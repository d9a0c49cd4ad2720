"""Torch's own operators that inference uses and that round, each with its formula. `movement` holds the exact ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.common.ops.arguments import Draw
from core_conformance.inputs import formulas

Inputs = Callable[[Draw], dict[str, tuple[Tensor, ...]]]
_HALF = (torch.bfloat16, torch.float16)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator of torch."""

    name: str
    #: Runs it, on tensors of the device.
    call: Callable[..., Tensor]
    #: Computes the same in elementary terms.
    formula: Callable[..., Tensor]
    #: Inputs by name; each is judged separately.
    inputs: Inputs
    #: Whether the operator rounds once, as a formula in fp64 does that is rounded to the dtype. Else the yardstick is
    #: the formula in fp32.
    once: bool = False
    #: The dtypes in which models call it.
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *_HALF)


def _rows(*shapes: tuple[int, ...], scale: float = 1.0) -> Inputs:
    """Return inputs of one name, normally distributed."""
    return lambda draw: {"": tuple(draw(*shape, scale=scale) for shape in shapes)}


def _spread(low: float, high: float, more: Mapping[str, tuple[float, float]] = _NOTHING) -> Inputs:
    """Return 2048 evenly spaced numbers for each interval. more: intervals of other orders of magnitude, by name."""

    def inputs(draw: Draw) -> dict[str, tuple[Tensor, ...]]:
        parts = {"": (low, high), **more}
        spaced = {name: torch.linspace(*ends, 2048, dtype=torch.float64) for name, ends in parts.items()}
        return {name: (values.to(draw.dtype).to(draw.device),) for name, values in spaced.items()}

    return inputs


def _with_tail(bulk: tuple[float, float], tail: tuple[float, float]) -> Inputs:
    """Return numbers of an interval, and in half precision those of a tail, where results are small.

    There the two forms of GELU differ by a tenth, which half precision can't hide. In fp32 the bulk shows a wrong form,
    and the tail would judge how a library avoids the cancellation of `1 + erf` or `1 + tanh`, which is its choice.
    """
    return lambda draw: _spread(*bulk, {} if draw.dtype == torch.float32 else {"tail": tail})(draw)


def _norm_inputs(draw: Draw) -> dict[str, tuple[Tensor, ...]]:
    weight, bias = draw(768, scale=0.4, shift=1.0), draw(768)
    # In the last, eps is as large as the variance.
    forms = {"": draw(4, 768), "shifted": draw(4, 768, shift=3.0), "small": draw(4, 768, scale=3e-3)}
    return {name: (x, weight, bias) for name, x in forms.items()}


def _heads(num_kv_heads: int, num_queries: int, num_keys: int) -> Inputs:
    keys = (2, num_kv_heads, num_keys, 64)
    return _rows((2, 4, num_queries, 64), keys, keys)


def _masked(draw: Draw) -> dict[str, tuple[Tensor, ...]]:
    keys = (2, 4, 23, 64)
    mask = torch.ones(17, 23, dtype=torch.bool).tril(6)
    added = torch.zeros(17, 23, dtype=torch.float64).masked_fill(~mask, -1e4)
    return {"": (draw(2, 4, 17, 64), draw(*keys), draw(*keys), added.to(draw.dtype).to(draw.device))}


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, mask, **options)


_PAIR = _rows((4, 512), (4, 512))
_ONE = _rows((4, 512))
_AWAY = _spread(0.3, 3)
_SUMMED = _rows((512, 640))

ROUNDING: tuple[Operator, ...] = (
    Operator(name="linear", call=functional.linear, formula=formulas.linear, inputs=_rows((9, 768), (96, 768), (96,))),
    Operator(name="matmul", call=torch.matmul, formula=formulas.product, inputs=_rows((33, 768), (768, 40))),
    Operator(name="bmm", call=torch.bmm, formula=formulas.product, inputs=_rows((4, 17, 512), (4, 512, 24))),
    Operator(
        name="baddbmm",
        call=partial(torch.baddbmm, beta=0.5, alpha=2.0),
        formula=lambda start, a, b: 0.5 * start + 2 * formulas.product(a, b),
        inputs=_rows((4, 17, 24), (4, 17, 512), (4, 512, 24)),
    ),
    Operator(name="add", call=torch.add, formula=lambda a, b: a + b, inputs=_PAIR, once=True),
    Operator(name="mul", call=torch.mul, formula=lambda a, b: a * b, inputs=_PAIR, once=True),
    Operator(
        name="div",
        call=torch.div,
        formula=lambda a, b: a / b,
        inputs=lambda draw: {"": (draw(4, 512), draw(4, 512, scale=0.2, shift=2.0))},
        once=True,
    ),
    # For torch, operators with a number are different overloads from those of two tensors; a device may lack one and
    # fall back to the host. No formula uses the operator that it stands for: `1 - x` is -(x - 1).
    Operator(name="number-minus", call=lambda x: 1 - x, formula=lambda x: -(x - 1), inputs=_ONE, once=True),
    Operator(name="minus", call=torch.sub, formula=lambda a, b: a + (-b), inputs=_PAIR, once=True),
    Operator(name="plus-number", call=lambda x: x + 1.5, formula=lambda x: x - (-1.5), inputs=_ONE, once=True),
    Operator(name="times-number", call=lambda x: 0.3 * x, formula=lambda x: x / (1 / 0.3), inputs=_ONE),
    Operator(name="number-over", call=lambda x: 2 / x, formula=formulas.of_each(lambda x: 2 / x), inputs=_AWAY),
    Operator(name="square", call=lambda x: x**2, formula=lambda x: x * x, inputs=_ONE, once=True),
    Operator(name="negative", call=torch.neg, formula=lambda x: 0 - x, inputs=_ONE, once=True),
    Operator(name="exp", call=torch.exp, formula=formulas.exp, inputs=_spread(-3, 0, {"large": (2, 8)}), once=True),
    Operator(
        name="log", call=torch.log, formula=formulas.log, inputs=_spread(0.01, 0.5, {"large": (3, 3e3)}), once=True
    ),
    Operator(
        name="tanh", call=torch.tanh, formula=formulas.tanh, inputs=_spread(-4, 4, {"small": (1e-3, 0.02)}), once=True
    ),
    Operator(
        name="sin", call=torch.sin, formula=formulas.sin, inputs=_spread(-3, 3, {"positions": (1, 5000)}), once=True
    ),
    Operator(
        name="cos", call=torch.cos, formula=formulas.cos, inputs=_spread(-3, 3, {"positions": (1, 5000)}), once=True
    ),
    Operator(name="rsqrt", call=torch.rsqrt, formula=formulas.rsqrt, inputs=_spread(0.01, 4), once=True),
    Operator(
        name="sigmoid",
        call=torch.sigmoid,
        formula=lambda x: 1 / (1 + formulas.exp(-x)),
        inputs=_with_tail((-4, 4), (-9, -6)),
    ),
    Operator(
        name="silu",
        call=functional.silu,
        formula=lambda x: x / (1 + formulas.exp(-x)),
        inputs=_with_tail((-4, 4), (-9, -6)),
    ),
    Operator(
        name="gelu",
        call=functional.gelu,
        formula=lambda x: x / 2 * (1 + formulas.erf(x / math.sqrt(2.0))),
        inputs=_with_tail((-3, 3), (-4.5, -3)),
    ),
    Operator(
        name="gelu_tanh",
        call=partial(functional.gelu, approximate="tanh"),
        formula=lambda x: x / 2 * (1 + formulas.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),
        inputs=_with_tail((-3, 3), (-4.5, -3)),
    ),
    Operator(
        name="softplus", call=functional.softplus, formula=formulas.softplus, inputs=_spread(-3, 3, {"large": (15, 30)})
    ),
    Operator(
        name="softmax", call=partial(torch.softmax, dim=-1), formula=formulas.softmax, inputs=_rows((4, 768), scale=2)
    ),
    Operator(
        name="log_softmax",
        call=partial(torch.log_softmax, dim=-1),
        formula=lambda x: x - formulas.largest(x) - formulas.log(formulas.powers(x)[1]),
        inputs=_rows((4, 768), scale=2),
    ),
    Operator(
        name="logsumexp",
        call=partial(torch.logsumexp, dim=-1),
        formula=lambda x: (formulas.largest(x) + formulas.log(formulas.powers(x)[1]))[..., 0],
        inputs=_rows((512, 64), scale=2),
    ),
    Operator(name="sum", call=partial(torch.sum, dim=-1), formula=formulas.total, inputs=_SUMMED),
    Operator(name="mean", call=partial(torch.mean, dim=-1, keepdim=True), formula=formulas.mean, inputs=_SUMMED),
    Operator(  # models sum probabilities in fp32, and positions as integers
        name="cumsum",
        call=partial(torch.cumsum, dim=-1),
        formula=formulas.running_total,
        inputs=_rows((16, 640)),
        dtypes=(torch.float32,),
    ),
    Operator(
        name="layer_norm",
        call=lambda x, weight, bias: functional.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5),
        formula=formulas.layer_norm,
        inputs=_norm_inputs,
    ),
    Operator(
        name="rms_norm",
        call=lambda x, weight, _: functional.rms_norm(x, (x.shape[-1],), weight, 1e-5),
        formula=lambda x, weight, _: formulas.rms_norm(x, weight),
        inputs=_norm_inputs,
    ),
    Operator(name="attention", call=_attend, formula=formulas.attention, inputs=_heads(4, 17, 23)),
    Operator(name="attention-mask", call=_attend, formula=formulas.attention, inputs=_masked),
    Operator(
        name="attention-causal",
        call=partial(_attend, is_causal=True),
        formula=formulas.causal_attention,
        inputs=_heads(4, 17, 17),
    ),
    Operator(
        name="attention-grouped",
        call=partial(_attend, enable_gqa=True),
        formula=formulas.attention,
        inputs=_heads(2, 17, 23),
    ),
)
"""Judged by T2, the fp64 formula being the reference."""
