"""Kernels of one output element per input element: arithmetic, comparison, logic, selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simulator.formulas import both, in_place, stored
from simulator.marshal import kernel

Function = Callable[..., Tensor]

_UNARY: dict[str, Function] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Asin": torch.asin,
    "Atan": torch.atan,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Erfc": torch.erfc,
    "Exp": torch.exp,
    "Exp2": torch.exp2,
    "Expm1": torch.expm1,
    "Floor": torch.floor,
    "Frac": torch.frac,
    "IsFinite": torch.isfinite,
    "Log": torch.log,
    "Log10": torch.log10,
    "Log1p": torch.log1p,
    "Log2": torch.log2,
    "LogicalNot": torch.logical_not,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Round": torch.round,
    "Rsqrt": torch.rsqrt,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Signbit": torch.signbit,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Trunc": torch.trunc,
}
_UNARY_OUT: dict[str, Function] = {"IsInf": torch.isinf, "IsNegInf": torch.isneginf, "IsPosInf": torch.isposinf}

_BINARY: dict[str, Function] = {
    "Atan2": torch.atan2,
    "BitwiseAndTensor": torch.bitwise_and,
    "BitwiseOrTensor": torch.bitwise_or,
    "BitwiseXorTensor": torch.bitwise_xor,
    "Div": torch.true_divide,
    "EqTensor": torch.eq,
    "FloorDivide": torch.floor_divide,
    "FmodTensor": torch.fmod,
    "GeTensor": torch.ge,
    "GtTensor": torch.gt,
    "LeTensor": torch.le,
    "LeftShift": torch.bitwise_left_shift,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "LogicalXor": torch.logical_xor,
    "LtTensor": torch.lt,
    "Mul": torch.mul,
    "NeTensor": torch.ne,
    "PowTensorTensor": torch.pow,
    "RemainderTensorTensor": torch.remainder,
    "RightShift": torch.bitwise_right_shift,
}
_BINARY_OUT: dict[str, Function] = {
    "ClampMinTensor": torch.maximum,
    "ClampMaxTensor": torch.minimum,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
}
_WITH_SCALAR: dict[str, Function] = {
    "BitwiseAndScalar": torch.bitwise_and,
    "BitwiseOrScalar": torch.bitwise_or,
    "BitwiseXorScalar": torch.bitwise_xor,
    "Divs": torch.true_divide,
    "EqScalar": torch.eq,
    "FloorDivides": torch.floor_divide,
    "FmodScalar": torch.fmod,
    "GeScalar": torch.ge,
    "GtScalar": torch.gt,
    "LeScalar": torch.le,
    "LeftShifts": torch.bitwise_left_shift,
    "LessScalar": torch.lt,
    "LtScalar": torch.lt,
    "Muls": torch.mul,
    "NeScalar": torch.ne,
    "PowTensorScalar": torch.pow,
    "RemainderTensorScalar": torch.remainder,
    "RightShifts": torch.bitwise_right_shift,
}
_WITH_SCALAR_OUT: dict[str, Function] = {"ClampMax": torch.clamp_max, "ClampMin": torch.clamp_min}
_SCALAR_FIRST: dict[str, Function] = {"RemainderScalarTensor": torch.remainder, "PowScalarTensor": torch.pow}

for _spec, _functions in (("TT", _UNARY), ("TTT", _BINARY), ("TST", _WITH_SCALAR)):
    both({name: (_spec, function) for name, function in _functions.items()})
for _spec, _functions in (
    ("TT", _UNARY_OUT),
    ("TTT", _BINARY_OUT),
    ("TST", _WITH_SCALAR_OUT),
    ("STT", _SCALAR_FIRST),
):
    stored({name: (_spec, function) for name, function in _functions.items()})


def _plus(x: Any, y: Any, alpha: Any) -> Tensor:
    """Return x + alpha * y; whole numbers stay whole."""
    kinds = {y.dtype if isinstance(y, Tensor) else type(y), x.dtype if isinstance(x, Tensor) else type(x)}
    exact = not any(kind is float or (isinstance(kind, torch.dtype) and kind.is_floating_point) for kind in kinds)
    factor = int(alpha) if exact and not isinstance(alpha, bool) else alpha
    return torch.add(x, y) if factor == 1 else torch.add(x, y, alpha=factor)


def _minus(x: Any, y: Any, alpha: Any) -> Tensor:
    return torch.sub(x, y) if alpha == 1 else _plus(x, y, -alpha)


def _divided(x: Tensor, y: Any, mode: int) -> Tensor:
    """Divide. mode 0: without rounding, 1: towards zero, 2: down."""
    return torch.div(x, y, rounding_mode={0: None, 1: "trunc", 2: "floor"}[mode])


both(
    {
        "Add": ("TTST", _plus),
        "Adds": ("TSST", _plus),
        "Sub": ("TTST", _minus),
        "Subs": ("TSST", _minus),
        "DivMod": ("TTiT", _divided),
        "DivMods": ("TSiT", _divided),
        "Addcmul": ("TTTST", lambda x, y, z, value: torch.addcmul(x, y, z, value=value)),
        "Addcdiv": ("TTTST", lambda x, y, z, value: torch.addcdiv(x, y, z, value=value)),
    }
)
stored(
    {
        "AddV3": ("STST", lambda x, y, alpha: _plus(torch.tensor(x, dtype=y.dtype), y, alpha)),
        "Rsub": ("TTST", lambda x, y, alpha: torch.rsub(x, y, alpha=alpha)),
        "Rsubs": ("TSST", lambda x, y, alpha: torch.rsub(x, y, alpha=alpha)),
        "Lerp": ("TTTT", torch.lerp),
        "Lerps": ("TTST", torch.lerp),
        "SWhere": ("TTTT", lambda condition, x, y: torch.where(condition.bool(), x, y)),
        "Clamp": ("TSST", torch.clamp),
        "ClampTensor": ("TTTT", torch.clamp),
        "RoundDecimals": ("TIT", lambda x, decimals: torch.round(x, decimals=decimals)),
        "IsClose": ("TTDDbT", torch.isclose),
        "Equal": ("TTT", lambda x, y: torch.tensor(x.shape == y.shape and bool((x == y).all()))),
        "NanToNum": ("TFFFT", torch.nan_to_num),
    }
)
in_place(
    {
        "MaskedFillScalar": ("TTS", lambda x, mask, value: x.masked_fill(mask.bool(), value)),
        "MaskedFillTensor": ("TTT", lambda x, mask, value: torch.where(mask.bool(), value.to(x.dtype), x)),
    }
)


@kernel("aclnnForeachAddScalarV2", "LSL")
def _add_scalar_to_each(tensors: list[Tensor], scalar: Any, outs: list[Tensor]) -> None:
    for x, out in zip(tensors, outs, strict=True):
        out.copy_(_plus(x, scalar, 1))
