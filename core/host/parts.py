"""Wraps the functions of `DeviceParts` so that every error names plugin and part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any

from core.device import DeviceParts, MemoryInfo, PluginInfo
from core.errors import CoreError, PluginError
from core.host.loading import describe, plugin_error

_OPTIONAL_COUNTS = ("held_bytes",)
_SLEEPING = ("in_host_memory", "allocate", "release", "restore")


def blamed(info: PluginInfo, parts: DeviceParts) -> DeviceParts:
    """Return the parts with functions that name the plugin where they fail; memory is read once, to try it."""
    record, sleeping, reads = parts.record, parts.sleeping_memory, parts.read_rates
    checked = replace(
        parts,
        memory=_guarded(info, "memory", parts.memory, _memory_problem),
        synchronize=_guarded(info, "synchronize", parts.synchronize),
        empty_cache=_guarded(info, "empty_cache", parts.empty_cache),
        reset_peak_memory=_guarded(info, "reset_peak_memory", parts.reset_peak_memory),
        side_stream=_guarded(info, "side_stream", parts.side_stream, _context_problem),
        record=None if record is None else _guarded(info, "record", record, _wait_problem),
        read_rates=None if reads is None else _guarded(info, "read_rates", reads, _rates_problem),
        sleeping_memory=None if sleeping is None else _guarded(info, "sleeping_memory", sleeping, _sleeping_problem),
    )
    checked.memory()
    return checked


def _guarded(
    info: PluginInfo, part: str, function: Callable[[], Any], problem_of: Callable[[Any], str] | None = None
) -> Callable[[], Any]:
    def call() -> Any:
        try:
            result = function()
        except CoreError as error:
            error.add_note(_blame(info, part))
            raise
        except Exception as error:
            error.add_note(_blame(info, part))
            # Keep the types of torch's errors, which other code catches; only reading memory is no work of the device.
            if isinstance(error, RuntimeError) and part != "memory":
                raise
            raise plugin_error(info, f"part {part} of its DeviceParts raised {describe(error)}") from error
        problem = "" if problem_of is None else problem_of(result)
        if problem:
            raise _returned(info, part, result, problem)
        return result

    return call


def _blame(info: PluginInfo, part: str) -> str:
    return f"raised by plugin {info} in part {part} of its DeviceParts"


def _returned(info: PluginInfo, part: str, result: Any, problem: str) -> PluginError:
    what = "None" if result is None else f"an object of type {type(result).__name__}"
    return plugin_error(info, f"part {part} of its DeviceParts returned {what}{problem}")


def _memory_problem(result: Any) -> str:
    if not isinstance(result, MemoryInfo):
        return " instead of core.device.MemoryInfo"
    for field in fields(MemoryInfo):
        value = getattr(result, field.name)
        if value is None and field.name in _OPTIONAL_COUNTS:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return f" whose {field.name} is {value!r} instead of a number of bytes"
    return ""


def _context_problem(result: Any) -> str:
    return "" if isinstance(result, AbstractContextManager) else " instead of a context manager"


def _sleeping_problem(result: Any) -> str:
    missing = [name for name in _SLEEPING if not hasattr(result, name)]
    return f" without {', '.join(missing)}, which core.device.SleepingMemory has" if missing else ""


def _rates_problem(result: Any) -> str:
    if isinstance(result, Mapping) and result and all(isinstance(rate, float) and rate > 0 for rate in result.values()):
        return ""
    return " instead of positive bytes per second by number of threads"


def _wait_problem(result: Any) -> str:
    return "" if callable(result) else " instead of a function that waits"
