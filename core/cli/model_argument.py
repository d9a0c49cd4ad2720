"""What subcommands ask of a model alike: MODEL (a folder, a type, or none), where and in what dtype it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import typer

from core.engine.models.resolve import check_choice

if TYPE_CHECKING:
    from core.device import Device

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


def parse_modes(text: str | None) -> Any:
    """Return `--mode` as the engine takes it: one for all phases, or by phase."""
    if text is None or "=" not in text:
        return text
    pairs = [item.partition("=") for item in text.split(",")]
    return {phase.strip(): mode.strip() for phase, _, mode in pairs}


def check_options(options: Mapping[str, Any], device: Device | None = None) -> None:
    """Raise `UsageError` for options of `EngineConfig` that a compile will refuse, before a model is loaded for it.

    device: the one chosen, to be asked for its modes and lowerings; None checks what needs no device.
    """
    from core.compilation.options import MODES, CompileOptions, Verify
    from core.engine.steps.runner import EngineConfig
    from core.engine.steps.step import Phase

    config = EngineConfig(**options)
    for mode in config.mode.values() if isinstance(config.mode, Mapping) else (config.mode,):
        check_choice("--mode", mode, MODES)
    check_choice("--verify", config.verify, get_args(Verify))
    if device is None:
        return
    wanted = CompileOptions(mode=config.mode)
    for phase in get_args(Phase):
        if phase != "verify" or config.speculative:
            wanted.modes_of(phase, device.capabilities.modes)
    device.lowerings.resolve(config.lowering)
