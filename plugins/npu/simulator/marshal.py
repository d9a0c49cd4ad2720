"""Registers kernels and turns the arguments of a launch into tensors and Python values.

A kernel is a function of its arguments in the order of the C prototype of aclnnXGetWorkspaceSize, without the two last
(workspace size and executor). Its specification has one letter for each:

    T tensor        L list of tensors   S scalar          Z list of scalars
    A list of ints  B list of bools     R list of floats  C string (char *)
    I int64         i int32 or an enum  h int8            b bool
    D double        F float         P bytes: a struct of parameters
    G the name of a communicator, by which the kernel exchanges with other ranks (kernels/communicating.py)

A null object arrives as None. Tensors are views of the device's memory: a kernel writes its outputs in place. One that
finds the size of an output itself fills the beginning of its memory and returns {index of the argument: its shape}.
"""

from __future__ import annotations

import ctypes
import gc
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from simulator.library import library

MAX_WORDS = 64
MAX_DOUBLES = 8
KERNEL_FAILED = 507015  # ACL_ERROR_RT_AICORE_EXCEPTION
# A storage format other than the plain one: torch_npu describes private formats by their plain shape, see view_tensor.
_PRIVATE_FORMATS = frozenset({3, 4, 29, 33})

DTYPES: dict[int, torch.dtype] = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    7: torch.uint16,
    8: torch.uint32,
    9: torch.int64,
    10: torch.uint64,
    11: torch.float64,
    12: torch.bool,
    16: torch.complex64,
    17: torch.complex128,
    27: torch.bfloat16,
    29: torch.uint8,  # int4, two in a byte: the kernel unpacks
    35: torch.float8_e5m2,
    36: torch.float8_e4m3fn,
    37: torch.float8_e8m0fnu,
}

Kernel = Callable[..., dict[int, list[int]] | None]


@dataclass(frozen=True)
class Stored:
    """A tensor in its storage format."""

    #: Its elements as they lie.
    memory: torch.Tensor
    #: The shape that torch sees.
    size: list[int]
    #: Whether the format is other than the plain one.
    private: bool


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("magic", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8),
        ("offset", ctypes.c_int64),
        ("num_stored", ctypes.c_int64),
        ("stored", ctypes.c_int64 * 8),
        ("data", ctypes.c_void_p),
        ("origin", ctypes.c_void_p),
        ("owned", ctypes.c_void_p),
    ]


class _Scalar(ctypes.Structure):
    _fields_ = [("magic", ctypes.c_int32), ("type", ctypes.c_int32), ("value", ctypes.c_ubyte * 16)]


class _List(ctypes.Structure):
    _fields_ = [("magic", ctypes.c_int32), ("unused", ctypes.c_int32), ("size", ctypes.c_int64)]


class _Executor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 96),
        ("spec", ctypes.c_char * (MAX_WORDS + MAX_DOUBLES + 1)),
        ("words", ctypes.c_int64 * MAX_WORDS),
        ("doubles", ctypes.c_double * MAX_DOUBLES),
    ]


def dtype_of(code: int) -> torch.dtype:
    """Return the torch dtype of an aclDataType; raises NotImplementedError for one that torch lacks."""
    try:
        return DTYPES[code]
    except KeyError:
        raise NotImplementedError(f"aclDataType {code} has no dtype in simulator/marshal.py") from None


def view_tensor(address: int) -> torch.Tensor:
    """Return a CPU tensor over the device memory that an aclTensor describes."""
    described = _Tensor.from_address(address)
    dtype = dtype_of(described.type)
    size = described.dims[: described.num_dims]
    strides = described.strides[: described.num_dims]
    if described.format in _PRIVATE_FORMATS:
        raise NotImplementedError(f"a tensor in storage format {described.format}; only plain formats are simulated")
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    if any(stride < 0 for stride in strides):
        raise NotImplementedError(f"a tensor of strides {strides}")
    span = described.offset + 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    buffer = (ctypes.c_char * (span * dtype.itemsize)).from_address(described.data)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(size, strides, described.offset)


def stored_tensor(address: int) -> Stored:
    """Return a tensor as it lies in memory, in whatever format."""
    described = _Tensor.from_address(address)
    size = described.dims[: described.num_dims]
    if described.format not in _PRIVATE_FORMATS:
        return Stored(view_tensor(address), size, False)
    dtype, shape = dtype_of(described.type), described.stored[: described.num_stored]
    buffer = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(described.data)
    return Stored(torch.frombuffer(buffer, dtype=dtype).view(shape), size, True)


def _scalar(address: int) -> Any:
    described = _Scalar.from_address(address)
    dtype = dtype_of(described.type)
    return torch.frombuffer(bytearray(described.value), dtype=dtype, count=1)[0].item()


def _values(kind: Any, address: int) -> list[Any]:
    return list((kind * _List.from_address(address).size).from_address(address + ctypes.sizeof(_List)))


def _objects(one: Callable[[int], Any], address: int) -> list[Any]:
    return [one(each) if each else None for each in _values(ctypes.c_void_p, address)]


def _bytes(address: int) -> bytes:
    return ctypes.string_at(address + ctypes.sizeof(_List), _List.from_address(address).size)


_OBJECT_READERS: dict[str, Callable[[int], Any]] = {
    "T": view_tensor,
    "L": partial(_objects, view_tensor),
    "S": _scalar,
    "Z": partial(_objects, _scalar),
    "A": partial(_values, ctypes.c_int64),
    "B": partial(_values, ctypes.c_bool),
    "R": partial(_values, ctypes.c_float),
    "P": _bytes,
    **dict.fromkeys("CG", lambda address: ctypes.string_at(address).decode()),
}
_READERS: dict[str, Callable[[int], Any]] = {
    **_OBJECT_READERS,
    # A narrow value fills only the low part of its register; the rest is whatever was there.
    "I": lambda word: word,
    "i": lambda word: ctypes.c_int32(word).value,
    "h": lambda word: ctypes.c_int8(word).value,
    "b": lambda word: bool(word & 0xFF),
}


def _float(register: float) -> float:
    return float(ctypes.c_float.from_buffer_copy(ctypes.c_double(register)).value)


def arguments(spec: str, words: Any, doubles: Any, *, formats: bool = False) -> list[Any]:
    """Read the arguments of one launch by the letters of its specification."""
    readers = {**_READERS, "T": stored_tensor} if formats else _READERS
    read: list[Any] = []
    word = double = 0
    for letter in spec:
        if letter in "DF":
            read.append(doubles[double] if letter == "D" else _float(doubles[double]))
            double += 1
        else:
            is_null = letter in _OBJECT_READERS and not words[word]
            read.append(None if is_null else readers[letter](words[word]))
            word += 1
    return read


_KERNELS: dict[str, tuple[str, Kernel]] = {}
_OF_FORMATS: set[str] = set()


def kernel(name: str, spec: str, *, formats: bool = False) -> Callable[[Kernel], Kernel]:
    """Register the decorated function as the arithmetic of kernel `name` (aclnn…, Atb…) with arguments as `spec` says.

    formats: it takes tensors in whatever storage format, as `Stored`; others see plain ones only.
    """
    unknown = set(spec) - set(_READERS) - {"D", "F"}
    if unknown or sum(letter in "DF" for letter in spec) > MAX_DOUBLES or len(spec) > MAX_WORDS:
        raise ValueError(f"specification {spec!r} of {name}: unknown letters {sorted(unknown)}, or too long")
    if name in _KERNELS:
        raise ValueError(f"kernel {name} has two handlers; keep one")

    def register(function: Kernel) -> Kernel:
        if library().ascend_sim_register(name.encode(), spec.encode()):
            raise ValueError(f"kernel {name} has a name or specification that is too long")
        _KERNELS[name] = (spec, function)
        if formats:
            _OF_FORMATS.add(name)
        return function

    return register


def registered() -> dict[str, str]:
    """Return the specification of every registered kernel by its name."""
    return {name: spec for name, (spec, _) in _KERNELS.items()}


def _launch(name: bytes, address: int) -> int:
    # No collection may run in here: a finalizer that waits for a stream would wait for the kernel it interrupts.
    collecting = gc.isenabled()
    gc.disable()
    try:
        _compute(name.decode(), address)
        return 0
    except BaseException as error:  # an exception cannot pass through C; its text does
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = " ".join(str(error).split())
        text = f"kernel {name.decode()}: {type(error).__name__}: {what[:600]} ({where.filename}:{where.lineno})"
        library().ascend_sim_set_message(text.encode())
        return KERNEL_FAILED
    finally:
        if collecting:
            gc.enable()


def _compute(name: str, address: int) -> None:
    """Run a handler outside of whatever modes of torch the op was called under."""
    spec, function = _KERNELS[name]
    executor = _Executor.from_address(address)
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        shapes = function(*arguments(spec, executor.words, executor.doubles, formats=name in _OF_FORMATS))
    for index, shape in (shapes or {}).items():
        word = sum(letter not in "DF" for letter in spec[:index])
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        library().ascend_sim_set_shape(ctypes.c_void_p(executor.words[word]), sizes, len(shape))


# A name of its own keeps it: C holds its address and no reference.
_HANDLER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_launch)
library().ascend_sim_set_handler(_HANDLER)
