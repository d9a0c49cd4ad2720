"""Asking every plugin's probe, in worker processes and all at once, whether its device can be used here."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from core.device import PluginInfo
from core.host.discovery import Discovery, PluginEntry, discover
from core.host.workers.pool import WorkerPool, WorkerResult
from core.probe import Probe
from core.settings import Settings

logger = logging.getLogger(__name__)

MAX_TEXT = 500
"""Longest reason or hint, in characters; what a vendor's library says is otherwise without bound."""

_ESCAPE_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])|\x9b[0-?]*[ -/]*[@-~]"
)

State = Literal["available", "unavailable", "blocked", "incompatible", "conflict", "broken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOutcome:
    """A probe's answer, or the host's in its place.

    failed: the probe itself is at fault (crash, hang, exception, wrong answer), which is not the same as a device that
    is absent. probed: false for a plugin without a probe. output: the tail of what the probe printed.
    """

    probe: Probe
    failed: bool = False
    probed: bool = True
    imported_torch: bool = False
    output: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceStatus:
    """One line of `core devices`. outcome is None for a plugin that was not asked (blocked, incompatible, …)."""

    plugin: PluginInfo
    state: State
    device_count: int | None
    reason: str
    hint: str = ""
    outcome: ProbeOutcome | None = None


class DeviceScan:
    """Lists devices in two steps, so that a caller can do other work while the probes run.

    Entering reads metadata and launches the probes; `statuses()` waits for them; leaving kills those still running.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pool = WorkerPool()
        self.discovery: Discovery = discover(settings)

    def __enter__(self) -> Self:
        self._pool.__enter__()
        for number, entry in enumerate(self.discovery.entries):
            if entry.verdict == "ready" and entry.info.probe_entry_point:
                _launch(self._pool, str(number), entry.info, self._settings.probe_timeout_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, traceback)

    def statuses(self) -> tuple[DeviceStatus, ...]:
        """Return one status per plugin entry, in order of device name."""
        results = self._pool.collect()
        return tuple(_status(entry, results.get(str(n))) for n, entry in enumerate(self.discovery.entries))


def run_probe(info: PluginInfo, timeout_s: float) -> ProbeOutcome:
    """Run one plugin's probe in a worker process."""
    if not info.probe_entry_point:
        return _unprobed()
    with WorkerPool() as pool:
        _launch(pool, info.device, info, timeout_s)
        return _outcome(info, pool.collect()[info.device])


def _launch(pool: WorkerPool, key: str, info: PluginInfo, timeout_s: float) -> None:
    pool.launch(key, "core.host.probe_worker", info.probe_entry_point, timeout_s=timeout_s)


def _status(entry: PluginEntry, result: WorkerResult | None) -> DeviceStatus:
    info = entry.info
    if entry.verdict != "ready":
        return DeviceStatus(plugin=info, state=entry.verdict, device_count=0, reason=entry.reason, hint=entry.hint)
    outcome = _unprobed() if result is None else _outcome(info, result)
    probe = outcome.probe
    state: State = "broken" if outcome.failed else "available" if probe.available else "unavailable"
    return DeviceStatus(
        plugin=info,
        state=state,
        device_count=probe.device_count if outcome.probed else None,
        reason=probe.reason,
        hint=probe.hint,
        outcome=outcome,
    )


def _unprobed() -> ProbeOutcome:
    reason = "the plugin brings no probe; opening the device will tell"
    return ProbeOutcome(probe=Probe(available=True, device_count=0, reason=reason), probed=False)


def _outcome(info: PluginInfo, result: WorkerResult) -> ProbeOutcome:
    if result.output:
        logger.debug("probe %s of %s printed:\n%s", info.probe_entry_point, info, result.output)
    answer = result.answer or {}
    probe = None if result.problem or "problem" in answer else _probe(answer)
    if probe is None:
        problem = result.problem or answer.get("problem") or "sent something else than an answer"
        return ProbeOutcome(
            probe=Probe(
                available=False,
                device_count=0,
                reason=_plain(f"its probe {info.probe_entry_point} {problem}"),
                hint=f"run `core doctor`, and report it to the author of {info.distribution}",
            ),
            failed=True,
            imported_torch=bool(answer.get("imported_torch")),
            output=result.output,
        )
    return ProbeOutcome(probe=probe, imported_torch=bool(answer.get("imported_torch")), output=result.output)


def _probe(answer: dict[str, Any]) -> Probe | None:
    """Return the worker's probe, or None where some other code of that process has written the answer."""
    match answer.get("probe"):
        case {"available": bool(available), "device_count": int(count), "reason": str(reason), "hint": str(hint)}:
            return Probe(available=available, device_count=count, reason=_plain(reason), hint=_plain(hint))
    return None


def _plain(text: str) -> str:
    """Return one line of at most `MAX_TEXT` printable characters, which can neither steer a terminal nor fill it."""
    # Cut first, generously, since the text may be of any size; shortened again once nothing more can be left out.
    line = " ".join(_ESCAPE_SEQUENCE.sub("", text[: 8 * MAX_TEXT]).split())
    line = "".join(character for character in line if character.isprintable())
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"
