"""What subcommands ask of a model alike: MODEL (a folder, a type, or none), where and in what dtype it runs."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import typer

from core.errors import UsageError

if TYPE_CHECKING:
    import torch

    from core.compilation.options import CompileOptions, Verify
    from core.compilation.rewrite.order import PassSwitches
    from core.device import Device
    from core.engine.models.checkpoint import Progress
    from core.engine.models.loading import LoadedModel
    from core.engine.models.quantizing import Quantize
    from core.engine.steps.runner import EngineConfig

MODEL: Any = typer.Argument(
    None,
    metavar="MODEL",
    help="Folder of a transformers causal LM, or the name of a model type such as `llama`, which is built tiny with "
    "random weights; default: the embedded model.",
)
DEVICE: Any = typer.Option(
    "auto", "--device", help="Device name, as `core devices` lists it; auto prefers an accelerator."
)
DTYPE: Any = typer.Option("auto", "--dtype", help="auto (the model's own), float32, bfloat16 or float16.")
KV_CACHE_DTYPE: Any = typer.Option(
    "auto", "--kv-cache-dtype", help="auto (as keys and values are) or fp8: half the memory, by the model's own scales."
)
PHASE: Any = typer.Option(None, "--phase", help="decode or prefill; default: both.")
CACHE: Any = typer.Option(
    "auto", "--cache", help="Graphs on the paged or the static cache; auto is what the engine runs the model on."
)
QUANTIZE: Any = typer.Option(
    None, "--quantize", metavar="SCHEME", help="Quantise the model first: fp8, int8, w4a16, ... (docs/quantization.md)."
)
CALIBRATION: Any = typer.Option(
    None, "--calibration", metavar="FILE", help="Text whose lines give static scales; default: a built-in one."
)
"""Defaults of a subcommand's parameters `model`, `device`, `dtype`, `kv_cache_dtype`, `phase`, `cache`,
`quantize` and `calibration`."""

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def resolve_model(
    model: str | None,
    device: Device,
    dtype: str,
    progress: Progress | None = None,
    quantize: Quantize | None = None,
) -> tuple[LoadedModel, str]:
    """Load or build what MODEL names, on the device; return it with a short name for readers.

    A folder wins over a model type of the same name. quantize: what to do to it then. Raises `UsageError` for a name
    that is neither, `ModelError` for a folder that cannot be used.
    """
    loaded, name = _resolve(model, device, dtype, progress)
    return (loaded, name) if quantize is None else (quantize.apply(loaded, progress), quantized_name(name, quantize))


def quantized_name(name: str, quantize: Quantize) -> str:
    """Return what readers call a model that was quantised."""
    return f"{name}, quantised ({quantize.scheme.name})"


def _resolve(model: str | None, device: Device, dtype: str, progress: Progress | None) -> tuple[LoadedModel, str]:
    from core.engine.models.assets import embedded_model
    from core.engine.models.loading import build_model, load_model
    from core.engine.models.tiny import causal_lm_types, tiny_config

    kind = parse_dtype(dtype, device)
    torch_device = device.torch_device
    if model is None:
        return load_model(
            embedded_model(), torch_device=torch_device, dtype=kind, progress=progress
        ), "the embedded model"
    folder = Path(model).expanduser()
    if folder.exists() or os.sep in model:
        name = folder.resolve().name
        return load_model(folder, torch_device=torch_device, dtype=kind, progress=progress), name
    types = causal_lm_types()
    if model not in types:
        close = difflib.get_close_matches(model, types, 1)
        raise UsageError(
            f"model {model!r}",
            found="no such folder, and transformers has no causal language model of that type",
            remedy=f"did you mean the type {close[0]!r}?" if close else "pass a folder or a model type such as 'llama'",
        )
    loaded = build_model(tiny_config(model), torch_device=torch_device, dtype=kind)
    return loaded, f"{model}, built tiny with random weights"


def check_choice(option: str, given: str | None, known: Sequence[str]) -> None:
    """Raise `UsageError` where an option has a value that is none of the known ones; None is left out."""
    if given is not None and given not in known:
        raise UsageError(f"{option} {given}", found=f"the choices are {', '.join(known)}", remedy="name one of these")


def parse_dtype(name: str, device: Device) -> torch.dtype | None:
    """Return the dtype that `--dtype` names, None for auto; raises `UsageError` for one the device lacks."""
    import torch

    check_choice("--dtype", name, _DTYPES)
    if name == "auto":
        return None
    kind: torch.dtype = getattr(torch, name)
    known = device.capabilities.dtypes
    if kind not in known:
        raise UsageError(
            f"--dtype {name} on {device.name}",
            found=f"it computes in {', '.join(sorted(str(d).removeprefix('torch.') for d in known))}",
            remedy="choose one of these",
        )
    return kind


def compile_options(
    mode: str | None,
    lowering: str | None,
    switches: PassSwitches,
    *,
    strict: bool,
    verify: str = "off",
    cache: bool | None = None,
) -> CompileOptions:
    """Return what a command line says of a compile; raise `UsageError` for what needs no device to be refused."""
    from core.compilation.options import MODES, CompileOptions, Verify

    modes = _parse_modes(mode)
    for each in modes.values() if isinstance(modes, Mapping) else (modes,):
        check_choice("--mode", each, MODES)
    check_choice("--verify", verify, get_args(Verify))
    return CompileOptions(
        mode=modes,
        lowering=lowering,
        passes=switches.only,
        disable_passes=switches.disable,
        enable_passes=switches.enable,
        strict=strict,
        verify=cast("Verify", verify),
        cache=cache,
    )


def _parse_modes(text: str | None) -> Any:
    """Return `--mode` as the engine takes it: one for all phases, or by phase."""
    if text is None or "=" not in text:
        return text
    pairs = [item.partition("=") for item in text.split(",")]
    return {phase.strip(): mode.strip() for phase, _, mode in pairs}


def check_device(config: EngineConfig, device: Device) -> None:
    """Raise `UsageError` for what a compile on this device will refuse, before a model is loaded for it."""
    from core.compilation.rewriting import device_passes
    from core.engine.steps.step import Phase

    options = config.options
    options.switches.select(device_passes(device))
    for phase in get_args(Phase):
        if phase != "verify" or config.speculative:
            options.modes_of(phase, device.capabilities.modes)
    device.lowerings.resolve(options.lowering)
