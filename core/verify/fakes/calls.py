"""Calls of an op without declared samples, guessed from its schema; a kernel takes some of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import Argument, FunctionSchema

from core.verify.fakes.parity import described

Shape = tuple[int, ...]

# What the n-th tensor of a call is shaped like. Sizes differ, so that dimensions taken for each other show; the last
# ones are even, for ops that halve them.
_SHAPES: tuple[Callable[[int], Shape], ...] = (
    lambda n: (5, 8),
    lambda n: (5, 8) if n == 0 else (8,),
    lambda n: ((5, 8), (6, 8))[n] if n < 2 else (6,),
    lambda n: ((5, 8), (8, 6))[n] if n < 2 else (6,),
    lambda n: (5, 2, 8),
    lambda n: (5, 2, 8) if n == 0 else (8,),
    lambda n: (8,),
    lambda n: (3, 5, 2, 8),
    lambda n: (5, 8) if n == 0 else (5,),
    lambda n: ((3, 5, 8), (3, 8, 6))[n] if n < 2 else (3, 5, 6),
    lambda n: (),
)
_DTYPES: tuple[Callable[[int], torch.dtype], ...] = (
    lambda n: torch.float32,
    lambda n: torch.bfloat16,
    lambda n: torch.float32 if n == 0 else torch.int64,
    lambda n: torch.int64 if n == 0 else torch.float32,
    lambda n: torch.bfloat16 if n == 0 else torch.float32,
    lambda n: torch.int64,
    lambda n: torch.int32,
    lambda n: torch.float16,
    lambda n: torch.bool,
)
_NUMBERS: tuple[tuple[int, float, bool], ...] = ((2, 0.5, False), (1, 1.0, True), (0, 2.0, False))
_DIMS = frozenset({"dim", "axis"})


class NoValue(Exception):
    """An argument is of a kind that no value can be guessed for."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to fill in a call."""

    #: The shape of the n-th tensor.
    shape: Callable[[int], Shape]
    #: The dtype of the n-th tensor.
    dtype: Callable[[int], torch.dtype]
    strided: bool
    numbers: tuple[int, float, bool]
    #: Optional arguments, and those with defaults, get values of their own.
    given: bool


def guessed_calls(schema: FunctionSchema, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield calls by argument name, always the same: plain ones first, then the rest of the combinations, shuffled.

    Raises `NoValue` if an argument that has no default is of a kind that no value can be guessed for.
    """
    plans = [
        _Plan(shape, dtype, strided, numbers, given)
        for dtype, strided, numbers, given, shape in itertools.product(
            _DTYPES, (False, True), _NUMBERS, (False, True), _SHAPES
        )
    ]
    rest = plans[len(_SHAPES) :]
    random.Random(0).shuffle(rest)
    seen: set[str] = set()
    for plan in (*plans[: len(_SHAPES)], *rest):
        call = _fill(schema, plan, device)
        # Without numbers or options among the arguments, many combinations are the same call.
        kind = call_text(call)
        if kind not in seen:
            seen.add(kind)
            yield call


def call_text(call: dict[str, Any]) -> str:
    """Return a call in one line: kinds of tensors and values of all else."""
    return ", ".join(f"{name}={described(value)}" for name, value in call.items())


def _fill(schema: FunctionSchema, plan: _Plan, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tensors = itertools.count()

    def tensor() -> Tensor:
        number = next(tensors)
        return _tensor(plan.shape(number), plan.dtype(number), plan.strided, generator).to(device)

    call: dict[str, Any] = {}
    for argument in schema.arguments:
        kind = str(argument.real_type)
        if argument.has_default_value() and not plan.given:
            call[argument.name] = argument.default_value
        elif kind.startswith("Optional[") and not plan.given:
            call[argument.name] = None
        else:
            call[argument.name] = _value(argument, kind, plan.numbers, tensor, device)
    return call


def _value(
    argument: Argument, kind: str, numbers: tuple[int, float, bool], tensor: Callable[[], Tensor], device: torch.device
) -> Any:
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    integer = -1 if argument.name in _DIMS else numbers[0]
    made: dict[str, Callable[[], Any]] = {
        "Tensor": tensor,
        "List[Tensor]": lambda: [tensor(), tensor()],
        "int": lambda: integer,
        "SymInt": lambda: integer,
        "List[int]": lambda: [max(1, numbers[0])] * 2,
        "List[SymInt]": lambda: [max(1, numbers[0])] * 2,
        "float": lambda: numbers[1],
        "List[float]": lambda: [numbers[1]] * 2,
        "number": lambda: numbers[0],
        "bool": lambda: numbers[2],
        "ScalarType": lambda: torch.float32,
        "Device": lambda: device,
    }
    if kind in made:
        return made[kind]()
    if argument.has_default_value():
        return argument.default_value
    if str(argument.real_type).startswith("Optional["):
        return None
    raise NoValue(f"no value can be guessed for argument {argument.name!r} of type {kind}")


def _tensor(shape: Shape, dtype: torch.dtype, strided: bool, generator: torch.Generator) -> Tensor:
    wide = (*shape[:-1], 2 * shape[-1]) if strided and shape else shape
    if dtype.is_floating_point:
        made = torch.randn(wide, generator=generator).to(dtype)
    else:
        made = torch.randint(0, 2, wide, generator=generator).to(dtype)  # small enough to index with
    return made[..., : shape[-1]] if strided and shape else made
