"""torch's switches of the whole process that Inductor's code depends on, as values that go to a worker with a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch.utils import deterministic as settings


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchState:
    """The switches; besides these, Inductor's own settings count."""

    num_threads: int
    default_dtype: torch.dtype
    #: Of products in fp32.
    matmul_precision: str
    deterministic: bool
    warn_only: bool
    #: Whether deterministic algorithms fill what `torch.empty` gives.
    fill_uninitialized_memory: bool
    mkldnn: bool

    @classmethod
    def read(cls) -> Self:
        """Return the switches as they are in this process."""
        return cls(
            num_threads=torch.get_num_threads(),
            default_dtype=torch.get_default_dtype(),
            matmul_precision=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            fill_uninitialized_memory=settings.fill_uninitialized_memory,  # type: ignore[attr-defined]  # set by its class
            mkldnn=torch._C._get_mkldnn_enabled(),
        )

    def apply(self) -> None:
        """Set the switches of this process."""
        torch.set_num_threads(self.num_threads)
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        settings.fill_uninitialized_memory = self.fill_uninitialized_memory  # type: ignore[attr-defined]
        torch._C._set_mkldnn_enabled(self.mkldnn)
