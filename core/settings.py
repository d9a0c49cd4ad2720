"""The one file that reads `CORE_*` environment variables: parsed into a frozen object, invalid values rejected."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import UsageError
from core.paths import local_path

VARIABLES: Mapping[str, str] = {
    "CORE_PLUGINS": "allow-list of third-party plugins by distribution, device or distribution:device, separated by "
    "commas; unset allows all, empty allows those that ship with core only",
    "CORE_PLUGINS_DISABLE": "deny-list by distribution, device or distribution:device, separated by commas; it wins "
    "over the allow-list and applies to the plugins that ship with core too",
    "CORE_CACHE": "0 switches the compile cache off, whatever asks for it; 1 or unset does nothing",
    "CORE_CACHE_DIR": "folder of the compile cache (default: `core` in the user's cache folder, $XDG_CACHE_HOME)",
    "CORE_API_KEY": "what clients of `core serve` must send; unset lets everybody in, empty is refused",
    "CORE_ACCELERATOR_GRAPHS": "how the generic device captures: recorded (default), or torch, which takes "
    "torch.accelerator.Graph where the device has it",
    "CORE_PROBE_TIMEOUT_S": "seconds a device probe may take before it is killed (default 5)",
}
"""Every variable that `core` reads, with its meaning."""

_DEFAULT_PROBE_TIMEOUT_S = 5.0
_PREFIX = "CORE_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the environment asks for."""

    #: The allow-list, normalised; None allows all.
    plugins: tuple[str, ...] | None = None
    #: The deny-list, normalised.
    plugins_disabled: tuple[str, ...] = ()
    probe_timeout_s: float = _DEFAULT_PROBE_TIMEOUT_S
    #: How the generic device captures: "recorded" or "torch".
    accelerator_graphs: str = "recorded"
    #: Whether the compile cache may be used.
    cache: bool = True
    #: Its folder; None for the user's own.
    cache_dir: Path | None = None
    #: What clients of the server must send; None for nothing.
    api_key: str | None = field(default=None, repr=False)
    #: One line per variable that looks like a misspelt one.
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Parse the `CORE_*` variables of `environ` (default: the process's own); raise `UsageError` on a bad value."""
        values = os.environ if environ is None else environ
        allowed = values.get("CORE_PLUGINS")
        return cls(
            plugins=None if allowed is None else _names("CORE_PLUGINS", allowed),
            plugins_disabled=_names("CORE_PLUGINS_DISABLE", values.get("CORE_PLUGINS_DISABLE", "")),
            probe_timeout_s=_seconds("CORE_PROBE_TIMEOUT_S", values.get("CORE_PROBE_TIMEOUT_S")),
            accelerator_graphs=_choice(
                "CORE_ACCELERATOR_GRAPHS", values.get("CORE_ACCELERATOR_GRAPHS"), ("recorded", "torch")
            ),
            cache=_switch("CORE_CACHE", values.get("CORE_CACHE")),
            cache_dir=_folder("CORE_CACHE_DIR", values.get("CORE_CACHE_DIR")),
            api_key=_secret("CORE_API_KEY", values.get("CORE_API_KEY")),
            warnings=_misspelt(values),
        )


def normalize(name: str) -> str:
    """Return `name` as distribution names are compared: lower case, with runs of `-`, `_`, `.` as one `-`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _names(variable: str, value: str) -> tuple[str, ...]:
    if not value.strip():
        return ()
    names = tuple(normalize(item) for item in value.split(","))
    if "" in names:
        raise UsageError(
            f"{variable}={value!r}",
            found="an empty name between commas",
            remedy=f"write names separated by single commas, e.g. {variable}=acme-device,other",
        )
    return names


def _seconds(variable: str, value: str | None) -> float:
    if value is None:
        return _DEFAULT_PROBE_TIMEOUT_S
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    # Written so that "nan" is refused too; "inf" would wait for ever on a hanging driver.
    if not 0 < seconds < float("inf"):
        raise UsageError(
            f"{variable}={value!r}",
            found="not a positive, finite number of seconds",
            remedy=f"set it to a number above 0, or unset it for the default of {_DEFAULT_PROBE_TIMEOUT_S:g}",
        )
    return seconds


def _choice(variable: str, value: str | None, choices: tuple[str, ...]) -> str:
    """Return the value, the first of the choices where none is given."""
    if value is None:
        return choices[0]
    if value not in choices:
        alternatives = " or ".join(choices)
        raise UsageError(
            f"{variable}={value!r}", found=f"not {alternatives}", remedy=f"set it to {alternatives}, or unset it"
        )
    return value


def _switch(variable: str, value: str | None) -> bool:
    if value not in (None, "0", "1"):
        raise UsageError(f"{variable}={value!r}", found="neither 0 nor 1", remedy="set it to 0 or 1, or unset it")
    return value != "0"


def _folder(variable: str, value: str | None) -> Path | None:
    if value is None:
        return None
    path = local_path(f"{variable}={value!r}", value)
    if not path.is_absolute():
        raise UsageError(
            f"{variable}={value!r}", found="not an absolute path", remedy="set it to a folder like /var/cache/core"
        )
    return path


def _secret(variable: str, value: str | None) -> str | None:
    if value is not None and not (value.isascii() and value.isprintable() and value.strip() == value != ""):
        raise UsageError(
            variable,  # never its value
            found="it is empty, or no printable ASCII without spaces around it, as an HTTP header needs",
            remedy="set it to a key, or unset it",
        )
    return value


def _misspelt(environ: Mapping[str, str]) -> tuple[str, ...]:
    known = [name.removeprefix(_PREFIX) for name in VARIABLES]
    warnings = []
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in VARIABLES:
            continue
        # The shared prefix is left out: with it, every CORE_ variable would resemble every other.
        close = difflib.get_close_matches(name.removeprefix(_PREFIX), known, n=1, cutoff=0.75)
        if close:
            warnings.append(f"environment variable {name} is not read by core; did you mean {_PREFIX}{close[0]}?")
    return tuple(warnings)
