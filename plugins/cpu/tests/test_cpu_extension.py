"""core_cpu/extension.py: built once for all processes, told apart by what it is made of, and missed aloud."""

from __future__ import annotations

import functools
import json
import logging
import os
import runpy
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import core
from core.common.kernel_compilers import KernelForms
from core.common.lowering import Unavailable
from core.errors import UsageError
from core_cpu import extension
from core_cpu.aot import graph

LIBRARY = "ipex_rms_norm"
"""An op that needs no kernel of the plugin."""
CALL = """
import logging, torch
logging.basicConfig()
from core.common.ops.attention.paged import ATTENTION
from core_cpu.attention import attention
sample = next(iter(ATTENTION.samples(torch.float32, torch.device("cpu"))))
call, other = ({n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in sample.kwargs.items()} for _ in "12")
torch.testing.assert_close(attention(**call), ATTENTION.reference(**other))
print(torch._C._dispatch_has_kernel_for_dispatch_key("core_cpu::attention", "CPU"))
"""
LIMITED = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""What torch's kernels, and oneDNN's, are limited by."""
TESTS = """
import sys, pytest
from core_cpu import extension
print(extension.identity())
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test load anew; other tests go on with what this process has loaded, which can't be loaded twice."""
    monkeypatch.setattr(extension, "_loaded", {})
    monkeypatch.setattr(extension, "load", functools.cache(extension.load.__wrapped__))


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, and a compiler that writes down how often it is called; nobody loads what it makes."""
    made, calls = tmp_path / "kernels", tmp_path / "calls"
    compiler = script(tmp_path / "c++", f'echo call >> {calls}\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"')
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("CORE_CPU_KERNELS_DIR", str(made))
    monkeypatch.setattr(extension, "_link", lambda library: None)
    return made


def num_calls(folder: Path) -> int:
    return len((folder.parent / "calls").read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux only")
def test_it_is_compiled_once_and_counted(folder: Path) -> None:
    with extension.KERNELS.counting() as count:
        assert extension.load("attention") == "" and count() == 1
        extension.load.cache_clear()
        assert extension.load("attention") == "" and count() == 1
    assert num_calls(folder) == 1
    assert [path.name for path in folder.glob("*.so")] == [f"attention-{extension.identity()}.so"]


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux only")
def test_an_early_build_is_the_one_that_is_loaded(folder: Path) -> None:
    core.select_device("cpu").parts.prepare()
    assert extension.load("attention") == ""  # waits for it
    for thread in threading.enumerate():
        if thread.name == "core-cpu-kernels":
            thread.join()
    assert num_calls(folder) == len(extension._OF_EACH_MODEL)


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux only")
def test_what_is_loaded_is_not_built_early_for_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_AFTER_LOADING", {})
    for source in extension._OF_EACH_MODEL:
        assert extension.load(source) == ""
    monkeypatch.setenv("CORE_CPU_KERNELS_DIR", str(folder.parent / "other"))
    core.select_device("cpu").parts.prepare()
    for thread in threading.enumerate():
        if thread.name == "core-cpu-kernels":
            thread.join()
    assert num_calls(folder) == len(extension._OF_EACH_MODEL)


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux only")
def test_an_early_build_that_fails_leaves_the_reason_to_who_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(script(folder.parent / "broken", "echo 'error: no such header' >&2\nexit 1")))
    core.select_device("cpu").parts.prepare()
    assert "no such header" in extension.load("attention")
    assert caplog.text.count("no such header") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux only")
def test_what_it_is_made_of_tells_builds_apart(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [extension.identity()]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    found.append(extension.identity())
    assert found[-1].startswith("default-")
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    found.append(extension.identity())
    with (tmp_path / "c++").open("a") as compiler:
        compiler.write("# another one\n")
    found.append(extension.identity())
    sources = Path(shutil.copytree(extension.SOURCES, tmp_path / "csrc"))
    monkeypatch.setattr(extension, "SOURCES", sources)
    with (sources / "vectors.h").open("a") as header:
        header.write("// changed\n")
    monkeypatch.setattr(extension, "SOURCE_DIGESTS", extension._digests())
    found.append(extension.identity())
    assert len(set(found)) == len(found)


def upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the plugin's files, as an installer does in place, while this process runs."""
    sources = Path(shutil.copytree(extension.SOURCES, tmp_path / "csrc"))
    (sources / "graph.h").write_text("// of another version\n")
    monkeypatch.setattr(extension, "SOURCES", sources)


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux only")
def test_libraries_of_two_versions_do_not_meet_in_a_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert extension.load("graph") == ""
    before = extension.identity()
    upgrade(tmp_path, monkeypatch)
    assert "graph.h was replaced while this process ran" in extension.load("container")
    assert extension.identity() == before and [each.name for each in folder.glob("*.so")] == [f"graph-{before}.so"]


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux only")
def test_a_library_that_was_built_before_an_upgrade_is_used_after_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert extension.load("container") == ""
    extension.load.cache_clear()
    upgrade(tmp_path, monkeypatch)
    assert extension.load("container") == "" and num_calls(folder) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux only")
@pytest.mark.usefixtures("folder")
def test_graphs_and_their_container_are_of_one_build(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extension.load("graph") == ""
    monkeypatch.setattr(torch, "__version__", "2.99.0")  # as anything else that a build is made of
    monkeypatch.setattr(graph, "_api", lambda: None)
    monkeypatch.setattr(graph, "_container", graph._container.__wrapped__)
    with pytest.raises(Unavailable, match="container and graph share C"):
        graph.require(contained=True)


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux only")
def test_a_compiler_that_fails_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    script(tmp_path / "c++", "echo 'x.h:1: fatal error: no such file' >&2\nexit 1")
    with caplog.at_level(logging.WARNING):
        reason = extension.load("attention")
        assert (
            reason.endswith("c++ can't compile them: x.h:1: fatal error: no such file")
            and extension.load("attention") == reason
        )
    (record,) = caplog.records
    assert "no kernels of the plugin" in record.message and reason in record.message
    assert not list(folder.glob("*.so"))


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux only")
def test_a_folder_that_others_may_write_to_is_not_used(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert "others may write to" in extension.load("attention")


def test_without_a_compiler_the_device_has_no_kernels_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    device = core.select_device("cpu")
    assert [each.name for each in device.ops] == [LIBRARY]
    assert str(device.capabilities.extra["kernels"]).startswith("none: there is no C++ compiler")


def test_the_device_tells_which_build_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    if extension.why_not():
        pytest.skip(extension.why_not())
    device = core.select_device("cpu")
    assert device.capabilities.extra["kernels"] == extension.identity()
    names = [(each.op, each.name) for each in device.ops]
    collectives = ["all_reduce", "reduce_scatter", "all_gather"]
    shared = [(f"core::{name}", "cpu_shared_memory") for name in collectives]
    forms = ("cpu_linear", "cpu_linear_transposed", "torch_linear", "cpu_linear_alike", "cpu_linear_transposed_alike")
    linears = [("core::linear", name) for name in forms]
    linears += [("core::add_lora", name) for name in ("cpu_add_lora", "cpu_add_lora_alike")]
    attention = [("core::attention", name) for name in ("cpu_attention", "cpu_attention_alike")]
    coded, steps = ("weight_only_linear", "quantized_linear"), ("causal_conv1d_update", "gated_delta_rule")
    own = (*coded, *steps, "selective_state_update")
    products = [*linears, *((f"core::{name}", f"cpu_{name}") for name in own)]
    assert names == [*attention, *products, *shared, ("core::rms_norm", LIBRARY)]
    assert extension.KERNELS in device.kernel_compilers


FORMS = KernelForms(dtypes=(torch.float32,), head_sizes=(64,))


def test_all_kernels_are_built_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if extension.why_not():
        pytest.skip(extension.why_not())
    monkeypatch.setenv("CORE_CPU_KERNELS_DIR", str(tmp_path))
    monkeypatch.setattr(extension, "_compile", lambda library, source, build: library.write_text(source))
    sources = sorted(path.stem for path in extension.SOURCES.glob("*.cpp"))
    found = list(extension.build(FORMS))
    assert found == [f"{source}-{extension.identity()}.so" for source in sources]
    assert [(tmp_path / name).read_text() for name in found] == sources
    monkeypatch.setattr(extension, "_compile", None)  # nothing is compiled again
    assert list(extension.build(FORMS)) == found


def test_a_build_ahead_tells_what_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*args: object) -> None:
        raise OSError("g++ can't compile them: error: no such thing")

    monkeypatch.setenv("CORE_CPU_KERNELS_DIR", str(tmp_path))
    monkeypatch.setattr(extension, "_compile", fail)
    monkeypatch.setattr(extension, "why_not", lambda: "")
    with pytest.raises(UsageError, match="no such thing"):
        list(extension.build(FORMS))
    monkeypatch.setattr(extension, "why_not", lambda: "there is no C++ compiler")
    with pytest.raises(UsageError, match="there is no C"):
        list(extension.build(FORMS))


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("compiler", ["there", "gone"])
def test_a_process_that_only_calls_the_op_gets_its_kernel_or_its_reference(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that takes its graphs from the compile cache."""
    if compiler == "gone":
        monkeypatch.setenv("CXX", "gone")
    done = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(compiler == "there")]
    assert done.stderr.count("no kernels of the plugin") == (compiler == "gone")


@pytest.mark.parametrize("name", ["attention", "linear", "quantized", "weight_only"])
def test_what_is_planted_is_one_place_of_the_source(name: str) -> None:
    """Else a slow test says so, long after the source was changed."""
    found = runpy.run_path(str(Path(__file__).with_name("ops") / f"test_cpu_{name}.py"))
    texts = [path.read_text() for path in extension.SOURCES.iterdir()]
    for mistake, (right, _) in found["MISTAKES"].items():
        assert sum(text.count(right) for text in texts) == 1, mistake


@pytest.mark.slow
def test_kernels_and_models_are_right_with_avx2_alone(tmp_path: Path) -> None:
    """In processes of their own: torch reads its variable once."""
    if reason := extension.why_not():
        pytest.skip(reason)
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("the processor has no AVX2")
    environment = {each: value for each, value in os.environ.items() if not each.startswith("PYTEST_")}
    environment |= LIMITED | {"CORE_CACHE_DIR": str(tmp_path)}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[3])
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    of_kernels = ("attention", "linear", "quantized", "recurrent", "weight_only")
    files = [f"plugins/cpu/tests/ops/test_cpu_{each}.py" for each in of_kernels]
    told = run("-c", TESTS, "-q", "-p", "no:cacheprovider", "-m", "not slow and not exhaustive", *files)
    assert told.startswith("avx2-") and " passed" in told
    for dtype in ("float32", "bfloat16"):
        document = json.loads(run("-m", "core", "run", "--device", "cpu", "--dtype", dtype, "--json"))
        assert document["check"]["passed"] and document["program"]["lowering"] == "inductor"
