"""The model and the dtype that a user names: a folder, a model type built tiny, or the embedded model, on a device."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import UsageError
from core.paths import local_path

if TYPE_CHECKING:
    import torch

    from core.device import Device
    from core.engine.models.checkpoint import Progress
    from core.engine.models.loading import LoadedModel
    from core.engine.models.quantizing import Quantize
    from core.engine.models.sharding import ExpertCut

_CLOSE = 0.8
"""How alike a name is at least, from 0 to 1, that is suggested in place of an unknown one."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


def resolve_model(
    model: str | None,
    device: Device,
    dtype: str,
    progress: Progress | None = None,
    quantize: Quantize | None = None,
    *,
    sharded: bool = False,
    experts: ExpertCut = "width",
) -> tuple[LoadedModel, str]:
    """Load or build the model that MODEL names, on the device; return it with a short name for reports.

    A folder wins over a model type of the same name. quantize: how to quantise the loaded model. sharded, experts: as
    of `load_model`. Raises `UsageError` for a name that is neither, `ModelError` for a folder that cannot be used.
    """
    loaded, name = _resolve(model, device, dtype, progress, sharded, experts)
    return (loaded, name) if quantize is None else (quantize.apply(loaded, progress), quantized_name(name, quantize))


def check_type(model: str) -> None:
    """Refuse, without importing transformers, a text that can be the name of none of its causal language models.

    The name of a type begins like that of the folder of its code. Raises `UsageError` as `resolve_model` does.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return  # refused with what to install when it is imported
    folders = [path for path in (Path(spec.origin).parent / "models").iterdir() if path.is_dir()]
    if not any(model.replace("-", "_").startswith(path.name) for path in folders):
        raise _unknown(model, [path.name for path in folders if _has_causal_lm(path)])


def _has_causal_lm(folder: Path) -> bool:
    code = folder / f"modeling_{folder.name}.py"
    return code.is_file() and b"ForCausalLM(" in code.read_bytes()


def _unknown(model: str, types: Sequence[str]) -> UsageError:
    close = difflib.get_close_matches(model, types, 1, cutoff=_CLOSE)
    return UsageError(
        f"model {model!r}",
        found="no such folder, and transformers has no causal language model of that type",
        remedy=f"did you mean the type {close[0]!r}?" if close else "pass a folder or a model type such as 'llama'",
    )


def quantized_name(name: str, quantize: Quantize) -> str:
    """Return the short name of a quantised model."""
    return f"{name}, quantised ({quantize.scheme.name})"


def _resolve(
    model: str | None, device: Device, dtype: str, progress: Progress | None, sharded: bool, experts: ExpertCut
) -> tuple[LoadedModel, str]:
    from core.engine.models.assets import embedded_model
    from core.engine.models.loading import build_model, load_model
    from core.engine.models.tiny import causal_lm_types, tiny_config

    kind = parse_dtype(dtype, device)
    torch_device = device.torch_device
    how: dict[str, Any] = {"torch_device": torch_device, "dtype": kind, "progress": progress}
    how |= {"sharded": sharded, "experts": experts, "copy_in": device.parts.copy_in}
    if model is None:
        return load_model(embedded_model(), **how), "the embedded model"
    folder = local_path(f"model {model!r}", model)
    if folder.exists() or os.sep in model:
        return load_model(folder, **how), folder.resolve().name
    types = causal_lm_types()
    if model not in types:
        raise _unknown(model, types)
    loaded = build_model(tiny_config(model), torch_device=torch_device, dtype=kind)
    if sharded:
        from core.common.ops.collective.collectives import group_size
        from core.engine.models.sharding import plan_of, shard_model

        shard_model(loaded.model, plan_of(loaded.model, group_size(""), experts))
    return loaded, f"{model}, built tiny with random weights"


def check_choice(option: str, given: str | None, known: Sequence[str]) -> None:
    """Raise `UsageError` if an option has an unknown value; None is allowed."""
    if given is not None and given not in known:
        raise UsageError(f"{option} {given}", found=f"the choices are {', '.join(known)}", remedy="name one of these")


def check_dtype(name: str) -> None:
    """Raise `UsageError` for a `--dtype` that no device has, before torch is imported."""
    check_choice("--dtype", name, DTYPES)


def parse_dtype(name: str, device: Device) -> torch.dtype | None:
    """Return the dtype that `--dtype` names, None for auto; raises `UsageError` for one the device lacks."""
    import torch

    check_dtype(name)
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
