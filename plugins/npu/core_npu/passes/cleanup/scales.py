"""Take `1 / (1 / x)` for x where it is the scale of a quantisation.

Models that keep reciprocal scales for ops that multiply, and call ops that divide, end in it. It is not x in every bit:
each division rounds, so it may be off by one rounding (and is 0 for scales below 1e-38, which are none). For a scale
that is acceptable: it removes the rounding that the reciprocal had added. A value that anything else reads stays as it
is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from core.common.passes import Pass, Replacement, view
from core_npu.passes.calls import called, read
from core_npu.passes.streams import together

_SCALES = {
    "npu_quantize": ("scales",),
    "npu_add_rms_norm_quant": ("scales1", "scales2"),
    "npu_rms_norm_quant": ("scale",),
}


def _divided(x: Any) -> Any:
    return 1.0 / x


def _divided_whole(x: Any) -> Any:
    return 1 / x  # the matcher distinguishes 1 from 1.0


def _function(x: Any) -> Any:
    return torch.reciprocal(x)


def _method(x: Any) -> Any:
    return x.reciprocal()


def _twice(outer: Callable[[Any], Any], inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def pattern(x: Any) -> Any:
        return outer(inner(x))

    return pattern


def _itself(x: Any) -> Any:
    return x


def only_scales(bound: Mapping[str, Any]) -> str | None:
    """Return why x must keep its two roundings, or None."""
    x = bound["x"]
    dtype = view.dtype(x)
    if dtype is None or not dtype.is_floating_point:
        return f"{x} is {dtype}"
    for once in filter(_inverts, x.users):
        for twice in filter(_inverts, once.users):
            other = next((user for user in twice.users if not _is_scale(user, twice)), None)
            if other is not None:
                return f"{other} reads {twice} otherwise than as a scale, and it is {x} only to a rounding"
            if not together(once, twice):
                return f"{once} and {twice} run in two streams or scopes"
    return None


def _inverts(node: fx.Node) -> bool:
    if view.kind(node) == "div":
        return len(node.args) == 2 and not node.kwargs and node.args[0] in (1, 1.0)
    return view.kind(node) == "reciprocal"


def _is_scale(user: fx.Node, value: fx.Node) -> bool:
    names = _SCALES.get(called(user), ())
    return bool(names) and all(name in names for name, given in read(user).items() if given is value)


class _Scaled(nn.Module):
    """Quantisations by scales that were inverted twice, in two spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.linspace(0.01, 0.09, 64))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = torch.ops.npu.npu_quantize(x, 1.0 / (1.0 / self.scales), None, torch.qint8, -1, True)
        second = torch.ops.npu.npu_quantize(y, self.scales.sin().reciprocal().reciprocal(), None, torch.qint8, -1, True)
        return first.to(x.dtype) * self.scales, second.to(x.dtype)


def examples() -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield the two quantisations, of values that lie in the middle between no two codes."""
    codes = torch.randint(-90, 90, (2, 7, 64), generator=torch.Generator().manual_seed(4)) + 0.2
    scales = torch.linspace(0.01, 0.09, 64)
    yield _Scaled(), (codes[0] * scales, codes[1] * scales.sin())


_SPELLINGS = (_divided, _divided_whole, _function, _method)
FOLD_DOUBLE_RECIPROCAL = Pass(
    name="fold_npu_double_reciprocal",
    does="Replace the reciprocal of a scale's reciprocal by the scale.",
    mechanism="replace_pattern",
    patterns=tuple(
        Replacement(pattern=_twice(outer, inner), replacement=_itself, check=only_scales)
        for outer in _SPELLINGS
        for inner in _SPELLINGS
    ),
    examples=examples,
    owner="npu",
)
