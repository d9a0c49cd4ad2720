"""core_cpu/aot/shared_object.py: what AOTInductor generated is compiled by processes, which end with their work."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from core.common.lowering import Unavailable
from core.common.under_way import UnderWay
from core_cpu import extension
from core_cpu.aot import shared_object
from core_cpu.aot.shared_object import MODEL, Built, build

INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
CALLS = "void run() {\n    __check_inputs_outputs(input_handles, output_handles);\n}\n"
KERNELS = f"\n{INCLUDE}void one() {{}}\n{INCLUDE}void two() {{}}\n"
CHECKS = "static void check_input_0(AtenTensorHandle* input_handles) {}\n"
RUN = """void AOTInductorModel::run_impl(
    AtenTensorHandle* input_handles
) {
%s    work(input_handles);
}
} // namespace torch::aot_inductor
"""
WHOLE = (
    """
#include <torch/csrc/inductor/aoti_include/cpu.h>
// Definition of AOTI runtime interface functions

#include <vector>
extern "C" {
AOTIRuntimeError AOTInductorModelContainerCreate() {}
} // extern "C"

extern "C" void one(float* out);
CACHE_TORCH_DTYPE(float32);
namespace torch::aot_inductor {
namespace {
class AOTInductorModelKernels : public AOTInductorModelKernelsBase {};
}  // namespace
AOTInductorModel::AOTInductorModel()
    : AOTInductorModelBase(3,
                           2,
                           0,
                           device_str) {}
} // namespace torch::aot_inductor
using namespace torch::aot_inductor;
extern "C" { extern int direct(); }
namespace torch::aot_inductor {
void AOTInductorModel::_const_run_impl(
    DeviceStreamType stream
) {}
"""
    + CHECKS
    + RUN % "    __check_inputs_outputs(input_handles, output_handles);\n"
)
"""What AOTInductor generates for a graph, in short."""
ALONE = (
    f"""#include "{MODEL}"

extern "C" void one(float* out);
CACHE_TORCH_DTYPE(float32);
extern "C" {{ extern int direct(); }}
namespace torch::aot_inductor {{
"""
    + RUN % ""
    + "\n\nCORE_CPU_MODEL(2)\n"
)
RECORD = """#!/bin/sh
for last; do :; done
echo "$@" >> "$0.calls"
while [ "$1" != -o ]; do shift; done
echo code > "$2"
"""


FAILS = """#!/bin/sh
echo "$@" >> "$0.calls"
for each; do
case "$each" in *wrapper.cpp) grep -q CORE_CPU_MODEL "$each" && { echo '/x:7: error: no such name' >&2; exit 1; };; esac
done
while [ "$1" != -o ]; do shift; done
echo code > "$2"
"""
"""A compiler that takes no code without torch's container."""


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are not run here."""
    monkeypatch.setattr(shared_object, "require", lambda *, contained=False: None)


def made(folder: Path, script: str, source: str = CALLS + KERNELS, load: Callable[[Path], object] = Path) -> Built:
    """Build what AOTInductor would generate."""
    return UnderWay(build(generated(folder, script, source), folder / "graph.so", load)).finish()


def generated(folder: Path, script: str, source: str = CALLS + KERNELS) -> list[str]:
    """Write what AOTInductor would generate, with a script for a compiler."""
    compiler = folder / "compiler"
    compiler.write_text(script)
    compiler.chmod(0o700)
    (folder / "a.wrapper.cpp").write_text(source)
    flags = {
        "compiler": str(compiler),
        "definitions": ["ONE", " TWO"],
        "include_dirs": ["/head ers"],
        "cflags": ["O3", "fPIC"],
        "ldflags": [],
        "libraries_dirs": [],
        "libraries": [],
        "passthrough_args": ["", "-mavx2 -mfma"],
    }
    linked = flags | {"cflags": ["O3", "shared"], "libraries": ["torch"], "libraries_dirs": ["/libs"]}
    (folder / "a.wrapper_compile_flags.json").write_text(json.dumps(flags))
    (folder / "a.wrapper_linker_flags.json").write_text(json.dumps(linked))
    names = ("a.wrapper.cpp", "a.wrapper_compile_flags.json", "a.wrapper_linker_flags.json", "script.ld", "consts.o")
    return [str(folder / name) for name in names]


def test_kernels_and_the_code_that_calls_them_are_compiled_apart_and_linked(tmp_path: Path) -> None:
    assert made(tmp_path, RECORD) == Built(contained=True)
    assert (tmp_path / "graph.so").read_text() == "code\n"
    calls, kernels, link = sorted((tmp_path / "compiler.calls").read_text().splitlines(), key=_order)
    assert "a.wrapper.cpp -DONE -DTWO -O3 -fPIC -c -O1 -I/head ers -mavx2 -mfma -o" in calls
    assert "a.wrapper.kernels.cpp -DONE -DTWO -O3 -fPIC -c -I/head ers" in kernels
    for name in ("consts.o", "a.wrapper.o", "a.wrapper.kernels.o", "-shared", "-ltorch", "-L/libs"):
        assert name in link
    assert (tmp_path / "a.wrapper.cpp").read_text() == "void run() {\n}\n\n"
    assert (tmp_path / "a.wrapper.kernels.cpp").read_text() == KERNELS.lstrip("\n")


def _built(folder: Path, source: str) -> tuple[bool, str]:
    """Return whether torch's container is around a graph, and the code that calls its kernels."""
    built = made(folder, RECORD, source)
    assert not built.reason
    return built.contained, (folder / "a.wrapper.cpp").read_text()


def test_the_code_of_a_graph_is_compiled_without_the_container_that_it_does_not_need(tmp_path: Path) -> None:
    assert _built(tmp_path, WHOLE + KERNELS) == (False, ALONE)


@pytest.mark.parametrize(
    ("part", "other"),
    [
        pytest.param("0,\n                           device", "1,\n device", id="a constant"),
        pytest.param("work(", "aoti_torch_proxy_executor_call_function(", id="an op through the dispatcher"),
        pytest.param("// Definition of AOTI", "// Other", id="another form"),
    ],
)
def test_a_graph_that_needs_torchs_container_keeps_it(part: str, other: str, tmp_path: Path) -> None:
    source = WHOLE.replace(part, other)
    assert source != WHOLE
    contained, calls = _built(tmp_path, source + KERNELS)
    assert contained and calls.count("#include <torch/csrc/inductor/aoti_include/cpu.h>") == 1
    assert "__check_inputs_outputs" not in calls


def _order(call: str) -> int:
    return 2 if "-shared" in call else int("kernels.cpp" in call)


def test_a_graph_without_kernels_has_one_file(tmp_path: Path) -> None:
    made(tmp_path, RECORD, CALLS)
    assert len((tmp_path / "compiler.calls").read_text().splitlines()) == 2


def test_what_the_compiler_says_is_in_the_error(tmp_path: Path) -> None:
    from torch._inductor.exc import CppCompileError

    with pytest.raises(CppCompileError, match="no such header"):
        made(tmp_path, "#!/bin/sh\necho 'error: no such header' >&2\nexit 1")


def unloadable(path: Path) -> None:
    raise OSError(f"{path} can't be loaded: {path}: undefined symbol: aoti_new")


@pytest.mark.parametrize(
    ("script", "load", "reason"),
    [
        pytest.param(FAILS, Path, "error: no such name", id="compiled"),
        pytest.param(RECORD, unloadable, "undefined symbol: aoti_new", id="loaded"),
        pytest.param(
            FAILS.replace('*wrapper.cpp) grep -q CORE_CPU_MODEL "$each"', '-shared) mkdir "$0.linked"'),
            Path,
            "error: no such name",
            id="linked",
        ),
    ],
)
def test_code_that_fails_without_torchs_container_is_compiled_once_more_with_it(
    script: str, load: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    assert made(tmp_path, script, WHOLE + KERNELS, load) == Built(contained=True, reason=reason)
    calls = (tmp_path / "compiler.calls").read_text().splitlines()
    count = [sum(name in call for call in calls) for name in ("a.wrapper.cpp", "a.wrapper.kernels.cpp")]
    assert count == [2, 1]  # the kernels are those of before
    assert "AOTInductorModelContainerCreate" in (tmp_path / "a.wrapper.cpp").read_text()


def test_kernels_that_fail_are_no_fault_of_the_code_without_the_container(tmp_path: Path) -> None:
    from torch._inductor.exc import CppCompileError

    script = FAILS.replace("*wrapper.cpp) grep -q CORE_CPU_MODEL", "*kernels.cpp) test -e")
    with pytest.raises(CppCompileError, match="no such name"):
        made(tmp_path, script, WHOLE + KERNELS)
    assert "CORE_CPU_MODEL" in (tmp_path / "a.wrapper.cpp").read_text()


def test_nothing_is_compiled_for_a_container_that_cant_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(*, contained: bool = False) -> None:
        if contained:
            raise Unavailable("no container here")

    monkeypatch.setattr(shared_object, "require", require)
    assert not made(tmp_path, RECORD, WHOLE + KERNELS).contained
    with pytest.raises(Unavailable, match="no container here"):
        made(tmp_path, RECORD)


def test_a_header_that_was_replaced_meanwhile_makes_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "SOURCE_DIGESTS", {**extension.SOURCE_DIGESTS, MODEL.name: "another"})
    with pytest.raises(OSError, match=r"model\.h was replaced while this process ran"):
        made(tmp_path, RECORD, WHOLE + KERNELS)


def test_abandoned_compilers_end_with_what_they_started(tmp_path: Path) -> None:
    work = UnderWay(build(generated(tmp_path, '#!/bin/sh\nsleep 60 &\necho $! > "$0.$$"\nwait'), tmp_path / "g", Path))
    while len(started := [path.read_text() for path in tmp_path.glob("compiler.[0-9]*")]) < 2 or not all(started):
        time.sleep(0.01)
    work.abandon()
    assert not any(_runs(int(child)) for child in started)


def _runs(child: int) -> bool:
    """Return whether a process is there a moment after its end was asked for, and no zombie."""
    for _ in range(200):
        try:
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
            os.kill(child, 0)
        except (ProcessLookupError, FileNotFoundError):
            return False
        time.sleep(0.01)
    return True
