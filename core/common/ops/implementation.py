"""A device's implementation of a canonical op, with the condition under which it applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCall:
    """One call of a canonical op as it stands in a graph.

    args holds every argument of the schema by name, defaults filled in; tensors are fake (shape, dtype, device only).
    """

    op: str
    args: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


Condition = Callable[[OpCall], str | None]
"""Returns None where the implementation applies, else the reason why not. Decided once per call in a graph."""


def always(call: OpCall) -> str | None:
    """Apply everywhere."""
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class OpImplementation:
    """One implementation. op: canonical name, `core::attention`. name: what reports call it.

    fn takes the op's arguments exactly as its schema states them and keeps its contract, mutation included. It must be
    traceable when the device's lowering traces (plain torch ops, or a custom op, also as `torch.library.custom_op`
    gives it).
    """

    op: str
    name: str
    fn: Callable[..., Any]
    condition: Condition = always

    def __post_init__(self) -> None:
        # What `custom_op` gives is no function with a name, as a node of a graph needs it, but knows the op it made.
        overload = getattr(self.fn, "_opoverload", None)
        if overload is not None:
            object.__setattr__(self, "fn", overload)
