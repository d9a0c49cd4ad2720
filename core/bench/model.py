"""Opens the model of a bench: a folder, a model type built tiny, or a preset made on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.bench.presets import Preset, find_preset, random_model
from core.engine.models.resolve import parse_dtype, quantized_name, resolve_model
from core.errors import UsageError

if TYPE_CHECKING:
    import torch

    from core.device import Device
    from core.engine.models.loading import LoadedModel
    from core.engine.models.quantizing import Quantize
    from core.engine.steps.runner import EngineConfig

_CHOSEN = ("mode", "lowering", "strict", "passes", "disable_passes", "enable_passes", "providers", "measure")
"""Options of a compile that `core bench` has."""


def find(model: str | None, preset: str | None) -> Preset | None:
    """Return the preset asked for, None for a MODEL; raise `UsageError` where both are given."""
    if preset is None:
        return None
    if model is not None:
        raise UsageError(
            f"MODEL {model!r} with --preset {preset!r}", found="these are two models", remedy="leave one of them out"
        )
    return find_preset(preset)


def open_model(
    model: str | None,
    preset: str | None,
    device: Device,
    dtype: str,
    quantize: Quantize | None = None,
    *,
    sharded: bool = False,
    seen: Callable[[LoadedModel], LoadedModel] | None = None,
) -> tuple[LoadedModel, str]:
    """Return the model on the device and its title; raise as `resolve_model` does, and for an unknown preset.

    sharded: hold only this process's part, as `resolve_model` and `random_model` do. seen: gets the model, cut, before
    it is quantised, and returns it with what is to be added.
    """
    found = find(model, preset)
    if found is None:
        made, name = resolve_model(model, device, dtype, sharded=sharded)
    else:
        kind = preset_dtype(found, device, dtype)
        title = f"preset {found.name}"
        made = random_model(found.config(), torch_device=device.torch_device, dtype=kind, title=title, sharded=sharded)
        name = f"{found.name}, random weights"
    made = made if seen is None else seen(made)
    return (made, name) if quantize is None else (quantize.apply(made), quantized_name(name, quantize))


def random_config(asked: Mapping[str, Any], device: Device) -> tuple[Any, torch.dtype]:
    """Return configuration and dtype of a model with random weights, by the entries `preset` and `dtype`.

    Raises `UsageError` for a MODEL, whose weights are its own.
    """
    found = find(None, asked["preset"])
    if found is None:
        raise UsageError(
            f"--apart with MODEL {asked['model']!r}",
            found="peers would need its weights, which core has to load first",
            remedy="leave --apart out",
        )
    return found.config(), preset_dtype(found, device, asked["dtype"])


def asked_quantize(asked: Mapping[str, Any]) -> Quantize | None:
    """Return how to quantise the model, by the entries `quantize` and `calibration` of what was asked for."""
    from core.engine.models.quantizing import Quantize

    calibration = asked.get("calibration")
    return Quantize.of(asked.get("quantize"), None if calibration is None else Path(calibration))


def engine_options(config: EngineConfig) -> dict[str, Any]:
    """Return the user's engine options as JSON-ready values."""
    chosen = {name: getattr(config.options, name) for name in _CHOSEN} | {"kv_cache_dtype": config.kv_cache_dtype}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}


def config_of(options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration that `engine_options` was given, as far as that goes; values may come from JSON."""
    from core.compilation.options import CompileOptions
    from core.engine.steps.runner import EngineConfig

    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    kv_cache_dtype = given.pop("kv_cache_dtype", "auto")
    return EngineConfig(kv_cache_dtype=kv_cache_dtype, options=CompileOptions(**given))


def preset_dtype(preset: Preset, device: Device, dtype: str) -> torch.dtype:
    """Return the requested dtype; for auto the preset's own, or a substitute that the device has."""
    asked = parse_dtype(dtype, device)
    known = device.capabilities.dtypes
    if asked is None and preset.dtype not in known:
        return max(known, key=lambda kind: (kind.itemsize <= 4, kind.itemsize))
    return asked or preset.dtype
