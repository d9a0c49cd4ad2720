"""Names the formats of checkpoints that other tools quantised, and refuses those that can't be read here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.errors import ModelError
from core.quantization.config import METHOD

UNREAD = ("gptq", "awq", "bitsandbytes")
"""Formats whose weights are for the kernels of their own libraries, in layouts that are not read here."""

REMEDY = (
    "quantise the original model with llm-compressor, which writes compressed-tensors, or with core.quantize; or "
    "dequantise this one with the library that wrote it, and save it in bfloat16 (docs/quantization.md)"
)


def other_format(config: Mapping[str, Any]) -> str:
    """Return the `quant_method` that a `config.json` states, "" for none or compressed-tensors."""
    stated = config.get("quantization_config")
    if not isinstance(stated, dict):
        return ""
    # Early checkpoints of bitsandbytes state no method.
    method = stated.get("quant_method") or ("bitsandbytes" if _num_bits(stated) else "")
    return "" if method == METHOD else str(method)


def refuse_other_format(asked: str, config: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a `config.json` whose weights are in a format that is not read here."""
    method = other_format(config)
    if method not in UNREAD:
        return
    stated = config["quantization_config"]
    num_bits, group_size = stated.get("bits") or _num_bits(stated), stated.get("group_size")
    sizes = [f"{num_bits} bits"] if num_bits else []
    sizes += [f"groups of {group_size}"] if isinstance(group_size, int) and group_size > 0 else []
    told = f" ({', '.join(sizes)})" if sizes else ""
    raise ModelError(
        asked,
        found=f"quantization_config: quant_method is {method!r}{told}, a format that is not read here",
        remedy=REMEDY,
    )


def _num_bits(stated: Mapping[str, Any]) -> int:
    """Return the width that bitsandbytes was asked for, 0 for none."""
    return next((num_bits for num_bits in (4, 8) if stated.get(f"load_in_{num_bits}bit")), 0)
