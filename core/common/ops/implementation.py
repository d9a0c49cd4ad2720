"""A device's implementation of a canonical op, with the condition under which it applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCall:
    """One call of a canonical op in a graph."""

    #: the op, as `core::attention`
    op: str
    #: every argument of the schema by name, defaults filled in; tensors are fake (shape, dtype, device only)
    args: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    #: names of tensors among them that are constants of the graph, bound to it and written by nothing in it: a kernel
    #: may read these before earlier work of a step is done. Not known when `timed` is asked
    constants: frozenset[str] = frozenset()


Condition = Callable[[OpCall], str | None]
"""Returns why an implementation can't take a call, None where it can; asked once for each call in a graph."""


def always(call: OpCall) -> str | None:
    """Apply everywhere."""
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class OpImplementation:
    """What a device runs for a canonical op, and for which of its calls.

    An op may have several, in order of preference. Where more than one takes a call, that which is fastest at its sizes
    runs (`core.compilation.measuring`), and users may ask for one by name.
    """

    #: the op, as `core::attention`
    op: str
    #: what users and reports call the implementation; another for each of one op
    name: str
    #: takes the arguments as the op's schema has them, and writes and returns what the op does; traceable where the
    #: device's lowering traces: plain torch ops, or a custom op, also as `torch.library.custom_op` gives it
    fn: Callable[..., Any]
    condition: Condition = always
    #: why it can't be used on this machine, such as a library that is not installed; "" where it can
    missing: str = ""
    #: says why it is not to be timed against the one before all others, None where it is; asked for each bucket, with
    #: its sizes, and never of the first, which is what the others are timed against. For what is known without a
    #: timing: starting a program takes longer with each
    timed: Condition = always
    #: multiplies eager's errors in the bounds by which it is judged (`core.common.numerics.judge`); above 1 for what
    #: gives accuracy up for speed, which runs only where a user asks for it by name
    slack: float = 1.0
    #: declares that a row of its results (a token of attention) is the same in every bit whatever other rows are in the
    #: call and however many: programs of `deterministic="batch"` run no others. Its condition must not depend on the
    #: number of rows. The conformance suite tests it
    batch_invariant: bool = False
    #: runs only where a user asks for it by name, or for `deterministic="batch"`: another is faster
    on_request: bool = False

    def __post_init__(self) -> None:
        # A node of a graph needs a function with a name. What `custom_op` gives has none, but knows the op it made.
        overload = getattr(self.fn, "_opoverload", None)
        if overload is not None:
            object.__setattr__(self, "fn", overload)
