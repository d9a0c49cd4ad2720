"""Running code in fp64 although it names narrower dtypes: how the reference of core/common/numerics.py is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WIDER = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}
_CASTS = {
    Tensor.float: torch.float64,
    Tensor.half: torch.float64,
    Tensor.bfloat16: torch.float64,
    Tensor.double: torch.float64,
    Tensor.cfloat: torch.complex128,  # type: ignore[attr-defined]  # left out of torch's annotations
    Tensor.chalf: torch.complex128,
}
_NARROW_NAMES = ("FloatTensor", "HalfTensor", "BFloat16Tensor")


class Fp64Mode(TorchFunctionMode):
    """Keep a computation in fp64 although its code casts to fp32 or half on the way (as norms and softmax do).

    Every narrow floating or complex dtype named in a call is widened, each spelling of a cast becomes a cast to fp64
    (complex tensors stay complex), and new tensors without a dtype are fp64: inside the mode, fp64 is the default dtype
    of the whole process. Constants computed in a narrower dtype beforehand keep their rounding, as the criterion
    wants: they are inputs. fp8 is kept too: such tensors are codes. Autocast leaves fp64 alone and needs no care. Out
    of reach: TorchScript and constructors such as `torch.FloatTensor(...)`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._defaults: list[torch.dtype] = []

    def __enter__(self) -> Self:
        TorchFunctionMode.__enter__(self)
        self._defaults.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.set_default_dtype(self._defaults.pop())
        TorchFunctionMode.__exit__(self, kind, error, traceback)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func` with every narrow floating dtype among its arguments widened."""
        named = dict(kwargs or {})
        if func in _CASTS:
            func, args = Tensor.to, (args[0], _CASTS[func])
        if func is Tensor.view and not (args[0].is_floating_point() or args[0].is_complex()):
            return func(*args, **named)  # a view of the bits, not a cast
        if func in (Tensor.to, Tensor.type_as):
            func, (args, named) = Tensor.to, _without_other(args, named)
        is_complex_cast = func in (Tensor.to, Tensor.type) and args[0].is_complex()
        widen = _widen_complex if is_complex_cast else _widen
        return func(*map(widen, args), **{name: widen(value) for name, value in named.items()})


def _without_other(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Name device and dtype where a cast names a tensor that has them."""
    for name in kwargs.keys() & {"tensor", "other"}:  # as Tensor.to and Tensor.type_as call it
        args = (args[0], kwargs.pop(name), *args[1:])
    if len(args) > 1 and isinstance(args[1], Tensor):
        args = (args[0], args[1].device, args[1].dtype, *args[2:])
    return args, kwargs


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, (str, type(torch.FloatTensor))):
        # Old names of types: "torch.FloatTensor", or the object of that name.
        module, _, name = (value if isinstance(value, str) else torch.typename(value)).rpartition(".")
        return f"{module}.DoubleTensor" if name in _NARROW_NAMES else value
    return value


def _widen_complex(value: Any) -> Any:
    """Return the wide dtype for a cast of this tensor: complex for a complex one, else its imaginary part would be
    lost."""
    wide = _widen(value)
    if isinstance(wide, str) and wide.endswith(".DoubleTensor"):
        return torch.complex128
    return torch.complex128 if wide is torch.float64 else wide
