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
    """A call of an op that takes host-side arguments, for a device that declares `update`.

    function: called as `function(**inputs, **step)`; gives one tensor. inputs: tensors on the device, by name. steps:
    sets of host-side arguments, by the names of the op's arguments; two at least, each with another result. Where the
    names of a step are those of inputs, the arguments are the values of these: a step holds flat lists of them, and
    `function` is called as `function(**inputs)`.
    """

    function: Callable[..., torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    steps: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceProfile:
    """Declared limits of a device.

    not_supported maps a case name or glob (`"ops/attention/*"`) to the reason; such cases are counted apart, never as
    passed. nondeterministic_ops names ops whose replays may differ in bits, as "aten::index_add". host_argument_example
    makes, for a torch device, what the renewal of host-side arguments is tried on; a device that declares `update` owes
    one.
    """

    not_supported: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    nondeterministic_ops: frozenset[str] = frozenset()
    host_argument_example: Callable[[torch.device], HostArgumentExample] | None = None
