"""Larger calls of collectives and of the ops that end in fp4 codes, for the default group. See `opcalls.calls`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from core.common.ops.arguments import Draw, at_least_fp32
from core.common.ops.declaration import Sample

_ROWS, _WIDTH = 9, 1024


def parts(draw: Draw) -> Iterator[Sample]:
    """Yield rows of 1024."""
    yield Sample(name="1024 wide", kwargs={"x": draw(_ROWS, _WIDTH), "group": ""})


def grouped(samples: Iterable[Sample], **options: Any) -> Iterator[Sample]:
    """Yield the calls of an op for the op that has a collective beside it."""
    for sample in samples:
        yield Sample(name=sample.name, kwargs={**sample.kwargs, "group": "", **options})


def quantize_fp4(draw: Draw) -> Iterator[Sample]:
    """Yield rows of 1024, with a scale and without."""
    given = draw(scale=0.0002, shift=0.002, dtype=at_least_fp32(draw.dtype))
    yield Sample(name="1024 wide", kwargs={"x": draw(_ROWS, _WIDTH, scale=3.0), "scale": None})
    yield Sample(name="1024 wide, given scale", kwargs={"x": draw(_ROWS, _WIDTH, scale=3.0), "scale": given})


def quantize_fp4_sizes(draw: Draw) -> Iterator[Sample]:
    """Yield odd numbers of rows past the tiles, of an odd number of groups, with a scale and without."""
    given = draw(scale=0.0002, shift=0.002, dtype=at_least_fp32(draw.dtype))
    yield Sample(name="129 rows of 1008", kwargs={"x": draw(129, 1008, scale=3.0), "scale": None})
    yield Sample(name="65 rows of 4112, given scale", kwargs={"x": draw(65, 4112, scale=3.0), "scale": given})
