"""Exceptions that users see, each naming what was asked, what was found, and what to do.

CoreError
├── UsageError                  an argument, option or environment variable is wrong
├── PluginError                 an installed plugin is broken; names plugin, version and hook
│   ├── PluginConflictError     two distributions claim one device name
│   └── PluginVersionError      a plugin does not accept this version of `core`
├── DeviceUnavailableError      the device was asked for and cannot be used here
│   └── UnknownDeviceError      no installed plugin has that device name
├── ModelError                  a model folder, its weights, its configuration or a prompt is unusable
├── PassError                   a pass failed, or the declared order of passes is contradictory
├── TraceError                  a model could not be traced as one graph
├── LoweringError               a traced graph could not be turned into a callable
└── CaptureError                a callable could not be captured, or a key that was not captured was asked for

This module imports nothing of `core`: every layer may raise these.
"""

from __future__ import annotations


class CoreError(Exception):
    """Base of every error that `core` raises on purpose.

    asked: what the caller wanted, with the value in `repr`. found: what stands in the way.
    remedy: what to do about it; an imperative sentence.
    """

    def __init__(self, asked: str, *, found: str, remedy: str) -> None:
        super().__init__(asked, found, remedy)
        self.asked = asked
        self.found = found
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.asked}\n  found: {self.found}\n  to do: {self.remedy}"

    def to_json(self) -> dict[str, str]:
        """Return the error as the `error` object of the documented JSON schema."""
        return {"type": type(self).__name__, "asked": self.asked, "found": self.found, "remedy": self.remedy}


class UsageError(CoreError):
    """An argument, option or environment variable is wrong."""


class PluginError(CoreError):
    """An installed plugin is broken; the message names plugin, version and hook."""


class PluginConflictError(PluginError):
    """Two distributions claim one device name."""


class PluginVersionError(PluginError):
    """A plugin does not accept this version of `core`."""


class DeviceUnavailableError(CoreError):
    """The device was asked for and cannot be used here."""


class UnknownDeviceError(DeviceUnavailableError):
    """No installed plugin has that device name."""


class ModelError(CoreError):
    """A model folder, its weights, its configuration or a prompt is unusable."""


class PassError(CoreError):
    """A pass failed, or the declared order of passes is contradictory."""


class TraceError(CoreError):
    """A model could not be traced as one graph.

    spoiled: the attempt may have left empty stand-ins in lists or attributes of the model, which must be loaded anew.
    """

    spoiled = False


class LoweringError(CoreError):
    """A traced graph could not be turned into a callable."""


class CaptureError(CoreError):
    """A callable could not be captured, or a key that was not captured was asked for."""
