"""The contract between `core` and a device plugin: seven hooks, each given one frozen context object.

A plugin is a module (or object) named by an entry point in group `core.plugins`; the entry point's name is the device
name. It implements `core_open_device` and whichever other hooks it needs, marked with `core.hookspecs.hookimpl`. An
implementation may take no argument instead of `context`; arguments with defaults are refused, since pluggy never passes
them. All hooks run once, at selection (`core_conformance`: at a conformance run); none runs per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from core.common.conformance import ConformanceProfile
    from core.common.fakes import FakeOp
    from core.common.graphs.backend import GraphBackendFactory
    from core.common.lowering import Lowerings
    from core.common.ops.implementation import OpImplementation
    from core.common.passes.declaration import Pass
    from core.device import DeviceParts, PluginInfo

PROJECT = "core"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenContext:
    """Given to `core_open_device`. index: which device of that kind, counted from 0."""

    plugin: PluginInfo
    index: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceContext:
    """Given to every other hook: the plugin's metadata and the device it opened."""

    plugin: PluginInfo
    parts: DeviceParts


class CoreSpec:
    """The hooks. All but `core_open_device` may be left out; the default is stated with each."""

    @hookspec(firstresult=True)
    def core_open_device(self, context: OpenContext) -> DeviceParts:
        """Open the device and return its parts; raise `DeviceUnavailableError` naming cause and remedy if it cannot."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def core_lowering(self, context: DeviceContext) -> Lowerings:
        """Return the lowerings that turn a finished graph into a callable. Default: `inline` only."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def core_graph_backend(self, context: DeviceContext) -> GraphBackendFactory:
        """Return a factory of graph backends, called once per program. Default: run the callable, capture nothing."""
        raise NotImplementedError

    @hookspec
    def core_register_passes(self, context: DeviceContext) -> Sequence[Pass]:
        """Return declarations of passes, of any mechanism. Default: none."""
        raise NotImplementedError

    @hookspec
    def core_register_ops(self, context: DeviceContext) -> Sequence[OpImplementation]:
        """Return implementations of canonical ops with the conditions under which each applies. Default: none."""
        raise NotImplementedError

    @hookspec
    def core_register_fakes(self, context: DeviceContext) -> Sequence[FakeOp]:
        """Return fake kernels for ops of foreign libraries that lack one. Default: none."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def core_conformance(self, context: DeviceContext) -> ConformanceProfile:
        """Return what the device declares not to support, each item with its reason. Default: nothing."""
        raise NotImplementedError
