"""Inputs for a forward, by the names of its parameters: several attempts, of which the first that runs is taken."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

BATCH, TOKENS = 2, 24
PAIRS = 8
"""Pictures and texts where a model compares each with each: enough similarities to be judged."""
_IMAGES = ("pixel_values", "pixel_values_videos")


def attempts(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield sets of inputs by name, the likeliest first: what the forward requires, and what its main input needs."""
    taken = _wanted(model)
    choices = [list(_values(name, model)) for name in taken]
    for values in product(*choices):
        yield dict(zip(taken, values, strict=True))


def _wanted(model: nn.Module) -> list[str]:
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    required = [name for name, each in parameters.items() if each.default is each.empty and each.kind not in (2, 4)]
    wanted = [main, *(name for name in required if name != main)]
    if "decoder_input_ids" in parameters and main != "pixel_values":
        wanted.append("decoder_input_ids")
    if _config(model, "is_composition") or _compares(model):
        wanted += ["input_ids", "pixel_values"]
    return [name for name in dict.fromkeys(wanted) if name in parameters]


def _compares(model: nn.Module) -> bool:
    taken = inspect.signature(model.forward).parameters
    return "input_ids" in taken and any(name in taken for name in _IMAGES)


def _values(name: str, model: nn.Module) -> Iterator[Tensor]:
    torch.manual_seed(1)
    config: Any = model.config
    batch = PAIRS if _compares(model) else BATCH
    if name.endswith("ids") or name == "input":
        high = min(_config(model, "vocab_size") or 100, 100)
        yield torch.randint(3, high, (batch, 8 if name.startswith("decoder") else TOKENS))
    elif name.endswith("mask"):
        yield torch.ones(batch, TOKENS, dtype=torch.int64)
    elif name in _IMAGES:
        yield from _pictures(config, batch)
    elif name in ("input_features", "audio_values", "input_values", "input_audio"):
        yield from _sounds(model)


def _pictures(config: Any, batch: int) -> Iterator[Tensor]:
    channels = _find(config, ("num_channels", "in_chans", "in_channels")) or 3
    size = _find(config, ("image_size", "img_size", "input_size")) or 64
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    frames = _find(config, ("num_frames", "frames_per_clip")) or 4
    yield torch.randn(batch, channels, height, width)
    yield torch.randn(batch, frames, channels, height, width)
    yield torch.randn(batch, channels, 256, 256)


def _sounds(model: nn.Module) -> Iterator[Tensor]:
    config: Any = model.config
    names = ("num_mel_bins", "feature_size", "feature_projection_input_dim", "input_feat_per_channel")
    bins = _find(config, names) or 80
    positions = _find(config, ("max_source_positions",))
    length = _find(config, ("max_length",))
    if model.main_input_name == "input_features":
        if positions:
            yield torch.randn(BATCH, bins, 2 * positions)
        yield torch.randn(BATCH, 64, bins)
        yield torch.randn(BATCH, bins, 64)
    if length and _find(config, ("num_mel_bins",)):
        yield torch.randn(BATCH, length, bins)
    yield torch.randn(BATCH, 4000)
    yield torch.randn(BATCH, 1, 4000)


def _config(model: nn.Module, name: str) -> Any:
    return _find(model.config, (name,))


def _find(config: Any, names: tuple[str, ...]) -> Any:
    """Return the first value of these fields in a configuration or, breadth first, in those within it."""
    queue = [config]
    while queue:
        here = queue.pop(0)
        for name in names:
            value = getattr(here, name, None)
            if value is not None:
                return value
        queue += [v for v in vars(here).values() if hasattr(v, "to_dict")]
    return None
