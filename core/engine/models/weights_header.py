"""The header of a safetensors file: whether the file is whole, and what it holds.

The format: https://github.com/huggingface/safetensors#format. Eight bytes of length, a JSON header, then the tensors
end to end. No weight is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.engine.models.statements import parse_json, shown

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What a whole file holds."""

    num_tensors: int
    num_elements: int
    num_bytes: int


def read_header(file: Path, expected: set[str]) -> Contents | str:
    """Return what a safetensors file holds, or the problem where it is damaged or lacks an expected tensor."""
    num_bytes = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(_LENGTH_BYTES)
        if start == b"version ":
            return "it is a Git LFS pointer, not the weights (run `git lfs pull`)"
        if len(start) < _LENGTH_BYTES:
            return f"{num_bytes} bytes are too few for a safetensors header"
        header_bytes = int.from_bytes(start, "little")
        if header_bytes > min(_MAX_HEADER_BYTES, num_bytes - _LENGTH_BYTES):
            return f"its header claims {header_bytes} bytes, the file has {num_bytes}"
        text = stream.read(header_bytes)
    try:
        header = parse_json(text)
    except ValueError as error:
        return f"its header is not JSON: {error}"
    if not isinstance(header, dict):
        return f"its header is a JSON {type(header).__name__}, not an object"
    header.pop("__metadata__", None)
    absent = sorted(expected - header.keys())
    if absent:
        return f"the index promises tensors that it does not hold: {first(absent)}"
    return _contents(header, num_bytes - _LENGTH_BYTES - header_bytes)


def _contents(header: dict[str, Any], data_bytes: int) -> Contents | str:
    extents: list[tuple[int, int, str]] = []
    num_elements = 0
    for name, entry in header.items():
        if not _is_entry(entry):
            return f"the header's entry for tensor {name!r} is malformed"
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype in _DTYPE_BITS and math.prod(shape) * _DTYPE_BITS[dtype] != 8 * (end - begin):
            return f"tensor {name!r} of dtype {dtype} and shape {shown(shape)} does not fill its {end - begin} bytes"
        extents.append((begin, end, name))
        num_elements += math.prod(shape)
    position = 0
    for begin, end, name in sorted(extents):
        if begin != position:
            return f"tensor {name!r} begins at byte {begin} of the data, not at {position}"
        position = end
    if position != data_bytes:
        return f"its tensors need {position} bytes of data, the file has {data_bytes}"
    return Contents(num_tensors=len(extents), num_elements=num_elements, num_bytes=data_bytes)


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 and len(shape) <= 64):
        return False
    whole = all(type(number) is int and 0 <= number < 2**63 for number in (*shape, *offsets))
    return whole and offsets[0] <= offsets[1]


def first(names: list[str], limit: int = 3) -> str:
    """Return the first of these names, and how many there are more."""
    listed = ", ".join(repr(name if len(name) <= 200 else f"{name[:200]}...") for name in names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"
