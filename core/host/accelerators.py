"""The generic device: which accelerator torch drives that no plugin claims, and its entry among the plugins.

Asking torch means importing it. `select_device` does so for a name that no plugin has, in this process, which is about
to need torch anyway. A listing asks a worker, and only where something installed may bring such a device.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from core._version import __version__
from core.device import PluginInfo
from core.errors import one_line
from core.host.discovery import Discovery, PluginEntry, discover, entry_without_metadata
from core.host.plugin_metadata import HOST_DISTRIBUTION
from core.settings import Settings

WORKER = "core.host.accelerator_worker"
TIMEOUT_S = 60.0
"""How long a worker may take to import torch with its extensions."""

_PLUGIN = "core.accelerator.plugin"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def describe(info: PluginInfo, settings: Settings) -> str:
    """Return what a generic device is, for listings and reports; "" for any other plugin."""
    if info.entry_point != _PLUGIN:
        return ""
    graphs = {"recorded": "recorded replay", "torch": "graphs of torch.accelerator.Graph"}[settings.accelerator_graphs]
    return (
        f"generic: torch's own kernels, {graphs}, not proven on this device: "
        f"run core conformance --device {info.device}"
    )


def entry_of(device_type: str, settings: Settings) -> PluginEntry:
    """Return the entry of the generic device for a type of accelerator."""
    info = PluginInfo(
        device=device_type,
        distribution=HOST_DISTRIBUTION,
        version=__version__,
        entry_point=_PLUGIN,
        in_tree=True,
    )
    return entry_without_metadata(info, settings)


def installed_claims(device: str) -> tuple[PluginEntry, ...]:
    """Return `claims` as the installed distributions and the environment have it now."""
    settings = Settings.from_environment()
    return claims(device, discover(settings), settings)


def claims(device: str, discovery: Discovery, settings: Settings) -> tuple[PluginEntry, ...]:
    """Return the plugins that claim a device name; where there are none, the generic device if torch drives that type.

    Imports torch for a name that no plugin has and torch may know.
    """
    entries = discovery.claiming(device)
    if entries or not _may_know(device, discovery):
        return entries
    offered, _ = _asked()
    return (entry_of(device, settings),) if offered and device == offered else ()


def left_to_name(discovery: Discovery) -> str:
    """Return which device of torch a choice among plugins has left out, and why; "" for none. Imports torch."""
    offered, _ = _asked()
    if not offered or discovery.claiming(offered):
        return ""
    from core.accelerator.asked import count_devices

    return f"{offered} (generic, not proven: opened only if asked for by name)" if count_devices() else ""


def said_by_torch(device: str, discovery: Discovery) -> tuple[str, str]:
    """Return what torch says of a name that neither a plugin has nor torch drives, and what to do; "" for nothing."""
    if not _may_know(device, discovery):
        return "", ""
    offered, problem = _asked()
    if problem:
        return f"torch could not be asked for its accelerators: {problem}", ""
    from core.accelerator.asked import knows

    if discovery.extensions and _switched_off():
        return f"{_AUTOLOAD}=0 keeps torch from loading {', '.join(discovery.extensions)}", f"unset {_AUTOLOAD}"
    if knows(device):
        from core.accelerator.parts import refuse_absent
        from core.errors import DeviceUnavailableError

        try:
            refuse_absent(device)
        except DeviceUnavailableError as error:
            return error.found, error.remedy
    return (f"torch's accelerator here is {offered!r}", "") if offered else ("", "")


def may_offer(discovery: Discovery) -> bool:
    """Return whether something installed may bring torch an accelerator that no plugin claims, importing nothing.

    That is: an extension of torch whose name does not name a claimed device; a torch whose `version.py` tells that it
    was built for something unclaimed; a system on which builds tell nothing.
    """
    claimed = {entry.info.device for entry in discovery.entries}
    loaded = () if _switched_off() else discovery.extensions
    if any(not claimed.intersection(re.split(r"[^A-Za-z0-9]+", name)) for name in loaded):
        return True
    return sys.platform != "linux" or bool(_built_for() - claimed)


def _may_know(device: str, discovery: Discovery) -> bool:
    """Return whether torch may have a device type of that name, importing nothing.

    Each type that torch brings itself has a package in torch; an extension of torch may bring any.
    """
    folder = _torch_folder()
    return bool(discovery.extensions) or (folder is not None and (folder / device / "__init__.py").is_file())


def _torch_folder() -> Path | None:
    spec = find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _switched_off() -> bool:
    return os.environ.get(_AUTOLOAD) == "0"


def _built_for() -> set[str]:
    """Return what the installed torch was built for besides processors, as the assignments in its version.py tell."""
    folder = _torch_folder()
    if folder is None:
        return set()
    try:
        tree = ast.parse((folder / "version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return set()
    return {
        node.target.id
        for node in tree.body
        # Toolkits are the optional texts there; version and commit are plain ones.
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if "Optional" in ast.unparse(node.annotation)
    }


def _asked() -> tuple[str, str]:
    """Ask torch in this process; return the type of accelerator that it drives, and why it could not be asked."""
    try:
        from core.accelerator.asked import offered_type

        return offered_type(), ""
    except Exception as error:  # an extension that torch loads may raise anything
        return "", one_line(f"{type(error).__name__}: {error}")


def from_answer(answer: dict[str, Any] | None) -> tuple[str, int, str]:
    """Return type, number of devices and problem as the worker has sent them."""
    match answer:
        case {"accelerator": str(name), "count": int(count), "problem": str(problem)}:
            return name, count, problem
    return "", 0, ""
