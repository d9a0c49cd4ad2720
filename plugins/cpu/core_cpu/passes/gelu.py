"""Replace GELU by its formula with tanh, written out, by torch's op: one pass over memory instead of eight.

Inductor fuses either alike; where graphs run op by op (`inline`, or no compiler) each of the eight begins and ends
threads and rounds its result. The formula is that of Hendrycks and Gimpel, "Gaussian Error Linear Units"
(arXiv:1606.08415); GPT-2, GPT-J and Phi write it out, by transformers' `NewGELUActivation` or `FastGELUActivation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from core.common.passes import LIFTS, Guards, Pass, Replacement, view

_VALUES = {"half": 0.5, "one": 1.0, "cubic": 0.044715, "power": 3.0, "root": math.sqrt(2.0 / math.pi)}
_TOLERANCE = 1e-6  # relative, of constants that models write in decimals: 0.7978845608


def _powered(x: Any, half: Any, one: Any, cubic: Any, power: Any, root: Any) -> Any:
    """As `NewGELUActivation` spells it."""
    return half * x * (one + torch.tanh(root * (x + cubic * torch.pow(x, power))))


def _multiplied(x: Any, half: Any, one: Any, cubic: Any, root: Any) -> Any:
    """As `FastGELUActivation` spells it."""
    return half * x * (one + torch.tanh(x * root * (one + cubic * x * x)))


def _gelu(x: Any) -> Any:
    return functional.gelu(x, approximate="tanh")


def _refusal(matched: Mapping[str, Any]) -> str | None:
    """Return which number is not the formula's, or that x has no kernel, or None."""
    for name, value in _VALUES.items():
        found = matched.get(name, value)
        if not isinstance(found, (int, float)) or not math.isclose(found, value, rel_tol=_TOLERANCE):
            return f"{name} is {found}, in GELU {value:.7g}"
    dtype = view.dtype(matched["x"])
    return None if dtype is not None and dtype.is_floating_point else f"{matched['x']} is {dtype}"


def _nothing(graph: fx.Graph) -> str:
    """Return that a graph has no tanh: the matcher compares each node with each of its own, and few models have one."""
    return "" if any(view.kind(node) == "tanh" for node in graph.nodes) else "nothing calls tanh"


class _Activations(nn.Module):
    """Both spellings."""

    def forward(self, x: Tensor) -> Tensor:
        new = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        return 0.5 * new * (1.0 + torch.tanh(new * 0.7978845608 * (1.0 + 0.044715 * new * new)))


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield them, over numbers from both tails."""
    yield _Activations(), (torch.randn(5, 67, generator=torch.Generator().manual_seed(63)) * 3,)


FUSE_TANH_GELU = Pass(
    name="fuse_tanh_gelu",
    does="Replace GELU's formula with tanh, written out, by the op.",
    mechanism="replace_pattern",
    patterns=tuple(
        Replacement(pattern=pattern, replacement=_gelu, literals=literals, check=_refusal)
        for pattern, literals in (
            (_powered, ("half", "one", "cubic", "power", "root")),
            (_multiplied, ("half", "one", "cubic", "root")),
        )
    ),
    # A gate's activation belongs to the op of the gate.
    after=LIFTS,
    guards=Guards(nothing=_nothing),
    examples=examples,
    owner="core_cpu",
)
