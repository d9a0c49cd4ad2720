"""Shapes of well-known models, and models of these shapes with random weights, made on the device itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from core.bench.preset_names import check_preset
from core.common.ops.collective.collectives import group_size
from core.engine.models.hf import driven, import_transformers
from core.engine.models.loading import LoadedModel, loaded_model
from core.engine.models.sharding import cut_parameters, plan_of, shard_model
from core.engine.models.sharding.cuts import Cut, rank_in
from core.errors import ModelError
from core.quantization.layers import num_weights

_POSITIONS = 131_072


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One shape."""

    name: str
    #: Name of a model type of transformers.
    model_type: str
    #: The arguments of its configuration.
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    #: The dtype of `--dtype auto`.
    dtype: torch.dtype = torch.bfloat16

    def config(self) -> Any:
        """Return a fresh configuration."""
        with driven(None):
            return import_transformers().AutoConfig.for_model(self.model_type, **self.fields)


def read_preset(path: Path) -> Preset:
    """Return the shape that a `config.json` of transformers states, named after the file, or after its folder if that
    is the file's name; raise `ModelError` if it states none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        shape = Preset(name=name, model_type=fields.pop("model_type"), fields=fields)
        dtype = shape.config().get_text_config().dtype
    except Exception as error:  # transformers raises what a value of a wrong kind runs into
        raise ModelError(
            f"--preset {str(path)!r}",
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            remedy="give the config.json of a model type that transformers knows",
        ) from error
    return replace(shape, dtype=dtype) if isinstance(dtype, torch.dtype) else shape


def _shape(
    hidden: int, layers: int, heads: tuple[int, int], head_dim: int, intermediate: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": False,
        **more,
    }


_LLAMA = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
_QWEN = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
_TINY = {"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="llama-100m",
            model_type="llama",
            fields=_shape(768, 12, (12, 4), 64, 2048, 32_000, **(_LLAMA | {"tie_word_embeddings": True})),
        ),
        Preset(
            name="llama-1b",
            model_type="llama",
            fields=_shape(2048, 16, (32, 8), 64, 8192, 128_256, **(_LLAMA | {"tie_word_embeddings": True})),
        ),
        Preset(
            name="llama-8b",
            model_type="llama",
            fields=_shape(4096, 32, (32, 8), 128, 14_336, 128_256, **_LLAMA),
        ),
        Preset(
            name="qwen3-0.6b",
            model_type="qwen3",
            fields=_shape(1024, 28, (16, 8), 128, 3072, 151_936, **(_QWEN | {"tie_word_embeddings": True})),
        ),
        Preset(
            name="qwen3-8b",
            model_type="qwen3",
            fields=_shape(4096, 36, (32, 8), 128, 12_288, 151_936, **_QWEN),
        ),
        Preset(
            name="qwen3-30b-a3b",
            model_type="qwen3_moe",
            fields=_shape(2048, 48, (32, 4), 128, 6144, 151_936, **_QWEN, **_EXPERTS)
            | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        ),
        Preset(
            name="tiny-llama",
            model_type="llama",
            fields=_shape(64, 2, (4, 2), 16, 96, 160, **(_LLAMA | _TINY | {"tie_word_embeddings": True})),
            dtype=torch.float32,
        ),
        Preset(
            name="tiny-qwen3",
            model_type="qwen3",
            fields=_shape(64, 2, (4, 2), 16, 96, 160, **(_QWEN | _TINY)),
            dtype=torch.float32,
        ),
        Preset(
            name="tiny-moe",
            model_type="qwen3_moe",
            fields=_shape(64, 2, (4, 2), 16, 96, 160, **(_QWEN | _TINY), **_EXPERTS)
            | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            dtype=torch.float32,
        ),
    )
}
"""Shapes by name; `tiny-…` are for trying the command out."""


def find_preset(name: str) -> Preset:
    """Return the preset of that name, or the shape that a `.json` file states; raise `UsageError` that lists the known
    ones, and `ModelError` for a file that states none."""
    if name.endswith(".json"):
        return read_preset(Path(name))
    check_preset(name)
    return PRESETS[name]


def random_model(
    config: Any,
    *,
    torch_device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    title: str = "a random model",
    sharded: bool = False,
) -> LoadedModel:
    """Build a causal language model with random weights, none of which passes through the host's memory.

    Matrices are drawn from N(0, 1/sqrt(hidden size)), which keeps activations and logits near 1 in any depth; vectors
    (norm weights) from within 0.25 of what the model initialises them to, since a constant hides a step that is left
    out. The random state of the host is left as it was. sharded: cut the model among the processes of the default group
    as `shard_model` does, with the values of the whole; the device holds its part, and one whole matrix at a time.
    Raises `ModelError` where the device has too little memory, and with `sharded` as `shard_model` does.
    """
    transformers = import_transformers()
    start_s = time.perf_counter()
    try:
        with driven(None) as logged, torch.random.fork_rng(devices=[]), torch.device(torch_device):
            torch.manual_seed(seed)
            # Constructors compute buffers such as rotary frequencies, so they are not run on the meta device.
            with _matrices_on_meta():
                model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            num_parameters = num_weights(model)
            _draw(model, float(config.get_text_config().hidden_size ** -0.5), sharded)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"making {title} on {torch_device}",
            found=f"out of memory: {' '.join(str(error).split())[:200]}",
            remedy="choose a smaller preset or a narrower dtype, or free memory there",
        ) from error
    loaded = loaded_model(model, dtype=dtype, logged=logged, load_time_s=time.perf_counter() - start_s)
    return replace(loaded, num_parameters=num_parameters)


@contextmanager
def _matrices_on_meta() -> Iterator[None]:
    """Give modules that are made meanwhile matrices without memory: they are drawn one by one, once it is known which
    part of them this process holds."""

    made: dict[int, nn.Parameter] = {}  # one of these comes again where modules share it

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.dim() < 2 or id(parameter) in made:
            return None
        new = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        made[id(new)] = new
        return new

    hook: Any = without_memory  # torch states that it returns nothing, and takes what it returns
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _draw(model: nn.Module, std: float, sharded: bool) -> None:
    names: dict[int, list[str]] = {}  # several where modules share a weight
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    sizes = {each[0]: tuple(model.get_parameter(each[0]).shape) for each in names.values()}
    cuts: dict[str, Cut] = {}
    if sharded:
        plan = plan_of(model, group_size(""))
        cuts = cut_parameters(model, plan, group_size(""))
        shard_model(model, plan)
    for first, *more in names.values():
        held = model.get_parameter(first)
        drawn = torch.empty(sizes[first], dtype=held.dtype)
        drawn = drawn.normal_(0.0, std) if held.dim() >= 2 else drawn.uniform_(-0.25, 0.25)
        part = cuts[first].of(drawn, rank_in(""), group_size("")) if first in cuts else drawn
        if held.dim() >= 2:
            held = nn.Parameter(part)
            for name in (first, *more):
                owner, _, own = name.rpartition(".")
                setattr(model.get_submodule(owner), own, held)
        else:
            held.add_(part)
