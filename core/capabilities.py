"""A device's capabilities as data: a part of the contract, written by plugins and read by passes and engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Mode = Literal["full", "piecewise", "segmented", "compile", "off"]
"""How a phase runs.

- full: one captured graph per bucket
- piecewise: captured graphs between break points of a trace
- segmented: captured graphs between break points of the model as it is, without a trace
- compile: one compiled program per bucket, without a device graph
- off: the model as it is
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a device can do, as data; nothing is inferred from which methods exist."""

    #: The product's name, as the vendor writes it.
    device_name: str
    #: Floating dtypes with device arithmetic.
    dtypes: frozenset[torch.dtype]
    #: Capture modes that work, the preferred one first; "off" is always allowed and need not be listed.
    modes: tuple[Mode, ...] = ("off",)
    #: The device computes in float64.
    fp64: bool = True
    #: Replays with equal inputs give equal bits.
    deterministic: bool = True
    #: Captured ops take host-side arguments, which must be renewed before each replay.
    update: bool = False
    #: Kernels run while the host goes on, so that the host can prepare a step ahead, in pinned memory.
    asynchronous: bool = False
    #: torch's own ops give their results the strides that torch's fakes give them. False: results may be contiguous
    #: where the fakes keep the memory order of an input; a trace that depends on that order is then refused.
    keeps_strides: bool = True
    #: Attention of a prefill reads the sequences' lengths on the device, so that one graph can hold all of it.
    device_lengths: bool = False
    #: Anything that a plugin's own passes or implementations want to test.
    extra: Mapping[str, str | int | float | bool] = field(default_factory=lambda: MappingProxyType({}))
    #: Names of passes that cost more than they gain on this device, each with the reason; they run only if asked for by
    #: name.
    unprofitable: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
