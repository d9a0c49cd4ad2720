"""The probe of device "npu": looks for device nodes, the CANN libraries and torch_npu without importing anything."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from core.probe import Probe

_DEVICE_NODE = re.compile(r"davinci\d+")
_RUNTIME_LIBRARY = "libascendcl.so"
_HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_DEFAULT_HOME = "usr/local/Ascend/ascend-toolkit/latest"


def probe(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Probe:
    """Look for what an NPU needs, and name everything that is missing. root: where the file system begins."""
    environ = os.environ if environ is None else environ
    num_nodes = sum(1 for path in (root / "dev").glob("davinci*") if _DEVICE_NODE.fullmatch(path.name))
    visible = environ.get("ASCEND_RT_VISIBLE_DEVICES")
    num_devices = num_nodes if visible is None else min(num_nodes, len([i for i in visible.split(",") if i.strip()]))
    library = find_runtime(root, environ)
    missing: list[tuple[str, str]] = []
    if num_nodes == 0:
        missing.append(("no device node /dev/davinci*", "install the Ascend driver, or pass an NPU into the container"))
    elif num_devices == 0:
        missing.append((f"ASCEND_RT_VISIBLE_DEVICES={visible!r} hides every device", "unset it, or set it to e.g. 0"))
    if library is None:
        missing.append(
            (
                f"no {_RUNTIME_LIBRARY} (CANN)",
                "install the CANN toolkit and source its set_env.sh, which sets ASCEND_HOME_PATH",
            )
        )
    if importlib.util.find_spec("torch_npu") is None:
        missing.append(
            ("no package torch_npu", "install the torch_npu made for the installed torch (extra `npu` of core)")
        )
    if missing:
        reasons, hints = zip(*missing, strict=True)
        return Probe(available=False, device_count=0, reason="; ".join(reasons), hint="; ".join(hints))
    return Probe(available=True, device_count=num_devices, reason=f"CANN at {library}")


def find_runtime(root: Path, environ: Mapping[str, str]) -> Path | None:
    """Return the path of CANN's runtime library, looked for where its set_env.sh points and at the usual place."""
    homes = [Path(environ[name]) for name in _HOME_VARIABLES if environ.get(name)]
    folders = [home / "lib64" for home in (*homes, root / _DEFAULT_HOME)]
    folders += [Path(item) for item in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if item]
    return next((path for folder in folders if (path := folder / _RUNTIME_LIBRARY).is_file()), None)
