"""Listing plugins from the metadata of installed distributions: nothing of a plugin, and no torch, is imported."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from core._version import __version__
from core.device import PluginInfo
from core.host.distributions.metadata import Damaged
from core.host.plugin_metadata import read_plugins
from core.settings import Settings, normalize

Verdict = Literal["ready", "blocked", "incompatible", "conflict", "broken"]


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
    #: One line each, with those on `unread`.
    warnings: tuple[str, ...] = ()
    #: All distributions with damaged metadata.
    damaged: tuple[Damaged, ...] = ()
    #: Damaged distributions without a plugin among the entries; each may have plugins that can't be read.
    unread: tuple[Damaged, ...] = ()
    #: Names of the extensions that `import torch` loads.
    extensions: tuple[str, ...] = ()

    def claiming(self, device: str) -> tuple[PluginEntry, ...]:
        """Return all entries with that device name, whatever their verdict."""
        return tuple(entry for entry in self.entries if entry.info.device == device)


def discover(settings: Settings) -> Discovery:
    """Read the metadata of all installed distributions and judge each plugin entry."""
    read = read_plugins()
    claims: dict[str, list[PluginInfo]] = defaultdict(list)
    for info, defect in read.plugins:
        # A plugin that can't be loaded does not conflict with a sound one of the same name.
        if not defect and not _blocked(info, settings):
            claims[info.device].append(info)
    entries = [_judge(info, defect, claims[info.device], settings) for info, defect in read.plugins]
    entries.sort(key=lambda entry: (entry.info.device, entry.info.distribution))
    infos = [entry.info for entry in entries]
    unmatched = [
        *_unmatched("CORE_PLUGINS", settings.plugins or (), infos),
        *_unmatched("CORE_PLUGINS_DISABLE", settings.plugins_disabled, infos),
    ]
    return Discovery(
        entries=tuple(entries),
        warnings=(*settings.warnings, *unmatched, *read.warnings, *map(str, read.unread)),
        unread=tuple(read.unread),
        damaged=tuple(read.damaged),
        extensions=tuple(sorted(set(read.extensions))),
    )


def _judge(info: PluginInfo, defect: str, claimants: list[PluginInfo], settings: Settings) -> PluginEntry:
    blocked = _blocked(info, settings)
    if blocked:
        return PluginEntry(info=info, verdict="blocked", reason=blocked[0], hint=blocked[1])
    if defect:
        hint = f"report it to the author of {info.distribution}, or uninstall it"
        return PluginEntry(info=info, verdict="broken", reason=defect, hint=hint)
    if len(claimants) > 1:
        return PluginEntry(info=info, verdict="conflict", reason=_conflict(claimants), hint=_separation(claimants))
    if not accepts_host(info):
        age = _age(info)
        return PluginEntry(
            info=info,
            verdict="incompatible",
            reason=f"it requires core {info.requires_core}, and this is core {__version__}{age and f': {age}'}",
            hint=f"install a version of {info.distribution} made for core {__version__}, or core {info.requires_core}",
        )
    return PluginEntry(info=info)


def entry_without_metadata(info: PluginInfo, settings: Settings) -> PluginEntry:
    """Return the entry of a plugin of `core` that no distribution names: the settings alone may keep it out."""
    blocked = _blocked(info, settings)
    return (
        PluginEntry(info=info, verdict="blocked", reason=blocked[0], hint=blocked[1])
        if blocked
        else PluginEntry(info=info)
    )


def accepts_host(info: PluginInfo) -> bool:
    """Return whether the plugin's required range contains this version of `core`."""
    if not info.requires_core:
        return True
    from packaging.specifiers import SpecifierSet

    # A pre-release of core is a core one can test a plugin against.
    return SpecifierSet(info.requires_core).contains(__version__, prereleases=True)


def _age(info: PluginInfo) -> str:
    """Return which of the two is too old, "" where the range says neither."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    here = Version(__version__)
    ends = [(each.operator, Version(each.version.removesuffix(".*"))) for each in SpecifierSet(info.requires_core)]
    if any(operator in (">=", ">", "~=", "==", "===") and end > here for operator, end in ends):
        return "this core is too old for it"
    if any(operator in ("<", "<=", "~=", "==", "===") and end <= here for operator, end in ends):
        return "it was made for an older core"
    return ""


def _names(info: PluginInfo) -> set[str]:
    distribution, device = normalize(info.distribution), normalize(info.device)
    return {distribution, device, f"{distribution}:{device}"}


def _blocked(info: PluginInfo, settings: Settings) -> tuple[str, str] | None:
    """Return which setting keeps the plugin out, and what to do about it; None where none does."""
    denied = _names(info).intersection(settings.plugins_disabled)
    if denied:
        setting = "CORE_PLUGINS_DISABLE"
        return f"{setting} contains {min(denied)!r}", f"remove {min(denied)!r} from {setting}"
    # The allow-list is for foreign code; core's own plugins stay allowed, else nothing could be selected.
    if settings.plugins is None or info.in_tree or _names(info).intersection(settings.plugins):
        return None
    hint = f"add {normalize(info.distribution)!r} to CORE_PLUGINS, or unset it"
    return f"CORE_PLUGINS={','.join(settings.plugins)!r} does not contain it", hint


def _conflict(claimants: list[PluginInfo]) -> str:
    who = " and ".join(f"{info} ({info.entry_point})" for info in claimants)
    return f"device name {claimants[0].device!r} is claimed by {who}"


def _separation(claimants: list[PluginInfo]) -> str:
    if len({info.distribution for info in claimants}) == 1:
        return f"report it to the author of {claimants[0].distribution}: a device name may be declared once"
    # Disabling `core` as a whole would also disable the other plugins that ship with it.
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
