"""Listing plugins from the metadata of installed distributions: nothing of a plugin, and no torch, is imported."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Literal

from core._version import __version__
from core.device import PluginInfo
from core.settings import Settings, normalize

PLUGIN_GROUP = "core.plugins"
PROBE_GROUP = "core.probes"
HOST_DISTRIBUTION = "core"
AUTO = "auto"

Verdict = Literal["ready", "blocked", "incompatible", "conflict", "broken"]

# A name must survive `--device name:index` and a comma-separated list in the environment.
_DEVICE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_REQUIRES_HOST = re.compile(rf"\s*{HOST_DISTRIBUTION}\s*($|[\[(<>=!~;@])", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginEntry:
    """One installed plugin and whether it may be loaded; `reason` and `hint` are empty when it is ready."""

    info: PluginInfo
    verdict: Verdict = "ready"
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    """Every plugin entry found, in order of device name, and warnings about settings and metadata."""

    entries: tuple[PluginEntry, ...]
    warnings: tuple[str, ...] = ()

    def claiming(self, device: str) -> tuple[PluginEntry, ...]:
        """Return all entries with that device name, whatever their verdict."""
        return tuple(entry for entry in self.entries if entry.info.device == device)


@dataclass(frozen=True, slots=True)
class _Found:
    """A plugin as its metadata states it; `defect` says what makes it unusable whatever the settings."""

    info: PluginInfo
    defect: str = ""


def discover(settings: Settings) -> Discovery:
    """Read the metadata of all installed distributions and judge each plugin entry."""
    found, warnings = _read_all()
    claims: dict[str, list[PluginInfo]] = defaultdict(list)
    for item in found:
        if not _blocked_by(item.info, settings):
            claims[item.info.device].append(item.info)
    entries = [_judge(item, claims[item.info.device], settings) for item in found]
    entries.sort(key=lambda entry: (entry.info.device, entry.info.distribution))
    infos = [entry.info for entry in entries]
    unmatched = [
        *_unmatched("CORE_PLUGINS", settings.plugins or (), infos),
        *_unmatched("CORE_PLUGINS_DISABLE", settings.plugins_disabled, infos),
    ]
    return Discovery(entries=tuple(entries), warnings=(*settings.warnings, *unmatched, *warnings))


def _read_all() -> tuple[list[_Found], list[str]]:
    found: list[_Found] = []
    warnings: list[str] = []
    seen: set[str] = set()
    for distribution in distributions():
        plugins = _unique(distribution.entry_points.select(group=PLUGIN_GROUP))
        probes = {entry.name: entry for entry in distribution.entry_points.select(group=PROBE_GROUP)}
        if not plugins and not probes:
            continue
        name, version, defect = _identity(distribution)
        # The first on sys.path is the one that imports; a second copy is the same distribution, not a rival.
        if normalize(name) in seen:
            continue
        seen.add(normalize(name))
        in_tree = normalize(name) == HOST_DISTRIBUTION
        requires = ""
        if not in_tree and not defect:
            requires, defect = _host_range(distribution)
        for entry in plugins:
            probe = probes.pop(entry.name, None)
            info = PluginInfo(
                device=entry.name,
                distribution=name,
                version=version,
                entry_point=entry.value,
                probe_entry_point="" if probe is None else probe.value,
                requires_core=requires,
                in_tree=in_tree,
            )
            found.append(_Found(info, defect or name_defect(entry.name)))
        warnings += [f"probe {probe!r} of {name} {version} belongs to none of its plugins" for probe in sorted(probes)]
    return found, warnings


def _unique(entries: Iterable[EntryPoint]) -> list[EntryPoint]:
    return list({(entry.name, entry.value): entry for entry in entries}.values())


def _identity(distribution: Distribution) -> tuple[str, str, str]:
    """Return name, version and a defect; the name comes from the folder where METADATA is missing or damaged."""
    fields: dict[str, str] = {}
    # What is raised for a missing METADATA differs between Python versions; the defect below reports all of them.
    with contextlib.suppress(Exception):
        fields = {key: distribution.metadata[key] for key in ("Name", "Version")}
    if all(fields.values()) and fields:
        return fields["Name"], fields["Version"], ""
    folder = getattr(getattr(distribution, "_path", None), "name", "unknown")
    name, _, version = folder.removesuffix(".dist-info").partition("-")
    return name, version or "(no version)", f"its metadata ({folder}/METADATA) is missing or damaged"


def _host_range(distribution: Distribution) -> tuple[str, str]:
    """Return the range of `core` versions the distribution accepts, and a defect if that cannot be read."""
    # packaging is needed only where a third-party plugin is installed, and costs a tenth of the listing.
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.specifiers import SpecifierSet

    combined = SpecifierSet()
    for line in distribution.requires or ():
        if not _REQUIRES_HOST.match(line):
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            return "", f"its metadata has an invalid requirement {line!r}: {str(error).splitlines()[0]}"
        marker = requirement.marker
        # A requirement of an extra says nothing about the plugin itself.
        if marker is not None and ("extra" in str(marker) or not marker.evaluate()):
            continue
        combined &= requirement.specifier
    return str(combined), ""


def name_defect(device: str) -> str:
    """Return why this cannot be a device name, "" if it can."""
    if device == AUTO:
        return f"device name {device!r} is reserved for choosing a device automatically"
    if not _DEVICE_NAME.fullmatch(device):
        return f"device name {device!r} is not a letter followed by letters, digits, '-' or '_'"
    return ""


def _judge(item: _Found, claimants: list[PluginInfo], settings: Settings) -> PluginEntry:
    info = item.info
    blocked = _blocked_by(info, settings)
    if blocked:
        return PluginEntry(info=info, verdict="blocked", reason=blocked, hint=_unblock_hint(info, settings))
    if item.defect:
        hint = f"report it to the author of {info.distribution}, or uninstall it"
        return PluginEntry(info=info, verdict="broken", reason=item.defect, hint=hint)
    if len(claimants) > 1:
        return PluginEntry(info=info, verdict="conflict", reason=_conflict(claimants), hint=_separation(claimants))
    if not accepts_host(info):
        return PluginEntry(
            info=info,
            verdict="incompatible",
            reason=f"it requires core {info.requires_core}, and this is core {__version__}",
            hint=f"install a version of {info.distribution} made for core {__version__}, or core {info.requires_core}",
        )
    return PluginEntry(info=info)


def accepts_host(info: PluginInfo) -> bool:
    """Return whether the plugin's required range contains this version of `core`."""
    if not info.requires_core:
        return True
    from packaging.specifiers import SpecifierSet

    # A pre-release of core is a core one can test a plugin against.
    return SpecifierSet(info.requires_core).contains(__version__, prereleases=True)


def _names(info: PluginInfo) -> set[str]:
    distribution, device = normalize(info.distribution), normalize(info.device)
    return {distribution, device, f"{distribution}:{device}"}


def _blocked_by(info: PluginInfo, settings: Settings) -> str:
    denied = _names(info).intersection(settings.plugins_disabled)
    if denied:
        return f"CORE_PLUGINS_DISABLE contains {min(denied)!r}"
    # The allow-list is about foreign code: without the plugins of core itself nothing could be selected.
    if settings.plugins is not None and not info.in_tree and not _names(info).intersection(settings.plugins):
        return f"CORE_PLUGINS={','.join(settings.plugins)!r} does not contain it"
    return ""


def _unblock_hint(info: PluginInfo, settings: Settings) -> str:
    denied = _names(info).intersection(settings.plugins_disabled)
    if denied:
        return f"remove {min(denied)!r} from CORE_PLUGINS_DISABLE"
    return f"add {normalize(info.distribution)!r} to CORE_PLUGINS, or unset it"


def _conflict(claimants: list[PluginInfo]) -> str:
    who = " and ".join(f"{info} ({info.entry_point})" for info in claimants)
    return f"device name {claimants[0].device!r} is claimed by {who}"


def _separation(claimants: list[PluginInfo]) -> str:
    if len({info.distribution for info in claimants}) == 1:
        return f"report it to the author of {claimants[0].distribution}: a device name may be declared once"
    # Disabling `core` as a whole would take the other plugins that ship with it along.
    values = [f"core:{info.device}" if info.in_tree else normalize(info.distribution) for info in claimants]
    choices = " or ".join(f"CORE_PLUGINS_DISABLE={value}" for value in values)
    return f"uninstall one of them, or set {choices}"


def _unmatched(variable: str, names: tuple[str, ...], infos: list[PluginInfo]) -> list[str]:
    known = set().union(*(_names(info) for info in infos))
    installed = ", ".join(sorted({name for name in known if ":" not in name})) or "none"
    return [
        f"{variable} names {name!r}, which is no installed plugin's distribution or device (installed: {installed})"
        for name in names
        if name not in known
    ]
