"""The arguments that subcommands share about a model: which one, on what device, in what dtype, how compiled."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import typer

from core.cli.completion import device_names, one_of
from core.common.ops.names import check_op
from core.engine.config import CACHES, KV_CACHE_DTYPES, OWN_HEADS, PHASES
from core.engine.models.resolve import DTYPES, check_choice, check_dtype, check_type
from core.errors import UsageError
from core.paths import local_path
from core.quantization.names import check_options

if TYPE_CHECKING:
    from core.compilation.options import CompileOptions, Deterministic, Verify
    from core.compilation.rewrite.order import PassSwitches
    from core.engine.lora.stated import AdapterConfig

MODEL: Any = typer.Argument(
    None,
    metavar="MODEL",
    help="Folder of a transformers causal LM, or the name of a model type such as `llama`, which is built tiny with "
    "random weights; default: the embedded model.",
)
MODEL_OPTION: Any = typer.Option(None, "--model", metavar="FOLDER", hidden=True, help="A folder; the same as MODEL.")
DEVICE: Any = typer.Option(
    "auto",
    "--device",
    help="Device name, as `core devices` lists it; auto prefers an accelerator.",
    autocompletion=device_names,
)
DTYPE: Any = typer.Option(
    "auto",
    "--dtype",
    help="auto (the model's own), float32, bfloat16 or float16.",
    autocompletion=one_of(DTYPES),
)
KV_CACHE_DTYPE: Any = typer.Option(
    "auto", "--kv-cache-dtype", help="auto (as keys and values are) or fp8: half the memory, by the model's own scales."
)
PHASE: Any = typer.Option(None, "--phase", help="decode or prefill; default: both.", autocompletion=one_of(PHASES))
CACHE: Any = typer.Option(
    "auto", "--cache", help="Graphs on the paged or the static cache; auto is what the engine runs the model on."
)
SPECULATIVE: Any = typer.Option(
    0, "--speculative", help="Tokens drafted at most per step: by --draft-model, else from what the text said before."
)
DRAFT_MODEL: Any = typer.Option(
    None,
    "--draft-model",
    metavar="FOLDER",
    help="What drafts: a smaller model of the same tokenizer, an EAGLE head, or `self` for the model's own heads.",
)
LORA: Any = typer.Option(
    [],
    "--lora",
    metavar="NAME=FOLDER",
    help="A LoRA adapter in PEFT's form, which requests choose as `model`; repeatable (docs/lora.md).",
)
ADAPTER: Any = typer.Option(
    None, "--lora", metavar="FOLDER", help="A LoRA adapter in PEFT's form to generate with (docs/lora.md)."
)
DETERMINISTIC: Any = typer.Option(
    None,
    "--deterministic",
    metavar="batch",
    help="batch: the same bits whatever else is in a batch (docs/batch-invariance.md).",
)
QUANTIZE: Any = typer.Option(
    None, "--quantize", metavar="SCHEME", help="Quantise the model first: fp8, int8, w4a16, ... (docs/quantization.md)."
)
CALIBRATION: Any = typer.Option(
    None, "--calibration", metavar="FILE", help="Text whose lines give static scales; default: a built-in one."
)
PROVIDER: Any = typer.Option(
    [],
    "--provider",
    metavar="OP=NAME",
    help="Run this op by this implementation, or by `reference`; repeatable (docs/providers.md).",
)
BACKGROUND: Any = typer.Option(
    True, help="Answer while graphs are compiled, where the device can: steps run by a quicker lowering meanwhile."
)
MEASURE: Any = typer.Option(True, help="Time the implementations of a call that several take; the fastest runs.")
MAX_STEP_TOKENS: Any = typer.Option(
    None, "--max-step-tokens", min=1, help="Tokens at most in a step with prompts; default: the largest prefill bucket."
)
MIXED_STEP_TOKENS: Any = typer.Option(
    None, "--mixed-step-tokens", min=1, help="Of these, of prompts, in steps in which others generate; default: all."
)
"""Defaults of a subcommand's parameters `model`, `model_option`, `device`, `dtype`, `kv_cache_dtype`, `phase`, `cache`,
`speculative`, `draft_model`, `lora` (of several adapters, of one), `deterministic`, `quantize`, `calibration`,
`max_step_tokens` and `mixed_step_tokens`."""


def one_model(model: str | None, option: str | None) -> str | None:
    """Return the model that MODEL or `--model`, a folder, names; None for neither.

    Raises `UsageError` for both, and `ModelError` for an option that is no folder, before torch is imported.
    """
    from core.engine.models.checkpoint import check_folder

    if option is not None:
        check_folder(local_path(f"model {option!r}", option))
    if model is not None and option is not None:
        raise UsageError(
            f"MODEL {model!r} with --model {option!r}", found="both name the model", remedy="leave --model out"
        )
    return option if model is None else model


def check_model_options(
    model: str | Path | None,
    dtype: str,
    *,
    phase: str | None = None,
    cache: str = "auto",
    kv_cache_dtype: str = "auto",
    draft_model: Path | None = None,
    quantize: str | None = None,
    calibration: Path | None = None,
    sensitivity: bool = False,
) -> None:
    """Refuse, before torch is imported, options that no device and no model allows.

    model: a folder; a text without a separator may also name a model type. draft_model: a folder, or `OWN_HEADS`.
    Raises `UsageError`, also for a text that is no folder and can be no model type, and `ModelError` for a folder
    that is not there.
    """
    from core.engine.models.checkpoint import check_folder

    check_dtype(dtype)
    check_choice("--phase", phase, PHASES)
    check_choice("--cache", cache, CACHES)
    check_choice("--kv-cache-dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    check_options(quantize, calibration, sensitivity=sensitivity)
    if draft_model is not None and str(draft_model) != OWN_HEADS:
        check_folder(local_path(f"draft model {str(draft_model)!r}", draft_model))
    if isinstance(model, str) and os.sep not in model and not local_path(f"model {model!r}", model).exists():
        check_type(model)
        return
    if model is not None:
        check_folder(local_path(f"model {str(model)!r}", model))


def compile_options(
    mode: str | None,
    lowering: str | None,
    switches: PassSwitches | None = None,
    *,
    strict: bool = False,
    verify: str = "off",
    cache: bool | None = None,
    provider: Sequence[str] = (),
    measure: bool = True,
    background: bool = False,
) -> CompileOptions:
    """Return the compile options of a command line; raise `UsageError` for options that can be refused without a
    device."""
    from core.compilation.options import MODES, CompileOptions, Verify

    modes = _parse_modes(mode)
    for each in modes.values() if isinstance(modes, Mapping) else (modes,):
        check_choice("--mode", each, MODES)
    check_choice("--verify", verify, get_args(Verify))
    return CompileOptions(
        mode=modes,
        lowering=lowering,
        passes=None if switches is None else switches.only,
        disable_passes=() if switches is None else switches.disable,
        enable_passes=() if switches is None else switches.enable,
        strict=strict,
        verify=cast("Verify", verify),
        cache=cache,
        providers=_parse_providers(provider),
        measure=measure,
        background=background,
    )


def _parse_providers(texts: Sequence[str]) -> dict[str, str] | None:
    """Return `--provider` as `CompileOptions.providers`: names of implementations by op, which only a device knows."""
    found: dict[str, str] = {}
    for text in texts:
        op, _, name = text.partition("=")
        if not op or not name or found.get(op, name) != name:
            again = f"{op} is given {found[op]!r} too" if op in found and name else "it is not of the form OP=NAME"
            raise UsageError(
                f"--provider {text}", found=again, remedy="write each op once, like --provider core::attention=NAME"
            )
        check_op(f"--provider {text}", op)
        found[op] = name
    return found or None


def deterministic_of(text: str | None) -> Deterministic | None:
    """Return `--deterministic` as an engine takes it; raise `UsageError` for anything but its values."""
    from core.compilation.options import Deterministic

    check_choice("--deterministic", text, get_args(Deterministic))
    return cast("Deterministic | None", text)


def parse_loras(texts: Sequence[str]) -> dict[str, AdapterConfig]:
    """Return what the adapters of `--lora` state, by name; raise `ModelError` for a folder that holds none."""
    from core.engine.lora.stated import read_stated

    found: dict[str, AdapterConfig] = {}
    for text in texts:
        name, _, folder = (part.strip() for part in text.partition("="))
        if not name or not folder or name in found:
            wrong = f"{name!r} is given twice" if name in found else "it is not of the form NAME=FOLDER"
            raise UsageError(f"--lora {text}", found=wrong, remedy="write --lora NAME=FOLDER, once for each name")
        found[name] = read_stated(folder)
    return found


def _parse_modes(text: str | None) -> Any:
    """Return `--mode` as the engine takes it: one for all phases, or by phase."""
    if text is None or "=" not in text:
        return text
    pairs = [item.partition("=") for item in text.split(",")]
    phases = [phase.strip() for phase, _, _ in pairs]
    twice = next((phase for phase in phases if phases.count(phase) > 1), None)
    if twice is not None:
        raise UsageError(
            f"--mode {text}", found=f"{twice!r} has more than one mode", remedy="name each phase once at most"
        )
    return {phase: mode.strip() for phase, (_, _, mode) in zip(phases, pairs, strict=True)}
