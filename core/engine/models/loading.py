"""Load or build a causal language model of transformers, unmodified, and never from the network.

`load_model` checks the folder itself first (core/engine/models/checkpoint.py, core/engine/models/architecture.py),
lets transformers
read the weights, so that tied weights and conversions are as everywhere else, and then judges what transformers only
logs: weights that are missing or have the wrong shape.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.common.ops.collective.collectives import group_size
from core.device import CopyIn
from core.engine.models.architecture import (
    check_architecture,
    check_causal,
    config_dtype,
    max_position,
    num_positions,
    stop_token_ids,
)
from core.engine.models.bounds import check_checkpoint_size, check_finite, check_memory
from core.engine.models.checkpoint import Progress, asked_for, inspect_checkpoint, read_json
from core.engine.models.hf import driven, import_transformers
from core.engine.models.part import PartReader, WeightsRead
from core.engine.models.quantized import QuantizedCheckpoint
from core.engine.models.reading import (
    described,
    few,
    load_tokenizer,
    read_config,
    read_folder,
    read_weights,
    refuse_codes,
)
from core.engine.models.sharding import ExpertCut, plan_of, shard_model
from core.engine.models.statements import MAX_LAYERS, too_many_layers, wrong_field
from core.engine.models.vocabulary import vocab_size_of
from core.errors import ModelError, UsageError
from core.paths import local_path
from core.quantization.config import stated_config
from core.quantization.formats import other_format, refuse_other_format
from core.quantization.layers import num_weights, share_input_scales


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode on its device, with what an engine needs to know about it."""

    #: A causal language model of transformers whose parameters need no gradient.
    model: nn.Module
    #: Its `PreTrainedConfig`.
    config: Any
    #: None where the folder has none or it cannot be used; `require_tokenizer` raises the reason.
    tokenizer: Any | None
    #: The folder; None for a built model.
    path: Path | None
    dtype: torch.dtype
    num_parameters: int
    #: Positions the model was made for; None where it states no limit.
    max_position: int | None
    stop_token_ids: tuple[int, ...]
    load_time_s: float
    #: Warnings of the loading, one line each.
    warnings: tuple[str, ...] = ()
    tokenizer_error: ModelError | None = field(default=None, repr=False)
    #: What this process read of the weight files of a sharded model; None for a whole one.
    weights_read: WeightsRead | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: a token id must be below it."""
        return vocab_size_of(self.model)

    def require_tokenizer(self) -> Any:
        """Return the tokenizer; raises ModelError with the reason where there is none."""
        if self.tokenizer is not None:
            return self.tokenizer
        raise self.tokenizer_error or ModelError(
            "encode or decode text",
            found="a model with random weights has no tokenizer",
            remedy="pass prompts as lists of token ids",
        )


def load_model(
    path: str | Path,
    *,
    torch_device: torch.device,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    sharded: bool = False,
    experts: ExpertCut = "width",
    copy_in: CopyIn | None = None,
) -> LoadedModel:
    """Load a causal language model from a local folder onto `torch_device`.

    dtype: of the weights; None means what the configuration states, else fp32. progress is called with a stage, done
    and total: "check files" counts files, "load weights" tensors, "move to device" 0 and 1 of 1 (left out where the
    weights are in place). The weights pass through host memory. sharded: cut the model among the processes of the
    default group as `shard_model` does, and read this process's part alone where the files allow it. experts: as of
    `planned`. copy_in: how the device copies tensors, where it has a way of its own (`DeviceParts`). Raises ModelError
    for a folder that cannot be used and UsageError for a dtype that is not floating, and as `shard_model` does.
    """
    _check_dtype(dtype)
    import_transformers()  # the import of the library is no part of the load time
    start_s = time.perf_counter()
    checkpoint = inspect_checkpoint(local_path(f"load model {str(path)!r}", path), progress)
    asked = asked_for(checkpoint.path)
    warnings = check_architecture(asked, checkpoint.config)
    refuse_other_format(asked, checkpoint.config)
    with driven(progress) as logged:
        config = read_config(asked, checkpoint.path)
        check_causal(asked, config)
        dtype = dtype or config_dtype(config)
        encoded = bool(checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config"))
        check_checkpoint_size(asked, config, checkpoint.contents, quantized=encoded)
        stated = stated_config(checkpoint.config)
        part: PartReader | None = None
        shared: tuple[int, WeightsRead] | None = None
        if stated is None:
            read: Callable[..., Any] = partial(read_folder, checkpoint.path, config, dtype)
            if sharded:
                files = checkpoint.weight_files
                part = PartReader(
                    path=checkpoint.path, files=files, config=config, dtype=dtype, read_whole=read, experts=experts
                )
                read = part
            model, unexpected = read_weights(asked, read, logged, other_format(checkpoint.config))
        else:
            quantized = QuantizedCheckpoint(asked, checkpoint, stated, config, dtype)
            model, unexpected = read_weights(asked, quantized.load, logged)
            warnings += quantized.warnings
            if sharded:
                shared = (
                    num_weights(model),
                    WeightsRead.of_all(checkpoint.weight_files, "its layers are quantised there"),
                )
                shard_model(model, plan_of(model, group_size(""), experts))
        tokenizer, tokenizer_error = load_tokenizer(checkpoint)
    refuse_codes(asked, unexpected)
    check_finite(asked, model)
    _move(asked, model, torch_device, progress, copy_in)
    if unexpected:
        warnings.append(f"{len(unexpected)} weights that the model has no place for were not read: {few(unexpected)}")
    if tokenizer_error is not None:
        warnings.append(f"no tokenizer: {tokenizer_error.found}")
    loaded = loaded_model(
        model,
        dtype=dtype,
        path=checkpoint.path,
        tokenizer=tokenizer,
        tokenizer_error=tokenizer_error,
        logged=logged,
        warnings=warnings,
        load_time_s=time.perf_counter() - start_s,
    )
    if part is not None:
        shared = part.num_parameters, part.read
    return loaded if shared is None else replace(loaded, num_parameters=shared[0], weights_read=shared[1])


def build_model(
    config: Any, *, torch_device: torch.device, dtype: torch.dtype | None = None, seed: int = 0
) -> LoadedModel:
    """Build a model with random weights, for tests and benchmarks; it has no tokenizer.

    config: a `PreTrainedConfig` (not changed), or the path of a `config.json` or of a folder with one; no weights are
    read. The weights are drawn on the host by the model's own initialisation, so that one seed gives the same weights
    on every device. Every parameter that is constant after that is perturbed, and so is a padding token's embedding:
    norm weights of exactly 1 and biases of exactly 0 hide a step that is left out or applied twice. The global random
    state is left as it was.
    """
    _check_dtype(dtype)
    transformers = import_transformers()
    start_s = time.perf_counter()
    with driven(None) as logged:
        if isinstance(config, str | Path):
            file = local_path(f"build a model from {str(config)!r}", config)
            file = file / "config.json" if file.is_dir() else file
            asked = f"build a model from {str(file)!r}"
            if not file.is_file():
                raise ModelError(asked, found="no such file", remedy="pass a config.json or a folder that holds one")
            described_by = read_json(file.parent, file)
            problem = wrong_field("config.json", described_by)
            if not problem and (layers := too_many_layers(described_by, MAX_LAYERS)):
                problem = f"{layers}; {MAX_LAYERS} layers are the most that are built"
            if problem:
                raise ModelError(asked, found=problem, remedy=f"correct {file.name}")
            check_architecture(asked, described_by)
            config = read_config(asked, file)
        else:
            asked = f"build a model from a {type(config).__name__}"
            check_architecture(asked, config.to_dict())
        check_causal(asked, config)
        dtype = dtype or config_dtype(config)
        check_memory(asked, config, dtype)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            # A copy, because transformers writes the dtype into the configuration that it is given.
            model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
            _perturb_constants(model)
    _move(asked, model, torch_device, None)
    return loaded_model(
        model,
        dtype=dtype,
        logged=logged,
        load_time_s=time.perf_counter() - start_s,
    )


def loaded_model(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    load_time_s: float,
    logged: Sequence[str],
    warnings: Sequence[str] = (),
    path: Path | None = None,
    tokenizer: Any | None = None,
    tokenizer_error: ModelError | None = None,
) -> LoadedModel:
    """Put a model into evaluation mode and return it with what an engine needs to know about it.

    logged: messages of transformers, which are added to the warnings.
    """
    model.eval().requires_grad_(False)
    return LoadedModel(
        model=model,
        config=model.config,
        tokenizer=tokenizer,
        path=path,
        dtype=dtype,
        num_parameters=num_weights(model),
        max_position=num_positions(model, max_position(model.config)),
        stop_token_ids=stop_token_ids(model),
        load_time_s=load_time_s,
        warnings=(*warnings, *(" ".join(message.split()) for message in logged)),
        tokenizer_error=tokenizer_error,
    )


def _check_dtype(dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(
            f"load weights as {dtype!r}", found="it is not a floating dtype", remedy="pass torch.bfloat16, or None"
        )


def _move(
    asked: str,
    model: nn.Module,
    torch_device: torch.device,
    progress: Progress | None,
    copy_in: CopyIn | None = None,
) -> None:
    if all(parameter.device == torch_device for parameter in model.parameters()):
        return
    if progress is not None:
        progress("move to device", 0, 1)
    try:
        if copy_in is not None:
            parameters = list(model.parameters())
            copies = dict(zip(map(id, parameters), copy_in([each.data for each in parameters]), strict=True))
            model._apply(lambda held: copies.get(id(held), held))  # as `to` does
        model.to(torch_device)
    except torch.OutOfMemoryError as error:
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        raise ModelError(
            asked,
            found=f"the weights take {num_bytes / 2**30:.2f} GiB, too much for {torch_device}: {described(error)}",
            remedy="free memory there, choose a narrower dtype, or a smaller model",
        ) from error
    share_input_scales(model)  # for devices where moving a parameter makes a new one
    if progress is not None:
        progress("move to device", 1, 1)


@torch.no_grad()
def _perturb_constants(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            noise = torch.rand(parameter.shape, dtype=torch.float32).mul_(0.5).sub_(0.25)
            parameter.copy_(parameter.float() + noise)
    # Perturb the zero row of the padding token: prompts may hold that token, and after a zero row all choices are ties.
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            row = module.weight[module.padding_idx]
            row.copy_(torch.randn(row.shape, dtype=torch.float32).mul_(module.weight.float().std()))
