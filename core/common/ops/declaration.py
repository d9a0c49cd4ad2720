"""Canonical ops: one declaration each, from which registration, fakes, tests and implementations derive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from core.common.ops.arguments import Draw
from core.common.ops.implementation import OpCall
from core.common.ops.layout import laid_out
from core.errors import UsageError

_LIBRARY = torch.library.Library("core", "DEF")
_DECLARED: dict[str, CanonicalOp] = {}


Calls = Callable[[Draw], Mapping[str, Mapping[str, Any]]]
"""Returns calls worth testing by what is special about them, the arguments of each by their names in the schema."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One call of an op that is worth testing."""

    #: what is special about the call
    name: str
    #: all arguments by their names in the schema
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalOp:
    """The declaration of one op of the `core::` namespace."""

    #: torch's schema without a namespace: the op's name, its arguments and its results
    schema: str
    #: what the op means, in plain torch: the default kernel and the oracle of its tests; computes in at least fp32, and
    #: in fp64 for fp64
    reference: Callable[..., Any]
    #: returns tensors of the results' shapes, dtypes and strides, for tracing
    fake: Callable[..., Any]
    #: raises if arguments do not fit together; called before reference, eager and fake, with the same arguments
    check: Callable[..., None] | None = None
    #: deterministic; weights and caches are never constant
    calls: Calls
    #: the generator from which `calls` draws numbers
    seed: int = 0
    #: whether piecewise capture may cut the graph here
    break_point: bool = False
    #: the function that runs at a cut if the device has no implementation; it may read tensors on the host. None for
    #: the reference
    eager: Callable[..., Any] | None = None
    #: whether the reference is much slower than what models write in its place: a device without an implementation then
    #: gets the op only where the model's own code can be put back
    costly: bool = False
    #: returns new tensors, by name, for the arguments of a call that index others, with values that a step may have, so
    #: that the call can be timed; arguments by name. None where no argument indexes another
    indices: Callable[[Mapping[str, Any]], dict[str, torch.Tensor]] | None = None
    #: of an op that applies another to the first result of one: that one
    first: CanonicalOp | None = None

    @property
    def name(self) -> str:
        """The op's name in the namespace `core`."""
        return self.schema.partition("(")[0]

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
    def positional(self) -> tuple[str, ...]:
        """Names of the arguments that may be given by position."""
        return tuple(a.name for a in self.overload._schema.arguments if not a.kwarg_only)

    @property
    def mutates(self) -> tuple[str, ...]:
        """Names of the arguments that the op writes into, from the schema."""
        arguments = self.overload._schema.arguments
        return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)

    @property
    def is_collective(self) -> bool:
        """Whether the op has an argument for a group of processes; in a single process it exchanges nothing."""
        return any(a.name == "group" for a in self.overload._schema.arguments)

    def samples(self, dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
        """Yield the calls worth testing, floating tensors in this dtype."""
        for name, kwargs in self.calls(Draw(dtype, device, self.seed)).items():
            yield Sample(name=name, kwargs=kwargs)

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, constants: frozenset[str] = frozenset()
    ) -> OpCall:
        """Return the call with every argument by name and defaults filled in; constants: as `OpCall` has them."""
        arguments = self.overload._schema.arguments
        bound = {a.name: a.default_value for a in arguments if a.has_default_value()}
        bound.update(zip(self.positional, args, strict=False))
        bound.update(kwargs)
        return OpCall(op=self.qualified_name, args=MappingProxyType(bound), constants=constants)


def declare(op: CanonicalOp) -> CanonicalOp:
    """Register the op with torch (reference as kernel on every device, fake for tracing) and return it.

    reference, eager and fake of the result check their arguments first; reference and eager lay results out as the fake
    says, whatever the device does.
    """
    if op.qualified_name in _DECLARED:
        raise UsageError(
            f"declaring the canonical op {op.qualified_name!r}",
            found="an op of that name is declared already",
            remedy="give it another name, or use the declared one",
        )
    _LIBRARY.define(op.schema)
    fake = _checked(op, op.fake)
    eager = None if op.eager is None else laid_out(_checked(op, op.eager), fake)
    op = replace(op, reference=laid_out(_checked(op, op.reference), fake), fake=fake, eager=eager)
    _LIBRARY.impl(op.name, op.reference, "CompositeExplicitAutograd")
    torch.library.register_fake(op.qualified_name, op.fake, lib=_LIBRARY)
    _DECLARED[op.qualified_name] = op
    return op


def _checked(op: CanonicalOp, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the op's check before it, both called by the schema.

    Arguments before the schema's star are passed by position, however the caller names them. So a function can pass on
    arguments that it does not name.
    """
    names, check = op.positional, op.check

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        for name in names[len(args) :]:
            if name not in kwargs:
                break
            args = (*args, kwargs.pop(name))
        if check is not None:
            check(*args, **kwargs)
        return function(*args, **kwargs)

    return run


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
