"""Canonical ops: one declaration each, from which registration, fakes, tests and implementations derive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from core.common.ops.implementation import OpCall
from core.common.ops.layout import laid_out
from core.errors import UsageError

_LIBRARY = torch.library.Library("core", "DEF")
_DECLARED: dict[str, CanonicalOp] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One set of arguments for an op. name: what is special about it; kwargs: every argument, by schema name."""

    name: str
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalOp:
    """The declaration of one op of the `core::` namespace.

    schema: the torch schema without namespace. reference: plain torch; it is the semantics, the default kernel and the
    test oracle, computes in at least fp32 and keeps fp64 as fp64. fake: checks arguments and returns output metadata.
    samples: `(dtype, device)` -> arguments worth testing, deterministic, weights and caches never constant.
    break_point: piecewise capture may cut the graph here. eager: what then runs there for want of an implementation:
    the reference in a form that may read tensors on the host; None for the reference as it is. costly: the reference is
    much slower than what models write in its place, so a device without an implementation gets the op only where that
    can be put back.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    samples: Callable[[torch.dtype, torch.device], Iterator[Sample]]
    break_point: bool = False
    eager: Callable[..., Any] | None = None
    costly: bool = False
    notes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def qualified_name(self) -> str:
        """`core::name`, as implementations and reports name the op."""
        return f"core::{self.name}"

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The registered op, as it stands in traced graphs."""
        packet = getattr(torch.ops.core, self.name)
        return packet.default  # type: ignore[no-any-return]  # torch.ops is untyped

    @property
    def mutates(self) -> tuple[str, ...]:
        """Names of the arguments that the op writes into, from the schema."""
        arguments = self.overload._schema.arguments
        return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)

    @property
    def is_collective(self) -> bool:
        """Whether the op is told a group of processes, and means no more than a copy of itself in a single one."""
        return any(a.name == "group" for a in self.overload._schema.arguments)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpCall:
        """Return the call with every argument by name and defaults filled in."""
        arguments = self.overload._schema.arguments
        bound = {a.name: a.default_value for a in arguments if a.has_default_value()}
        positional = [a.name for a in arguments if not a.kwarg_only]
        bound.update(zip(positional, args, strict=False))
        bound.update(kwargs)
        return OpCall(op=self.qualified_name, args=MappingProxyType(bound))


def declare(op: CanonicalOp) -> CanonicalOp:
    """Register the op with torch (reference as kernel on every device, fake for tracing) and return it.

    Of what is returned, reference and eager give results laid out as the fake says, whatever the device.
    """
    if op.qualified_name in _DECLARED:
        raise UsageError(
            f"declaring the canonical op {op.qualified_name!r}",
            found="an op of that name is declared already",
            remedy="give it another name, or use the declared one",
        )
    eager = None if op.eager is None else laid_out(op.eager, op.fake)
    op = replace(op, reference=laid_out(op.reference, op.fake), eager=eager)
    _LIBRARY.define(op.schema)
    _LIBRARY.impl(op.name, op.reference, "CompositeExplicitAutograd")
    torch.library.register_fake(op.qualified_name, op.fake, lib=_LIBRARY)
    _DECLARED[op.qualified_name] = op
    return op


def declared_ops() -> Mapping[str, CanonicalOp]:
    """Return all canonical ops by qualified name."""
    return MappingProxyType(_DECLARED)


def find_op(target: object) -> CanonicalOp | None:
    """Return the canonical op that a graph node's target names, or None for any other target."""
    # Dynamo keeps the spelling of the source: `torch.ops.core.x` is a packet, `torch.ops.core.x.default` an overload.
    if isinstance(target, torch._ops.OpOverloadPacket):
        return _DECLARED.get(target._qualified_op_name)
    if isinstance(target, torch._ops.OpOverload):
        return _DECLARED.get(target.name().split(".")[0])
    return None
