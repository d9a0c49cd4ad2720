"""When a pass runs: at which stage, on which form of graph, and what must hold there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Stage = Literal["torch", "functional", "aten"]
Form = Literal["v1", "v2"]
Scalar = str | int | float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Guards:
    """What must hold for a pass to run; asked once per graph, and a refused pass reports the reason.

    dtypes: a graph without a value of one of these is skipped, and `fuse` leaves sites of other dtypes alone.
    min_rank: likewise, for the rank. capabilities: keys of `Capabilities.extra` with the value each must have.
    world_size, tokens: inclusive ranges; an upper end of None is open. A pass with a token range is skipped where the
    caller does not say how many tokens the graph serves. constants: the pass reads the tensors bound to the graph's
    placeholders, and is skipped where the caller does not give them. implements: names of canonical ops, all of which
    the device must bring an implementation of; skipped too where the caller does not say which it brings.
    """

    dtypes: frozenset[torch.dtype] | None = None
    min_rank: int = 0
    capabilities: Mapping[str, Scalar] = field(default_factory=lambda: MappingProxyType({}))
    world_size: tuple[int, int | None] = (1, None)
    tokens: tuple[int, int | None] | None = None
    constants: bool = False
    implements: frozenset[str] = frozenset()

    def refuses_value(self, value: object) -> str | None:
        """Return why a site of this value is none for the pass, or None; values that are no tensors are not judged."""
        dtype, rank = getattr(value, "dtype", None), getattr(value, "ndim", None)
        if dtype is None or rank is None:
            return None
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"dtype {dtype} is none of {', '.join(sorted(map(str, self.dtypes)))}"
        return f"rank {rank} is below {self.min_rank}" if rank < self.min_rank else None
