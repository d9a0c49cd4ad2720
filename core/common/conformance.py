"""What a plugin declares about itself for a conformance run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class HostArgumentExample:
    """A call of an op that takes host-side arguments, for a device that declares `update`."""

    #: called as `function(**inputs, **step)`, or as `function(**inputs)` where a step holds values of inputs; gives one
    #: tensor
    function: Callable[..., torch.Tensor]
    #: tensors on the device, by name
    inputs: Mapping[str, torch.Tensor]
    #: at least two sets of host-side arguments, each with another result: keyed by the op's argument names, or by input
    #: names with flat lists of the inputs' values
    steps: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceProfile:
    """Declared limits of a device."""

    #: name or glob of cases (`"ops/attention/*"`) -> the reason; such cases are counted as limits, never as passed
    not_supported: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    #: ops whose replays may differ in bits, as "aten::index_add"
    nondeterministic_ops: frozenset[str] = frozenset()
    #: takes a torch device and makes the op call on which updates of host-side arguments are tested; required of a
    #: device with `update`
    host_argument_example: Callable[[torch.device], HostArgumentExample] | None = None
