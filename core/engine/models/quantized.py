"""Load a compressed-tensors checkpoint: quantised layers by core/quantization, the rest by transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core.engine.models.bounds import model_class
from core.engine.models.checkpoint import Checkpoint
from core.engine.models.hf import import_transformers
from core.quantization.checkpoint import read_experts, read_linear
from core.quantization.config import CheckpointConfig, parse_config
from core.quantization.layers import QuantizedModule, share_input_scales
from core.quantization.quantize import num_bytes, replace_module
from core.quantization.report import LayerReport, QuantizationReport
from core.quantization.targets import Ignored, is_experts
from core.quantization.tensors import CACHE_SCALE_NAMES, FLOATS, TensorFiles

_CACHE_SCALES_READ = (
    "the checkpoint is made for an fp8 key/value cache, and its scales serve kv_cache_dtype 'fp8'; "
    "any other cache keeps the model's dtype"
)
_NO_CACHE_SCALES = "kv_cache_scheme states an fp8 key/value cache without any scale: with kv_cache_dtype 'fp8' it is 1"


class QuantizedCheckpoint:
    """One checkpoint whose configuration states how its layers are quantised.

    asked: the first line of errors.
    stated: its `quantization_config`.
    config: its `PreTrainedConfig`, from which that statement is removed, so that transformers sees a plain model.
    dtype: of all that is not quantised.
    """

    def __init__(
        self, asked: str, checkpoint: Checkpoint, stated: Mapping[str, Any], config: Any, dtype: torch.dtype
    ) -> None:
        self._asked, self._checkpoint, self._config, self._dtype = asked, checkpoint, config, dtype
        self._parsed: CheckpointConfig = parse_config(asked, stated)
        #: Notes on settings that are not applied, and on the scales of a cache; complete after `load`.
        self.warnings = self._parsed.warnings
        if hasattr(config, "quantization_config"):
            del config.quantization_config

    def load(self, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model on the host and what transformers says of the tensors that are not quantised.

        options: of `from_pretrained`. Raises `ModelError` for tensors that are missing or do not fit.
        """
        hollowed = model_class(self._config)
        with torch.device("meta"):
            skeleton = hollowed(self._config)
        rename = _renaming(skeleton)
        self._parsed = self._parsed.renamed(rename)
        with TensorFiles(self._asked, self._checkpoint.weight_files, rename) as files:
            layers = self._read(files, skeleton)
            cache_scales = self._read_cache_scales(files, skeleton)
            if not layers:
                raise files.error("quantization_config names no layer of the model")
            model, info = _load_rest(
                hollowed, tuple(layers), state_dict=files.rest(), config=self._config, dtype=self._dtype, **options
            )
        for name, layer in layers.items():
            replace_module(model, name, layer)
        share_input_scales(model)
        for (path, name), scale in cache_scales.items():
            setattr(model.get_submodule(path), name, scale)
        model.quantization = self._report(skeleton, layers)  # type: ignore[assignment]  # a plain attribute
        self._read_generation_config(model)
        return model, info

    def _read(self, files: TensorFiles, skeleton: nn.Module) -> dict[str, QuantizedModule]:
        layers: dict[str, QuantizedModule] = {}
        for name, module in skeleton.named_modules():
            if is_experts(module):
                found = read_experts(files, name, module, self._parsed)
                if found is not None:
                    layers[name] = found
            elif isinstance(module, nn.Linear):
                group = self._parsed.group_of(files.paths(name), "Linear")
                if group is not None:
                    layers[name] = read_linear(files, name, module, group, self._dtype)
        return layers

    def _read_cache_scales(self, files: TensorFiles, skeleton: nn.Module) -> dict[tuple[str, str], Tensor]:
        """Return the scales of keys and values, (1,) or (K,) fp32, by path of their module and name.

        A module that has one needs the other, and so does every module of its class.
        """
        if not self._parsed.cache_scales:
            return {}
        modules = dict(skeleton.named_modules())
        kinds = {type(m) for path, m in modules.items() for n in CACHE_SCALE_NAMES if files.has(f"{path}.{n}")}
        scales = {
            (path, name): files.read(f"{path}.{name}", FLOATS).float().flatten()
            for path, module in modules.items()
            if type(module) in kinds
            for name in CACHE_SCALE_NAMES
        }
        self.warnings += (_CACHE_SCALES_READ if scales else _NO_CACHE_SCALES,)
        return scales

    def _report(self, skeleton: nn.Module, layers: Mapping[str, QuantizedModule]) -> QuantizationReport:
        reports = tuple(
            LayerReport(
                name=name,
                kind=type(skeleton.get_submodule(name)).__name__,
                scheme=layer.scheme.name,
                shape=layer.weight_shape,
                bytes_before=sum(p.numel() for p in skeleton.get_submodule(name).parameters()) * self._dtype.itemsize,
                bytes_after=num_bytes(layer),
            )
            for name, layer in layers.items()
        )
        ignored = tuple(
            Ignored(name=name, reason="not quantised in the checkpoint")
            for name, module in skeleton.named_modules()
            if name not in layers and (isinstance(module, nn.Linear) or is_experts(module))
        )
        schemes = ", ".join(dict.fromkeys(layer.scheme.name for layer in layers.values()))
        return QuantizationReport(scheme=schemes, layers=reports, ignored=ignored, source="from the checkpoint")

    def _read_generation_config(self, model: Any) -> None:
        """Read the weights as `from_pretrained` does for a folder."""
        if (self._checkpoint.path / "generation_config.json").is_file():
            read = import_transformers().GenerationConfig.from_pretrained
            model.generation_config = read(self._checkpoint.path, local_files_only=True)


def _renaming(model: nn.Module) -> Callable[[str], str]:
    """Return what gives the name of a stored tensor as the model has it, by what transformers renames in its type.

    Nemotron-H's files say `backbone` where the model says `model`.
    """
    import_transformers()
    mappings: Any = importlib.import_module("transformers.conversion_mapping")
    kind: Any = importlib.import_module("transformers.core_model_loading").WeightRenaming
    renamings = [each for each in mappings.get_model_conversion_mapping(model) if isinstance(each, kind)]

    def rename(name: str) -> str:
        for each in renamings:
            name, _ = each.rename_source_key(name)
        return name

    return rename


def _load_rest(base: type[nn.Module], quantized: tuple[str, ...], **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model with empty places for the quantised layers, so that no memory is spent on their weights."""

    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        for name in quantized:
            replace_module(self, name, nn.Identity())

    # The class keeps its name: transformers looks up conversions of weights by it.
    body = {"__init__": __init__, "__module__": base.__module__}
    hollow: Any = type(base.__name__, (base,), body)
    model, info = hollow.from_pretrained(None, output_loading_info=True, **options)
    model.__class__ = base
    return model, info
