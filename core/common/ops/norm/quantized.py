"""`core::rms_norm_quantize`, `core::add_rms_norm_quantize`: an RMSNorm whose result is only needed as codes.

Shapes: x (..., D); codes (..., D), contiguous; scales as `core::quantize` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import Any

import torch

from core.common.ops.arguments import Draw
from core.common.ops.composition import followed
from core.common.ops.declaration import Sample, declare
from core.common.ops.norm.norms import ADD_RMS_NORM, RMS_NORM
from core.common.ops.quantize.symmetric import QUANTIZE, quantize

_GROUPS = (16, 12)


def _forms(binary: int, odd: int) -> dict[str, Mapping[str, Any]]:
    """Return formats and granularities worth testing, by name; binary, odd: sizes of groups."""
    fp8, int8 = {"dtype": torch.float8_e4m3fn}, {"dtype": torch.int8}
    return {
        "fp8 by token": fp8,
        "int8 by token": int8,
        f"fp8 by group of {binary}": {**fp8, "granularity": "group", "group_size": binary},
        f"int8 by group of {odd}": {**int8, "granularity": "group", "group_size": odd},
        "fp8, one scale": {**fp8, "granularity": "tensor"},
        "int8, one scale": {**int8, "granularity": "tensor"},
    }


def in_each_form(sample: Sample, draw: Draw, width: int, groups: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Return a call in each form of codes, with a scale given and without.

    sample: of the op before the codes, which gives 7 rows of `width`. groups: sizes of groups, the second no power of
    two.
    """
    calls = {}
    for name, form in _forms(*groups).items():
        shape = quantize(torch.zeros(7, width), None, **form)[1].shape
        given = draw(*shape, scale=0.002, shift=0.02, dtype=draw.wide)
        for scale, suffix in ((None, ""), (given, ", given scale")):
            calls[f"{name}{suffix}"] = {**sample.kwargs, "scale": scale, **form}
    return calls


def in_turn(samples: Iterable[Sample], groups: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Return each call of the op before the codes in one form of codes, the forms taking turns."""
    return {
        f"{sample.name}, {name}": {**sample.kwargs, "scale": None, **form}
        for sample, (name, form) in zip(samples, cycle(_forms(*groups).items()), strict=False)
    }


def _rms_norm_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return every form of codes with one norm, and every norm with one form."""
    first, *others = RMS_NORM.samples(draw.dtype, draw.device)
    return in_each_form(first, draw, 48, _GROUPS) | in_turn(others, _GROUPS)


def _add_rms_norm_calls(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return every norm of a sum with one form of codes, and one with a scale given."""
    calls = in_turn(ADD_RMS_NORM.samples(draw.dtype, draw.device), _GROUPS)
    scale = draw(scale=0.002, shift=0.02, dtype=draw.wide)
    first = next(iter(calls.values()))
    return calls | {"fp8, one scale, given scale": {**first, "scale": scale, "granularity": "tensor"}}


RMS_NORM_QUANTIZE = declare(followed(RMS_NORM, QUANTIZE, _rms_norm_calls, seed=21))
"""(codes, scale): the normed values are rounded as `core::rms_norm` says, and then become codes."""
ADD_RMS_NORM_QUANTIZE = declare(followed(ADD_RMS_NORM, QUANTIZE, _add_rms_norm_calls, seed=22))
"""(codes, scale, sum): as above, of the sum of x and residual, which is given besides."""
