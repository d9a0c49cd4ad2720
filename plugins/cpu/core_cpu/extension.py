"""The plugin's kernels in C++ (csrc/): compiled at their first use, kept on disk, loaded into the process."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import torch

from core.common.kernel_compilers import Count, KernelCompiler, KernelForms
from core.errors import UsageError, one_line
from core.kernel_folder import kernel_folder
from core_cpu.compiler import find_cxx_compiler, missing
from core_cpu.row_limits import WEIGHT_ONLY_LINEAR

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
_BF16_PAIRS = ("-mavx512bf16", "-DCORE_CPU_BF16_PAIRS")
"""Where the processor multiplies pairs of bf16, which torch's AVX512 does not say."""
_VNNI = ("-mavx512vnni", "-DCORE_CPU_VNNI")
"""Where it sums products of 8-bit integers, likewise."""
_OF_EACH_MODEL = ("graph", "attention", "linear")
"""Files that most models use."""
_AFTER_LOADING: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {"weight_only_linear": WEIGHT_ONLY_LINEAR.use_measured}
)


def _digests() -> Mapping[str, str]:
    """Return a digest of each file in csrc/ as it is now."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(SOURCES.glob("*"))}


SOURCE_DIGESTS = _digests()
"""A digest of each file in csrc/ as it was when this process began. Nothing that is made of others is loaded, as after
an upgrade in place: what is loaded shares C++ objects, and the Python of this process calls it."""
_compiled: list[Path] = []
"""The libraries that this process has compiled."""
_loaded: dict[str, str] = {}
"""The identity of each file's library that this process has loaded."""
_building: set[str] = set()
"""Files that a thread of this process builds."""


def why_not() -> str:
    """Return why the kernels can't be built on this machine, as one clause; "" where they can."""
    if sys.platform != "linux":
        return f"they are built on Linux only, and this is {sys.platform}"
    return missing()


def identity() -> str:
    """Return the identity of a build of the kernels: the instruction set and a digest of everything that it is made
    from.

    Call it only if `why_not` returns "".
    """
    capability = torch.backends.cpu.get_cpu_capability()
    digest = hashlib.sha256("\0".join((torch.__version__, str(torch.version.git_version), *_command("", ""))).encode())
    compiler = Path(find_cxx_compiler() or "").resolve()
    with suppress(OSError):  # a compiler that was removed meanwhile can't build either
        digest.update(f"{compiler} {compiler.stat().st_size} {compiler.stat().st_mtime_ns}".encode())
    for name, content in SOURCE_DIGESTS.items():
        digest.update(f"{name}\0{content}".encode())
    return f"{capability.lower()}-{digest.hexdigest()[:16]}"


def refuse_replaced() -> None:
    """Raise `OSError` where the files in csrc/ are no longer those of `SOURCE_DIGESTS`, so that nothing is made of
    them."""
    now = _digests()
    changed = sorted(name for name in {*now, *SOURCE_DIGESTS} if now.get(name) != SOURCE_DIGESTS.get(name))
    if changed:
        raise OSError(f"{SOURCES / changed[0]} was replaced while this process ran; start it again to use the new one")


@functools.cache
def load(source: str) -> str:
    """Load the kernels of a file, and build them first if no process has done so; return why that failed, or "".

    source: the file's name in csrc/, without its ending. Each is a library of its own, built where it is needed.
    A failure is logged once. Builds are kept in the folder of `CORE_CPU_KERNELS_DIR`, else beside the compile cache;
    one that others may write to is refused.
    """
    reason = why_not()
    if not reason:
        try:
            if source in _building:
                importlib.import_module("torch._inductor.compile_fx")  # 2 to 3 s, which the lowering needs next
            build = identity()
            library = _built(source, build)
            _link(library)
            _loaded[source] = build
            if source in _AFTER_LOADING:
                _AFTER_LOADING[source](library)
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
    if reason:
        log.warning("no kernels of the plugin, canonical ops run as torch's own: %s", reason)
    return reason


def _link(library: Path) -> None:
    """Load a library into the process, so that compiled graphs find its C functions by name."""
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(library)


def ending(source: str) -> str:
    """Return what the names of the C functions end with that `load` has loaded from a file's library."""
    return _ending(_loaded[source])


def _ending(build: str) -> str:
    """Return it for the identity of a build, as a name in C can have it: a process may load several builds."""
    return build.replace("-", "_")


def prepare() -> None:
    """Begin to build the kernels in threads, one for each file; `load` waits for them, and tells what failed.

    Nothing is done where they are loaded in this process: they may have been built for another folder.
    """
    if not why_not():
        for source in _OF_EACH_MODEL:
            if source not in _loaded:
                threading.Thread(target=_build_early, args=(source,), name="core-cpu-kernels", daemon=True).start()


def _build_early(source: str) -> None:
    _building.add(source)
    try:
        with suppress(OSError, subprocess.SubprocessError):
            _built(source, identity())
    finally:
        _building.discard(source)


@contextmanager
def _counting() -> Iterator[Count]:
    before = len(_compiled)
    yield lambda: len(_compiled) - before


def build(forms: KernelForms) -> Iterator[str]:
    """Build the kernels of each file and yield their names; they serve all forms.

    The libraries are for this version of torch, this compiler and this kind of processor, which their names hold.
    """
    if reason := why_not():
        raise UsageError(
            "building the kernels of the processor", found=reason, remedy="install it, and build them again"
        )
    for path in sorted(SOURCES.glob("*.cpp")):
        try:
            yield _built(path.stem, identity()).name
        except (OSError, subprocess.SubprocessError) as error:
            raise UsageError(
                f"building the kernels of {path.name}",
                found=one_line(str(error)),
                remedy="see whether the compiler and the folder are in order, and build them again",
            ) from error


KERNELS = KernelCompiler(name=_NAME, counting=_counting, folder_variable=_FOLDER_VARIABLE, build=build)
"""The extension, as `core` knows it: whether it was compiled, and where it is kept."""


def _built(source: str, build: str) -> Path:
    """Return the path of the extension, compiled where it does not lie there yet; build: its identity."""
    folder = kernel_folder(KERNELS)
    library = folder / f"{source}-{build}.so"
    if not library.exists():
        with _locked(folder / f"{source}.lock"):
            if not library.exists():  # another process may have made it meanwhile
                _compile(library, source, build)
    return library


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time compile a file: that takes a core for a tenth of a minute."""
    import fcntl  # not on Windows

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(library: Path, source: str, build: str) -> None:
    log.info("compiling the kernels of the plugin, once: %s", library)
    with tempfile.TemporaryDirectory(dir=library.parent) as made:
        out = Path(made) / library.name
        command = [*_command(str(SOURCES / f"{source}.cpp"), str(out)), f'-DCORE_CPU_ENDING="{_ending(build)}"']
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
            raise OSError(f"{command[0]} can't compile them: {(errors or ['it says nothing'])[0].strip()}")
        refuse_replaced()  # after the compiler has read them
        os.replace(out, library)
    _compiled.append(library)


def instructions() -> frozenset[str]:
    """Return the compiler's options for the sets of instructions that the kernels are compiled with."""
    return frozenset(option for option in _command("", "") if option.startswith("-m"))


def _command(source: str, out: str) -> Sequence[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    headers, libraries = (Path(torch.__path__[0]) / name for name in ("include", "lib"))
    return (
        # No warnings: of torch's headers there are thousands, and nobody sees them.
        *(find_cxx_compiler() or "", "-std=c++20", "-O3", "-w", "-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
        *_ISA.get(capability, ()),
        *(_BF16_PAIRS if capability == "AVX512" and torch.cpu._is_avx512_bf16_supported() else ()),
        *(_VNNI if capability == "AVX512" and torch.cpu._is_vnni_supported() else ()),
        *(f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"),
        *(f"-I{headers}", source, "-o", out, f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"),
    )
