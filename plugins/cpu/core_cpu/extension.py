"""The plugin's kernels in C++ (csrc/): compiled at their first use, kept on disk, loaded into the process."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from core.common.kernel_compilers import Count, KernelCompiler
from core.kernel_folder import kernel_folder
from core_cpu.compiler import find_cxx_compiler, missing

log = logging.getLogger("core.cpu")

SOURCES = Path(__file__).parent / "csrc"
_NAME = "core_cpu"
_FOLDER_VARIABLE = "CORE_CPU_KERNELS_DIR"
_TIMEOUT_S = 600.0
_ISA = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
}
"""Options for each set of instructions that torch's vectors have and that a compiler does not use by itself."""
_compiled = 0


def why_not() -> str:
    """Return why the kernels can't be built on this machine, as one clause; "" where they can."""
    if sys.platform != "linux":
        return f"they are built on Linux only, and this is {sys.platform}"
    return missing()


def identity() -> str:
    """Return what tells one build of the kernels from another: the instructions and a digest of all that it is made of.

    For where `why_not` has nothing to say.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    digest = hashlib.sha256("\0".join((torch.__version__, str(torch.version.git_version), *_command("", ""))).encode())
    compiler = Path(find_cxx_compiler() or "").resolve()
    with suppress(OSError):  # one that has gone meanwhile can't build either
        digest.update(f"{compiler} {compiler.stat().st_size} {compiler.stat().st_mtime_ns}".encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{capability.lower()}-{digest.hexdigest()[:16]}"


@functools.cache
def load() -> str:
    """Load the kernels, built first where no process has done it yet; return why not, "" where they are loaded.

    What goes wrong is said once in the log. Builds are kept in the folder of `CORE_CPU_KERNELS_DIR`, else beside the
    compile cache; one that others may write to is refused.
    """
    reason = why_not()
    if not reason:
        try:
            torch.ops.load_library(_built())
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
    if reason:
        log.warning("no kernels of the plugin, canonical ops run as torch's own: %s", reason)
    return reason


@contextmanager
def _counting() -> Iterator[Count]:
    before = _compiled
    yield lambda: _compiled - before


KERNELS = KernelCompiler(name=_NAME, counting=_counting, folder_variable=_FOLDER_VARIABLE)
"""The extension, as `core` knows it: whether it was compiled, and where it is kept."""


def _built() -> Path:
    """Return the path of the extension, compiled where it does not lie there yet."""
    folder = kernel_folder(KERNELS)
    library = folder / f"{identity()}.so"
    if not library.exists():
        with _locked(folder):
            if not library.exists():  # another process may have made it meanwhile
                _compile(library)
    return library


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time compile: it takes all of a core for a quarter of a minute."""
    import fcntl  # not on Windows

    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(library: Path) -> None:
    global _compiled
    log.info("compiling the kernels of the plugin, once: %s", library)
    with tempfile.TemporaryDirectory(dir=library.parent) as made:
        out = Path(made) / library.name
        command = _command(str(SOURCES / "attention.cpp"), str(out))
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
            raise OSError(f"{command[0]} can't compile them: {(errors or ['it says nothing'])[0].strip()}")
        os.replace(out, library)
    _compiled += 1


def _command(source: str, out: str) -> Sequence[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    headers, libraries = (Path(torch.__path__[0]) / name for name in ("include", "lib"))
    return (
        *(find_cxx_compiler() or "", "-std=c++20", "-O3", "-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
        *_ISA.get(capability, ()),
        *(f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"),
        *(f"-I{headers}", source, "-o", out, f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"),
    )
