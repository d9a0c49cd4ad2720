"""The parameter structs of ATB's C++ operations, as they lie in memory.

Fields lie as a compiler lays them for ATB's declarations; sizes are those in csrc/atb.c.
"""

from __future__ import annotations

import ctypes
from typing import TypeVar

_INT, _FLOAT, _BOOL = ctypes.c_int32, ctypes.c_float, ctypes.c_bool

PA_ENCODER, PREFIX_ENCODER = 3, 4
"""Where self-attention reads keys and values: packed, or in pages."""

NO_MASK, MASK, ALIBI, SPEC = 0, 1, 2, 3
COMPRESSED_SELF, COMPRESSED_PAGED = 3, 5
"""Numbers of masks; the triangle that stands for one of any size has another number for pages."""


class SelfAttention(ctypes.Structure):
    """`calc_type`, `mask_type`: above."""

    _fields_ = (
        ("quant_type", _INT), ("out_dtype", _INT), ("heads", _INT), ("kv_heads", _INT), ("q_scale", _FLOAT),
        ("scale", _FLOAT), ("batch_state", _BOOL), ("triangle", _INT), ("calc_type", _INT), ("kernel_type", _INT),
        ("clamp_type", _INT), ("clamp_min", _FLOAT), ("clamp_max", _FLOAT), ("mask_type", _INT), ("cache", _INT),
        ("scale_type", _INT), ("layout", _INT), ("latent", _INT), ("cache_type", ctypes.c_int8), ("window", _INT),
        ("reserved", ctypes.c_uint8 * 64),
    )  # fmt: skip


class PagedAttention(ctypes.Structure):
    """`latent`: leading features of the keys that are the values; 0 where values are given."""

    _fields_ = (
        ("heads", _INT), ("scale", _FLOAT), ("kv_heads", _INT), ("mask_type", _INT), ("batch_state", _BOOL),
        ("quant_type", _INT), ("out_dtype", _INT), ("offsets", _BOOL), ("compress_type", _INT), ("calc_type", _INT),
        ("scale_type", _INT), ("layout", _INT), ("latent", _INT), ("reserved", ctypes.c_uint8 * 68),
    )  # fmt: skip


class ReshapeAndCache(ctypes.Structure):
    """`kind`: 0 two caches, 1 one, 2 two of a private format."""

    _fields_ = (("compress_type", _INT), ("kind", _INT), ("reserved", ctypes.c_uint8 * 16))


class Rope(ctypes.Structure):
    """`coefficient`: 2 for halves, the head size for neighbours."""

    _fields_ = (("coefficient", _INT), ("format", _INT), ("reserved", ctypes.c_uint8 * 8))


class Linear(ctypes.Structure):
    """A product, and what it is added to where `accumulate`."""

    _fields_ = (
        ("transpose_a", _BOOL), ("transpose_b", _BOOL), ("bias", _BOOL), ("out_dtype", _INT), ("accumulate", _BOOL),
        ("reserved", ctypes.c_uint8 * 23),
    )  # fmt: skip


class GroupTopk(ctypes.Structure):
    """`best`: how many of a group's values count for it, where `several`."""

    _fields_ = (
        ("groups", _INT), ("k", _INT), ("several", ctypes.c_uint16), ("best", ctypes.c_uint16),
        ("reserved", ctypes.c_uint8 * 12),
    )  # fmt: skip


class Elewise(ctypes.Structure):
    """`kind`: 17 for codes by scales and offsets."""

    _fields_ = (("kind", _INT), ("rest", ctypes.c_uint8 * 60))


class RmsNorm(ctypes.Structure):
    """`kind`: 1 for the plain norm; `quant_type`: 2 for int8."""

    _fields_ = (
        ("kind", _INT), ("padding", _INT), ("quant_type", _INT), ("epsilon", _FLOAT), ("rest", ctypes.c_uint8 * 128),
    )  # fmt: skip


Parameters = TypeVar("Parameters", bound=ctypes.Structure)


def read(kind: type[Parameters], given: bytes) -> Parameters:
    """Return the fields of a struct; raises ValueError where it has another size than the runtime copied."""
    if ctypes.sizeof(kind) != len(given):
        raise ValueError(f"{kind.__name__}: {len(given)} bytes, and its fields take {ctypes.sizeof(kind)}")
    return kind.from_buffer_copy(given)
