"""Sizes of results as data: integers among the arguments, dimensions of tensors, and arithmetic on these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Key = str | int
"""An argument, by its name in the op's schema or by its position."""
Need = Literal["tensor", "int", "bool", "dtype"]
"""How a rule uses an argument. "dtype": the argument is a dtype, or a tensor whose dtype counts."""
Values = Mapping[Key, Any]
"""The arguments of a call, each by name and by position."""

_STRENGTH = {"+": 0, "-": 0, "*": 1, "//": 1}


class Size:
    """An integer that a call of an op determines; `+`, `-`, `*` and `//` with integers and others of its kind work."""

    def of(self, values: Values) -> Any:
        """Return the number for these arguments; a symbolic integer where sizes are symbolic."""
        raise NotImplementedError

    def needs(self) -> Iterator[tuple[Key, Need]]:
        """Yield the arguments that the size reads, and how it uses each."""
        raise NotImplementedError

    def __add__(self, other: Size | int) -> Size:
        return _Combined("+", self, sized(other))

    def __radd__(self, other: int) -> Size:
        return _Combined("+", sized(other), self)

    def __sub__(self, other: Size | int) -> Size:
        return _Combined("-", self, sized(other))

    def __rsub__(self, other: int) -> Size:
        return _Combined("-", sized(other), self)

    def __mul__(self, other: Size | int) -> Size:
        return _Combined("*", self, sized(other))

    def __rmul__(self, other: int) -> Size:
        return _Combined("*", sized(other), self)

    def __floordiv__(self, other: Size | int) -> Size:
        return _Combined("//", self, sized(other))


@dataclass(frozen=True, slots=True)
class _Number(Size):
    value: int

    def of(self, values: Values) -> Any:
        return self.value

    def needs(self) -> Iterator[tuple[Key, Need]]:
        yield from ()

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class _Integer(Size):
    argument: Key

    def of(self, values: Values) -> Any:
        return values[self.argument]

    def needs(self) -> Iterator[tuple[Key, Need]]:
        yield self.argument, "int"

    def __str__(self) -> str:
        return shown(self.argument)


@dataclass(frozen=True, slots=True)
class _Dimension(Size):
    argument: Key
    dim: int

    def of(self, values: Values) -> Any:
        return values[self.argument].shape[self.dim]

    def needs(self) -> Iterator[tuple[Key, Need]]:
        yield self.argument, "tensor"

    def __str__(self) -> str:
        return f"{shown(self.argument)}.shape[{self.dim}]"


@dataclass(frozen=True, slots=True)
class _Combined(Size):
    sign: str
    left: Size
    right: Size

    def of(self, values: Values) -> Any:
        left, right = self.left.of(values), self.right.of(values)
        if self.sign == "+":
            return left + right
        if self.sign == "-":
            return left - right
        return left * right if self.sign == "*" else left // right

    def needs(self) -> Iterator[tuple[Key, Need]]:
        yield from self.left.needs()
        yield from self.right.needs()

    def __str__(self) -> str:
        def part(side: Size, *, closer: bool) -> str:
            bare = not isinstance(side, _Combined) or _STRENGTH[side.sign] >= _STRENGTH[self.sign] + closer
            return str(side) if bare else f"({side})"

        return f"{part(self.left, closer=False)} {self.sign} {part(self.right, closer=True)}"


@dataclass(frozen=True, slots=True)
class _Computed(Size):
    function: Callable[..., Any]
    arguments: tuple[tuple[Key, Need], ...]

    def of(self, values: Values) -> Any:
        return self.function(*(values[key] for key, _ in self.arguments))

    def needs(self) -> Iterator[tuple[Key, Need]]:
        yield from self.arguments

    def __str__(self) -> str:
        return f"{self.function.__name__}({', '.join(shown(key) for key, _ in self.arguments)})"


def arg(argument: Key) -> Size:
    """Return the size that an integer argument states."""
    return _Integer(argument)


def size(argument: Key, dim: int) -> Size:
    """Return a dimension of a tensor argument; dim counts from 0, or from the end if negative."""
    return _Dimension(argument, dim)


def computed(function: Callable[..., Any], *arguments: tuple[Key, Need]) -> Size:
    """Return a size that a function computes from some arguments, for what arithmetic can't express.

    arguments: the name and use of each. The size prints as the function's name.
    """
    return _Computed(function, arguments)


def sized(value: Size | int) -> Size:
    """Return a size, also for a plain integer."""
    return value if isinstance(value, Size) else _Number(value)


def shown(argument: Key) -> str:
    """Return how an argument is printed: its name, or its position in words."""
    return argument if isinstance(argument, str) else f"argument {argument}"
