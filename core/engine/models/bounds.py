"""Limits on the size of a model before it is built: its configuration against its checkpoint or the machine's
memory."""

from __future__ import annotations

import copy
import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from core.common.collector import paused
from core.engine.models.weights_header import Contents
from core.errors import ModelError

_SLACK = 10_000_000
"""Elements of buffers and layers that a checkpoint may lack."""
_CODES_PER_BYTE = 8
"""Most elements that one stored byte of a quantised weight holds."""
_REMEDY = "use the config.json and the weights of one and the same model"


class _TooLarge(Exception):
    """Ends a build that exceeds its limit."""


def model_class(config: Any) -> Any:
    """Return the class of causal language models that transformers has for this kind of configuration."""
    mapping = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING
    with paused():  # the modules that this imports live on
        found: Any = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def check_checkpoint_size(asked: str, config: Any, contents: Contents, *, quantized: bool) -> None:
    """Raise `ModelError` where a configuration describes far more weights than the checkpoint holds.

    Without this check the missing weights would be allocated and initialised before they are reported.
    """
    held = contents.num_bytes * _CODES_PER_BYTE if quantized else contents.num_elements
    # Twice: tied weights are built as two.
    if _is_larger(config, 2 * held + _SLACK):
        found = f"config.json describes a model of many more weights than the {contents.num_elements} in the files"
        raise ModelError(asked, found=found, remedy=_REMEDY)


def check_memory(asked: str, config: Any, dtype: torch.dtype) -> None:
    """Raise `ModelError` where a model that is to be built on the host is larger than its memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _is_larger(config, memory // dtype.itemsize):
        found = f"its weights in {dtype} take more than the {memory / 2**30:.1f} GiB of this machine"
        raise ModelError(asked, found=found, remedy="state smaller sizes")


def _is_larger(config: Any, limit: int) -> bool:
    """Tell whether a model has more elements in parameters and buffers; a build on the meta device is ended there."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]), _counted(limit):
            model_class(config)(copy.deepcopy(config))
    except _TooLarge:
        return True
    except Exception:  # the real build reports any other fault of the configuration
        return False
    return False


@contextmanager
def _counted(limit: int) -> Iterator[None]:
    count, thread = 0, threading.get_ident()

    def add(_module: nn.Module, _name: str, value: Tensor | None) -> None:
        nonlocal count
        if isinstance(value, Tensor) and threading.get_ident() == thread:
            count += value.numel()
            if count > limit:
                raise _TooLarge

    handles = [
        hooks.register_module_parameter_registration_hook(add),
        hooks.register_module_buffer_registration_hook(add),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_finite(asked: str, model: nn.Module) -> None:
    """Raise `ModelError`, naming them, for weights that hold NaN or infinity."""
    wrong = [name for name, value in model.named_parameters() if not _is_finite(value)]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ModelError(
            asked,
            found=f"{len(wrong)} weights hold NaN or infinity: {', '.join(wrong[:3])}{more}",
            remedy="copy the weights again from where the model came; they were damaged before or as they were saved",
        )


def _is_finite(value: Tensor) -> bool:
    if not value.is_floating_point() or value.itemsize < 2 or not value.numel():
        return True
    # Minimum and maximum propagate NaN, allocate nothing of the weight's size, and read 6 GB/s on one core: 20 times
    # what
    # isfinite does.
    smallest, largest = torch.aminmax(value.detach())
    return bool(smallest.isfinite() and largest.isfinite())
