"""Plugins in the metadata of installed distributions: their names, probes, versions and defects."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint

from core.device import PluginInfo
from core.host.distributions import metadata
from core.host.distributions.metadata import Damaged
from core.settings import normalize

PLUGIN_GROUP = "core.plugins"
PROBE_GROUP = "core.probes"
EXTENSION_GROUP = "torch.backends"
"""By which `import torch` loads extensions, each of which may bring torch an accelerator."""
HOST_DISTRIBUTION = "core"
AUTO = "auto"

# A name must survive `--device name:index` and a comma-separated list in the environment.
_DEVICE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")
_REQUIRES_HOST = re.compile(rf"\s*{HOST_DISTRIBUTION}\s*($|[\[(<>=!~;@])", re.IGNORECASE)
# Each probe is a process of its own.
_MAX_DEVICES = 64
_MAX_SHOWN = 300


@dataclass(slots=True)
class PluginMetadata:
    """The metadata of all installed distributions."""

    #: Plugins as their metadata state them, each with what makes it unusable whatever the settings, "" for nothing.
    plugins: list[tuple[PluginInfo, str]] = field(default_factory=list)
    #: All distributions whose metadata are damaged.
    damaged: list[Damaged] = field(default_factory=list)
    #: Damaged distributions without an entry in `plugins`.
    unread: list[Damaged] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    #: Names of the extensions that torch loads.
    extensions: list[str] = field(default_factory=list)


def read_plugins() -> PluginMetadata:
    """Read all installed distributions, one by one: whatever is wrong with one is said of that one alone."""
    distributions, failures = metadata.installed()
    read = PluginMetadata(warnings=failures)
    seen: set[str] = set()
    for distribution in distributions:
        points, damage = metadata.entry_points(distribution)
        plugins = list(metadata.entries_of(points, PLUGIN_GROUP))
        probes = list(metadata.entries_of(points, PROBE_GROUP))
        read.extensions += [_shown(entry.name) for entry in metadata.entries_of(points, EXTENSION_GROUP)]
        registers = bool(plugins or probes)
        damage = damage or metadata.undecodable(distribution)
        if registers:
            damage = damage or _too_many(plugins) or metadata.damaged_record(distribution)
        if not registers and not damage:
            continue
        name, version, defect = metadata.identity(distribution)
        if damage:
            folder = metadata.folder_of(distribution)
            damaged = Damaged(distribution=f"{name} {version}", folder=folder, problem=damage)
            read.damaged.append(damaged)
            if not plugins or normalize(name) in seen:
                read.unread.append(damaged)
                continue
            defect = f"its metadata are damaged: {damage} in {folder}"
        # The first on sys.path is the one that imports; a second copy is the same distribution, not a rival.
        if normalize(name) in seen:
            continue
        if not damage:
            seen.add(normalize(name))
        _add(read, distribution, plugins[:_MAX_DEVICES], probes, (name, version, defect))
    return read


def _add(
    read: PluginMetadata,
    distribution: Distribution,
    plugins: list[EntryPoint],
    probes: list[EntryPoint],
    identity: tuple[str, str, str],
) -> None:
    name, version, defect = identity
    in_tree = normalize(name) == HOST_DISTRIBUTION
    requires = ""
    if not in_tree and not defect:
        requires, defect = _host_range(distribution)
    unclaimed = {entry.name: entry for entry in probes}
    for entry in plugins:
        probe = unclaimed.pop(entry.name, None)
        info = PluginInfo(
            device=_shown(entry.name),
            distribution=name,
            version=version,
            entry_point=_shown(entry.value),
            probe_entry_point="" if probe is None else _shown(probe.value),
            requires_core=requires,
            in_tree=in_tree,
        )
        problem = name_defect(entry.name) or value_defect(entry) or (value_defect(probe) if probe else "")
        read.plugins.append((info, defect or problem))
    read.warnings += [
        f"probe {_shown(probe)!r} of {name} {version} belongs to none of its plugins" for probe in sorted(unclaimed)
    ]


def _too_many(plugins: list[EntryPoint]) -> str:
    return f"entry_points.txt names {len(plugins)} devices (at most {_MAX_DEVICES})" * (len(plugins) > _MAX_DEVICES)


def _shown(text: str) -> str:
    """Return the text as it is where it may be printed; it is the author's, who may have written anything."""
    if text.isprintable() and len(text) <= _MAX_SHOWN:
        return text
    return f"{ascii(text)[1 : _MAX_SHOWN - 1]}…"


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
            marker = requirement.marker
            # A requirement of an extra says nothing about the plugin itself.
            if marker is not None and ("extra" in str(marker) or not marker.evaluate()):
                continue
        except InvalidRequirement as error:
            return "", f"its metadata has an invalid requirement {_shown(line)!r}: {str(error).splitlines()[0]}"
        except Exception as error:  # what `evaluate` raises differs between versions of packaging
            return "", f"its metadata has a requirement {_shown(line)!r} that can't be judged: {error}"
        combined &= requirement.specifier
    return str(combined), ""


def name_defect(device: str) -> str:
    """Return why this cannot be a device name, "" if it can."""
    if device == AUTO:
        return f"device name {device!r} is reserved for choosing a device automatically"
    if not _DEVICE_NAME.fullmatch(device):
        return f"device name {_shown(device)!r} is not a letter followed by letters, digits, '-' or '_'"
    return ""


def value_defect(entry: EntryPoint) -> str:
    """Return why nothing can be imported by an entry point, "" if something may."""
    if len(entry.value) <= _MAX_SHOWN and entry.value.isprintable() and EntryPoint.pattern.match(entry.value):
        return ""
    return f"entry point {_shown(entry.name)!r} is {_shown(entry.value)!r} and not `module` or `module:attribute`"
