"""The probe of device "npu": looks for driver, devices, the CANN libraries and torch_npu without importing anything."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from core.probe import Probe

__all__ = ["SIMULATED", "Runtime", "find_runtime", "probe"]

SIMULATED = "CORE_NPU_SIMULATED"
"""Environment variable of the tests: 1 lets a simulated runtime count as a device."""

_MARK = b"ascend_sim_version"
"""The symbol that marks a simulated runtime."""

_DEVICE_NODE = re.compile(r"davinci\d+")
_LIBRARIES = ("libascendcl.so", "libhccl.so")
_HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_DEFAULT_HOME = "usr/local/Ascend/ascend-toolkit/latest"
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_NONE = "there is no such file"
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime library that was found."""

    path: Path
    #: Whether it computes on the host, for tests.
    simulated: bool


Missing = tuple[str, str]
"""What is missing, and what to do about it."""


def probe(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Probe:
    """Look for the parts that an NPU needs, and name everything that is missing. root: where the file system begins."""
    environ = os.environ if environ is None else environ
    runtime = find_runtime(root, environ)
    if runtime is not None and runtime.simulated:
        num_devices, missing = _simulated_devices(runtime, environ)
    else:
        num_devices, missing = _devices(root, environ)
        missing += _missing_libraries(root, environ, runtime)
    missing += _missing_package(cann_found=runtime is not None, environ=environ)
    if missing:
        reasons, hints = zip(*missing, strict=True)
        return Probe(available=False, device_count=0, reason="; ".join(reasons), hint="; ".join(hints))
    assert runtime is not None
    what = "SIMULATED runtime, for tests," if runtime.simulated else "CANN"
    return Probe(available=True, device_count=num_devices, reason=f"{what} at {runtime.path}")


def find_runtime(root: Path, environ: Mapping[str, str]) -> Runtime | None:
    """Return CANN's runtime library: what the loader takes first, else where set_env.sh points, or the usual place."""
    path = _find(_LIBRARIES[0], root, environ)
    return None if path is None else Runtime(path, _is_simulated(path))


def _find(library: str, root: Path, environ: Mapping[str, str]) -> Path | None:
    return next((path for path in _places(library, root, environ) if not _why_unreadable(path)), None)


def _places(library: str, root: Path, environ: Mapping[str, str]) -> list[Path]:
    homes = [Path(environ[name]) for name in _HOME_VARIABLES if environ.get(name)]
    folders = [Path(item) for item in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if item]
    folders += [home / "lib64" for home in (*homes, root / _DEFAULT_HOME)]
    return [folder / library for folder in folders]


def _why_unreadable(path: Path) -> str:
    """Return why the loader could not read a file there, "" where it can."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return _NONE
        with path.open("rb"):
            return ""
    except (FileNotFoundError, NotADirectoryError):
        return _NONE
    except OSError as error:
        return error.strerror or str(error)


def _is_simulated(path: Path) -> bool:
    # Read the file and do not load it: a loaded runtime stays in the process, and opens the driver.
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(_MARK) >= 0


def _devices(root: Path, environ: Mapping[str, str]) -> tuple[int, list[Missing]]:
    """Count the visible devices, or say what hides them."""
    nodes = [path.name for path in (root / "dev").glob("davinci*")]
    num_nodes = sum(1 for name in nodes if _DEVICE_NODE.fullmatch(name))
    if not num_nodes and "davinci_manager" not in nodes:
        remedy = "install the Ascend driver and firmware, or pass its devices into the container"
        return 0, [("no driver (/dev/davinci_manager is missing)", remedy)]
    if not num_nodes:
        remedy = "pass an NPU into the container (--device /dev/davinci0); npu-smi info shows those of the machine"
        return 0, [("the driver is there, and no device node /dev/davinci0 and so on", remedy)]
    visible = environ.get(_VISIBLE)
    if visible is None:
        return num_nodes, []
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if not entries:
        return 0, [(f"{_VISIBLE}={visible!r} hides every device", "unset it, or set it to e.g. 0")]
    wrong = [entry for entry in entries if not entry.isdecimal() or int(entry) >= num_nodes]
    if wrong:
        found = f"{_VISIBLE}={visible!r} names {', '.join(wrong)}, and there are {num_nodes} devices, counted from 0"
        return 0, [(found, "name devices that there are")]
    return len(entries), []


def _simulated_devices(runtime: Runtime, environ: Mapping[str, str]) -> tuple[int, list[Missing]]:
    if environ.get(SIMULATED) != "1":
        found = f"the runtime at {runtime.path} is a simulation for tests: it computes on the host"
        return 0, [(found, f"take it off LD_LIBRARY_PATH and source CANN's set_env.sh; for tests, set {SIMULATED}=1")]
    asked = environ.get("ASCEND_SIM_DEVICES", "0")
    if not asked.isdecimal() or int(asked) < 1:
        return 0, [(f"the simulated runtime has ASCEND_SIM_DEVICES={asked!r} devices", "set it to 1 or more")]
    return int(asked), []


def _missing_libraries(root: Path, environ: Mapping[str, str], runtime: Runtime | None) -> list[Missing]:
    names = [name for name in _LIBRARIES if _find(name, root, environ) is None]
    if not names:
        return []
    asked = [(path, _why_unreadable(path)) for path in _places(names[0], root, environ)]
    closed = "".join(f"; {_short(path)}: {why}" for path, why in asked if why not in ("", _NONE))
    if runtime is None:
        remedy = "install the CANN toolkit and source its set_env.sh, which sets ASCEND_HOME_PATH"
        return [(f"no CANN ({', '.join(names)}{closed})", remedy)]
    return [(f"CANN at {runtime.path} lacks {', '.join(names)}{closed}", "install the whole CANN toolkit")]


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]}…{path.name}"


def _missing_package(*, cann_found: bool, environ: Mapping[str, str]) -> list[Missing]:
    if importlib.util.find_spec("torch_npu") is None:
        return [("no package torch_npu", "install the torch_npu made for the installed torch (extra `npu` of core)")]
    versions = {name: _version(name) for name in ("torch", "torch_npu")}
    torch, torch_npu = versions.values()
    if torch and torch_npu and _minor(torch) != _minor(torch_npu):
        found = f"torch_npu {torch_npu} is made for torch {_minor(torch_npu)}, and torch {torch} is installed"
        return [(found, f"install torch_npu {_minor(torch)}, or torch {_minor(torch_npu)}")]
    if not cann_found and environ.get(_AUTOLOAD, "1") == "1":  # as torch has it
        # Nothing is missing, but the next step fails on any device.
        return [
            ("torch_npu is installed, and without CANN `import torch` fails by it", f"until then set {_AUTOLOAD}=0")
        ]
    return []


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
