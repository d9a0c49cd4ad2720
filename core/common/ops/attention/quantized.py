"""`core::attention_quantize`, `core::rotary_attention_quantize`: attention whose result is only needed as codes.

Each is the attention of paged.py or rotary.py followed by `core::quantize` of its rows, the heads of a token behind one
another as the output projection reads them. The attention's result is rounded to its own dtype before it is quantised,
as a model does that has two ops.

Shapes: T tokens, H query heads, V value size; codes (T, H * V), contiguous; their scale () or (T, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

import core.common.ops.attention.paged as attention
import core.common.ops.attention.rotary as rotary_attention
import core.common.ops.attention.samples as attention_samples
from core.common.ops.arguments import at_least_fp32, check_choice
from core.common.ops.attention.paged import ATTENTION
from core.common.ops.attention.rotary import ROTARY_ATTENTION
from core.common.ops.declaration import CanonicalOp, Sample, declare
from core.common.ops.quantize.symmetric import quantize, quantize_fake

GRANULARITIES = ("token", "tensor")
_NAMES = ("out_scale", "dtype", "granularity")


def _schema(of: CanonicalOp) -> str:
    """Return the schema of an attention with a scale of codes behind its tensors, and two results."""
    arguments = of.schema.removeprefix(f"{of.name}(").removesuffix(") -> Tensor")
    positional, keywords = arguments.split(", *, ")
    coded = 'ScalarType dtype, str granularity="token"'
    return (
        f"{of.name}_quantize({positional}, Tensor? out_scale, *, {coded}, {keywords}) -> (Tensor codes, Tensor scale)"
    )


def _coded(of: Callable[..., Tensor], coding: Callable[..., tuple[Tensor, Tensor]], name: str) -> Callable[..., Any]:
    """Return an attention that ends in codes, of its reference, its fake or its form between graphs."""

    def run(*operands: Any, **options: Any) -> tuple[Tensor, Tensor]:
        (*inside, out_scale), dtype = _apart(operands, options), options.pop("dtype")
        granularity = options.pop("granularity", "token")
        check_choice(name, "granularity", granularity, GRANULARITIES)
        result = of(*inside, **options)
        return coding(result.flatten(1), out_scale, dtype=dtype, granularity=granularity)

    return run


def _apart(operands: Sequence[Any], options: dict[str, Any]) -> Sequence[Any]:
    """Return the operands with out_scale as the last of them, wherever it was given."""
    return (*operands, options.pop("out_scale")) if "out_scale" in options else operands


def _declared(of: CanonicalOp, fake: Callable[..., Tensor], samples: Callable[..., Iterator[Sample]]) -> CanonicalOp:
    assert of.eager is not None
    name = f"{of.name}_quantize"
    return declare(
        CanonicalOp(
            name=name,
            schema=_schema(of),
            reference=_coded(of.reference, quantize, name),
            fake=_coded(fake, quantize_fake, name),
            samples=samples,
            break_point=True,
            eager=_coded(of.eager, quantize, name),
        )
    )


def _in_codes(samples: Iterator[Sample], dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield each call with one form of codes, another one in turn; most have a scale given, as kernels want it."""
    fp8, int8 = torch.float8_e4m3fn, torch.int8
    forms: list[tuple[torch.dtype, str, float | None]] = [
        (fp8, "tensor", 0.00931),
        (fp8, "token", None),
        (int8, "tensor", 0.02713),
        (fp8, "tensor", 0.00167),
        (int8, "token", None),
        (fp8, "tensor", None),
    ]
    for sample, (codes, granularity, number) in zip(samples, cycle(forms), strict=False):
        scale = None if number is None else torch.tensor(number, dtype=at_least_fp32(dtype), device=device)
        form = f"{str(codes).removeprefix('torch.')} by {granularity}{'' if scale is None else ', given scale'}"
        options = {"out_scale": scale, "dtype": codes, "granularity": granularity}
        yield Sample(name=f"{sample.name}, {form}", kwargs={**sample.kwargs, **options})


def attention_quantize_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield every call of `core::attention`, each with one form of codes."""
    return _in_codes(attention_samples.samples(dtype, device), dtype, device)


def rotary_attention_quantize_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield every call of `core::rotary_attention`, each with one form of codes."""
    return _in_codes(rotary_attention.samples(dtype, device), dtype, device)


ATTENTION_QUANTIZE = _declared(ATTENTION, attention.fake, attention_quantize_samples)
ROTARY_ATTENTION_QUANTIZE = _declared(ROTARY_ATTENTION, rotary_attention.fake, rotary_attention_quantize_samples)
"""Their arguments are those of the attention, out_scale () or (T, 1) or None behind the tensors, and by name dtype and
granularity, "token" or "tensor": of `core::quantize`, which takes no groups here. Results: codes and their scale."""
