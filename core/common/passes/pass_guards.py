"""Conditions under which a pass runs: stage, form of graph, and guards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import fx

Stage = Literal["torch", "functional", "aten"]
Form = Literal["v1", "v2"]
Scalar = str | int | float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Guards:
    """Conditions for a pass to run, checked once per graph; a pass that is not run reports the reason."""

    #: A graph without a value of one of these dtypes is skipped, and `fuse` leaves sites of other dtypes alone.
    dtypes: frozenset[torch.dtype] | None = None
    #: The same for the rank.
    min_rank: int = 0
    #: Keys of `Capabilities.extra`, with the value that each must have.
    capabilities: Mapping[str, Scalar] = field(default_factory=lambda: MappingProxyType({}))
    #: Least and most processes, both included; None for no upper limit.
    world_size: tuple[int, int | None] = (1, None)
    #: Least and most tokens that the graph serves, likewise. Skipped where the caller does not say how many it serves.
    tokens: tuple[int, int | None] | None = None
    #: Whether the pass reads the constants of the graph's placeholders. Skipped where the caller does not give them.
    constants: bool = False
    #: Canonical ops, all of which the device must implement. Skipped where the caller does not say what it implements.
    implements: frozenset[str] = frozenset()
    #: Returns why a graph has nothing for the pass, or "". Asked of graphs of the stage and of graphs as traced: these
    #: are turned into ATen ops, which takes time, only for a pass that finds something.
    nothing: Callable[[fx.Graph], str] | None = None
    #: Returns the stream or scope of each node of a graph; empty for a graph with only one. `fuse` skips a site that
    #: spans several.
    scopes: Callable[[fx.Graph], Mapping[fx.Node, object]] | None = None

    def refuses_value(self, value: object) -> str | None:
        """Return why the pass must skip a site of this value, or None; values other than tensors are not checked."""
        dtype, rank = getattr(value, "dtype", None), getattr(value, "ndim", None)
        if dtype is None or rank is None:
            return None
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"dtype {dtype} is none of {', '.join(sorted(map(str, self.dtypes)))}"
        return f"rank {rank} is below {self.min_rank}" if rank < self.min_rank else None
