"""The contract of a lowering, which makes a plain function of a finished graph, and the simplest one, `inline`.

Which implementation each canonical op gets is chosen before (core/compilation/implementations.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import fx

FlatCallable = Callable[..., "tuple[torch.Tensor, ...]"]
"""Takes the graph's placeholders positionally (tensors and ints) and returns its outputs as a flat tuple."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringRequest:
    """What a lowering is given."""

    #: finished; the lowering owns it and may change it
    graph: fx.GraphModule
    #: real values for the graph's placeholders, in order; symbolic sizes as ints
    example_inputs: tuple[Any, ...]


Lowering = Callable[[LoweringRequest], FlatCallable]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowerings:
    """The lowerings of a device."""

    #: all of them, by name
    available: Mapping[str, Lowering]
    #: the one that is used when none is asked for
    default: str
    #: those whose callables run at every size that the trace allows, so that one callable serves all buckets
    any_size: frozenset[str] = frozenset()
    #: why the default is not the lowering that the device prefers; noted by programs that use the default unasked
    instead: str = ""

    def resolve(self, name: str | None) -> tuple[str, Lowering]:
        """Return name and lowering; None means the default. Raises `UsageError` naming the known ones."""
        wanted = self.default if name is None else name
        if wanted not in self.available:
            raise UsageError(
                f"lowering {wanted!r}",
                found=f"this device has: {', '.join(sorted(self.available))}",
                remedy="choose one of these with --lowering or core.compile(..., lowering=...)",
            )
        return wanted, self.available[wanted]

    def notes(self, name: str | None) -> tuple[str, ...]:
        """Return what a program notes when this lowering was asked for, None for the default."""
        return (f"lowering {self.default!r}: {self.instead}",) if name is None and self.instead else ()


def inline(request: LoweringRequest) -> FlatCallable:
    """Return the graph's own generated Python: each op is one eager call, at any size the trace allows."""
    request.graph.recompile()
    return request.graph.forward  # the bound method: no nn.Module call around it


INLINE = Lowerings(available=MappingProxyType({"inline": inline}), default="inline", any_size=frozenset({"inline"}))
"""Of a device whose plugin names none: every op goes through torch's dispatcher, where any backend can see it."""
