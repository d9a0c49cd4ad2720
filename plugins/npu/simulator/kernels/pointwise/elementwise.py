"""Kernels of one output element per input element: arithmetic, comparison, logic, selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simulator.marshal import kernel

Unary = Callable[[Tensor], Tensor]
Binary = Callable[[Any, Any], Tensor]

_UNARY: dict[str, Unary] = {
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
_UNARY_OUT: dict[str, Unary] = {"IsInf": torch.isinf, "IsNegInf": torch.isneginf, "IsPosInf": torch.isposinf}

_BINARY: dict[str, Binary] = {
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
_BINARY_OUT: dict[str, Binary] = {
    "ClampMinTensor": torch.maximum,
    "ClampMaxTensor": torch.minimum,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
}
_WITH_SCALAR: dict[str, Binary] = {
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
_WITH_SCALAR_OUT: dict[str, Binary] = {
    "ClampMax": torch.clamp_max,
    "ClampMin": torch.clamp_min,
    "RemainderScalarTensor": torch.remainder,
    "PowScalarTensor": torch.pow,
}
_SCALAR_FIRST = ("RemainderScalarTensor", "PowScalarTensor")


def _register_unary(name: str, function: Unary, in_place: bool) -> None:
    @kernel(f"aclnn{name}", "TT")
    def out_of_place(x: Tensor, out: Tensor) -> None:
        out.copy_(function(x))

    if in_place:

        @kernel(f"aclnnInplace{name}", "T")
        def inside(x: Tensor) -> None:
            x.copy_(function(x))


def _register_binary(name: str, second: str, function: Binary, in_place: bool) -> None:
    @kernel(f"aclnn{name}", f"ST{'T'}" if name in _SCALAR_FIRST else f"T{second}T")
    def out_of_place(x: Any, y: Any, out: Tensor) -> None:
        out.copy_(function(x, y))

    if in_place:

        @kernel(f"aclnnInplace{name}", f"T{second}")
        def inside(x: Tensor, y: Any) -> None:
            x.copy_(function(x, y))


for _name, _function in (*_UNARY.items(), *_UNARY_OUT.items()):
    _register_unary(_name, _function, _name in _UNARY)
for _name, _binary in (*_BINARY.items(), *_BINARY_OUT.items()):
    _register_binary(_name, "T", _binary, _name in _BINARY)
for _name, _binary in (*_WITH_SCALAR.items(), *_WITH_SCALAR_OUT.items()):
    _register_binary(_name, "S", _binary, _name in _WITH_SCALAR)


# ---- sums with a factor: x + alpha * y


def _plus(x: Any, y: Any, alpha: Any) -> Tensor:
    kinds = {y.dtype if isinstance(y, Tensor) else type(y), x.dtype if isinstance(x, Tensor) else type(x)}
    exact = not any(kind is float or (isinstance(kind, torch.dtype) and kind.is_floating_point) for kind in kinds)
    factor = int(alpha) if exact and not isinstance(alpha, bool) else alpha
    return torch.add(x, y) if factor == 1 else torch.add(x, y, alpha=factor)


def _minus(x: Any, y: Any, alpha: Any) -> Tensor:
    return torch.sub(x, y) if alpha == 1 else _plus(x, y, -alpha)


def _register_sum(name: str, second: str, function: Callable[[Any, Any, Any], Tensor]) -> None:
    @kernel(f"aclnn{name}", f"T{second}ST")
    def out_of_place(x: Tensor, y: Any, alpha: Any, out: Tensor) -> None:
        out.copy_(function(x, y, alpha))

    @kernel(f"aclnnInplace{name}", f"T{second}S")
    def inside(x: Tensor, y: Any, alpha: Any) -> None:
        x.copy_(function(x, y, alpha))


_register_sum("Add", "T", _plus)
_register_sum("Adds", "S", _plus)
_register_sum("Sub", "T", _minus)
_register_sum("Subs", "S", _minus)


@kernel("aclnnAddV3", "STST")
def _add_scalar_first(x: Any, y: Tensor, alpha: Any, out: Tensor) -> None:
    out.copy_(_plus(torch.tensor(x, dtype=y.dtype), y, alpha))


@kernel("aclnnForeachAddScalarV2", "LSL")
def _add_scalar_to_each(tensors: list[Tensor], scalar: Any, outs: list[Tensor]) -> None:
    for x, out in zip(tensors, outs, strict=True):
        out.copy_(_plus(x, scalar, 1))


@kernel("aclnnRsubs", "TSST")
def _reversed_minus(x: Tensor, y: Any, alpha: Any, out: Tensor) -> None:
    out.copy_(torch.rsub(x, y, alpha=alpha))


@kernel("aclnnRsub", "TTST")
def _reversed_minus_tensor(x: Tensor, y: Tensor, alpha: Any, out: Tensor) -> None:
    out.copy_(torch.rsub(x, y, alpha=alpha))


# ---- division with rounding; mode 0: none, 1: towards zero, 2: down

_ROUNDING = {0: None, 1: "trunc", 2: "floor"}


@kernel("aclnnDivMod", "TTiT")
def _divide(x: Tensor, y: Tensor, mode: int, out: Tensor) -> None:
    out.copy_(torch.div(x, y, rounding_mode=_ROUNDING[mode]))


@kernel("aclnnDivMods", "TSiT")
def _divide_by_scalar(x: Tensor, y: Any, mode: int, out: Tensor) -> None:
    out.copy_(torch.div(x, y, rounding_mode=_ROUNDING[mode]))


@kernel("aclnnInplaceDivMod", "TTi")
def _divide_in_place(x: Tensor, y: Tensor, mode: int) -> None:
    x.copy_(torch.div(x, y, rounding_mode=_ROUNDING[mode]))


@kernel("aclnnInplaceDivMods", "TSi")
def _divide_by_scalar_in_place(x: Tensor, y: Any, mode: int) -> None:
    x.copy_(torch.div(x, y, rounding_mode=_ROUNDING[mode]))


# ---- three operands


@kernel("aclnnAddcmul", "TTTST")
def _addcmul(x: Tensor, y: Tensor, z: Tensor, value: Any, out: Tensor) -> None:
    out.copy_(torch.addcmul(x, y, z, value=value))


@kernel("aclnnInplaceAddcmul", "TTTS")
def _addcmul_in_place(x: Tensor, y: Tensor, z: Tensor, value: Any) -> None:
    x.addcmul_(y, z, value=value)


@kernel("aclnnAddcdiv", "TTTST")
def _addcdiv(x: Tensor, y: Tensor, z: Tensor, value: Any, out: Tensor) -> None:
    out.copy_(torch.addcdiv(x, y, z, value=value))


@kernel("aclnnInplaceAddcdiv", "TTTS")
def _addcdiv_in_place(x: Tensor, y: Tensor, z: Tensor, value: Any) -> None:
    x.addcdiv_(y, z, value=value)


@kernel("aclnnLerp", "TTTT")
def _lerp(x: Tensor, y: Tensor, weight: Tensor, out: Tensor) -> None:
    out.copy_(torch.lerp(x, y, weight))


@kernel("aclnnLerps", "TTST")
def _lerp_by_scalar(x: Tensor, y: Tensor, weight: Any, out: Tensor) -> None:
    out.copy_(torch.lerp(x, y, weight))


@kernel("aclnnSWhere", "TTTT")
def _where(condition: Tensor, x: Tensor, y: Tensor, out: Tensor) -> None:
    out.copy_(torch.where(condition.bool(), x, y))


@kernel("aclnnClamp", "TSST")
def _clamp(x: Tensor, low: Any, high: Any, out: Tensor) -> None:
    out.copy_(torch.clamp(x, low, high))


@kernel("aclnnClampTensor", "TTTT")
def _clamp_tensor(x: Tensor, low: Tensor | None, high: Tensor | None, out: Tensor) -> None:
    out.copy_(torch.clamp(x, low, high))


@kernel("aclnnInplaceMaskedFillScalar", "TTS")
def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> None:
    x.masked_fill_(mask.bool(), value)


@kernel("aclnnInplaceMaskedFillTensor", "TTT")
def _masked_fill_tensor(x: Tensor, mask: Tensor, value: Tensor) -> None:
    x.copy_(torch.where(mask.bool(), value.to(x.dtype), x))


@kernel("aclnnRoundDecimals", "TIT")
def _round_decimals(x: Tensor, decimals: int, out: Tensor) -> None:
    out.copy_(torch.round(x, decimals=decimals))


@kernel("aclnnIsClose", "TTDDbT")
def _is_close(x: Tensor, y: Tensor, relative: float, absolute: float, equal_nan: bool, out: Tensor) -> None:
    out.copy_(torch.isclose(x, y, relative, absolute, equal_nan))


@kernel("aclnnEqual", "TTT")
def _equal(x: Tensor, y: Tensor, out: Tensor) -> None:
    out.fill_(x.shape == y.shape and bool((x == y).all()))


@kernel("aclnnNanToNum", "TFFFT")
def _nan_to_num(x: Tensor, nan: float, high: float, low: float, out: Tensor) -> None:
    out.copy_(torch.nan_to_num(x, nan, high, low))
