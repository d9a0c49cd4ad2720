"""Summary of an entry of the compile cache: what distinguishes entries of one model. Imports no torch."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

# The form in which core/compilation/cache/values.py writes a tensor; one that shares memory with another counts once.
_TENSOR = re.compile(r"(\w+) (\w+)\[([\d, ]*)\] on (?!.*, in the memory of )")
_CACHE = (".key_cache", ".value_cache")  # of `core::attention`'s paged cache
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "float8_e4m3fn": "fp8"}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_SWITCHES = (("passes", "only"), ("disable_passes", "without"), ("enable_passes", "with"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSummary:
    """One phase in one mode. buckets: how many; sizes: the largest dimension of each bucket, each size once."""

    phase: str
    mode: str
    buckets: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        sizes = f"{self.sizes[0]}-{self.sizes[-1]}" if len(self.sizes) > 1 else "".join(map(str, self.sizes))
        count = f"({self.buckets})" if self.buckets > 1 else ""
        return " ".join(filter(None, (self.phase, self.mode, sizes, count)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """weights, cache: bytes by dtype, of parameters and of the paged key/value cache. quantization: names of schemes.

    switches: the passes asked for, in words, "" for none.
    """

    weights: Mapping[str, int]
    cache: Mapping[str, int]
    quantization: tuple[str, ...]
    phases: tuple[PhaseSummary, ...]
    lowering: str
    switches: str
    torch_device: str

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)

    def lines(self) -> tuple[str, str]:
        """Return one line on dtypes and sizes, and one on how the program was compiled."""
        weights = f"weights {_amount(self.weights)}" if self.weights else ""
        cache = f"kv cache {_amount(self.cache)}" if self.cache else ""
        made = "; ".join(map(str, self.phases))
        return (
            "; ".join(filter(None, (", ".join(self.quantization), weights, cache))),
            "; ".join(filter(None, (made, self.lowering, self.switches))),
        )


def summarize(factors: Mapping[str, Mapping[str, str]], graphs: Mapping[str, Any]) -> Summary:
    """Return the summary of an entry; groups of factors that it lacks are left out."""
    values, options = factors.get("values", {}), factors.get("options", {})
    weights: Counter[str] = Counter()
    cache: Counter[str] = Counter()
    for path, text in values.items():
        found = _TENSOR.match(text)
        if found is None:
            continue
        kind, dtype, shape = found.groups()
        num_bytes = prod(int(size) for size in shape.split(",") if size.strip()) * _itemsize(dtype)
        if kind == "Parameter":
            weights[dtype] += num_bytes
        elif path.endswith(_CACHE):
            cache[dtype] += num_bytes
    schemes = {name for text in factors.get("quantization", {}).values() for name in text.split(", ") if name}
    asked = ((word, options.get(name, "None")) for name, word in _SWITCHES)
    buckets = factors.get("buckets", {})
    return Summary(
        weights=dict(weights.most_common()),
        cache=dict(cache.most_common()),
        quantization=tuple(sorted(schemes)),
        phases=tuple(_phase(each["phase"], each["mode"], buckets) for each in graphs.get("phases", ())),
        lowering=options.get("lowering", ""),
        switches=", ".join(f"{word} {text.strip('()')}" for word, text in asked if text not in ("None", "()")),
        torch_device=factors.get("device", {}).get("torch device", ""),
    )


def _phase(phase: str, mode: str, buckets: Mapping[str, str]) -> PhaseSummary:
    keys = json.loads(buckets.get(phase, "[]"))
    sizes = {max(key["dims"]) for key in keys if key["dims"]}
    return PhaseSummary(phase=phase, mode=mode, buckets=len(keys), sizes=tuple(sorted(sizes)))


def _itemsize(dtype: str) -> int:
    """Return the bytes of an element by the name of its dtype: `float8_e4m3fn`, `bool`."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1


def _amount(num_bytes: Mapping[str, int]) -> str:
    size = float(sum(num_bytes.values()))
    unit, length = next((each for each in _UNITS if size >= each[1]), _UNITS[-1])
    return f"{size / length:.1f} {unit} {' + '.join(_SHORT.get(dtype, dtype) for dtype in num_bytes)}"
