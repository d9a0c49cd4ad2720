"""To lower is to make a callable of a finished graph: `fx.GraphModule` in, a plain function out. `inline` is one way.

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
    """What a lowering is given.

    graph: the finished graph; the lowering owns it and may change it. example_inputs: real values for its placeholders,
    in order; symbolic sizes as ints.
    """

    graph: fx.GraphModule
    example_inputs: tuple[Any, ...]


Lowering = Callable[[LoweringRequest], FlatCallable]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowerings:
    """The lowerings of a device by name, and which one is used when none is asked for.

    any_size: those whose callables run at every size the trace allows, not only the examples': one serves all buckets.
    instead: why the default is not the one that the device prefers; a program that uses it unasked notes this.
    """

    available: Mapping[str, Lowering]
    default: str
    any_size: frozenset[str] = frozenset()
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
        """Return what a program has to note where nothing or this name was asked for."""
        return (f"lowering {self.default!r}: {self.instead}",) if name is None and self.instead else ()


def inline(request: LoweringRequest) -> FlatCallable:
    """Return the graph's own generated Python: each op is one eager call, at any size the trace allows."""
    request.graph.recompile()
    return request.graph.forward  # the bound method: no nn.Module call around it


INLINE = Lowerings(available=MappingProxyType({"inline": inline}), default="inline", any_size=frozenset({"inline"}))
"""What a device has that states nothing: every op goes through torch's dispatcher, where any backend can see it."""
