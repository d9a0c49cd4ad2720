"""Build the libraries of the simulated runtime from what the installed torch_npu asks for, once per version and source.

Nothing of the vendor is kept here: names of libraries and functions come from torch_npu's binaries, prototypes from the
headers inside its wheel. A new torch_npu therefore needs a new build and no edit.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
# plugins/npu/simulator -> the repository, whose .cache holds everything that can be made again.
CACHE = Path(__file__).resolve().parents[3] / ".cache" / "npu-sim"
RUNTIME_LIBRARY = "libascendcl.so"
KERNEL_LIBRARY = "libopapi.so"
HCCL_TYPES = "third_party/hccl/inc/hccl/hccl_types.h"
TOOLS = ("gcc", "nm", "readelf")
# Opened by name at run time, so no list of needed libraries has them.
OPENED_LATER = (KERNEL_LIBRARY, "libnnopbase.so")
SYSTEM_LIBRARIES = (
    *("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"),
    *("libstdc++.so.6", "libgcc_s.so.1"),
)
# Integer arguments that the generated functions can read: those in registers, then those on the stack.
NUM_WORDS = 64
REGISTERS = {"x86_64": 6, "aarch64": 8}


class BuildError(Exception):
    """The simulated runtime cannot be built here; says what is missing and what to do."""


@dataclass(frozen=True)
class Wanted:
    """What torch_npu asks of the vendor's libraries."""

    #: File names.
    libraries: tuple[str, ...]
    #: Functions that the loader resolves when torch_npu is loaded.
    linked: tuple[str, ...]
    #: Functions that torch_npu looks up by name.
    optional: tuple[str, ...]
    #: Functions named aclnn… and Atb…: launches, and the calls that prepare them.
    kernels: tuple[str, ...]


def build(cache: Path | None = None) -> Path:
    """Return the folder of the libraries, building them where they are not there yet.

    Two builds at once are harmless: each works in a folder of its own, and the first one's result stays.
    Raises BuildError where torch_npu, its architecture's convention or a tool is missing.
    """
    wheel = find_wheel()
    folder = (cache or Path(os.environ.get("ASCEND_SIM_CACHE") or CACHE)) / _key(wheel)
    if folder.is_dir():
        return folder
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise BuildError(
            f"build of the simulated ACL runtime; found: no {', '.join(missing)} on PATH; "
            "to do: install gcc and binutils (Debian: apt install gcc binutils)"
        )
    if os.uname().machine not in REGISTERS:
        raise BuildError(
            f"build of the simulated ACL runtime; found: machine {os.uname().machine!r}; "
            f"to do: use one of {', '.join(sorted(REGISTERS))}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as work:
        made = Path(work) / "lib"
        made.mkdir()
        _compile(wheel, find_wanted(wheel), Path(work), made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def find_wheel() -> Path:
    """Return the folder of the installed torch_npu without importing it (an import without the libraries fails)."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise BuildError(
            f"build of the simulated ACL runtime; found: no torch_npu in {sys.prefix}; "
            "to do: pip install -c constraints.txt -c constraints-npu.txt torch_npu"
        )
    return Path(spec.origin).parent


def _key(wheel: Path) -> str:
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted(SOURCES.iterdir())):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    library = (wheel / "lib" / "libtorch_npu.so").stat()
    digest.update(f"{wheel} {library.st_size} {os.uname().machine}".encode())
    return f"{importlib.metadata.version('torch_npu')}-{digest.hexdigest()[:12]}"


def find_wanted(wheel: Path) -> Wanted:
    """Read from torch_npu's binaries which libraries and functions they need that nothing installed provides."""
    binaries = sorted(wheel.rglob("*.so"))
    own = [
        path for root in (wheel, wheel.parent / "torch_npu.libs", _torch_libraries()) for path in root.rglob("*.so*")
    ]
    system = [found for name in SYSTEM_LIBRARIES if (found := _system_library(name)) is not None]
    system += [path for found in system[:1] for path in found.parent.glob("ld-linux-*")]
    needed = {name for path in binaries for name in re.findall(r"\(NEEDED\).*\[(.*)\]", _run("readelf", "-d", path))}
    libraries = {name for name in needed - {path.name for path in own} if _system_library(name) is None}
    defined = {name for path in [*own, *system] for name in _symbols(path, "--defined-only")}
    # A weak name ("w") may stay absent; a strong one ("U") stops the loader.
    undefined = {name for path in binaries for name in _symbols(path, "--undefined-only", "U")}
    linked = {name for name in undefined - defined if not re.match(r"_?Py", name)}
    looked_up = rb"acl[a-z]*[A-Z][A-Za-z0-9]+|Hccl[A-Z][A-Za-z0-9]+|Atb[A-Z][A-Za-z0-9]+GetWorkspaceSize"
    texts = re.findall(rb"[ -~]{5,}", (wheel / "lib" / "libtorch_npu.so").read_bytes())
    atb = wheel / "lib" / "libop_plugin_atb.so"
    texts += re.findall(rb"Atb[A-Z]\w+", atb.read_bytes()) if atb.is_file() else []
    named = {text.decode() for text in texts if re.fullmatch(looked_up, text)}
    kernels = {name for name in named if re.fullmatch(r"(aclnn|Atb)[A-Z]\w+", name)}
    # Both halves of each call: some names appear only with their suffix.
    kernels |= {name.removesuffix("GetWorkspaceSize") for name in kernels}
    return Wanted(
        libraries=tuple(sorted({*libraries, *OPENED_LATER, RUNTIME_LIBRARY})),
        linked=tuple(sorted(linked)),
        optional=tuple(sorted(named - kernels - linked)),
        kernels=tuple(sorted(kernels)),
    )


def _torch_libraries() -> Path:
    # Beside torch_npu as a rule; in an environment stacked on another one, elsewhere.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(f"build of the simulated ACL runtime; found: no torch in {sys.prefix}; to do: install torch")
    return Path(spec.origin).parent / "lib"


def _system_library(name: str) -> Path | None:
    found = _run("gcc", f"-print-file-name={name}").strip()
    return Path(found) if "/" in found else None


def _symbols(path: Path, which: str, kind: str = "") -> set[str]:
    """Return the dynamic symbols of a library without their versions, of one kind only where `kind` names it."""
    fields = [line.split() for line in _run("nm", "-D", which, path).splitlines()]
    return {field[-1].split("@")[0] for field in fields if len(field) > 1 and (not kind or field[-2] == kind)}


def _compile(wheel: Path, wanted: Wanted, work: Path, into: Path) -> None:
    _write(work / "hccl_types.h", _as_c((wheel / "include" / HCCL_TYPES).read_text(encoding="utf-8")))
    objects = [work / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.c"))]
    for target in objects:
        include = [f"-I{wheel}/include", f"-I{SOURCES}", f"-I{work}"]
        # The wheel's headers mark some enumerators deprecated in a way that gcc warns about wherever they are included.
        warnings = ["-Wall", "-Wextra", "-Wno-attributes", "-Werror=implicit-function-declaration"]
        flags = ["-std=gnu11", "-fPIC", "-O1", "-fexceptions", "-fvisibility=hidden"]
        _run("gcc", "-c", *flags, *warnings, *include, "-o", target, SOURCES / f"{target.stem}.c")
    lines = _run("nm", "--defined-only", *objects).splitlines()
    have = {line.split()[-1] for line in lines if " T " in line}
    rest = _write(work / "rest.c", _unsupported_source(sorted({*wanted.linked, *wanted.optional} - have)))
    runtime = into / RUNTIME_LIBRARY
    _link(runtime, [*objects, rest, "-Wl,-z,defs", "-lpthread", "-ldl", "-l:libstdc++.so.6"])
    kernels = tuple(name for name in wanted.kernels if name not in have)
    _link(into / KERNEL_LIBRARY, [_write(work / "kernels.c", _kernel_source(kernels)), runtime])
    empty = _write(work / "empty.c", "typedef int nothing;\n")
    for name in wanted.libraries:
        if name not in (RUNTIME_LIBRARY, KERNEL_LIBRARY):
            # Every function of the runtime lies in one library; the others only lead there.
            _link(into / name, [empty, "-Wl,--no-as-needed", runtime])
    # The folders whose presence torch_npu takes for an installed toolkit.
    for name in ("runtime", "compiler", "opp"):
        (into / name).mkdir()
    (into / "lib64").symlink_to(".")


def _as_c(header: str) -> str:
    """Return a header in which constants of C++ are constants of C too, so that they may be sizes of arrays."""
    return re.sub(r"const u?int\d+_t (\w+)\s*=\s*(\w+);", r"enum { \1 = \2 };", header)


def _link(target: Path, inputs: list[Path | str]) -> None:
    # Warnings are off: some generated functions share a name with a compiler built-in of another type.
    # Not optimised: a thousand functions of 64 arguments would take most of the time of a build.
    flags = ["-shared", "-fPIC", "-O0", "-w", "-fno-builtin", "-fexceptions", f"-Wl,-soname,{target.name}"]
    _run("gcc", *flags, "-o", target, *inputs)


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _unsupported_source(names: list[str]) -> str:
    """Write functions that refuse: C ones by an error code, C++ ones by an exception, since no object can be faked."""
    lines = ["long sim_unsupported(const char *);", "void sim_unsupported_cxx(const char *);"]
    for i, name in enumerate(names):
        if name.startswith("_Z"):
            lines.append(f'void cxx_{i}(void) __asm__("{name}");')
            lines.append(f'void cxx_{i}(void) {{ sim_unsupported_cxx("{name}"); }}')
        else:
            lines.append(f'long {name}(void) {{ return sim_unsupported("{name}"); }}')
    return "\n".join(lines) + "\n"


def _kernel_source(names: tuple[str, ...]) -> str:
    """Write the aclnn functions: preparations pass their arguments on as they lie in registers and on the stack.

    Both supported conventions pass the first integers and the first 8 floating point numbers in separate registers, and
    all others on the stack in slots of 8 bytes. So one prototype reads any list of arguments.
    """
    registers = REGISTERS[os.uname().machine]
    words = [f"long w{i}" for i in range(NUM_WORDS)]
    prototype = ", ".join([*words[:registers], *(f"double d{i}" for i in range(8)), *words[registers:]])
    lines = [
        "long sim_prepare(const char *, const long *, const double *);",
        "long sim_launch(const char *, void *, void *);",
        "long sim_atb_prepare(const char *, const long *, const double *);",
        "long sim_atb_launch(const char *, void *, void *);",
        f"#define WORDS {{ {', '.join(f'w{i}' for i in range(NUM_WORDS))} }}",
        "#define DOUBLES { d0, d1, d2, d3, d4, d5, d6, d7 }",
    ]
    for name in names:
        own = "sim_atb_" if name.startswith("Atb") else "sim_"
        # GetMaxWorkspaceSize asks for the largest workspace that any length may need; no launch follows it.
        if name.endswith(("GetWorkspaceSize", "GetMaxWorkspaceSize")):
            kernel = name.removesuffix("GetWorkspaceSize").removesuffix("GetMaxWorkspaceSize")
            body = f'long w[] = WORDS; double d[] = DOUBLES; return {own}prepare("{kernel}", w, d);'
            lines.append(f"long {name}({prototype}) {{ {body} }}")
        else:
            body = f'(void)workspace; (void)size; return {own}launch("{name}", executor, stream);'
            lines.append(f"long {name}(void *workspace, unsigned long size, void *executor, void *stream) {{ {body} }}")
    return "\n".join(lines) + "\n"


def _run(*command: str | Path) -> str:
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        output = error.stderr[-4000:]
        raise BuildError(f"build of the simulated ACL runtime; found: {command[0]} failed:\n{output}") from None
    return done.stdout
