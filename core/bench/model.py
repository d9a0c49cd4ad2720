"""What `core bench` runs: a model folder, a model type built tiny, or a preset made on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.bench.presets import Preset, find_preset, random_model
from core.cli.model_argument import parse_dtype, resolve_model
from core.errors import UsageError

if TYPE_CHECKING:
    import torch

    from core.device import Device
    from core.engine.loading import LoadedModel


def find(model: str | None, preset: str | None) -> Preset | None:
    """Return the preset asked for, None for a MODEL; raise `UsageError` where both are given."""
    if preset is None:
        return None
    if model is not None:
        raise UsageError(
            f"MODEL {model!r} with --preset {preset!r}", found="these are two models", remedy="leave one of them out"
        )
    return find_preset(preset)


def open_model(model: str | None, preset: str | None, device: Device, dtype: str) -> tuple[LoadedModel, str]:
    """Return the model on the device and its title; raise as `resolve_model` does, and for an unknown preset."""
    found = find(model, preset)
    if found is None:
        return resolve_model(model, device, dtype)
    kind = preset_dtype(found, device, dtype)
    made = random_model(found.config(), torch_device=device.torch_device, dtype=kind, title=f"preset {found.name}")
    return made, f"{found.name}, random weights"


def preset_dtype(preset: Preset, device: Device, dtype: str) -> torch.dtype:
    """Return the dtype asked for; for auto the preset's own, or what the device has instead."""
    asked = parse_dtype(dtype, device)
    known = device.capabilities.dtypes
    if asked is None and preset.dtype not in known:
        return max(known, key=lambda kind: (kind.itemsize <= 4, kind.itemsize))
    return asked or preset.dtype
