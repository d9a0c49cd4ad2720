"""Reads the JSON files of a model folder within limits, and checks the types of the fields that `core` relies on.

A model library checks the rest of its own files; checked here are the fields that decide sizes, reach the engine, or
pass through a library unchecked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

MAX_DEPTH = 100
"""Most nested objects and lists; real models have less than ten."""
_MAX_BYTES = 100_000_000
_MAX_DIGITS = 40
_MAX_SIZE = 2**40
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
MAX_LAYERS = 10_000
"""Limit for a model built without a checkpoint, whose tensors would show the real number."""
_MAX_LABELS = 1_000_000

Rule = tuple[Callable[[Any], bool], str]
"""A check of a value, and a description of valid values."""


def parse_json(data: bytes) -> Any:
    """Return the content of a JSON file; raise `ValueError`, with the reason, if it is no JSON or exceeds the
    limits."""
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{len(data)} bytes; {_MAX_BYTES} are the most")
    try:
        content = json.loads(data.decode("utf-8"), parse_int=_int)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    if _is_deep(content):
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    return content


def _int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits; {_MAX_DIGITS} are the most")
    return int(digits)


def _is_deep(content: Any) -> bool:
    level = [content]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield from (each for each in (value.values() if isinstance(value, dict) else value))


def _is_int(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_size(value: Any) -> bool:
    # Some architectures state one size per layer.
    each = value if isinstance(value, list) else [value]
    return all(item is None or _is_int(item, 0, _MAX_SIZE) for item in each)


def _are_ids(value: Any) -> bool:
    # -1 stands for "none" in older files.
    if value is None or isinstance(value, list):
        return all(_is_int(item, -1, 2**31) for item in value or ())
    return _is_int(value, -1, 2**31)


def _is_limit(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0)


_SIZE: Rule = (_is_size, f"a whole number from 0 to {_MAX_SIZE}")
_IDS: Rule = (_are_ids, "a token id or a list of them")
_FLAG: Rule = (lambda value: value is None or isinstance(value, bool), "true or false")
_TEXT: Rule = (lambda value: value is None or isinstance(value, str), "a text")
_OBJECT: Rule = (lambda value: value is None or isinstance(value, dict), "an object")
_LIMIT: Rule = (_is_limit, "a positive number")
_LABELS: Rule = (lambda value: value is None or _is_int(value, 0, _MAX_LABELS), f"a number up to {_MAX_LABELS}")
_TOKEN_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _IDS)
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", *LAYER_COUNTS),
)
FIELDS: Mapping[str, Mapping[str, Rule]] = MappingProxyType(
    {
        "config.json": {
            **dict.fromkeys(_SIZES, _SIZE),
            **_TOKEN_IDS,
            "num_labels": _LABELS,
            "dtype": _TEXT,
            "torch_dtype": _TEXT,
            "tie_word_embeddings": _FLAG,
            "is_decoder": _FLAG,
            "is_encoder_decoder": _FLAG,
            "quantization_config": _OBJECT,
        },
        "generation_config.json": _TOKEN_IDS,
        "tokenizer_config.json": {"model_max_length": _LIMIT},
    }
)
"""By file: the fields that are checked. A field that is absent or null leaves the library its default."""


def wrong_field(file: str, content: Mapping[str, Any]) -> str:
    """Return which field of a file has a value of the wrong type, or ""."""
    for name, (holds, wanted) in FIELDS.get(file, {}).items():
        if name in content and not holds(content[name]):
            return f"{file} states {name}={shown(content[name])}, not {wanted}"
    return ""


def too_many_layers(config: Mapping[str, Any], most: int) -> str:
    """Return which count of layers, of the model or of a part of it, is larger; "" where none is."""
    parts = [("", config), *((f"{name}.", part) for name, part in config.items() if isinstance(part, dict))]
    for place, part in parts:
        for name in LAYER_COUNTS:
            value = part.get(name)
            if isinstance(value, int) and value > most:
                return f"{place}{name}={value}"
    return ""


def shown(value: Any, limit: int = 60) -> str:
    """Return a value as JSON, cut to a length."""
    text = json.dumps(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
