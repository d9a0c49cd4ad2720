"""What the ranks of a job agree on before they compile an engine, and after."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from core._version import __version__
from core.compilation.report import ProgramReport
from core.compilation.rewrite.order import order
from core.compilation.rewriting import device_passes
from core.device import Device
from core.engine.models.hf import import_transformers
from core.engine.models.loading import LoadedModel
from core.engine.steps.runner import EngineConfig

_SAMPLED_BYTES = 2**16
_OPTIONS = ("mode", "lowering", "measure", "strict", "verify", "break_at", "eager", "oversized")


def before_compiling(
    loaded: LoadedModel, device: Device, config: EngineConfig, *, max_model_len: int
) -> dict[str, Any]:
    """Return what all ranks have to have in common: packages, model, device, options, buckets, passes, providers."""
    options, capabilities = config.options, device.capabilities
    passes = order(options.switches.select(device_passes(device)))
    sizes = {"decode": config.decode_sizes(capabilities), "prefill": config.prefill_sizes(capabilities, max_model_len)}
    engine = [each.name for each in fields(config) if each.name not in ("options", "draft_model")]
    described = {name: value for name, value in loaded.config.to_dict().items() if name != "_name_or_path"}
    return {
        "packages": {
            "core": __version__,
            "torch": torch.__version__,
            "transformers": import_transformers().__version__,
            "python": platform.python_version(),
            device.plugin.distribution: device.plugin.version,
        },
        "device": {"name": device.plugin.device, "product": capabilities.device_name},
        "model": {
            "class": type(loaded.model).__name__,
            "dtype": str(loaded.dtype),
            "num_parameters": loaded.num_parameters,
            "config": described,
            "weights": {} if loaded.path is None else weight_digests(loaded.path),
        },
        "options": {name: repr(getattr(options, name)) for name in _OPTIONS},
        "engine": {name: repr(getattr(config, name)) for name in engine},
        "buckets": sizes,
        "order of passes": [each.name for each in passes],
        "pass": {each.name: each.uuid() for each in passes},
        "providers": dict(options.providers or {}),
        "implementations": [(each.op, each.name) for each in device.ops],
    }


def weight_digests(folder: Path) -> dict[str, str]:
    """Return a digest of each weight file: of its size and of its first and last bytes, where its header stands."""
    return {file.name: _sampled(file) for file in sorted(folder.glob("*.safetensors"))}


def _sampled(file: Path) -> str:
    num_bytes = file.stat().st_size
    digest = hashlib.sha256(str(num_bytes).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_SAMPLED_BYTES))
        stream.seek(max(0, num_bytes - _SAMPLED_BYTES))
        digest.update(stream.read(_SAMPLED_BYTES))
    return digest.hexdigest()


def after_compiling(report: ProgramReport) -> Mapping[str, Any]:
    """Return what the compiled programs of all ranks have to have in common: what passes did, and what ops became."""
    return {
        "modes": dict(report.modes),
        "lowering": report.lowering,
        "passes of": {
            trace.phase: [(each.name, each.matched, bool(each.error)) for each in trace.passes]
            for trace in report.traces
        },
        "ops of": {
            trace.phase: sorted(Counter(f"{each.op} {each.implementation}" for each in trace.ops).items())
            for trace in report.traces
        },
    }
