"""Tensors of a checkpoint by name, from safetensors files, with one clear error for each that is missing or wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from core.errors import ModelError

QUANTIZED = re.compile(
    r".*\.(weight_(scale|packed|shape|zero_point|g_idx|global_scale)|(input|output)_(scale|zero_point|global_scale))"
)
"""Suffixes of a quantised layer's tensors in compressed-tensors."""
CACHE_SCALES = re.compile(r".*\.[kqv]_(scale|zero_point)")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which checkpoints keep scales."""
CACHE_SCALE_NAMES = ("k_scale", "v_scale")
"""Scales of an attention module's quantised keys and values, as attributes and as tensors."""


class TensorFiles:
    """The tensors in some safetensors files, which are open within this context manager.

    asked: the first line of errors. rename: gives a stored name as the model has it; tensors are found by either. Each
    tensor is read when it is asked for; `rest` then returns all others, by their stored names.
    """

    def __init__(self, asked: str, files: Iterable[Path], rename: Callable[[str], str] = str) -> None:
        self.asked, self._rename = asked, rename
        self._files = tuple(files)
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self._stored: dict[str, str] = {}
        self._paths: dict[str, dict[str, None]] = {}
        self._read: set[str] = set()

    def __enter__(self) -> Self:
        from safetensors import safe_open

        for file in self._files:
            handle = self._stack.enter_context(safe_open(file, framework="pt"))
            self._handles |= dict.fromkeys(handle.keys(), handle)
        renamed = {self._rename(name): name for name in self._handles}
        for name, stored in renamed.items():
            if name != stored:
                self._paths.setdefault(name.rpartition(".")[0], {})[stored.rpartition(".")[0]] = None
        self._stored = renamed | {name: name for name in self._handles}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def paths(self, layer: str) -> tuple[str, ...]:
        """Return a layer's path in the model and, where its tensors are stored under another one, that as well."""
        return (layer, *self._paths.get(layer, ()))

    def has(self, name: str) -> bool:
        """Tell whether there is such a tensor."""
        return name in self._stored

    def read(
        self, name: str, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]] | None = None, why: str = ""
    ) -> Tensor:
        """Return a finite tensor of one of these dtypes and shapes; raise `ModelError` if it is missing or differs.

        why: the reason for that shape, for the error.
        """
        if name not in self._stored:
            raise self.error(f"the tensor {name!r} is missing, which quantization_config asks for")
        stored = self._stored[name]
        self._read.add(stored)
        tensor: Tensor = self._handles[stored].get_tensor(stored)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise self.error(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not {wanted}")
        if shapes is not None and tuple(tensor.shape) not in {tuple(each) for each in shapes}:
            wanted = " or ".join(str(tuple(each)) for each in shapes)
            raise self.error(f"{name} has shape {tuple(tensor.shape)}, not {wanted}{why}")
        if tensor.is_floating_point():
            wrong = int((~tensor.to(torch.float32).isfinite()).sum())
            if wrong:
                raise self.error(f"{name} holds NaN or infinity: {wrong} of its {tensor.numel()} values")
        return tensor

    def rest(self) -> dict[str, Tensor]:
        """Return the tensors that were not read, by name; raise `ModelError` for those of quantised layers.

        Scales of a quantised cache are left out.
        """
        names = [name for name in self._handles if name not in self._read and not CACHE_SCALES.fullmatch(name)]
        unread = sorted(name for name in names if QUANTIZED.fullmatch(name))
        if unread:
            more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
            raise self.error(f"{unread[0]}{more}, of layers that quantization_config does not quantise")
        tensors = {name: self._handles[name].get_tensor(name) for name in names}
        for name, tensor in tensors.items():
            # Read as a weight without its scale, a code would be a number of any size.
            if tensor.dtype == torch.float8_e4m3fn or (name.endswith("weight") and not tensor.is_floating_point()):
                raise self.error(f"{name} holds codes, and quantization_config does not quantise its layer")
        return tensors

    def error(self, found: str) -> ModelError:
        """Return the error about these files."""
        return ModelError(
            self.asked,
            found=found,
            remedy="use config.json and weights of one and the same checkpoint, whole, as its author saved them",
        )
