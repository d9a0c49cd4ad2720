"""Recipes of fake results: the same call in another layer gets its fake result from the recipe and is not run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from core.common.passes.values.fresh import fresh, num_elements, reread
from core.common.passes.values.layouts import flat, memory
from core.common.passes.values.sizes import expression

_OWN = -1  # stands for "no argument": the result has memory of its own
_PLAIN = (int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a result. base: index of the argument whose memory it views, or _OWN. like: the tensor first made.

    offset: in the memory of the argument. count: the elements of its own memory, None where unknown.
    """

    base: int
    like: FakeTensor
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any = 0
    count: Any = None

    def make(self, leaves: Sequence[Any]) -> FakeTensor:
        if self.base == _OWN:
            return fresh(self.like, self.shape, self.stride, self.count)
        return reread(leaves[self.base], self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a call's result from arguments of the same `call_key`."""

    form: Any

    def make(self, leaves: Sequence[Any]) -> Any:
        """Return the result for these arguments, as `flat` gives them: views of them, or memory of its own."""
        return _make(self.form, leaves)


def _make(form: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(form, (tuple, list)):
        return type(form)(_make(item, leaves) for item in form)
    return form.make(leaves) if isinstance(form, _Tensor) else form


def recipe_of(value: Any, leaves: Sequence[Any]) -> Recipe | None:
    """Return how a result was made from its arguments; None where it must be computed anew each time."""
    memories = [memory(leaf) if isinstance(leaf, FakeTensor) else None for leaf in leaves]
    own = [memory(leaf) for leaf in flat(value) if isinstance(leaf, FakeTensor) and memory(leaf) not in memories]
    if len(set(own)) < len(own):
        return None
    try:
        return Recipe(_form(value, leaves, memories))
    except _Unknown:
        return None


class _Unknown(Exception):
    """A result that can't be made by hand."""


def _form(value: Any, leaves: Sequence[Any], memories: Sequence[int | None]) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_form(item, leaves, memories) for item in value)
    if type(value) in _PLAIN:
        return value
    # Sizes that depend on data are new ones each time.
    if type(value) is not FakeTensor or value.layout != torch.strided or free_unbacked_symbols(value):
        raise _Unknown
    offset, layout = value.storage_offset(), (tuple(value.shape), tuple(value.stride()))
    if memory(value) not in memories:
        if not _is_zero(offset) or value.is_conj() or value.is_neg():
            raise _Unknown
        return _Tensor(_OWN, value, *layout, count=num_elements(value))
    base = memories.index(memory(value))
    same = (value.dtype, value.is_conj(), value.is_neg())
    if same != (leaves[base].dtype, leaves[base].is_conj(), leaves[base].is_neg()):
        raise _Unknown
    return _Tensor(base, value, *layout, offset)


def _is_zero(offset: Any) -> bool:
    return bool(expression(offset) == 0)


def call_key(target: Any, args: Any, kwargs: Mapping[str, Any], leaves: Sequence[Any]) -> tuple[object, ...]:
    """Return a key that calls must share for one recipe to serve them. leaves: `flat` of the arguments."""
    memories = [memory(leaf) if isinstance(leaf, FakeTensor) else None for leaf in leaves]
    shared = tuple(map(memories.index, memories))  # which arguments share memory
    return (target, _nesting(args), *((name, _nesting(kwargs[name])) for name in kwargs), shared, signatures(leaves))


def _nesting(value: Any) -> object:
    """Return how arguments are nested: `x[0, 1]` and `x[[0, 1]]` hold the same leaves."""
    return (type(value), *map(_nesting, value)) if isinstance(value, (tuple, list)) else None


def signatures(leaves: Sequence[Any]) -> tuple[object, ...]:
    """Return what a call can see of a value: dtype, device and layout of a tensor, all of any other value."""
    return tuple(map(_signature, leaves))


def _signature(value: Any) -> object:
    if isinstance(value, Tensor):
        if type(value) is not FakeTensor or value.layout != torch.strided:
            return object()  # never equal to another value
        kind = (value.dtype, value.device, value.is_conj(), value.is_neg())
        return kind, expressions(value.shape), expressions(value.stride()), expression(value.storage_offset())
    if isinstance(value, (SymInt, SymFloat, SymBool)):
        return type(value), expression(value)
    if isinstance(value, slice):
        return slice, *signatures((value.start, value.stop, value.step))
    return object() if isinstance(value, dict) else (type(value), repr(value))


def expressions(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Return a hashable form of sizes or strides, without asking a symbol for its value."""
    return tuple(size if type(size) is int else expression(size) for size in sizes)
