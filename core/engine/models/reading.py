"""Reads a model's folder with transformers: configuration, weights, tokenizer; or says why that is impossible."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.engine.models.checkpoint import Checkpoint, read_stated
from core.engine.models.hf import import_transformers, unusable
from core.errors import CoreError, ModelError, one_line
from core.quantization.formats import REMEDY
from core.quantization.tensors import QUANTIZED


def read_config(asked: str, path: Path) -> Any:
    """Return the configuration as transformers reads it; raise ModelError where it rejects it."""
    try:
        return import_transformers().AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise unusable(error, asked) from error
    except Exception as error:  # configuration classes validate with exceptions of many kinds
        raise ModelError(
            asked, found=f"transformers rejects config.json: {described(error)}", remedy="correct config.json"
        ) from error


def read_folder(path: Path, config: Any, dtype: torch.dtype, **options: Any) -> Any:
    """Return the model that transformers makes of a folder, with its account of the weights."""
    return import_transformers().AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )


def read_weights(
    asked: str, read: Callable[..., Any], logged: list[str], quantized: str = ""
) -> tuple[nn.Module, list[str]]:
    """Return the model that `read` makes on the host, and the names of weights in the files that the model does not
    have.

    quantized: the format in which transformers is to read them, for the error where it can't.
    """
    try:
        # A wrong shape is reported in `info` and refused below; otherwise it would only be in a log.
        model, info = read(ignore_mismatched_sizes=True)
    except CoreError:
        raise
    except Exception as error:  # a model's constructor or conversion may raise anything
        found = f"transformers could not load it: {_conversion_problem(logged) or described(error)}"
        remedy = "check that config.json and the weights belong together and that what they need is installed"
        if quantized:
            found = f"its weights are quantised as {quantized!r}, and {found}"
            remedy = f"install what it needs; or {REMEDY}"
        raise ModelError(asked, found=found, remedy=remedy) from error
    logged[:] = [message for message in logged if "LOAD REPORT" not in message]  # judged below
    mismatched = sorted((name, tuple(found), tuple(wanted)) for name, found, wanted in info["mismatched_keys"])
    remedy = "use the config.json and the weights of one and the same model"
    if mismatched:
        shown = few([f"{name}: {found} in the file, {wanted} in the model" for name, found, wanted in mismatched])
        raise ModelError(asked, found=f"{len(mismatched)} weights have another shape: {shown}", remedy=remedy)
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(asked, found=f"{len(missing)} weights are missing: {few(missing)}", remedy=remedy)
    return model, sorted(info["unexpected_keys"])


def _conversion_problem(logged: list[str]) -> str | None:
    """Return which weights transformers failed to convert, and why: it says so in the log only."""
    report = "".join(message for message in logged if "LOAD REPORT" in message)
    names = re.findall(r"^(\S+.*?) *\| *CONVERSION", report, re.MULTILINE)
    reason = re.search(r"^\w*(?:Error|Exception): .*", report, re.MULTILINE)
    return f"conversion of {few(names)} failed: {reason[0] if reason else 'no reason given'}" if names else None


def load_tokenizer(checkpoint: Checkpoint) -> tuple[Any | None, ModelError | None]:
    """Return the tokenizer, or the error that says why there is none. A model without one takes token ids."""
    asked = f"use text with model {str(checkpoint.path)!r}"
    remedy = (
        "put the model's tokenizer files there; without them prompts are lists of token ids, which "
        "`core serve` and Engine.generate take"
    )
    # From tokenizer_config.json alone transformers may make a tokenizer that encodes every text to nothing.
    if not checkpoint.has_vocabulary:
        found = "the folder has no tokenizer files (tokenizer.json or a vocabulary)"
        return None, ModelError(asked, found=found, remedy=remedy)
    try:
        if (checkpoint.path / "tokenizer_config.json").is_file():
            read_stated(checkpoint.path, "tokenizer_config.json")
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=False
        )
    except ModelError as error:
        return None, ModelError(asked, found=error.found, remedy=error.remedy)
    except BaseException as error:  # parsers of several formats and optional libraries may raise anything
        # A panic of a Rust library is not an `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        found = f"transformers could not load the tokenizer: {described(error)}"
        return None, ModelError(asked, found=found, remedy=remedy)
    return tokenizer, None


def refuse_codes(asked: str, unexpected: list[str]) -> None:
    """Refuse weights of quantised layers that nothing says how to read: their codes would be taken for weights."""
    codes = [name for name in unexpected if QUANTIZED.fullmatch(name)]
    if codes:
        raise ModelError(
            asked,
            found=f"{len(codes)} tensors of quantised layers ({few(codes)}), and config.json states no "
            "quantization_config",
            remedy="use config.json and weights of one and the same checkpoint, as its author saved them",
        )


def described(error: BaseException) -> str:
    """Return the kind and the text of an error in one line."""
    return f"{type(error).__name__}: {one_line(str(error))}"


def few(names: list[str], limit: int = 3) -> str:
    """Return the first of these names, and how many there are more."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
