"""What a device can do, as data: a leaf of the contract, which passes and engines read alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Mode = Literal["full", "piecewise", "segmented", "compile", "off"]
"""How a phase runs: one captured graph per bucket, graphs between break points, capture without tracing, one compiled
program per bucket without a device graph, or the model as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a device can do, as data; nothing is inferred from which methods exist.

    device_name: the product's name, as the vendor writes it. dtypes: floating dtypes with device arithmetic.
    modes: capture modes that work, the preferred one first; "off" is always allowed and need not be listed.
    deterministic: replays with equal inputs give equal bits. update: captured ops take host-side arguments that must be
    renewed before each replay. asynchronous: kernels run while the host goes on, so that the host can prepare a step
    ahead, in pinned memory. device_lengths: attention of a prefill reads the sequences' lengths on the device, so that
    one graph can hold all of it. extra: anything a plugin's own passes or implementations want to test. unprofitable:
    names of passes that cost more than they gain here, each with the reason; they run only where asked for by name.
    """

    device_name: str
    dtypes: frozenset[torch.dtype]
    modes: tuple[Mode, ...] = ("off",)
    fp64: bool = True
    deterministic: bool = True
    update: bool = False
    asynchronous: bool = False
    device_lengths: bool = False
    extra: Mapping[str, str | int | float | bool] = field(default_factory=lambda: MappingProxyType({}))
    unprofitable: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
