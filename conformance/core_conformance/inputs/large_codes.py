"""Larger calls of the ops that end in codes: those of the op before, each in one form of codes. See `opcalls.calls`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from core.common.ops.arguments import Draw, at_least_fp32
from core.common.ops.declaration import Sample

_FORMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "int8 by token": {"dtype": torch.int8},
        "fp8 by group": {"dtype": torch.float8_e4m3fn, "granularity": "group", "group_size": 128},
        "fp8, given scale": {"dtype": torch.float8_e4m3fn, "granularity": "tensor"},
        "int8 by group": {"dtype": torch.int8, "granularity": "group", "group_size": 128},
        "fp8 by token": {"dtype": torch.float8_e4m3fn},
    }
)


def in_codes(draw: Draw, samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the calls with what quantisation is told, another form in turn; rows that 128 does not divide by token."""
    forms = cycle(_FORMS.items())
    for sample in samples:
        kwargs = dict(sample.kwargs)
        width = next(value.shape[-1] for value in kwargs.values() if isinstance(value, Tensor) and value.dim() > 1)
        if "gate_up" in kwargs:
            kwargs |= {"gate": kwargs.pop("gate_up"), "up": None}
            width //= 2
        halves = "in one tensor, " if "gate_up" in sample.kwargs else ""
        name, form = next(forms)
        while form.get("group_size") and width % form["group_size"]:
            name, form = next(forms)
        given = draw(scale=0.002, shift=0.02, dtype=at_least_fp32(draw.dtype)) if "tensor" in form.values() else None
        yield Sample(name=f"{sample.name}, {halves}{name}", kwargs={**kwargs, "scale": given, **form})
