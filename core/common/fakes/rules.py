"""Shape rules as data: each result of an op, described by the op's arguments.

A rule prints as its description and can be checked against the op's schema before any call
(`core.common.fakes.schema`). Where data do not suffice, a plain function over fake tensors serves as rule too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.common.fakes.sizes import Key, Need, Size, Values, shown, size, sized

Dtype = torch.dtype | Key | None
"""A fixed dtype, that of an argument (a dtype or a tensor), or None for that of the tensor the result is like."""


class Output:
    """One result of an op, from its arguments and the results before it."""

    def make(self, values: Values, earlier: Sequence[Tensor]) -> Tensor:
        """Return the result for arguments that are fake tensors."""
        raise NotImplementedError

    def needs(self) -> Iterator[tuple[Key, Need]]:
        """Yield the arguments that the rule reads, and how it uses each (a tensor, an int, a dtype)."""
        raise NotImplementedError

    @property
    def returns(self) -> Key | None:
        """The argument that is returned as the result; None for a result in new memory (or in another result's)."""
        return None


@dataclass(frozen=True, slots=True)
class _Like(Output):
    argument: Key
    dtype: Dtype

    def make(self, values: Values, earlier: Sequence[Tensor]) -> Tensor:
        return torch.empty_like(values[self.argument], dtype=_dtype(self.dtype, values))

    def needs(self) -> Iterator[tuple[Key, Need]]:
        yield self.argument, "tensor"
        yield from _needs_dtype(self.dtype)

    def __str__(self) -> str:
        return f"like {shown(self.argument)}{_shown_dtype(self.dtype)}"


@dataclass(frozen=True, slots=True)
class _New(Output):
    leading: Key | None
    sizes: tuple[Size, ...]
    like: Key
    dtype: Dtype

    def make(self, values: Values, earlier: Sequence[Tensor]) -> Tensor:
        front = () if self.leading is None else tuple(values[self.leading].shape[:-1])
        shape = (*front, *(each.of(values) for each in self.sizes))
        made: Tensor = values[self.like].new_empty(shape, dtype=_dtype(self.dtype, values))
        return made

    def needs(self) -> Iterator[tuple[Key, Need]]:
        yield self.like, "tensor"
        if self.leading is not None:
            yield self.leading, "tensor"
        for each in self.sizes:
            yield from each.needs()
        yield from _needs_dtype(self.dtype)

    def __str__(self) -> str:
        front = [] if self.leading is None else [f"*{shown(self.leading)}.shape[:-1]"]
        dtype = _shown_dtype(self.dtype) or f" of {shown(self.like)}'s dtype"
        return f"new ({', '.join([*front, *map(str, self.sizes)])}){dtype}"


@dataclass(frozen=True, slots=True)
class _Argument(Output):
    argument: Key

    def make(self, values: Values, earlier: Sequence[Tensor]) -> Tensor:
        given: Tensor = values[self.argument]
        return given

    def needs(self) -> Iterator[tuple[Key, Need]]:
        yield self.argument, "tensor"

    @property
    def returns(self) -> Key | None:
        return self.argument

    def __str__(self) -> str:
        return f"{shown(self.argument)} itself"


@dataclass(frozen=True, slots=True)
class _Part(Output):
    result: int
    last: Size

    def make(self, values: Values, earlier: Sequence[Tensor]) -> Tensor:
        return earlier[self.result].narrow(-1, 0, self.last.of(values))

    def needs(self) -> Iterator[tuple[Key, Need]]:
        yield from self.last.needs()

    def __str__(self) -> str:
        return f"the first {self.last} columns of result {self.result}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A shape rule made of data: one output for each result, in order; none for an op that only writes.

    Calling it with an op's arguments, fake tensors among them, returns what the op does: None, a tensor or a tuple.
    """

    outputs: tuple[Output, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values: dict[Key, Any] = dict(enumerate(args))
        values.update(kwargs)
        return self.on(values)

    def on(self, values: Values) -> Any:
        """Return the results for arguments by name and position."""
        made: list[Tensor] = []
        for output in self.outputs:
            made.append(output.make(values, made))
        if len(made) < 2:
            return made[0] if made else None
        return tuple(made)

    def needs(self) -> Iterator[tuple[Key, Need]]:
        """Yield the arguments that the rule reads, and how it uses each (a tensor, an int, a dtype)."""
        for output in self.outputs:
            yield from output.needs()

    def __str__(self) -> str:
        return "; ".join(map(str, self.outputs)) or "nothing"


nothing = Rule(())
"""The rule of ops that only write into their arguments."""


def like(argument: Key = 0, *, dtype: Dtype = None) -> Rule:
    """Return the rule "one result with the metadata of this argument", with `torch.empty_like`'s strides."""
    return Rule((_Like(argument, dtype),))


def new(*sizes: Size | int, like: Key = 0, dtype: Dtype = None) -> Rule:
    """Return the rule "one contiguous result of these sizes", with dtype and device of the argument it is `like`."""
    return Rule((_New(None, tuple(map(sized, sizes)), like, dtype),))


def with_last(argument: Key, last: Size | int, *, dtype: Dtype = None) -> Rule:
    """Return the rule "one contiguous result with this argument's sizes but for the last" (linears)."""
    return Rule((_New(argument, (sized(last),), argument, dtype),))


def half_last(argument: Key = 0) -> Rule:
    """Return the rule "like this argument, contiguous, with half its last dimension" (gated activations)."""
    return with_last(argument, size(argument, -1) // 2)


def argument(argument: Key) -> Rule:
    """Return the rule "the result is this argument itself", which the op's schema must say too."""
    return Rule((_Argument(argument),))


def part(result: int, last: Size | int) -> Rule:
    """Return the rule "the leading columns of an earlier result", whose memory it shares. result: the number of the
    earlier result."""
    return Rule((_Part(result, sized(last)),))


def results(*rules: Rule) -> Rule:
    """Return the rule of an op with several results, in order."""
    return Rule(tuple(output for rule in rules for output in rule.outputs))


def _dtype(dtype: Dtype, values: Values) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    given = values[dtype]
    found: torch.dtype = given.dtype if isinstance(given, Tensor) else given
    return found


def _needs_dtype(dtype: Dtype) -> Iterator[tuple[Key, Need]]:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        yield dtype, "dtype"


def _shown_dtype(dtype: Dtype) -> str:
    if dtype is None:
        return ""
    named = isinstance(dtype, torch.dtype)
    return f" of dtype {str(dtype).removeprefix('torch.') if named else shown(dtype)}"  # type: ignore[arg-type]
