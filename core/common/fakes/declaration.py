"""The declaration of a fake kernel for a foreign op, and the outcome of its registration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from core.common.fakes.rules import Rule

if TYPE_CHECKING:
    from core.common.ops.declaration import Sample

ShapeRule = Callable[..., Any]
"""Takes the op's arguments as fake tensors and returns fake outputs of the right shape, dtype, stride and device.

A `Rule` made of data, which is checked against the op's schema and printed, or any function.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeOp:
    """A fake kernel for one foreign op."""

    #: qualified name, `library::name`
    op: str
    #: computes the results' metadata; None for an op that has a fake already, of which only `also_writes` is declared
    rule: ShapeRule | None
    #: device -> calls, arguments by their names in the schema; the conformance suite and `core fakes --check` compare
    #: the fake with the real op on them
    samples: Callable[[torch.device], Iterable[Sample]] | None = None
    #: the arguments that the op writes, checked against the schema; None takes them from the schema
    writes: tuple[str, ...] | None = None
    #: arguments that the kernel is known to write, whether its schema declares them or not; passes and verification
    #: rely on this, even if the op already has a fake
    also_writes: tuple[str, ...] = ()
    #: whether the library changes the op's schema from version to version: a rule that does not fit the schema is then
    #: left out with the reason, not refused as a mistake
    changes: bool = False
    #: whether results are uninitialised memory (workspaces, buffers for later calls), in which two calls may differ
    unwritten: bool = False

    def __str__(self) -> str:
        named = "its own fake" if self.rule is None else getattr(self.rule, "__name__", repr(self.rule))
        rule = str(self.rule) if isinstance(self.rule, Rule) else named
        written = ", ".join(dict.fromkeys((*(self.writes or ()), *self.also_writes)))
        return f"{self.op} -> {rule}{f'; writes {written}' if written else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeResult:
    """The outcome of registering a declared fake."""

    #: whether it was registered
    applied: bool
    #: why, or why not, in one line
    reason: str
