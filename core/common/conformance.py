"""What a plugin declares about itself for a conformance run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceProfile:
    """Declared limits of a device.

    not_supported maps a case name or glob (`"ops/attention/*"`) to the reason; such cases are counted apart, never as
    passed. nondeterministic_ops names ops whose replays may differ in bits.
    """

    not_supported: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    nondeterministic_ops: frozenset[str] = frozenset()
