"""Tensor classes: how to convert each to plain tensors, and the errors for unknown ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from core.errors import TraceError

PLAIN = (Tensor, nn.Parameter)
"""Classes that are plain already."""


def rule_of(tensor: Tensor) -> str:
    """Return how to make a tensor plain: it already is, by a view, by its inner tensors, or unknown."""
    if type(tensor) in PLAIN:
        return "plain"
    if comes_in_parts(tensor):
        return "parts"
    return "unknown" if dispatches(type(tensor)) else "view"


def comes_in_parts(tensor: Any) -> bool:
    """Tell whether a tensor declares its inner tensors."""
    return is_traceable_wrapper_subclass(tensor)


def dispatches(kind: type) -> bool:
    """Tell whether a class handles operations itself, beneath torch's functions."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


def unknown_class(path: str, tensor: Tensor) -> TraceError:
    """Return the error for a tensor of a class that can't be split."""
    return TraceError(
        f"tracing with {path}, a {class_name(type(tensor))}",
        found=f"{path} is a {class_name(type(tensor))}; this tensor class handles operations itself and does not say "
        "of which tensors it is made (core.compilation.trace.flattening.register_flattening takes a rule)",
        remedy="give it __tensor_flatten__ and __tensor_unflatten__, or register a rule: "
        "core.compilation.trace.flattening.register_flattening",
    )


def class_name(kind: type) -> str:
    """Return the full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def as_plain(tensor: Tensor) -> Tensor:
    """Return a plain tensor of the same memory, which nothing that the class overrides reaches."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return tensor.detach().as_subclass(Tensor)


def refused_class(tensors: Iterator[tuple[str, Tensor]], said: str) -> TraceError | None:
    """Return the error that names the first of these tensors, by path, whose class made a trace fail; None if none did.

    said: Dynamo's reason, which names the class but neither the tensor nor what helps.
    """
    for path, tensor in tensors:
        if rule_of(tensor) == "unknown" and type(tensor).__name__ in said:
            return unknown_class(path, tensor)
    return None
