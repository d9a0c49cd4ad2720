"""Exceptions that users see, each naming what was asked, what was found, and what to do.

CoreError
├── UsageError                  an argument, option or environment variable is wrong
├── PluginError                 an installed plugin is broken; names plugin, version and hook
│   ├── PluginConflictError     two distributions claim one device name
│   └── PluginVersionError      a plugin does not accept this version of `core`
├── DeviceUnavailableError      the device was asked for and cannot be used here
│   └── UnknownDeviceError      no installed plugin has that device name
├── ModelError                  a model folder, its weights, its configuration or a prompt is unusable
├── EngineError                 an engine failed while it served, or can serve no more
├── PassError                   a pass failed, or the declared order of passes is contradictory
├── TraceError                  a model could not be traced as one graph
├── LoweringError               a traced graph could not be turned into a callable
└── CaptureError                a callable could not be captured, or a key that was not captured was asked for
    └── GraphResourcesError     the device holds no more graphs; those captured before stay valid

This module imports nothing of `core`: every layer may raise these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


class CoreError(Exception):
    """Base of every error that `core` raises on purpose."""

    def __init__(self, asked: str, *, found: str, remedy: str) -> None:
        """Keep what an error has to say.

        - asked: what the caller wanted, with the value in `repr`.
        - found: what stands in the way.
        - remedy: what to do about it, in an imperative sentence.
        """
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


class EngineError(CoreError):
    """An engine failed while it served, or can serve no more."""


class PassError(CoreError):
    """A pass failed, or the declared order of passes is contradictory."""


class TraceError(CoreError):
    """A model could not be traced as one graph."""

    #: The model changes Python state as it runs, which no capture without a trace would repeat either.
    keeps_state = False
    #: It states a recurrence for which there is no op: what it computes eagerly is something else than its trace.
    states_recurrence = False


class LoweringError(CoreError):
    """A traced graph could not be turned into a callable."""


class CaptureError(CoreError):
    """A callable could not be captured, or a key that was not captured was asked for."""


class GraphResourcesError(CaptureError):
    """The device holds no more graphs (its streams are used up, say); those captured before stay valid.

    Raised by a backend's `capture_one` or `segment`; what was captured of the failed key is gone. The buckets that have
    no graph are then served by larger captured ones, or eagerly.
    """


_NO_MEMORY = re.compile(r"out of memory|can(?:no|')t allocate memory", re.IGNORECASE)
"""What torch's allocators, compilers and the system say."""
_APPENDED = re.compile(
    r"\s(?:While executing %|Original traceback:|from user code:|Set TORCHDYNAMO_VERBOSE|Use tlparse)", re.IGNORECASE
)
"""Markers after which torch appends nodes, tracebacks and advice to a message."""


def one_line(text: str, limit: int = 300) -> str:
    """Return a message as one line of at most `limit` characters, without what torch appends.

    A longer message keeps its beginning and its last line: devices write the call first and the cause last.
    """
    lines = [" ".join(line.split()) for line in _APPENDED.split(text, maxsplit=1)[0].splitlines()]
    lines = [line for line in lines if re.search(r"\w", line)]
    whole = " ".join(lines)
    if len(whole) <= limit:
        return whole
    if len(lines) == 1:
        return _cut(whole, limit)
    last = _cut(lines[-1], limit // 2 - 1)
    return f"{_cut(' '.join(lines[:-1]), limit - len(last) - 1)} {last}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 2].rstrip()} …"


def broken_extension(asked: str, error: BaseException) -> DeviceUnavailableError | None:
    """Return the error for an import of torch that an installed backend of another device made fail; None otherwise.

    torch imports all installed backend extensions by itself, so an extension that lacks its own libraries takes torch
    away from every device.
    """
    match = re.match(r"Failed to load the backend extension: (\S+?)\.(?:\s|$)", str(error))
    if match is None:
        return None
    cause = one_line(str(error.__cause__ or "")) or "no reason is given"
    return DeviceUnavailableError(
        asked,
        found=f"torch cannot be imported, since its backend extension {match[1]} is installed and fails: {cause}",
        remedy=f"uninstall {match[1]}, or install what it needs; TORCH_DEVICE_BACKEND_AUTOLOAD=0 lets torch do without "
        "it (core imports the backend of the device asked for by itself), but transformers will still want it",
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether memory was short, on the host or on a device, by an error or what it was raised from.

    Python and torch's devices say so by type; torch on the processor, compilers and vendors' libraries in words.
    """
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        if _NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def error_json(error: CoreError) -> dict[str, Any]:
    """Return the documented error object: the error's own fields and its notes."""
    return {**error.to_json(), "notes": notes_of(error)}


def notes_of(error: BaseException) -> list[str]:
    """Return the notes that were added to an error."""
    return list(getattr(error, "__notes__", ()))


def error_from_json(fields: Mapping[str, Any]) -> CoreError:
    """Return the error whose JSON object, with its notes, another process has sent."""
    kind = globals().get(fields["type"])
    make = kind if isinstance(kind, type) and issubclass(kind, CoreError) else CoreError
    error = make(fields["asked"], found=fields["found"], remedy=fields["remedy"])
    for note in fields["notes"]:
        error.add_note(note)
    return error
