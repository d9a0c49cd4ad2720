"""What subcommands ask of a model alike: MODEL (a folder, a type, or none), where and in what dtype it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast, get_args

import typer

from core.engine.models.resolve import check_choice

if TYPE_CHECKING:
    from core.compilation.options import CompileOptions, Verify
    from core.compilation.rewrite.order import PassSwitches
    from core.device import Device
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
