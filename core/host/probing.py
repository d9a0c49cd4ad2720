"""Asking every plugin's probe, in worker processes and all at once, whether its device can be used here."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, Literal, Self

from core.device import PluginInfo
from core.errors import PluginError
from core.host import accelerators
from core.host.discovery import Discovery, PluginEntry, discover
from core.host.workers.worker import Asked, WorkerResult, ask_once
from core.probe import Probe
from core.settings import Settings

logger = logging.getLogger(__name__)

_WORKER = "core.host.probe_worker"

MAX_TEXT = 500
"""Longest reason or hint, in characters; a vendor's library may print any amount."""

_ESCAPE_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])|\x9b[0-?]*[ -/]*[@-~]"
)

_NO_DEVICE = "check that the device's driver is installed and that this process may use it"

_HARMLESS: set[PluginInfo] = set()
"""Plugins whose probes have come back, in a worker, since this process began."""

State = Literal["available", "unavailable", "blocked", "incompatible", "conflict", "broken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOutcome:
    """A probe's answer, or the host's in its place."""

    probe: Probe
    #: The probe itself is at fault (crash, hang, exception, wrong answer); an absent device is no fault.
    failed: bool = False
    #: Whether the plugin has a probe.
    probed: bool = True
    #: Its process crashed, ended or hung, as would any process that runs it.
    ended: bool = False
    imported_torch: bool = False
    #: The tail of what the probe printed.
    output: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceStatus:
    """One line of `core devices`."""

    plugin: PluginInfo
    state: State
    #: Usable devices; None where nothing tells.
    device_count: int | None
    reason: str
    hint: str = ""
    #: None for a plugin that was not asked (blocked, incompatible, …).
    outcome: ProbeOutcome | None = None


class DeviceScan(Asked):
    """Lists devices in two steps, so that a caller can do other work while the probes run.

    Entering reads metadata and launches the probes; `statuses()` waits for them; leaving kills those still running.
    """

    def __init__(self, settings: Settings, *, ask_torch: bool = False) -> None:
        """ask_torch: list the accelerator that torch drives too, where something may bring one that is unclaimed."""
        super().__init__()
        self._ask_torch = ask_torch
        self._settings = settings
        self.discovery: Discovery = discover(settings)
        #: One line each: those of the discovery, and from `statuses` on what kept torch from answering.
        self.warnings = self.discovery.warnings

    def __enter__(self) -> Self:
        for number, entry in enumerate(self.discovery.entries):
            if entry.verdict == "ready" and entry.info.probe_entry_point:
                probe, timeout_s = entry.info.probe_entry_point, self._settings.probe_timeout_s
                self.ask(str(number), _WORKER, probe=probe, timeout_s=timeout_s)
        if self._ask_torch and accelerators.may_offer(self.discovery):
            self.ask(accelerators.WORKER, accelerators.WORKER, timeout_s=accelerators.TIMEOUT_S)
        return self

    def statuses(self) -> tuple[DeviceStatus, ...]:
        """Return one status per plugin entry, in order of device name, and last the generic device, if there is one."""
        results = self.results()
        listed = tuple(_status(entry, results.get(str(n))) for n, entry in enumerate(self.discovery.entries))
        asked = results.get(accelerators.WORKER)
        return listed if asked is None else (*listed, *self._generic(asked))

    def _generic(self, asked: WorkerResult) -> tuple[DeviceStatus, ...]:
        answer = asked.answer or {}
        name, count, problem = accelerators.from_answer(answer)
        if asked.problem or problem:
            self.warnings += (f"torch could not be asked for its accelerator: {_plain(asked.problem or problem)}",)
        if not name or self.discovery.claiming(name):
            return ()
        entry = accelerators.entry_of(name, self._settings)
        if entry.verdict != "ready":
            return (_status(entry, None),)
        what = accelerators.describe(entry.info, self._settings)
        found = "" if count else f"torch has support for {name!r}, but finds no device; "
        probe = Probe(
            available=count > 0, device_count=count, reason=_plain(found + what), hint=_NO_DEVICE * (not count)
        )
        return (
            DeviceStatus(
                plugin=entry.info,
                state="available" if count else "unavailable",
                device_count=count,
                reason=probe.reason,
                hint=probe.hint,
                outcome=ProbeOutcome(probe=probe),
            ),
        )


def run_probe(info: PluginInfo, timeout_s: float) -> ProbeOutcome:
    """Run one plugin's probe in a worker process."""
    if not info.probe_entry_point:
        return _unprobed()
    return _outcome(info, ask_once(_WORKER, {"probe": info.probe_entry_point}, timeout_s=timeout_s))


def require_harmless_probe(info: PluginInfo, timeout_s: float) -> None:
    """Raise the error for a plugin whose probe ends its process: opening the device is likely to run the same code.

    The probe of a plugin from outside of `core` is run once in the life of this process, in a worker.
    """
    if info.in_tree or not info.probe_entry_point or info in _HARMLESS:
        return
    outcome = run_probe(info, timeout_s)
    if outcome.ended:
        raise PluginError(
            f"device {info.device!r}",
            found=f"plugin {info} ({info.entry_point}) is broken: {outcome.probe.reason}; opening the device was not "
            "tried, since it may end this process likewise",
            remedy=f"report it to the author of {info.distribution}; `core doctor` shows what it printed, and "
            "CORE_PROBE_TIMEOUT_S gives a slow probe more time",
        )
    _HARMLESS.add(info)


def _status(entry: PluginEntry, result: WorkerResult | None) -> DeviceStatus:
    info = entry.info
    if entry.verdict != "ready":
        return DeviceStatus(plugin=info, state=entry.verdict, device_count=0, reason=entry.reason, hint=entry.hint)
    outcome = _unprobed() if result is None else _outcome(info, result)
    probe = outcome.probe
    if not outcome.ended:
        _HARMLESS.add(info)
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
            ended=result.answer is None and bool(result.problem),
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
