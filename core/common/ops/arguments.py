"""Helpers of the declarations of canonical ops: argument checks, the default compute dtype, tensors for samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype an op computes in when its caller names none: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(condition: bool, op: str, message: str) -> None:
    """Raise `RuntimeError`, the op's name before the message, unless the condition holds."""
    # Not `torch._check`: its message is a closure, which Dynamo of torch 2.11 can't trace.
    if not condition:
        raise RuntimeError(f"core::{op}: {message}")


def check_floating(op: str, **tensors: Tensor | None) -> None:
    """Raise `RuntimeError` unless every tensor given is floating-point."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check(tensor.is_floating_point(), op, f"{name} must be floating-point, not {tensor.dtype}")


def check_shape(op: str, shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    """Raise `RuntimeError` unless every tensor given has this shape."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check(tuple(tensor.shape) == shape, op, f"{name} must have shape {shape}, not {tuple(tensor.shape)}")


def check_ranks(op: str, rank: int, **tensors: Tensor | None) -> None:
    """Raise `RuntimeError` unless every tensor given has this rank."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check(tensor.dim() == rank, op, f"{name} must have rank {rank}, not {tensor.dim()}")


def check_choice(op: str, name: str, value: str, known: Sequence[str]) -> None:
    """Raise `RuntimeError` unless `value` is among the known ones."""
    check(value in known, op, f"{name} {value!r} is none of {', '.join(map(repr, known))}")


class Draw:
    """Draws the tensors of calls worth testing: fp64 normals, the same on every device, rounded to a dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype = dtype
        self.device = device
        self.wide = at_least_fp32(dtype)
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of this shape with mean `shift` and deviation `scale`."""
        return self._normal(shape, scale, shift).to(dtype or self.dtype).to(self.device)

    def magnitudes(
        self, *shape: int, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the magnitudes of such a tensor, taken on the host: a device need not have `abs` for a call of an op
        that does not use it."""
        return self._normal(shape, scale, shift).abs().to(dtype or self.dtype).to(self.device)

    def _normal(self, shape: tuple[int, ...], scale: float, shift: float) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64) * scale + shift
