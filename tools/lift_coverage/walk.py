"""Walks over what was observed of a run: from a value to the op that made it, and to the modules around that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lift_coverage.observe import ModuleCall, Observation, Op

# No value changes in these, or only by rounding; the tensor looked through is the first input.
VIEWS = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "_reshape_copy", "expand", "slice", "select", "transpose", "t", "permute"),
        *("unsqueeze", "squeeze", "clone", "alias", "detach", "_to_copy", "contiguous", "native_dropout", "repeat"),
        *("split", "split_with_sizes", "chunk", "unbind", "index", "index_select", "gather"),
    }
)
CASTS = frozenset({"_to_copy", "detach", "alias", "clone"})


class Walk:
    """An observed run, with the users of each value."""

    def __init__(self, seen: Observation) -> None:
        self.seen = seen
        self.own = seen.own_ops()
        self.users: dict[int, list[Op]] = {}
        for op in seen.ops:
            for value in op.inputs:
                self.users.setdefault(value, []).append(op)

    def _owner(self, op: Op, wanted: re.Pattern[str], unwanted: re.Pattern[str] | None = None) -> ModuleCall | None:
        """Return the innermost module call around an op whose class is wanted, unless an unwanted one is nearer."""
        for call in self.seen.ancestors(op.call):
            if unwanted is not None and unwanted.search(call.class_name):
                return None
            if wanted.search(call.class_name):
                return call
        return None

    def _made(self, value: int, through: frozenset[str]) -> Op | None:
        made = self.seen.producer(value)
        while made is not None and made.name in through and made.inputs:
            made = self.seen.producer(made.inputs[0])
        return made

    def source(self, value: int) -> int:
        """Return the value that views and casts lead back to."""
        made = self.seen.producer(value)
        while made is not None and made.name in VIEWS and made.inputs:
            value = made.inputs[0]
            made = self.seen.producer(value)
        return value

    def _root(self, value: int) -> int:
        made = self.seen.producer(value)
        while made is not None and made.name in CASTS and made.inputs:
            value = made.inputs[0]
            made = self.seen.producer(value)
        return value

    def _is(self, value: int, name: str) -> bool:
        made = self._made(value, VIEWS)
        return made is not None and made.name == name

    def _uses(self, op: Op, maker: Op) -> bool:
        return any(self._made(value, VIEWS) is maker for value in op.inputs)

    def _chain(self, op: Op, depth: int) -> Iterator[Op]:
        """Yield the ops above an op, itself first."""
        yield op
        for value in op.inputs if depth else ():
            made = self.seen.producer(value)
            if made is not None and made.call == op.call:
                yield from self._chain(made, depth - 1)

    def _above(self, op: Op, depth: int) -> set[str]:
        return {above.name for above in self._chain(op, depth)}

    def _names(self, value: int, depth: int) -> set[str]:
        made = self.seen.producer(value)
        return self._above(made, depth) if made is not None else set()

    def _form(self, ops: Sequence[Op]) -> str:
        return " ".join(op.name for op in ops if op.name not in ("detach", "alias"))
