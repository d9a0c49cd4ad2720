"""Which plugin a trial is about, and its device where the machine has one."""

from __future__ import annotations

from core.device import Device
from core.errors import DeviceUnavailableError
from core.host.accelerators import installed_claims
from core.host.discovery import PluginEntry
from core.host.probing import run_probe
from core.settings import Settings
from core_conformance.trial import Skip, Trial


def base_name(trial: Trial) -> str:
    """Return the device's name without an index."""
    return trial.name.partition(":")[0]


def entry_of(trial: Trial) -> PluginEntry:
    """Return the one plugin of that device name; raise `LookupError` naming all there are."""
    entries = installed_claims(base_name(trial))
    if len(entries) != 1:
        who = " and ".join(str(entry.info) for entry in entries) or "no installed plugin"
        raise LookupError(f"device name {base_name(trial)!r} is claimed by {who}")
    return entries[0]


def present(trial: Trial) -> Device:
    """Return the opened device; skip where the machine has none, as long as the probe does not promise one."""
    try:
        return trial.device
    except DeviceUnavailableError as error:
        probed = run_probe(entry_of(trial).info, Settings.from_environment().probe_timeout_s)
        if probed.probed and (probed.failed or probed.probe.available):
            raise
        raise Skip(f"this machine has no such device: {error.found}") from None
